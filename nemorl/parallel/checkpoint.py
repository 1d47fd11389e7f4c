"""Checkpoints of a model and its optimizer as safetensors, in one form for every plan.

    config.json              and generation_config.json: `transformers` loads the folder of one rank
    model.safetensors        or, of n ranks, weights-0000k-of-0000n.safetensors: the pieces that
                             rank k holds (with LoRA: PEFT's two files)
    optimizer.safetensors    or optimizer-0000k-of-0000n.safetensors: of `<name in files>.<what>`
    backend.json             the optimizer's steps, and the fingerprint of the initial weights
    manifest.json            sizes and CRC-32 of all of these, written last

A rank writes what it holds; what several ranks hold, one of them writes. Each reads all headers,
of any plan, and its own pieces of the data, and checks them. An export makes whole tensors.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import or_
from pathlib import Path
from typing import Any

from torch import Tensor

from nemorl.checks import require
from nemorl.models.adapters import WEIGHTS
from nemorl.models.hub import PIECES
from nemorl.models.tensor_files import (
    CheckedFile,
    Checksum,
    Piece,
    TensorFiles,
    checksum,
    file_name,
    read_manifest,
    write_manifest,
    write_tensors,
)
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.world import World

STATE = "backend.json"
KIND = "optimizer"
"""The key of STATE that names an optimizer other than AdamW."""
BEGUN = ".begun"
"""A file by which ranks see whether they share the folder."""
Pieces = tuple[list[Piece], Iterable[Tensor]]
"""What a rank writes of tensors, and its values in the same order."""
File = tuple[str, Pieces]


@dataclass(frozen=True)
class Contents:
    """What this rank writes of a checkpoint."""

    weights: Pieces
    optimizer: Pieces
    write_config: Callable[[Path], None]
    adapters: bool = False


class CheckpointWriter:
    """Writes this rank's part of checkpoints, one at a time, at once or in a thread. Ranks share
    their errors.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._written: dict[str, Checksum] = {}
        self._error: Exception | None = None

    def save(
        self, contents: Contents, path: Path, *, state: Mapping[str, Any], background: bool = False
    ) -> None:
        """Write everything that the next step depends on, and `state` into backend.json; a
        collective call. With `background` return when all is copied to main memory.
        """
        self.wait()
        with self.world.share_errors():
            if self.world.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                for file in (*path.glob("*.json"), *path.glob("*.safetensors")):
                    file.unlink()
                (path / STATE).write_text(json.dumps(dict(state)), encoding="utf-8")
                contents.write_config(path)
                (path / BEGUN).touch()
        with self.world.share_errors():
            # It is listed, as a look-up may be answered from a cache.
            if not path.is_dir() or path / BEGUN not in path.iterdir():
                raise OSError(
                    f"{path} is not the folder that the other ranks see: put the run in one that"
                    " all machines share"
                )
        self._written, self._error = {}, None
        place = self.world.rank, self.world.size
        name = file_name("model" if self.world.size == 1 else "weights", *place)
        files: list[File] = [
            (WEIGHTS if contents.adapters else name, contents.weights),
            (file_name("optimizer", *place), contents.optimizer),
        ]
        with self.world.share_errors():
            if background:
                files = [
                    (name, (pieces, [each.detach().to("cpu", copy=True) for each in values]))
                    for name, (pieces, values) in files
                ]
                self._thread = threading.Thread(
                    target=self._write, args=(path, files), name="checkpoint", daemon=True
                )
                self._thread.start()
        self._path = path
        if not background:
            self._write(path, files)
            self.wait()

    def wait(self) -> None:
        """Return when the last checkpoint and its manifest are written; a collective call."""
        self.close()
        path, group = self._path, self.world.saving_group
        if path is None:
            return
        self._path = None
        with self.world.share_errors(group):
            if self._error is not None:
                raise self._error
        files = self.world.merge_objects(self._written, or_, group=group, everywhere=False)
        with self.world.share_errors(group):
            if self.world.rank == 0:
                write_manifest(path, files)
                (path / BEGUN).unlink()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, path: Path, files: list[File]) -> None:
        try:
            for name, (pieces, values) in files:
                if pieces:
                    self._written[name] = write_tensors(path / name, pieces, values)
            for file in path.glob("*.json") if self.world.rank == 0 else ():
                self._written[file.name] = checksum(file)
        except Exception as error:
            self._error = error


