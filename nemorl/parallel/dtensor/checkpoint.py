"""Checkpoints of a model and its optimizer in one form for every plan, exact, as safetensors, and
read without running anything from the files.

    config.json              and generation_config.json: with the weights a folder that
    `transformers` loads as it is model.safetensors        or, of n ranks,
    model-0000k-of-0000n.safetensors and their index: whole weights, of which each rank writes its
    share
                             (with LoRA: PEFT's two files instead)
    optimizer.safetensors    or optimizer-0000k-of-0000n.safetensors: `<parameter's name>.<what>`,
    of each the piece that rank k has backend.json             the optimizer's steps, and the
    fingerprint of what the run began with written-….json           what each rank says when its
    part is on the disk (see `shares`)

No rank holds more than one whole tensor besides what it writes, and each reads no more than its own
pieces, from files of whatever plan. Whatever is said between processes is said in `save` itself, so
that files are written in a thread while training goes on. torchtitan's CheckpointManager, on
torch.distributed.checkpoint, publishes a checkpoint by its folder's name alone and pickles what is
no tensor; ours is published as a whole or not at all (nemorl/runtime/run/checkpoint.py).
`tensor_files` says why we don't write through torch's own planner.
"""

import hashlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.models.adapters import CONFIG, WEIGHTS, has_adapters
from nemorl.models.tensor_files import (
    INDEX,
    Piece,
    TensorFiles,
    file_name,
    index_text,
    write_tensors,
)
from nemorl.parallel import shares
from nemorl.parallel.dtensor.build import canonical
from nemorl.parallel.dtensor.lora import adapter_tensors, check_scale, write_adapter_config
from nemorl.parallel.dtensor.mesh import World
from nemorl.parallel.dtensor.pieces import fill, full_tensor, own_part, replicas
from nemorl.parallel.shares import Written

STATE = "backend.json"
SMALL_FILES = ("config.json", "generation_config.json", CONFIG, INDEX, STATE)
Job = tuple[str, list[Piece], Iterable[Tensor]]
"""A file's name, what is in it, and the numbers in this order."""


