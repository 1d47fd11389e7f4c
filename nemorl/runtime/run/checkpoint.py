"""Checkpoints: everything that a run needs to go on bit for bit, in `checkpoints/step_N/`.

    trainer/             the training backend's files: model, optimizer, schedule
    state.json           the LoopState
    rng.json             generators of Python's random and numpy
    rng.safetensors      generators of torch, one for the CPU and one for every GPU
    manifest.json        size and CRC-32 of all of these; a backend that writes a manifest.json of
                         its own into trainer/ checks its files itself while it reads them

A checkpoint is written into a temporary folder and flushed to the disk, each rank its own part, if
asked for while training goes on; then the folder is renamed, and last `checkpoints/latest` names it
(and `checkpoints/best` the best one, by `checkpoints/metrics.json`). A process that dies at any
point of this leaves the previous checkpoint in force. No pickle is read or written.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from nemorl.models.checked_files import (
    MANIFEST,
    CheckedFile,
    checksum,
    read_manifest,
    write_manifest,
)
from nemorl.runtime.config.metric_rules import Ranking
from nemorl.runtime.run.directory import step_of, to_json
from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout
from nemorl.runtime.run.files import flush, write_atomically
from nemorl.runtime.run.rng import RandomState, random_state, restore_generators
from nemorl.runtime.run.state import LoopState, Run

TEMPORARY = ".tmp-"
REPLACED = ".replaced-"
SMALL = 1 << 20
"""Bytes of files that are checked when a checkpoint is looked for, before anything is loaded."""


class CheckpointError(OSError):
    """A checkpoint that cannot be written or read."""


def begin(
    directory: Path,
    run: Run,
    *,
    generators: RandomState | None = None,
    background: bool = False,
) -> "Unpublished":
    """Write the checkpoint of `run.state.step` aside, or with `background` copy it so that training
    may go on. `generators` is the random state to save, the present one by default.

    Raises:
        CheckpointError: it cannot be written. The previous checkpoint is then as it was.
    """
    begun = Unpublished(Path(directory) / "checkpoints", run.state.step, run.trainer, background)
    folder, trainer = begun.temporary, begun.temporary / "trainer"
    with begun.complete_or_removed():
        shutil.rmtree(folder, ignore_errors=True)
        trainer.mkdir(parents=True)
        run.trainer.save_checkpoint(trainer, **({"background": True} if background else {}))
        values, tensors = generators or random_state()
        save_file(tensors, folder / "rng.safetensors")
        (folder / "rng.json").write_text(json.dumps(values))
        state = {"algorithm": algorithm_of(run), **run.state.to_dict()}
        (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    return begun


@dataclass(frozen=True)
class Unpublished:
    """A checkpoint that is being written under another name."""

    checkpoints: Path
    step: int
    trainer: Any
    background: bool

    @property
    def target(self) -> Path:
        return self.checkpoints / f"step_{self.step}"

    @property
    def temporary(self) -> Path:
        return self.checkpoints / f"{TEMPORARY}{self.target.name}"

    def publish(
        self,
        *,
        keep: int,
        ranking: Ranking | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Put it in place, and remove all but the newest `keep`, or with a ranking all but the best
        `keep` and the newest. This may run in a thread while training goes on.

        `metrics` are measurements of this step. Raises as `begin`.
        """
        with self.complete_or_removed():
            if self.background:
                self.trainer.wait_for_checkpoint()
            _seal(self.temporary)
            _put_in_place(self.temporary, self.target)
            write_atomically(self.checkpoints / "latest", self.target.name + "\n")
            flush(self.checkpoints)
            rank(self.checkpoints.parent, self.step, metrics or {}, keep=keep, ranking=ranking)
        return self.target

    @contextmanager
    def complete_or_removed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            shutil.rmtree(self.temporary, ignore_errors=True)
            free = (
                f"; {shutil.disk_usage(self.checkpoints).free / 1e9:.3g} GB are free there"
                if self.checkpoints.exists()
                else ""
            )
            raise CheckpointError(
                f"the checkpoint {self.target} could not be written ({error}){free}. The previous"
                " one, if any, is intact."
            ) from error


def rank(
    directory: Path,
    step: int,
    metrics: Mapping[str, float],
    *,
    keep: int = 2,
    ranking: Ranking | None = None,
) -> None:
    """Record measurements of the checkpoint of `step`, and remove the ones that are not to be kept,
    also those of later steps: they are of a run that then went back.
    """
    checkpoints, there = Path(directory) / "checkpoints", present(directory)
    measured = metrics_by_step(directory)
    if metrics:
        measured[step] = {**measured.get(step, {}), **to_json(metrics)}
        write_atomically(checkpoints / "metrics.json", json.dumps(measured, indent=1) + "\n")
    earlier = [at for at in there if at <= step]
    kept = set(earlier[-keep:])
    if ranking is not None:
        ranked = ranking.best({at: measured[at] for at in earlier}, keep)
        kept = {*ranked, step}
        if ranked:
            write_atomically(checkpoints / "best", there[ranked[0]].name + "\n")
    for at in there.keys() - kept:
        _discard(there[at])
    if best(directory) is None:
        (checkpoints / "best").unlink(missing_ok=True)


def latest(directory: Path) -> Path | None:
    """Return the checkpoint to go on from: the one that `checkpoints/latest` names, or else the
    newest of which no file is missing or cut; None if there is none.

    One that is passed over is a warning that names the file and what is wrong with it.
    """
    for path in _in_order(directory):
        try:
            verify(path, largest=SMALL)
            return path
        except CheckpointError as error:
            warnings.warn(f"{error} Trying an older one.", stacklevel=2)
    return None


