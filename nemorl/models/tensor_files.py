"""Safetensors files written one tensor at a time, whole or in pieces, and read by slices: nobody
ever holds more than what he needs.

A file of pieces has in its header where each belongs, the way torch.distributed.checkpoint's
HuggingFaceStorageWriter puts it, so that its reader and tools understand our files. We don't write
with it: it serialises a file in memory (twice the size of a rank's part), agrees by collective
calls and pickles on what is written, which a thread beside a training step must not, and its
consolidation loses tensors without dimensions.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nemorl.parallel.shares import Written

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What the format calls the types of numbers."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
OFFSETS, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Piece:
    """A box out of a tensor: its shape, and where it begins."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> "Piece":
        """All of a tensor."""
        return cls(name, tensor.dtype, tuple(tensor.shape), (0,) * tensor.ndim)


def write_tensors(path: Path, pieces: Sequence[Piece], tensors: Iterable[Tensor]) -> Written:
    """Write a file of `pieces`, whose numbers `tensors` gives one after the other, and have it on
    the disk. Returns what was written.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if any(any(piece.offsets) for piece in pieces):
        places = {piece.name: {"saved_offsets": piece.offsets} for piece in pieces}
        entries["__metadata__"] |= {OFFSETS: json.dumps(places), VERSION: "1.0"}
    position = 0
    for piece in pieces:
        end = position + piece.num_bytes
        entries[piece.name] = {
            "dtype": NAMES[piece.dtype],
            "shape": piece.shape,
            "data_offsets": [position, end],
        }
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(header).to_bytes(8, "little"), header):
            file.write(part)
            digest.update(part)
        for piece, tensor in zip(pieces, tensors, strict=True):
            if tuple(tensor.shape) != piece.shape or tensor.dtype != piece.dtype:
                raise ValueError(
                    f"{piece.name} must be {piece.dtype} of shape {piece.shape}, but is"
                    f" {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
            if tensor.numel():
                numbers: Any = (
                    tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                )
                file.write(numbers)
                digest.update(numbers)
        file.flush()
        os.fsync(file.fileno())
        return Written(file.tell(), digest.hexdigest())


class TensorFiles:
    """The tensors in a set of files, wherever their pieces are; read when they are asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = ExitStack()
        self._pieces: dict[str, dict[tuple[int, ...], tuple[Any, Piece]]] = {}
        for path in sorted(paths):
            file = self._files.enter_context(safe_open(path, framework="pt"))
            offsets = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
            for name in file.keys():  # noqa: SIM118  # it is no dict
                stored = file.get_slice(name)
                shape = tuple(stored.get_shape())
                begin = (
                    tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(shape)
                )
                piece = Piece(name, DTYPES[stored.get_dtype()], shape, begin)
                self._pieces.setdefault(name, {})[begin] = (
                    file,
                    piece,
                )  # ranks that hold the same may both have written it

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole tensors, by name. Raises ValueError where a piece is missing."""
        return {name: self._shape(name) for name in self._pieces}

    def read(
        self, name: str, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A box out of a tensor, or all of it."""
        shape = self._shape(name) if shape is None else tuple(shape)
        offsets = (0,) * len(shape) if offsets is None else tuple(offsets)
        box: Tensor | None = None
        for file, piece in self._pieces[name].values():
            begins = [max(a, b) for a, b in zip(offsets, piece.offsets, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(offsets, shape, piece.offsets, piece.shape, strict=True)
            ]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            if not shape:
                return file.get_tensor(name)
            inside = file.get_slice(name)[_slices(begins, ends, piece.offsets)]
            if tuple(inside.shape) == shape:
                return inside
            box = torch.empty(shape, dtype=piece.dtype) if box is None else box
            box[_slices(begins, ends, offsets)] = inside
        return torch.empty(shape) if box is None else box

    def _shape(self, name: str) -> tuple[int, ...]:
        """The least box that holds all pieces; they must fill it."""
        pieces = [piece for _, piece in self._pieces[name].values()]
        shape = tuple(
            max(ends)
            for ends in zip(
                *(map(sum, zip(p.offsets, p.shape, strict=True)) for p in pieces), strict=True
            )
        )
        if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
            raise ValueError(
                f"{name} must be there in full, but a part of it is missing: was a file of the"
                " checkpoint lost?"
            )
        return shape


def _slices(begins: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin - start, end - start)
        for begin, end, start in zip(begins, ends, origin, strict=True)
    )


def file_name(kind: str, index: int, count: int) -> str:
    """As Hugging Face names the `index`-th of `count` files, counted from 0.

    >>> file_name("model", 0, 1), file_name("model", 2, 8)
    ('model.safetensors', 'model-00003-of-00008.safetensors')
    """
    return (
        f"{kind}.safetensors" if count == 1 else f"{kind}-{index + 1:05}-of-{count:05}.safetensors"
    )


def index_text(files: Mapping[str, Sequence[Piece]]) -> str:
    """What `transformers` finds the tensors of several files by."""
    places = {piece.name: file for file, pieces in files.items() for piece in pieces}
    total = sum(piece.num_bytes for pieces in files.values() for piece in pieces)
    return (
        json.dumps(
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))},
            indent=2,
        )
        + "\n"
    )


def write_model_files(
    folder: Path, weights: Iterable[tuple[str, Tensor]], *, max_bytes: float = 5e9
) -> None:
    """Weights as they come, in files of at most `max_bytes` (but for a single tensor that is
    larger), as `transformers` loads them.

    No more than one file's tensors are held at a time.
    """
    written: list[list[Piece]] = []
    for tensors in _batches(weights, max_bytes):
        pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
        write_tensors(folder / f".{len(written)}", pieces, tensors.values())
        written.append(pieces)
    names = [file_name("model", index, len(written)) for index in range(len(written))]
    for index, name in enumerate(names):
        (folder / f".{index}").rename(folder / name)
    if len(names) > 1:
        (folder / INDEX).write_text(
            index_text(dict(zip(names, written, strict=True))), encoding="utf-8"
        )


def _batches(
    weights: Iterable[tuple[str, Tensor]], max_bytes: float
) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if batch and size + tensor.nbytes > max_bytes:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor.detach().cpu()
        size += tensor.nbytes
    yield batch
