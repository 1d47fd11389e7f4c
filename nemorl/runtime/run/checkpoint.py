"""Checkpoints that are whole or not there: what a run needs to go on bit for bit, in
`checkpoints/step_N/`.

    trainer/             what the training backend writes: model, optimizer, schedule
    state.json           the LoopState
    metrics.json         what was measured in that step, with the validation's as val_…
    rng.json             generators of Python's random and numpy
    rng.safetensors      generators of torch, one for the CPU and one for every GPU
    manifest.json        size and SHA-256 of all of these

Everything is written to a temporary folder and flushed to the disk, by each rank its own part, and,
if asked for, while training goes on; then the folder is renamed to `step_N`, and last of all the
file `checkpoints/latest` names it (and `checkpoints/best` the best one, where a run ranks them). A
process that dies at any point of this leaves the previous checkpoint in force. No pickle is read or
written.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from nemorl.parallel import shares
from nemorl.runtime.config.metric_rules import Ranking
from nemorl.runtime.run.directory import step_of, to_json, write_atomically
from nemorl.runtime.run.files import flush, link, lives, replace_text
from nemorl.runtime.run.random_state import RandomState, random_state, restore_generators
from nemorl.runtime.run.state import LoopState, Run

FORMAT = 2
"""Of the layout above; a checkpoint of another one is refused."""
TEMPORARY = ".tmp-"
REPLACED = ".replaced-"


class CheckpointError(OSError):
    """A checkpoint that can't be written or read; says which, why, and what is left."""


def save(
    directory: Path,
    run: Run,
    *,
    keep: int = 2,
    ranking: Ranking | None = None,
    metrics: Mapping[str, float] | None = None,
    generators: RandomState | None = None,
) -> Path:
    """Write the checkpoint of `run.state.step` below `directory`, the run's, and remove all but the
    newest `keep`; with a ranking, all but the best `keep` and the newest. `metrics` are what it is
    ranked by, `generators` the random state (the present one unless given).

    Raises CheckpointError if it can't be written (disk full, no permission, …). The previous
    checkpoint is then as it was.
    """
    return begin(directory, run, metrics=metrics, generators=generators).publish(
        keep=keep, ranking=ranking
    )


def begin(
    directory: Path,
    run: Run,
    *,
    metrics: Mapping[str, float] | None = None,
    generators: RandomState | None = None,
    background: bool = False,
) -> "Unpublished":
    """The first half of `save`: everything is written or, with `background`, copied, so that
    training may go on. Raises as `save`.
    """
    unpublished = Unpublished(
        Path(directory) / "checkpoints", run.state.step, run.trainer, background
    )
    with unpublished.or_not_at_all():
        unpublished.checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unpublished.temporary, ignore_errors=True)
        _write(
            unpublished.temporary,
            run,
            metrics or {},
            generators or random_state(),
            background=background,
        )
    return unpublished


@dataclass(frozen=True)
class Unpublished:
    """A checkpoint that is being written under another name."""

    checkpoints: Path
    step: int
    trainer: Any
    background: bool

    @property
    def target(self) -> Path:
        """Where it will be."""
        return self.checkpoints / f"step_{self.step}"

    @property
    def temporary(self) -> Path:
        """Where it is until then."""
        return self.checkpoints / f"{TEMPORARY}{self.target.name}-{os.getpid()}"

    def publish(self, *, keep: int, ranking: Ranking | None) -> Path:
        """The second half of `save`, which may run in a thread while training goes on."""
        with self.or_not_at_all():
            if self.background:
                self.trainer.wait_for_checkpoint()
            _seal(self.temporary)
            _put_in_place(self.temporary, self.target)
            write_atomically(self.checkpoints / "latest", self.target.name + "\n")
            flush(self.checkpoints)
            _prune(self.checkpoints, self.step, keep, ranking)
        return self.target

    @contextmanager
    def or_not_at_all(self) -> Iterator[None]:
        """Clear up after an error, and raise it as a CheckpointError."""
        try:
            yield
        except Exception as error:
            shutil.rmtree(self.temporary, ignore_errors=True)
            free = (
                f"; {shutil.disk_usage(self.checkpoints).free / 1e9:.3g} GB are free there"
                if self.checkpoints.exists()
                else ""
            )
            reason = (
                f"the checkpoint {self.target} could not be written ({error}){free}. The previous"
                " one, if any, is intact."
            )
            raise CheckpointError(reason) from error


