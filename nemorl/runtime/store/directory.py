"""The folder that a run writes, and its lock: one place that knows the layout.

    config.yaml              the resolved configuration, and under `environment` versions and host
    data.json                sequence lengths of the data sets
    metrics.jsonl            per line step, time, phase ("train" or "validation") and the metrics
    groups.jsonl             per line step, and numbers of groups: trained on, dropped (by reason)
                             and open at its end
    samples/steps_1-100.jsonl  a few responses of each step, per line with its step; then
                             steps_101-200.jsonl, …
    validation/step_N.jsonl  how each answer of the validation after step N was judged
    checkpoints/step_N/      see `checkpoint`
    run.json                 which run this is and its status
    log.jsonl                its messages
    tensorboard/ plots/ hf/  events, pictures, and the trained model as transformers loads it

Times are in seconds since the epoch.
"""

import itertools
import json
import math
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from filelock import FileLock, Timeout

from nemorl.checks import is_number, require, warn
from nemorl.rollout.calls import HOLDERS
from nemorl.runtime.config.base import RunConfig
from nemorl.runtime.config.yaml_io import SECRET, dump
from nemorl.runtime.store.files import check_writer, write_atomically, writing

Phase = Literal["train", "validation"]
Resume = bool | Literal["auto"]
"""See `RunConfig.resume`."""
LOCK_NAME = ".lock"
STEPS_PER_FILE = 100