class Saved:
    """What a `CheckpointWriter` wrote, read by all ranks together. Damage that one rank meets is a
    DamagedFile on every rank.
    """

    def __init__(self, path: Path, world: World, *, optimizer: bool = True) -> None:
        """optimizer: whether its state counts; else it is new."""
        self.path, self.world, self._has_optimizer = path, world, optimizer
        with world.share_errors():
            self.checksums = read_manifest(path)
            state = CheckedFile(path / STATE, self.checksums[STATE]).read()
            self.state: dict[str, Any] = json.loads(bytes(state))

    def require_same(self, config: BackendConfig) -> None:
        """Raise ValueError for another optimizer, and where only one of the two has adapters."""
        name, rank = config.optimizer.name, config.lora.rank
        remedy = "resume with the settings of that run"
        written = f"as when {self.path} was written"
        theirs, adapted = self.state.get(KIND, "adamw"), WEIGHTS in self.checksums
        require(name == theirs, "optimizer.name", f"must be {theirs}, {written}", name, remedy)
        wanted = "above 0" if adapted else "0"
        require(bool(rank) == adapted, "lora.rank", f"must be {wanted}, {written}", rank, remedy)

    def require_base(self, found: str) -> None:
        """Raise ValueError unless its run began with weights of this fingerprint."""
        if found != self.state["base"]:
            raise ValueError(
                f"checkpoint {self.path} must be of a run that began with the model in use, but it"
                " began with other weights: load the initial model of that run again"
            )

    def weights(self, shapes: Mapping[str, tuple[int, ...]], *, lora: bool = False) -> TensorFiles:
        """Return the weights. Raises ValueError unless they belong to a model with `shapes`, or
        of its adapters.
        """
        files = [self.path / WEIGHTS] if lora else saved_weights(self.path)
        stored = TensorFiles(files, self.checksums)
        if wrong := sorted({name for name, _ in stored.shapes.items() ^ shapes.items()}):
            whose, remedy = "the model", "name the model of that run"
            if lora:
                whose = "the adapters"
                remedy = "give the model, lora.rank and lora.target_modules of that run"
            raise ValueError(
                f"checkpoint {self.path} must be of {whose} in use, but differs in"
                f" {', '.join(wrong[:5])} ({len(wrong)} in all): {remedy}"
            )
        return stored

    def optimizer(self, names: Iterable[str]) -> TensorFiles:
        """Return the optimizer's state. Raises ValueError unless it belongs to the parameters of
        these names.
        """
        files = self.path.glob("optimizer*.safetensors") if self._has_optimizer else ()
        stored = TensorFiles(files, self.checksums)
        saved = {key.rpartition(".")[0] for key in stored.shapes}
        if saved and (wrong := sorted(saved ^ set(names))):
            raise ValueError(
                f"the optimizer's state in {self.path} must belong to the parameters that train,"
                f" but differs in {', '.join(wrong[:5])}: use the settings of that run"
            )
        return stored


def shared_out(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Give each name an owner out of `count`: the largest first, to the one that has the least."""
    loads, owners = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def saved_weights(folder: Path) -> list[Path]:
    """Return the files with a checkpoint's weights, whole ones or pieces."""
    return sorted([*folder.glob("model.safetensors"), *folder.glob(PIECES)])


def write_model_config(model: Any, path: Path) -> None:
    """Write what `transformers` needs besides the weights."""
    model.config.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(path)
