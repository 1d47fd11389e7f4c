"""Checkpoints: everything that a run needs to go on bit for bit, in `checkpoints/step_N/`.

    policy/              the training backend's files: model, optimizer, schedule; other backends
                         that train have folders of their names
    state.json           the LoopState
    rng.json             generators of Python's random and numpy
    rng.safetensors      generators of torch, one for the CPU and one for every GPU
    manifest.json        size and CRC-32 of all of these; a backend with a manifest.json of its own
                         checks its files while it reads them

Each rank writes and flushes its own part of a temporary folder, which is then renamed; last
`checkpoints/latest` names it (`checkpoints/best` the best one, by `checkpoints/metrics.json`).
Until then the previous one is in force.
"""

import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from nemorl.checks import require, warn
from nemorl.data.digest import Digest
from nemorl.models.tensor_files import (
    MANIFEST,
    CheckedFile,
    Checksum,
    checksum,
    read_manifest,
    write_manifest,
)
from nemorl.parallel.backend import TrainingBackend
from nemorl.runtime.config.base import BaseConfig, Ranking
from nemorl.runtime.store.directory import by_step, to_json
from nemorl.runtime.store.files import (
    TEMPORARY,
    WorkerDied,
    WorkerTimeout,
    check_writer,
    flush,
    free_space,
    sweep_temporary,
    write_atomically,
)
from nemorl.runtime.store.state import POLICY, LoopState, RunView

T = TypeVar("T")
SMALL = 1 << 20
"""Of files that are checked before any is loaded."""


class CheckpointError(OSError):
    """A checkpoint that cannot be written or read."""