@dataclass
class RunDirectory:
    """The paths of a run, made by `create` or `open`."""

    path: Path

    def __post_init__(self) -> None:
        path = self.path
        self.name = path.resolve().name
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.groups = path / "groups.jsonl"
        self.record = path / "run.json"
        self.log = path / "log.jsonl"
        self.data = path / "data.json"
        self.samples = path / "samples"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.plots = path / "plots"
        self.hf = path / "hf"

    @classmethod
    def create(
        cls,
        path: Path | str,
        config_yaml: str,
        *,
        resume: Resume = False,
        restarted: bool = False,
    ) -> "RunDirectory":
        """Make the folder and write config.yaml, unless there are results to `resume` from.

        Raises: ValueError as `check_resume`, unless the run was `restarted`.
        """
        directory = cls(Path(path))
        if not restarted:
            directory.check_resume(resume)
        if not directory.holds_results():
            with writing("a run", directory.path):
                directory.path.mkdir(parents=True, exist_ok=True)
                if SECRET in config_yaml:  # which logs may show
                    directory.path.chmod(0o700)
            directory.write_config(config_yaml)
        return directory

    @classmethod
    def create_free(cls, name: str, parent: Path | str = "runs") -> "RunDirectory":
        """Make the first of the folders runs/NAME, runs/NAME-2, … that doesn't exist."""
        with _writing_below(parent):
            Path(parent).mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = Path(parent) / (name if number == 1 else f"{name}-{number}")
                with suppress(FileExistsError):
                    path.mkdir()
                    return cls(path)
        raise AssertionError

    def write_config(self, config_yaml: str) -> None:
        header = dump({"environment": environment()})
        write_atomically(self.config, f"{header}\n{config_yaml}", "the settings")

    def write_data(self, lengths: Mapping[str, Any]) -> None:
        write_atomically(self.data, json.dumps(lengths, indent=1) + "\n", "the lengths of the data")

    @classmethod
    def open(cls, path: Path | str) -> "RunDirectory":
        """Return a run's folder. Raises ValueError where there is none."""
        directory = cls(Path(path))
        if not (directory.config.exists() or directory.holds_results()):
            raise ValueError(
                f"run must be the folder of a run, but {directory.path} holds no config.yaml,"
                " metrics.jsonl or checkpoints: check the path"
            )
        return directory

    def require_no_results(self) -> None:
        if self.holds_results():
            raise ValueError(
                f"run.dir must be a folder without a run, but {self.path} already holds one: resume"
                " it (--run.resume) or name another folder (--run.dir)"
            )

    def check_resume(self, resume: Resume) -> None:
        """Raise ValueError where there is another run, or none to resume."""
        if not resume:
            self.require_no_results()
        elif self.holds_results() and not self.has_checkpoint():
            raise ValueError(
                f"run.resume needs a checkpoint, but {self.path} holds a run without one, which a"
                " new one would overwrite: move the folder away, or name another (--run.dir)"
            )
        elif resume is True and not self.has_checkpoint():
            raise ValueError(
                f"run.dir must be the folder of a run to resume, but there is none in {self.path}:"
                " check the path, or write --run.resume=auto to start one there"
            )

    @classmethod
    def check_missing(cls, run: RunConfig) -> None:
        if run.dir is not None and not Path(run.dir).exists():
            cls(Path(run.dir)).check_resume(run.resume)

    def has_checkpoint(self) -> bool:
        return bool(by_step(self.checkpoints))

    def require_checkpoint(self) -> None:
        if not self.has_checkpoint():
            raise ValueError(
                f"run must have a checkpoint, but {self.path} has none: one is saved every"
                " run.save_period steps and at the end"
            )

    def holds_results(self) -> bool:
        """Return whether a new run would spoil something."""
        results = (self.metrics, self.samples, self.checkpoints, self.hf)
        return any(path.exists() for path in results)

    def append_metrics(
        self, step: int, metrics: Mapping[str, float], *, phase: Phase = "train"
    ) -> None:
        line = {"step": step, "time": round(time.time(), 3), "phase": phase, **metrics}
        self._append("the metrics", self.metrics, [line])

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.metrics, METRICS)

    def append_groups(self, step: int, groups: Mapping[str, Any]) -> None:
        self._append("the numbers of the groups", self.groups, [{"step": step, **groups}])

    def append_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        lines = ({"step": step} | {**each, "step": step} for each in samples)
        self._append("the samples", self.samples_file(step), lines)

    def append_outcomes(self, step: int, outcomes: Iterable[Mapping[str, Any]]) -> None:
        self._append("the validation", self.path / "validation" / f"step_{step}.jsonl", outcomes)

    def _append(self, what: str, file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        with writing(what, file):
            file.parent.mkdir(exist_ok=True)
            append_lines(file, lines)

    def read_log(self, record: "RunRecord | None") -> list[dict[str, Any]]:
        lines = read_lines(self.log)
        return [line for line in lines if record is None or line.get("run_id") == record.run_id]

    def outcome_files(self) -> dict[int, Path]:
        return by_step(self.path / "validation")

    def samples_file(self, step: int) -> Path:
        first = max(step - 1, 0) // STEPS_PER_FILE * STEPS_PER_FILE + 1
        return self.samples / f"steps_{first}-{first + STEPS_PER_FILE - 1}.jsonl"

    def sample_sizes(self) -> dict[int, int]:
        """Return the bytes of each step's samples, by step, in order."""
        sizes = Counter[int]()
        for file in self.samples.glob("steps_*.jsonl"):
            with file.open("rb") as lines:
                for line in lines:
                    if match := STEP_LINE.match(line):
                        sizes[int(match[1])] += len(line)
        return dict(sorted(sizes.items()))

    def read_samples(self, steps: Iterable[int]) -> dict[int, list[dict[str, Any]]]:
        """Return the samples of some steps, without `step`, by step."""
        found: dict[int, list[dict[str, Any]]] = {step: [] for step in sorted(steps)}
        for file in dict.fromkeys(map(self.samples_file, found)):
            for _, line in lines_of(file, STEP, steps=found):
                if line["step"] in found:
                    found[line.pop("step")].append(line)
        return {step: lines for step, lines in found.items() if lines}

    def truncate(self, step: int) -> None:
        """Remove what a resumed run writes again: all after `step`."""
        cut_lines(self.metrics, step, "the metrics", METRICS)
        cut_lines(self.groups, step, "the groups")
        for file in self.samples.glob("steps_*.jsonl"):
            match = re.fullmatch(r"steps_\d+-(\d+)\.jsonl", file.name)
            # A file that ends at the step may have a torn line.
            if match and int(match[1]) >= step and not cut_lines(file, step, "the samples"):
                file.unlink()
        for number, file in self.outcome_files().items():
            if number > step:
                file.unlink()


@contextmanager
def _writing_below(path: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"run.dir must be a folder that can be written to, but {path} can't ({error}): name"
            " another one (--run.dir)"
        ) from error


@contextmanager
def locked(directory: Path | str) -> Iterator[None]:
    """Make a directory and hold it for this run in the block, while the process lives.

    Raises: ValueError where another run holds it, it can't be written to, or its lock is a link.
    """
    path = Path(directory) / LOCK_NAME
    lock = FileLock(path)  # which follows no link
    with _writing_below(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            holder = path.read_text(errors="replace") or "another process"
            raise ValueError(
                f"run.dir must be used by one run at a time, but {path.parent} is in use by"
                f" {holder}: wait for it or name another one (--run.dir)"
            ) from error
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        path.write_text(f"process {os.getpid()} on {platform.node()} since {since}", "utf-8")
    owner, folder = os.getpid(), os.path.abspath(path.parent)  # noqa: PTH100
    HOLDERS[folder] = owner
    try:
        yield
    finally:
        if os.getpid() == owner:  # not in a forked child
            del HOLDERS[folder]
            path.unlink(missing_ok=True)
            lock.release()


def by_step(folder: Path) -> dict[int, Path]:
    """Return the `step_N` or `step_N.jsonl` of a folder by N, ascending."""
    name = r"step_(\d+)(?:\.jsonl)?"
    named = ((re.fullmatch(name, path.name), path) for path in folder.glob("step_*"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def environment() -> dict[str, str]:
    """Return versions, hardware and commit."""
    found = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        found["gpus"] = ", ".join(torch.cuda.get_device_name(index) for index in gpus)
    found |= {name: version_of(name) for name in ("nemorl", "torch", "transformers")}
    return found | ({"commit": commit} if (commit := git_commit()) else {})


def version_of(package: str) -> str:
    """Return the version of a package, if installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_commit() -> str | None:
    """Return the commit, marked if files differ."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty= with changes"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines in one write, after a torn one on a line of their own."""
    check_writer(path)
    text = "".join(json.dumps(to_json(record), ensure_ascii=False) + "\n" for record in records)
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(text.encode(errors="backslashreplace"))  # half a character as JSON's escape


STEP: dict[str, Callable[[Any], bool]] = {"step": lambda each: type(each) is int and each >= 0}
METRICS = {**STEP, "time": is_number, "phase": get_args(Phase).__contains__}

STEP_LINE = re.compile(rb'\{"step": (\d+)[,}]')


def read_lines(
    path: Path, needed: Mapping[str, Callable[[Any], bool]] = {}
) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file whose `needed` fields are right; warn of others but a
    torn last line.
    """
    return [record for _, record in lines_of(path, needed)]


def cut_lines(
    path: Path, step: int, what: str, needed: Mapping[str, Callable[[Any], bool]] = STEP
) -> bool:
    """Remove lines of steps after `step` from a file; return whether others are left."""
    kept = [found for found in lines_of(path, needed) if found[1]["step"] <= step]
    if path.exists():
        write_atomically(path, "".join(f"{line}\n" for line, _ in kept), what)
    return bool(kept)


def lines_of(
    path: Path,
    needed: Mapping[str, Callable[[Any], bool]],
    *,
    steps: Container[int] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that `read_lines` keeps, with its object; of `steps` alone, if given."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        begin = STEP_LINE.match(line[:40].encode())
        if begin and steps is not None and int(begin[1]) not in steps:
            continue
        try:
            record = {**json.loads(line)}
            wrong = [f"has a wrong {x}" for x, fits in needed.items() if not fits(record.get(x))]
        except (ValueError, TypeError, RecursionError):
            wrong = ["is not a JSON object"]
        if not wrong:
            yield line, record
        elif number < len(lines):
            warn(f"{path}, line {number} {wrong[0]}, and is omitted: {line[:80]!r}")


def to_json(value: Any) -> Any:
    """Return a value for strict JSON: tensors as lists, nan and inf as None, other objects as text.

    >>> to_json({"reward": float("nan"), "tokens": (1, 2)})
    {'reward': None, 'tokens': [1, 2]}
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, through all processes that worked on it."""

    run_id: str
    """Short and unique, kept when the run is resumed."""
    algorithm: str
    """Its registered name, or `script_with` a config."""
    status: Status = "running"
    error: str | None = None
    total_steps: int | None = None
    """Steps of the whole run, once known."""
    sessions: tuple[float, ...] = ()
    """Start of each process."""
    ended: float | None = None
    """End of the last process, unless it was killed."""
    pid: int = 0
    host: str = ""

    @classmethod
    def begin(
        cls, directory: RunDirectory, *, algorithm: str, previous: "RunRecord | None" = None
    ) -> "RunRecord":
        """Write and return the record of a run that this process begins or resumes."""
        record = previous or cls(run_id=secrets.token_hex(4), algorithm=algorithm)
        sessions = (*record.sessions, round(time.time(), 3))
        here: dict[str, Any] = {"pid": os.getpid(), "host": platform.node(), "sessions": sessions}
        record = replace(record, status="running", error=None, ended=None, **here)
        record.write(directory)
        return record

    @classmethod
    def read(cls, directory: RunDirectory) -> "RunRecord | None":
        """Return a run's record, if any; warn of one that can't be read."""
        if not directory.record.exists():
            return None
        try:
            values = {**json.loads(directory.record.read_bytes())}
            values["sessions"] = tuple(values["sessions"])
            return cls(**{field.name: values[field.name] for field in fields(cls)})
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            warn(f"{directory.record} is not the record of a run, and is omitted")
            return None

    def write(self, directory: RunDirectory) -> None:
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        write_atomically(directory.record, text + "\n", "the status of the run")

    @property
    def present_status(self) -> Status:
        """The run's status, "interrupted" if it was killed on this machine."""
        if self.status != "running" or self.host != platform.node():
            return self.status
        try:
            began = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return "interrupted"
        # A later process may have the same number.
        return "running" if began <= max(self.sessions, default=0) + 1 else "interrupted"


def script_with(config: type) -> str:
    """Return what stands for an algorithm's name where a script has its own loop."""
    return f"a script with {config.__name__}"


def check_algorithm(directory: RunDirectory, *expected: str) -> None:
    """Raise ValueError where a run is of none of the `expected` algorithms."""
    record = RunRecord.read(directory)
    found = expected[0] if record is None else record.algorithm
    command = f"nemorl {found} --run.dir {directory.path} --run.resume resumes it"
    require(
        found in expected,
        "run.dir",
        f"must be the folder of a run of {' or '.join(expected)}",
        f"one of {found}",
        "resume it with that script" if found.startswith("a script ") else command,
    )
