"""Checkpoints of a model and its optimizer as safetensors, in one form for every plan.

    config.json              and generation_config.json: with the weights a folder that
                             `transformers` loads as it is
    model.safetensors        or, of n ranks, model-0000k-of-0000n.safetensors and their index:
                             whole weights, of which each rank writes its share
                             (with LoRA: PEFT's two files instead)
    optimizer.safetensors    or optimizer-0000k-of-0000n.safetensors: the pieces of
                             `<parameter's name>.<what>` that rank k holds
    backend.json             the optimizer's steps, and the fingerprint of the initial weights
    manifest.json            sizes and CRC-32 of all of these, written last by rank 0

No rank holds more than one whole tensor besides its own part, and each reads and checks its own
pieces only, from files of any plan. No pickle is read or written. torchtitan's CheckpointManager,
on torch.distributed.checkpoint, publishes a checkpoint by its folder's name alone and pickles what
is no tensor.
"""

import json
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.models.adapters import CONFIG, WEIGHTS, has_adapters
from nemorl.models.checked_files import (
    MANIFEST,
    CheckedFile,
    Checksum,
    DamagedFile,
    checksum,
    read_manifest,
    write_manifest,
)
from nemorl.models.tensor_files import (
    INDEX,
    Piece,
    TensorFiles,
    file_name,
    write_index,
    write_tensors,
)
from nemorl.parallel.dtensor.build import canonical
from nemorl.parallel.dtensor.lora import adapter_tensors, check_scale, write_adapter_config
from nemorl.parallel.dtensor.mesh import World
from nemorl.parallel.dtensor.pieces import fill, full_tensor, own_part, replicas

STATE = "backend.json"
SMALL_FILES = ("config.json", "generation_config.json", CONFIG, INDEX, STATE)
BEGUN = ".begun"
"""A file by which ranks see whether they share the folder."""
SLOWEST = timedelta(days=1)
"""A rank may wait this long for others that write; a dead one is noticed at once."""
File = tuple[str, list[Piece], Iterable[Tensor]]
"""A file's name, its pieces, and their values in the same order."""