def add_metrics(
    directory: Path,
    step: int,
    metrics: Mapping[str, float],
    *,
    keep: int = 2,
    ranking: Ranking | None = None,
) -> None:
    """Add what was measured after the checkpoint of `step` was written, such as a validation, and
    rank it anew.

    A new folder with links to the old one's files takes its place, so that it is whole at any time.
    Raises CheckpointError if that can't be written.
    """
    checkpoints = Path(directory) / "checkpoints"
    target = checkpoints / f"step_{step}"
    temporary = checkpoints / f"{TEMPORARY}{target.name}-{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(target, temporary, copy_function=link)
        manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
        replace_text(
            temporary / "metrics.json",
            json.dumps(to_json({**_metrics_of(target), **metrics}), indent=2) + "\n",
        )
        size, digest = _fingerprint(temporary / "metrics.json") or (0, "")
        manifest["files"]["metrics.json"] = {"size": size, "sha256": digest}
        replace_text(temporary / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        for path in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            flush(path)
        _put_in_place(temporary, target)
        _prune(checkpoints, step, keep, ranking)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the metrics of the checkpoint {target} could not be written ({error})."
        ) from error


def latest(directory: Path) -> Path | None:
    """The checkpoint to go on from: the one that `checkpoints/latest` names, or else the newest
    that is whole; None if there is none.

    One that is damaged is passed over with a warning that names the file and what is wrong with it.
    """
    checkpoints = Path(directory) / "checkpoints"
    pointed = _pointed_at(checkpoints / "latest")
    for path in sorted(
        present(directory).values(), key=lambda path: (path != pointed, -step_of(path))
    ):
        try:
            verify(path)
            return path
        except CheckpointError as error:
            warnings.warn(f"{error} Trying an older one.", stacklevel=2)
    return None


def best(directory: Path) -> Path | None:
    """The best checkpoint of a run that ranks them; None where there is none."""
    path = _pointed_at(Path(directory) / "checkpoints" / "best")
    return path if path is not None and path.exists() else None


def present(directory: Path) -> dict[int, Path]:
    """Every checkpoint below the run's directory by its step, the oldest first, whole or not."""
    found = {step_of(path): path for path in (Path(directory) / "checkpoints").glob("step_*")}
    return {step: found[step] for step in sorted(found) if step >= 0}


def metrics_by_step(directory: Path) -> dict[int, dict[str, Any]]:
    """What was measured in the step of each checkpoint, the oldest first."""
    return {step: _metrics_of(path) for step, path in present(directory).items()}


