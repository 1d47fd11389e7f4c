"""schedule.jsonl: which weights sampled which tokens, and when the engine took what.

Its first line has the settings. Then there is a line per step:

    step, version    the step, and the version of the weights that it ended with
    groups           per group: group, begun (finished steps when it began), and spans: per
                     conversation [version, tokens] in the order of its tokens
    again            with async.in_flight abort, per update of the weights: the groups that were
                     drawn again
    engine           of the embedded engine [passes, seeds] and [passes]: before which pass it took
                     requests, and fell asleep (`nemorl.rollout.schedule`)
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from nemorl.checks import require, short
from nemorl.rollout.conversation import Conversation
from nemorl.rollout.generation import GenerationBackend
from nemorl.rollout.schedule import Moment, Replay, Schedule, Slept, Taken
from nemorl.runtime.config.tree import flat, to_dict
from nemorl.runtime.store.directory import RunDirectory, read_lines

FREE = (
    *("run.dir", "run.display", "run.loggers", "run.project", "run.plots", "run.export"),
    *("run.save_period", "run.keep_checkpoints", "run.async_save", "async.replay"),
)
"""Settings in which a replay may differ."""


class ScheduleFile:
    """The schedule of a run that samples ahead: written, and with async.replay repeated.

    Raises: ValueError for a file that can't be repeated here.
    """

    def __init__(self, config: Any, directory: RunDirectory) -> None:
        self.directory, self.path = directory, config.async_.replay
        self._counts = config.generation.traits.repeats
        settings = flat(to_dict(config)).items()
        self.settings = {
            name: value
            for name, value in settings
            if name not in FREE and not name.startswith(("runtime.", "profile."))
        }
        self._groups: list[dict[str, Any]] = []
        self._repeats: list[dict[str, Any]] = []
        self._engine: Schedule | None = None
        self._begun = False
        self._again = list[list[int]]()
        self._expected = deque[list[int]]()
        if self.path is not None:
            self._read(config)

    def attach(self, generator: GenerationBackend) -> None:
        """Have the engine's passes recorded, or repeated."""
        if not self._counts:
            return
        moments = [_moment(each) for line in self._repeats for each in line["engine"]]
        self._engine = Replay(moments) if self.path else Schedule(records=True)
        generator.schedule = self._engine  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Wait until the engine may fall asleep."""
        if self._engine is not None:
            self._engine.wait()

    def note(self, conversations: Iterable[Conversation], begun: Mapping[int, int]) -> None:
        """Note groups that a step trains on. begun: by number."""
        for group, members in groupby(conversations, key=lambda each: each.group):
            spans = [_spans(each) for each in members]
            self._groups.append({"group": group, "begun": begun[group], "spans": spans})

    @property
    def expected_again(self) -> Sequence[int] | None:
        """The groups that the next update of a replay draws again; None: the ones in flight."""
        return self._expected[0] if self._expected else None

    def note_again(self, groups: Sequence[int]) -> None:
        """Note the groups that an update draws again."""
        self._again.append(list(groups))
        if self._expected:
            self._expected.popleft()

    def note_step(self, step: int, version: int) -> None:
        """Write the line of a step.

        Raises: RuntimeError where a replay differs from what it repeats.
        """
        line: dict[str, Any] = {"step": step, "version": version, "groups": self._groups}
        if self._again:
            line["again"], self._again = self._again, []
        if self._engine is not None:
            line["engine"] = [_written(each) for each in self._engine.moments]
            self._engine.moments = []
        self._groups = []
        if not self._begun:
            self._begun = True
            self.directory.append_schedule({"step": step - 1, "settings": self.settings})
        self.directory.append_schedule(line)
        if not self._repeats:
            return
        if (expected := self._repeats.pop(0)) != line:
            keys = {**expected, **line}
            key = next(name for name in keys if expected.get(name) != line.get(name))
            raise RuntimeError(
                f"step {step} must repeat {self.path}, but its {key} are others:"
                f" {short(line.get(key))}, not {short(expected.get(key))}: replay it with the same"
                " code, model and data"
            )

    def _read(self, config: Any) -> None:
        path, what = Path(self.path), "async.replay"
        fits, remedy = "must be the schedule.jsonl of a run", "name the file"
        require(path.is_file(), what, fits, self.path, remedy)
        lines = read_lines(path)
        headers = [line for line in lines if "settings" in line]
        require(len(headers) > 0 and lines[0] == headers[0], what, fits, self.path, remedy)
        fits = "must be false with async.replay: a run is repeated from its beginning"
        require(not config.run.resume, "run.resume", fits, config.run.resume, "remove one")
        once = "must be of a run that was not resumed: what was in flight then was drawn again"
        require(len(headers) == 1, what, once, self.path, "name that of another run")
        require(
            self._counts,
            "generation.backend",
            "must be torch with async.replay, which repeats the passes of the embedded engine",
            config.generation.backend,
            "remove async.replay: versions and spans of each token are in the file",
        )
        theirs = headers[0]["settings"]
        for name in sorted({*theirs, *self.settings}):
            ours = _plain(self.settings.get(name))
            require(
                ours == theirs.get(name),
                name,
                f"must be {theirs.get(name)!r}, as in the run of async.replay",
                ours,
                "set it, or replay another run",
            )
        self._repeats = [line for line in lines if "settings" not in line]
        self._expected.extend(each for line in self._repeats for each in line.get("again", ()))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _spans(conversation: Conversation) -> list[list[int]]:
    versions = [v for turn in conversation.turns for v in turn.completion.policy_versions]
    return [[version, len([*tokens])] for version, tokens in groupby(versions)]


def _written(moment: Moment) -> Sequence[Any]:
    seeds = [list(moment.seeds)] if isinstance(moment, Taken) else []
    return [moment.passes, *seeds]


def _moment(written: Sequence[Any]) -> Moment:
    passes, *seeds = written
    return Taken(passes, tuple(seeds[0])) if seeds else Slept(passes)