class CheckpointWriter:
    """Writes this rank's part of checkpoints, one at a time, at once or in a thread.

    Made by all ranks together.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        # A group of its own, as `wait` may run beside a training step.
        self._group = None
        if world.control_group is not None:
            self._group = dist.new_group(backend="gloo", timeout=SLOWEST)
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._written: dict[str, Checksum] = {}
        self._error: BaseException | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        path: Path,
        *,
        state: Mapping[str, Any],
        background: bool = False,
    ) -> None:
        """Write everything that the next step depends on; a collective call.

        With `background` return as soon as all is copied to main memory; `wait` says when it is
        written. `state` goes into backend.json. Raises OSError if a rank cannot write its part.
        """
        self.wait()
        self._begin(path)
        self._path, self._written, self._error = path, {}, None
        lora = has_adapters(model)
        if self.world.rank == 0:
            try:
                _write_small_files(model, path, state, lora=lora, count=self.world.size)
            except OSError as error:
                self._error = error
        files = [self._weights(model, lora=lora), self._optimizer(model, optimizer)]
        if background:
            files = [
                (name, pieces, [tensor.detach().to("cpu", copy=True) for tensor in tensors])
                for name, pieces, tensors in files
            ]
            self._thread = threading.Thread(
                target=self._write, args=(path, files), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._write(path, files)
            self.wait()

    def wait(self) -> None:
        """Return when all ranks have written the last checkpoint and its manifest is there.

        A collective call, in any thread. Raises OSError on every rank if one could not write.
        """
        path = self._path
        if path is None:
            return
        if self._thread is not None:
            self._thread.join()
        self._thread = self._path = None
        error, self._error = self._error, None
        if error is not None and self.world.size == 1:
            raise error
        problem = None
        if error is not None:
            problem = f"could not write its part: {str(error) or type(error).__name__}"
        parts = self._raise_any(problem, self._written, group=self._group)
        problem = None
        if self.world.rank == 0:
            try:
                write_manifest(path, {name: file for part in parts for name, file in part.items()})
                (path / BEGUN).unlink()
            except OSError as failure:
                problem = str(failure)
        self._raise_any(problem, group=self._group)

    def close(self) -> None:
        """Let a thread finish its files."""
        if self._thread is not None:
            self._thread.join()

    def _begin(self, path: Path) -> None:
        """Make an empty folder, and raise OSError on every rank unless all see it."""
        problem = None
        try:
            if self.world.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                _clear(path)
                (path / BEGUN).touch()
        except OSError as error:
            problem = f"on {socket.gethostname()}: {error}"
        self._raise_any(problem)
        try:  # the listing is read anew, where a look-up may come from a cache
            shared = BEGUN in {file.name for file in path.iterdir()}
        except OSError:
            shared = False
        problem = (
            f"on {socket.gethostname()}: {path} is not the folder that the other ranks see: put"
            " the run in one that all machines share"
        )
        self._raise_any(None if shared else problem)

    def _raise_any(self, problem: str | None, value: Any = None, *, group: Any = None) -> list[Any]:
        """Return every rank's value, or raise OSError on all if one has a problem."""
        found = self.world.gather_objects((problem, value), group=group)
        for rank, (problem, _) in enumerate(found):
            if problem is not None:
                size = self.world.size
                raise OSError(problem if size == 1 else f"rank {rank} of {size} {problem}")
        return [value for _, value in found]

    def _weights(self, model: nn.Module, *, lora: bool) -> File:
        """This rank's file of whole weights, which all ranks gather one by one."""
        tensors = adapter_tensors(model) if lora else unique_tensors(model)
        count = 1 if lora else num_files(tensors, self.world.size)
        owners = shared_out({name: tensor.numel() for name, tensor in tensors.items()}, count)
        own = [name for name, owner in owners.items() if owner == self.world.rank]
        pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items() if name in own]

        def values() -> Iterator[Tensor]:
            for name, tensor in tensors.items():
                whole = full_tensor(tensor.detach())
                if name in own:
                    yield whole

        name = WEIGHTS if lora else file_name("model", self.world.rank, count)
        return name, pieces, values()

    def _optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> File:
        """This rank's pieces of the optimizer's state. Ranks that hold the same take turns."""
        names = {id(parameter): name for name, parameter in unique_tensors(model).items()}
        pieces: list[Piece] = []
        values: list[Tensor] = []
        entries = [
            (f"{names[id(parameter)]}.{what}", tensor)
            for parameter, state in optimizer.state.items()
            for what, tensor in state.items()
        ]
        for number, (name, tensor) in enumerate(entries):
            local, offsets = own_part(tensor)
            copies, this = (
                replicas(tensor)
                if isinstance(tensor, DTensor)
                else (self.world.size, self.world.rank)
            )
            if local.numel() and this == number % copies:
                pieces.append(Piece(name, local.dtype, tuple(local.shape), offsets))
                values.append(local)
        return file_name("optimizer", self.world.rank, self.world.size), pieces, values

    def _write(self, path: Path, files: list[File]) -> None:
        for name, pieces, given in files:
            tensors = iter(given)
            try:
                if pieces or name.startswith("optimizer"):
                    self._written[name] = write_tensors(path / name, pieces, tensors)
            except BaseException as error:
                self._error = self._error or error
            deque(tensors, maxlen=0)  # the other ranks need this one's part of every tensor
        try:
            for name in SMALL_FILES:
                if self.world.rank == 0 and (path / name).exists():
                    self._written[name] = checksum(path / name)
        except OSError as error:
            self._error = self._error or error


def load_state(path: Path) -> dict[str, Any]:
    """Return the `state` that was saved."""
    return json.loads(bytes(CheckedFile(path / STATE, read_manifest(path)[STATE]).read()))


@contextmanager
def damage_shared(world: World) -> Iterator[None]:
    """Raise DamagedFile on every rank if one cannot read a file in the block; a collective call."""
    damage = None
    try:
        yield
    except OSError as error:
        damage = str(error)
    for found in world.gather_objects(damage):
        if found is not None:
            raise DamagedFile(found)