def best(directory: Path) -> Path | None:
    """Return the best checkpoint of a run that ranks them; None where there is none."""
    path = _pointed_at(Path(directory) / "checkpoints" / "best")
    return path if path is not None and path.exists() else None


def present(directory: Path) -> dict[int, Path]:
    """Return every checkpoint of a run by its step, the oldest first, whole or not."""
    found = {step_of(path): path for path in (Path(directory) / "checkpoints").glob("step_*")}
    return {step: found[step] for step in sorted(found) if step >= 0}


def metrics_by_step(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the measurements at the step of each checkpoint, the oldest first."""
    try:
        found = json.loads((Path(directory) / "checkpoints" / "metrics.json").read_bytes())
        return {step: dict(found.get(str(step), {})) for step in present(directory)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {step: {} for step in present(directory)}


def load_latest(directory: Path, run: Run) -> tuple[Path, LoopState] | None:
    """Load the checkpoint to go on from, an older one if that turns out to be damaged; None if
    none is whole. Raises as `load`.
    """
    for path in _in_order(directory):
        try:
            return path, load(path, run)
        except CheckpointError as error:
            warnings.warn(f"{error} Trying an older one.", stacklevel=2)
    return None


def load(path: Path, run: Run) -> LoopState:
    """Give trainer and random generators the state that they had when `path` was written, and
    return the loop's.

    Raises:
        ValueError: the checkpoint is of another algorithm or seed; nothing has been changed.
        CheckpointError: a file is missing or damaged. The trainer may then have read a part, and
            must load another checkpoint.
    """
    verify(path, largest=SMALL)
    with _as_checkpoint_error(path):  # a trainer without a manifest of its own does not check files
        files = {
            name: CheckedFile(path / name, expected).read()
            for name, expected in read_manifest(path).items()
        }
        values = json.loads(bytes(files["state.json"]))
        algorithm = values.pop("algorithm")
        state = LoopState.from_dict(values)
        generators = json.loads(bytes(files["rng.json"]))
        tensors = load_tensors(bytes(files["rng.safetensors"]))
    if algorithm != algorithm_of(run):
        raise ValueError(
            f"a run must be resumed by its own algorithm, but {path} is of {algorithm}, not"
            f" {algorithm_of(run)}: name another run.dir"
        )
    if state.seed != run.state.seed:
        raise ValueError(
            f"run.seed must stay as it was when a run is resumed ({state.seed}), but it is"
            f" {run.state.seed}: omit it"
        )
    try:
        run.trainer.load_checkpoint(path / "trainer")
    except (WorkerDied, WorkerTimeout):
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} is not used: {error}.") from error
    restore_generators(generators, tensors)  # last: loading may have drawn from them
    return state


def algorithm_of(run: Run) -> str:
    """Return the name that a checkpoint remembers, so that no other algorithm goes on with it."""
    return type(run.config).__name__.removesuffix("Config").lower()


def verify(path: Path, *, largest: float = math.inf) -> None:
    """Raise CheckpointError unless all files are there in full size, and those of up to `largest`
    bytes as they were written.
    """
    with _as_checkpoint_error(path):
        for folder in (path, path / "trainer"):
            if folder == path or (folder / MANIFEST).exists():
                for name, expected in read_manifest(folder).items():
                    if expected.size <= largest:
                        CheckedFile(folder / name, expected).read()


def sweep(directory: Path) -> None:
    """Remove what killed processes left unfinished, and put back a checkpoint that was just being
    replaced. Call it at a run's start, when no other process writes there.
    """
    checkpoints = Path(directory) / "checkpoints"
    for path in checkpoints.glob(f"{REPLACED}*"):
        original = checkpoints / path.name.removeprefix(REPLACED)
        if original.exists():
            _discard(path)
        else:
            path.rename(original)
    for path in checkpoints.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)
    for folder, names in (
        (checkpoints, ("latest", "best", "metrics.json")),
        (checkpoints.parent, ("metrics.jsonl", "config.yaml")),
    ):
        for name in names:
            for path in folder.glob(f".{name}.*"):
                path.unlink()


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {path} is not used: {error}.") from error


def _seal(folder: Path) -> None:
    """Add the manifest, with everything on the disk. A backend's own manifest stands for the files
    that it lists, which are on the disk already.
    """
    trainer = folder / "trainer"
    own = read_manifest(trainer) if (trainer / MANIFEST).exists() else {}
    known = {trainer / name for name in own}
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    write_manifest(
        folder,
        {
            name: checksum(path)
            for name, path in files.items()
            if path.is_file() and path not in known
        },
    )
    for path in (*(path for path in files.values() if path.is_dir()), folder):
        flush(path)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename; a checkpoint of the same step (damaged, or of an abandoned continuation) steps aside
    first.
    """
    aside = target.with_name(REPLACED + target.name)
    if target.exists():
        if aside.exists():
            _discard(aside)
        target.rename(aside)
    temporary.rename(target)
    flush(target.parent)
    if aside.exists():
        _discard(aside)


def _in_order(directory: Path) -> list[Path]:
    """All checkpoints, the one that `latest` names first, then the newest first."""
    pointed = _pointed_at(Path(directory) / "checkpoints" / "latest")
    paths = present(directory).values()
    return sorted(paths, key=lambda path: (path != pointed, -step_of(path)))


def _pointed_at(pointer: Path) -> Path | None:
    try:
        return pointer.parent / pointer.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _discard(path: Path) -> None:
    """Remove a folder so that half of it is never found under its name."""
    doomed = path.with_name(f"{TEMPORARY}{path.name.lstrip('.')}-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)