def load(path: Path, run: Run) -> LoopState:
    """Give trainer and random generators the state that they had when `path` was written, and
    return the loop's.

    Before anything has been changed it raises CheckpointError if a file is missing or damaged, and
    ValueError if the checkpoint is of a run with another algorithm or seed.
    """
    path = Path(path)
    verify(path)
    try:
        values = json.loads((path / "state.json").read_text(encoding="utf-8"))
        algorithm = values.pop("algorithm")
        state = LoopState.from_dict(values)
        generators = json.loads((path / "rng.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "rng.safetensors")
    except Exception as error:
        raise CheckpointError(f"the checkpoint {path} can't be read ({error}).") from error
    if algorithm != algorithm_of(run):
        raise ValueError(
            f"a run must be resumed by its own algorithm, but {path} is of {algorithm}, not"
            f" {algorithm_of(run)}: name another run.dir"
        )
    if state.seed != run.state.seed:
        raise ValueError(
            f"run.seed must stay as it was when a run is resumed ({state.seed}), but it is"
            f" {run.state.seed}: leave it out"
        )
    run.trainer.load_checkpoint(path / "trainer")
    restore_generators(generators, tensors)  # last: loading may have drawn from them
    return state


def algorithm_of(run: Run) -> str:
    """The name that a checkpoint remembers, so that no other algorithm goes on with it."""
    return type(run.config).__name__.removesuffix("Config").lower()


def verify(path: Path) -> None:
    """Compare a checkpoint with its manifest. Raises CheckpointError, naming file and difference."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        files, version = manifest["files"], manifest["format"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint {path} is not used: its manifest.json is missing or damaged"
            f" ({error!r})."
        ) from error
    if version != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} is not used: it has format {version}, and this version of"
            f" nemorl reads format {FORMAT}."
        )
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for name, found in zip(
            expected, pool.map(lambda name: _fingerprint(path / name), expected), strict=True
        ):
            size, digest = expected[name]
            if found is None:
                raise CheckpointError(f"the checkpoint {path} is not used: {name} can't be read.")
            if found != (size, digest):
                difference = (
                    f"has {found[0]} bytes instead of {size}"
                    if found[0] != size
                    else "is damaged (its SHA-256 differs from the manifest's)"
                )
                raise CheckpointError(f"the checkpoint {path} is not used: {name} {difference}.")


def sweep(directory: Path) -> None:
    """Clear up after killed processes, at a run's start: remove their unfinished folders and put
    back a checkpoint that was just being replaced.
    """
    checkpoints = Path(directory) / "checkpoints"
    for path in checkpoints.glob(f"{REPLACED}*"):
        original = checkpoints / path.name.removeprefix(REPLACED)
        if original.exists():
            _discard(path)
        else:
            path.rename(original)
    for path in checkpoints.glob(f"{TEMPORARY}*"):
        if not lives(path.name.rpartition("-")[2]):
            shutil.rmtree(path)
    half_written = [path for name in ("latest", "best") for path in checkpoints.glob(f".{name}.*")]
    for path in (
        *half_written,
        *checkpoints.parent.glob(".metrics.jsonl.*"),
        *checkpoints.parent.glob(".config.yaml.*"),
    ):
        if not lives(path.name.rpartition(".")[2]):
            path.unlink()


def _write(
    folder: Path,
    run: Run,
    metrics: Mapping[str, float],
    random_state: RandomState,
    *,
    background: bool,
) -> None:
    trainer = folder / "trainer"
    trainer.mkdir(parents=True)
    if background:
        run.trainer.save_checkpoint(trainer, background=True)
    else:
        run.trainer.save_checkpoint(trainer)
    generators, tensors = random_state
    save_file(tensors, folder / "rng.safetensors")
    (folder / "rng.json").write_text(json.dumps(generators), encoding="utf-8")
    (folder / "state.json").write_text(
        json.dumps({"algorithm": algorithm_of(run), **run.state.to_dict()}, indent=2) + "\n",
        encoding="utf-8",
    )
    (folder / "metrics.json").write_text(
        json.dumps(to_json(metrics), indent=2) + "\n", encoding="utf-8"
    )


def _seal(folder: Path) -> None:
    """Add the manifest, with everything on the disk.

    What the trainer's ranks have written they have flushed and summed up themselves.
    """
    known = {
        f"trainer/{name}": (file.size, file.sha256)
        for name, file in shares.files_of(folder / "trainer").items()
    }
    shares.clear(folder / "trainer")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for path in files:
        name = path.relative_to(folder).as_posix()
        size, digest = known.get(name) or _fingerprint(path) or (0, "")
        entries[name] = {"size": size, "sha256": digest}
    manifest = folder / "manifest.json"
    manifest.write_text(
        json.dumps({"format": FORMAT, "files": entries}, indent=2) + "\n", encoding="utf-8"
    )
    flushed = {folder / name for name in known}
    for path in (*files, manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        if path not in flushed:
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


def _prune(checkpoints: Path, step: int, keep: int, ranking: Ranking | None) -> None:
    """Of those up to `step` keep the newest `keep`, or the best `keep` and that of `step`.

    Later ones are of a run that then went back.
    """
    everything = present(checkpoints.parent)
    earlier = [path for at, path in everything.items() if at <= step]
    kept = earlier[-keep:]
    if ranking is not None:
        ranked = ranking.best({path: _metrics_of(path) for path in earlier}, keep)
        kept = [*ranked, earlier[-1]]
        if ranked:
            write_atomically(checkpoints / "best", ranked[0].name + "\n")
    for path in everything.values():
        if path not in kept:
            _discard(path)
    if best(checkpoints.parent) is None:
        (checkpoints / "best").unlink(missing_ok=True)


def _pointed_at(pointer: Path) -> Path | None:
    """The checkpoint that a file such as `latest` names."""
    try:
        return pointer.parent / pointer.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _metrics_of(path: Path) -> dict[str, Any]:
    try:
        metrics = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return metrics if isinstance(metrics, dict) else {}


def _discard(path: Path) -> None:
    """Remove a folder so that nobody ever finds half of it under its name."""
    doomed = path.with_name(f"{TEMPORARY}{path.name.lstrip('.')}-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _fingerprint(path: Path) -> tuple[int, str] | None:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