class Saved:
    """What a `CheckpointWriter` wrote, read by all ranks together: damage that one rank meets is
    raised on every rank.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.world = path, world
        self.checksums = read_manifest(path)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy this rank's part into the model's own tensors, or its adapters, and its optimizer.

        Raises ValueError, before anything is changed, if it belongs to another model, and
        DamagedFile on every rank if a rank reads a damaged byte; then another checkpoint must be
        loaded.
        """
        with damage_shared(self.world):
            self._load_weights(model)
            self._load_optimizer(optimizer, model)

    def _files(self, pattern: str) -> TensorFiles:
        return TensorFiles(self.path.glob(pattern), self.checksums)

    def _load_weights(self, model: nn.Module) -> None:
        lora = has_adapters(model)
        own = adapter_tensors(model) if lora else unique_tensors(model)
        with self._files(WEIGHTS if lora else "model*.safetensors") as stored:
            saved = stored.shapes
            wrong = sorted(
                name
                for name in saved.keys() | own.keys()
                if name not in saved or name not in own or saved[name] != tuple(own[name].shape)
            )
            if wrong:
                whose, remedy = "the model", "name the model of that run"
                if lora:
                    whose, remedy = (
                        "the adapters",
                        "give the model, lora.rank and lora.target_modules of that run",
                    )
                raise ValueError(
                    f"checkpoint {self.path} must be of {whose} in use, but differs in"
                    f" {', '.join(wrong[:5])} ({len(wrong)} in all): {remedy}"
                )
            if lora:
                check_scale(model, self.path)
            for name, tensor in own.items():
                fill(tensor, stored, name)

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in unique_tensors(model).items()}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        with self._files("optimizer*.safetensors") as stored:
            shapes = stored.shapes
            saved: dict[str, list[str]] = {}
            for key in shapes:
                saved.setdefault(key.rpartition(".")[0], []).append(key)
            own = [names[id(parameter)] for parameter in parameters]
            wrong = sorted(saved.keys() - set(own))
            wrong += [name for name in own if saved and name not in saved]
            if wrong:
                raise ValueError(
                    f"the optimizer's state in {self.path} must be that of the parameters that"
                    f" train, but differs in {', '.join(wrong[:5])}: go on with the settings of"
                    " that run"
                )
            for index, (name, parameter) in enumerate(zip(own, parameters, strict=True)):
                for key in saved.get(name, []):
                    if shapes[key] == tuple(parameter.shape):
                        empty = torch.empty_like(parameter, requires_grad=False)
                        value = fill(empty, stored, key)
                    else:
                        value = stored.read(key).clone()
                    state.setdefault(index, {})[key.rpartition(".")[2]] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their Hugging Face names, of tensors that share
    memory only the first.
    """
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {
        canonical(name): tensor
        for name, tensor in state.items()
        if seen.setdefault(id(tensor), name) == name
    }


def num_files(tensors: Mapping[str, Tensor], ranks: int) -> int:
    """Each rank writes a file, as long as there are tensors for all of them."""
    return max(1, min(ranks, len(tensors)))


def shared_out(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Give each name an owner out of `count` so that all get about the same: the largest first, to
    the one that has the least.

    >>> shared_out({"a": 5, "b": 1, "c": 4}, 2)
    {'a': 0, 'c': 1, 'b': 1}
    """
    loads, owners = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _write_small_files(
    model: Any, path: Path, state: Mapping[str, Any], *, lora: bool, count: int
) -> None:
    (path / STATE).write_text(json.dumps(dict(state)), encoding="utf-8")
    if lora:
        write_adapter_config(model, path)
        return
    model.config.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(path)
    tensors = unique_tensors(model)
    count = num_files(tensors, count)
    if count > 1:
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        files: dict[str, list[Piece]] = {}
        for name, owner in shared_out(sizes, count).items():
            piece = Piece.whole(name, tensors[name])
            files.setdefault(file_name("model", owner, count), []).append(piece)
        write_index(path, files)


def _clear(path: Path) -> None:
    """Remove an earlier checkpoint, whose files may have other names."""
    for pattern in (
        "model*.safetensors",
        "optimizer*.safetensors",
        WEIGHTS,
        MANIFEST,
        *SMALL_FILES,
    ):
        for file in path.glob(pattern):
            file.unlink()