def seed_generators(seed: int) -> None:
    """Seed every global random generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class RandomState(NamedTuple):
    """The state of every global random generator, torch's as tensors by device."""

    values: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def now(cls) -> "RandomState":
        kind, keys, *rest = np.random.get_state()
        values = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
        tensors = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # a run on the CPU wakes no GPU
            states = torch.cuda.get_rng_state_all()
            tensors |= {f"cuda:{index}": state for index, state in enumerate(states)}
        return cls(values, tensors)

    def restore(self) -> None:
        version, internal, gauss_next = self.values["python"]
        random.setstate((version, tuple(internal), gauss_next))
        kind, keys, *rest = self.values["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(self.tensors["cpu"])
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in self.tensors:
                torch.cuda.set_rng_state(self.tensors[f"cuda:{index}"], index)


def begin(
    directory: Path,
    run: RunView,
    *,
    keep: int,
    ranking: Ranking | None = None,
    metrics: Mapping[str, float] | None = None,
    generators: RandomState | None = None,
    background: bool = False,
) -> Callable[[], Path]:
    """Write the checkpoint of `run.state.step` aside, or with `background` copy it, and return a
    function that puts it in place, in any thread, and calls `rank`.

    generators: the random state (None: the present one). Both raise CheckpointError, and the
    previous checkpoint stays.
    """
    check_writer(directory)
    step, trainer = run.state.step, run.trainer  # as the run may be closed before `publish`
    target = Path(directory) / "checkpoints" / f"step_{step}"
    temporary = target.with_name(TEMPORARY + target.name)

    def publish() -> Path:
        with _complete_or_removed(temporary, target):
            if background:
                trainer.wait_for_checkpoint()
            _seal(temporary)
            if target.exists():  # of a run that went back
                _discard(target)
            temporary.rename(target)
            flush(target.parent)
            write_atomically(target.with_name("latest"), target.name + "\n")
            flush(target.parent)
        rank(directory, step, metrics or {}, keep=keep, ranking=ranking)
        return target

    with _complete_or_removed(temporary, target):
        shutil.rmtree(temporary, ignore_errors=True)
        # The policy last, and alone in the background: two would mix their collective calls.
        for name in sorted(run.backends, key=POLICY.__eq__):
            folder = temporary / name
            folder.mkdir(parents=True)
            options = {"background": True} if background and name == POLICY else {}
            run.backends[name].save_checkpoint(folder, **options)
        values, tensors = generators or RandomState.now()
        save_file(tensors, temporary / "rng.safetensors")
        (temporary / "rng.json").write_text(json.dumps(values))
        state = {"algorithm": _algorithm(run.config), "backends": list(run.backends)}
        state |= run.state.saved()
        (temporary / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    return publish


@contextmanager
def _complete_or_removed(temporary: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint {target} could not be written ({error}){free_space(target)}. The"
            " previous one, if any, is intact. Make room or give write access there."
        ) from error


def rank(
    directory: Path,
    step: int,
    metrics: Mapping[str, float],
    *,
    keep: int,
    ranking: Ranking | None,
) -> None:
    """Record a checkpoint's measurements, and remove those not kept; an error is a warning."""
    try:
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
    except OSError as error:
        warn(f"older checkpoints were not ranked or removed: {error}")


def latest(directory: Path, *, quiet: bool = False) -> Path | None:
    """Return the checkpoint to resume from, if any: the one that `checkpoints/latest` names, or the
    newest of which no file is missing or cut.
    """
    found = _first(directory, lambda path: verify(path, largest=SMALL), quiet=quiet)
    return found and found[0]


def load_latest(
    directory: Path, config: BaseConfig, trainer: TrainingBackend
) -> tuple[Path, LoopState] | None:
    """Load the checkpoint to resume from, an older one if it is damaged; None if none is whole."""
    return _first(directory, lambda path: load(path, config, trainer))


def _first(
    directory: Path, use: Callable[[Path], T], *, quiet: bool = False
) -> tuple[Path, T] | None:
    pointed = _pointed_at(Path(directory) / "checkpoints" / "latest")
    newest_first = reversed(present(directory).values())
    for path in sorted(newest_first, key=lambda path: path != pointed):
        try:
            return path, use(path)
        except CheckpointError as error:
            if not quiet:
                warn(f"{error} Trying an older one.")
    return None


def best(directory: Path) -> Path | None:
    """Return the best checkpoint, if ranked."""
    path = _pointed_at(Path(directory) / "checkpoints" / "best")
    return path if path is not None and path.exists() else None


def present(directory: Path) -> dict[int, Path]:
    """Return every checkpoint by its step, the oldest first."""
    return by_step(Path(directory) / "checkpoints")


def metrics_by_step(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the measurements at each checkpoint's step."""
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError, ValueError, AttributeError, TypeError):  # missing or damaged
        saved = json.loads((Path(directory) / "checkpoints" / "metrics.json").read_bytes())
        found = {step: {**values} for step, values in saved.items()}
    return {step: found.get(str(step), {}) for step in present(directory)}


def data_of(directory: Path | str) -> list[Digest]:
    """Return the digests of the run's rows."""
    found = latest(Path(directory), quiet=True)
    return json.loads((found / "state.json").read_bytes())["data"] if found else []


def backends_of(path: Path) -> list[str]:
    """Return the names of the backends in a checkpoint."""
    return json.loads((path / "state.json").read_bytes())["backends"]


def load(path: Path, config: BaseConfig, trainer: TrainingBackend) -> LoopState:
    """Restore trainer and random generators from a checkpoint, and return the loop's state.

    Raises: ValueError for another algorithm or seed, before anything changes; CheckpointError for a
    missing or damaged file, perhaps after the trainer has read others.
    """
    with _as_checkpoint_error(path):  # as not every trainer checks its files
        expected = read_manifest(path)
        files = {name: CheckedFile(path / name, expected[name]).read() for name in expected}
    values = json.loads(bytes(files["state.json"]))
    algorithm, names = values.pop("algorithm"), values.pop("backends")
    state = LoopState.resumed(values)
    if algorithm != _algorithm(config):
        raise ValueError(
            f"a run must be resumed by its own algorithm, but {path} is of {algorithm}, not"
            f" {_algorithm(config)}: name another run.dir"
        )
    if state.seed != config.run.seed:
        raise ValueError(
            f"run.seed must stay as it was when a run is resumed ({state.seed}), but it is"
            f" {config.run.seed}: omit it"
        )
    with _as_checkpoint_error(path):
        for name in {*names} - {POLICY}:  # which checks its own
            _check(_own_files(path / name))
        trainer.load_checkpoint(path / POLICY)
    tensors = load_tensors(bytes(files["rng.safetensors"]))
    # Last, as loading may draw from them.
    RandomState(json.loads(bytes(files["rng.json"])), tensors).restore()
    return state


def load_backend(path: Path, name: str, backend: TrainingBackend) -> None:
    """Restore the backend `name` from a checkpoint."""
    names = backends_of(path)
    require(
        name in names,
        "run.backend",
        f"must name one of the backends that {path} holds ({', '.join(names)})",
        name,
        "begin a new run with it (--run.dir)",
    )
    with _as_checkpoint_error(path):
        backend.load_checkpoint(path / name)


def verify(path: Path, *, largest: float = math.inf) -> dict[Path, Checksum]:
    """Return the checksums of a checkpoint's files. Raises CheckpointError for a wrong size, and
    for a wrong CRC-32 of files of up to `largest` bytes.
    """
    with _as_checkpoint_error(path):
        files = {path / name: expected for name, expected in read_manifest(path).items()}
        for folder in [file.parent for file in files if file.name == MANIFEST]:
            files |= _own_files(folder)
        _check({file: one for file, one in files.items() if one.size <= largest})
    return files


def _check(files: Mapping[Path, Checksum]) -> None:
    for file, expected in files.items():
        CheckedFile(file, expected).read()


def sweep(directory: Path) -> None:
    """Remove what killed processes left."""
    sweep_temporary()
    check_writer(directory)
    for folder in (Path(directory), Path(directory) / "checkpoints"):
        for path in folder.glob(f"{TEMPORARY}*"):
            _remove(path)


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (WorkerDied, WorkerTimeout):
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} is not used: {error}.") from error


def _algorithm(config: BaseConfig) -> str:
    return type(config).__name__.removesuffix("Config").lower()


def _seal(folder: Path) -> None:
    paths = set(folder.rglob("*"))
    paths -= {file for part in folder.iterdir() for file in _own_files(part)}
    files = sorted(path for path in paths if path.is_file())
    write_manifest(folder, {str(path.relative_to(folder)): checksum(path) for path in files})
    for path in (*(paths - set(files)), folder):
        flush(path)


def _own_files(folder: Path) -> dict[Path, Checksum]:
    """Return the files in a backend's own manifest, if any."""
    known = read_manifest(folder) if (folder / MANIFEST).exists() else {}
    return {folder / name: expected for name, expected in known.items()}


def _pointed_at(pointer: Path) -> Path | None:
    try:
        return pointer.parent / pointer.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _discard(path: Path) -> None:
    doomed = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