class CheckpointWriter:
    """Writes this rank's part of checkpoints, one at a time, at once or in a thread."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
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
        """Write all that the next step depends on; a collective call. `state` goes into
        backend.json.

        With `background` it returns as soon as everything is copied to main memory, and `wait`
        tells when it is written. Raises OSError if some rank can't write its part.
        """
        self.wait()
        self._begin(path)
        self._path = path
        lora = has_adapters(model)
        try:
            if self.world.rank == 0:
                _write_small_files(model, path, state, lora=lora, count=self.world.size)
        except OSError as error:
            self._error = error
        jobs = [*self._weights(model, lora=lora), self._optimizer(model, optimizer)]
        if background:
            jobs = [
                (name, pieces, [tensor.detach().to("cpu", copy=True) for tensor in tensors])
                for name, pieces, tensors in jobs
            ]
            self._thread = threading.Thread(
                target=self._write, args=(path, jobs), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._write(path, jobs)
            self.wait()

    def wait(self) -> None:
        """Return when all ranks have written their part of the last checkpoint; may be called in
        any thread. Raises OSError if one could not.
        """
        thread, path = self._thread, self._path
        if thread is not None:
            thread.join()
        if path is None:
            return
        self._thread = self._path = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        shares.wait_for_all(path, self.world.size)

    def close(self) -> None:
        """Let a thread finish what it is at; whoever wants to know how that ended calls `wait`."""
        if self._thread is not None:
            self._thread.join()

    def _begin(self, path: Path) -> None:
        """Have an empty place that all ranks can write to.

        Raises OSError on every rank if one can't.
        """
        rank, size, problem = self.world.rank, self.world.size, None
        try:
            path.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                _clear(path)
        except OSError as error:
            problem = str(error)
        self._raise_any(problem)
        try:
            shares.reserve(path, rank, size)
        except OSError as error:
            problem = str(error)
        self._raise_any(problem)
        if size > 1:
            alone = shares.begun(path) < size
            self._raise_any(
                f"{path} is not the folder that the other ranks see: put the run in one that all"
                " machines share"
                if alone
                else None
            )

    def _raise_any(self, problem: str | None) -> None:
        found = self.world.gather_objects(
            None if problem is None else f"on {socket.gethostname()}: {problem}"
        )
        for rank, problem in enumerate(found):
            if problem is not None:
                raise OSError(
                    problem
                    if self.world.size == 1
                    else f"rank {rank} of {self.world.size} {problem}"
                )

    def _weights(self, model: nn.Module, *, lora: bool) -> list[Job]:
        """This rank's file of whole weights.

        Each rank has to go through all of them, as each is gathered from all.
        """
        tensors = adapter_tensors(model) if lora else unique_tensors(model)
        count = 1 if lora else num_files(tensors, self.world.size)
        owners = shared_out({name: tensor.numel() for name, tensor in tensors.items()}, count)
        rank = self.world.rank
        pieces = [
            Piece.whole(name, tensor) for name, tensor in tensors.items() if owners[name] == rank
        ]

        def values() -> Iterator[Tensor]:
            for name, tensor in tensors.items():
                whole = full_tensor(tensor.detach())
                if owners[name] == rank:
                    yield whole

        return [(WEIGHTS if lora else file_name("model", rank, count), pieces, values())]

    def _optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Job:
        """This rank's pieces of the optimizer's state.

        Learning rate and decay are the configuration's, not state, and are not saved.
        """
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
            if (
                local.numel() and this == number % copies
            ):  # of those that have the same, they take turns
                pieces.append(Piece(name, local.dtype, tuple(local.shape), offsets))
                values.append(local)
        return file_name("optimizer", self.world.rank, self.world.size), pieces, values

    def _write(self, path: Path, jobs: list[Job]) -> None:
        """Write the files and report them. An error waits in `_error`."""
        rank, files = self.world.rank, dict[str, Written]()
        for name, pieces, given in jobs:
            tensors = iter(given)
            try:
                if pieces or name.startswith("optimizer"):
                    files[name] = write_tensors(path / name, pieces, tensors)
                deque(tensors, maxlen=0)
            except BaseException as failure:
                self._error = self._error or failure
                deque(tensors, maxlen=0)  # the other ranks need this one's part of every tensor
        try:
            if rank == 0 and self._error is None:
                files |= {
                    name: _on_disk(path / name) for name in SMALL_FILES if (path / name).exists()
                }
        except OSError as failure:
            self._error = failure
        error = None if self._error is None else str(self._error) or type(self._error).__name__
        shares.report(path, rank, self.world.size, files, error=error)


def load_state(path: Path) -> dict[str, Any]:
    """What `save` was given as `state`."""
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy this rank's part of what was saved into the model's own tensors, or into its adapters
    where it has any.

    Raises ValueError, before anything is changed, if it is another model's, or if the adapters are
    of other shapes or scale.
    """
    lora = has_adapters(model)
    own = adapter_tensors(model) if lora else unique_tensors(model)
    with TensorFiles([path / WEIGHTS] if lora else path.glob("model*.safetensors")) as stored:
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
                f"checkpoint {path} must be of {whose} in use, but differs in"
                f" {', '.join(wrong[:5])} ({len(wrong)} in all): {remedy}"
            )
        if lora:
            check_scale(model, path)
        for name, tensor in own.items():
            fill(tensor, stored, name)


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Take over this rank's part of the optimizer's state.

    Raises ValueError if it is that of other parameters.
    """
    names = {id(parameter): name for name, parameter in unique_tensors(model).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    with TensorFiles(path.glob("optimizer*.safetensors")) as stored:
        shapes = stored.shapes
        saved: dict[str, list[str]] = {}
        for key in shapes:
            saved.setdefault(key.rpartition(".")[0], []).append(key)
        unknown = sorted(saved.keys() - {names[id(parameter)] for parameter in parameters})
        missing = [
            name
            for parameter in parameters
            if saved and (name := names[id(parameter)]) not in saved
        ]
        if unknown or missing:
            raise ValueError(
                f"the optimizer's state in {path} must be that of the parameters that train, but"
                f" differs in {', '.join([*unknown, *missing][:5])}: go on with the settings of"
                " that run"
            )
        for index, parameter in enumerate(parameters):
            entries: dict[str, Tensor] = {}
            for key in saved.get(names[id(parameter)], []):
                if shapes[key] == tuple(parameter.shape):
                    entries[key.rpartition(".")[2]] = fill(
                        torch.empty_like(parameter, requires_grad=False), stored, key
                    )
                else:
                    entries[key.rpartition(".")[2]] = stored.read(key)
            state[index] = entries
    optimizer.load_state_dict(
        {
            **optimizer.state_dict(),
            "state": {index: entries for index, entries in state.items() if entries},
        }
    )


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their Hugging Face names; of tensors that share memory
    only the first name.
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
    """Who of `count` gets what, so that all get about the same: the largest first, to whom has the
    least.

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
        files: dict[str, list[Piece]] = {}
        for name, owner in shared_out(
            {name: tensor.numel() for name, tensor in tensors.items()}, count
        ).items():
            files.setdefault(file_name("model", owner, count), []).append(
                Piece.whole(name, tensors[name])
            )
        (path / INDEX).write_text(index_text(files), encoding="utf-8")


def _clear(path: Path) -> None:
    """Remove an earlier checkpoint, whose files may have other names."""
    for pattern in (
        "model*.safetensors",
        "optimizer*.safetensors",
        WEIGHTS,
        *SMALL_FILES,
        f"{shares.BEGINNING}*",
        f".{shares.BEGINNING}*",
    ):
        for file in path.glob(pattern):
            file.unlink()


def _on_disk(path: Path) -> Written:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return Written(
            os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        )
