"""The folder that a run writes: one place that knows the layout.

config.yaml              the resolved configuration, under `environment` what it ran with data.json
how long the sequences of its data sets are, see nemorl.data.statistics
metrics.jsonl            one JSON object a line: step, time, phase ("train" or
"validation"), then the metrics samples/step_N.jsonl     a few responses of step N
checkpoints/step_N/      see nemorl.runtime.run.checkpoint run.json                 which run this
is and how it stands, see nemorl.runtime.run.record log.jsonl                what it had to say, see
nemorl.runtime.watch.log tensorboard/ plots/ hf/  events, pictures, and the trained model as
transformers loads it
"""

import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemorl.runtime.config.yaml_io import dump
from nemorl.runtime.run.files import write_atomically

Phase = Literal["train", "validation"]
STEP_NAME = re.compile(r"step_(\d+)(?:\.jsonl)?")


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run, and what is written into them as it goes.

    Make one with `create` (a run that starts or resumes) or `open` (a run to be read).
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def data(self) -> Path:
        return self.path / "data.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @classmethod
    def create(cls, path: Path | str, config_yaml: str, *, resume: bool = False) -> "RunDirectory":
        """Make the folder and write config.yaml.

        Raises ValueError if the folder already holds results of a run and `resume` is False, or if
        it can't be written to. With `resume` a folder without any is a fresh start, so that the
        same command both starts a job and goes on with it; the config.yaml of a run with results
        stays as it is until it is clear that the run can go on (`write_config`).
        """
        directory = cls(Path(path))
        if directory.holds_results() and not resume:
            raise ValueError(
                f"run.dir must be a folder without a run, but {directory.path} already holds one: "
                "go on with it (--run.resume) or name another folder (--run.dir)"
            )
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            if not directory.holds_results():
                directory.write_config(config_yaml)
        except OSError as error:
            raise ValueError(
                f"run.dir must be a folder that can be written to, but {directory.path} can't"
                f" ({error}): name another one (--run.dir)"
            ) from error
        return directory

    def write_config(self, config_yaml: str) -> None:
        """config.yaml: the settings below a section `environment` (versions, commit, host system)."""
        header = dump({"environment": environment()})
        write_atomically(self.config, f"{header}\n{config_yaml}")

    def read_data(self) -> dict[str, Any]:
        """What `write_data` wrote; {} where there is nothing that can be read."""
        try:
            found = json.loads(self.data.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return (
            {name: value for name, value in found.items() if isinstance(value, dict)}
            if isinstance(found, dict)
            else {}
        )

    def write_data(self, lengths: Mapping[str, Any]) -> None:
        """data.json: how long the sequences of each data set are."""
        write_atomically(self.data, json.dumps(lengths, indent=1) + "\n")

    @classmethod
    def open(cls, path: Path | str) -> "RunDirectory":
        """The folder of a run that exists. Raises ValueError where there is none."""
        directory = cls(Path(path))
        if not (directory.config.exists() or directory.holds_results()):
            raise ValueError(
                f"run.dir must be the folder of a run, but {directory.path} holds no config.yaml,"
                " metrics.jsonl or checkpoints: check the path"
            )
        return directory

    def holds_results(self) -> bool:
        """Whether there is something that a new run would spoil.

        The config.yaml of a run that failed at its start is nothing of the kind.
        """
        return any(
            path.exists() for path in (self.metrics, self.samples, self.checkpoints, self.hf)
        )

    def append_metrics(
        self, step: int, metrics: Mapping[str, float], *, phase: Phase = "train"
    ) -> None:
        """One more line of metrics.jsonl; numbers that JSON has no word for (nan, inf) become null."""
        append_lines(
            self.metrics, [{"step": step, "time": round(time.time(), 3), "phase": phase, **metrics}]
        )

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in order.

        A last line that was torn when a process was killed is left out.
        """
        return read_lines(self.metrics)

    def append_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """More lines of samples/step_N.jsonl; tensors and arrays become lists."""
        self.samples.mkdir(exist_ok=True)
        append_lines(self.samples / f"step_{step}.jsonl", samples)

    def truncate(self, step: int) -> None:
        """Forget what was written after `step`, because a resumed run writes it again: metrics
        lines (a torn one, too) and sample files.

        -1 forgets everything: right where there is no checkpoint and the run starts anew.
        """
        if self.metrics.exists():
            kept = [line for line in self.read_metrics() if line.get("step", 0) <= step]
            write_atomically(
                self.metrics, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
            )
        for file in self.samples.glob("step_*.jsonl"):
            if step_of(file) > step:
                file.unlink()


def free_directory(name: str, parent: Path | str = "runs") -> str:
    """The first of runs/NAME, runs/NAME-2, … that doesn't exist: where a run goes that was given no
    folder. It is made, so that no other run gets it.

    Raises ValueError if it can't be.
    """
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        for path in (
            Path(parent) / (name if number == 1 else f"{name}-{number}")
            for number in itertools.count(1)
        ):
            with suppress(FileExistsError):
                path.mkdir()
                break
    except OSError as error:
        raise ValueError(
            f"run.dir must be a folder that can be written to, but {parent} can't ({error}): name"
            " another one (--run.dir)"
        ) from error
    return str(path)


def step_of(path: Path) -> int:
    """The N of `step_N` or `step_N.jsonl`; -1 for another name.

    >>> step_of(Path("checkpoints/step_40")), step_of(Path("latest"))
    (40, -1)
    """
    match = STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def environment() -> dict[str, str]:
    """What a run depends on besides its configuration: system, hardware, versions, and the git
    commit of the working directory if it has one.
    """
    found = {"python": platform.python_version(), "system": platform.platform(), **hardware()}
    for package in ("nemorl", "torch", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    commit = git_commit()
    return {**found, "commit": commit} if commit else found


def hardware() -> dict[str, str]:
    """Processors and memory, and the GPUs where torch is loaded and sees some."""
    import psutil

    found = {"cpus": str(os.cpu_count()), "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB"}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpus"] = ", ".join(
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        )
    return found


def git_commit() -> str | None:
    """The checked-out commit, marked where files differ from it; None outside a repository, before
    the first commit, and without git.
    """
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return (
        f"{commit} with changes"
        if commit and git("status", "--porcelain", "--untracked-files=no")
        else commit
    )


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines in one write, so that a killed process tears at most the last one."""
    text = "".join(json.dumps(to_json(record), ensure_ascii=False) + "\n" for record in records)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; [] if it doesn't exist.

    A last line that was torn is left out, another damaged one too, with a warning that names it.
    """
    if not path.exists():
        return []
    records = []
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate([*lines, last], start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number <= len(lines):
            warnings.warn(
                f"{path}, line {number} is no JSON object and is left out: {line[:80]!r}",
                stacklevel=2,
            )
    return records


def to_json(value: Any) -> Any:
    """A value as strict JSON can hold it: tensors and arrays as lists, paths and other objects as
    text, nan and inf as None.

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
