"""Safetensors files, written one tensor or one piece of a tensor at a time and read by slices.

A file of pieces says in its header where each belongs, as torch's HuggingFaceStorageWriter does.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemorl.models.checked_files import CheckedFile, CheckedWriter, Checksum, DamagedFile
from nemorl.models.hub import INDEX

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The names of number types in the format."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
OFFSETS, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
OF = "tensor"
"""The key of a place that names the tensor, where a file has several pieces of it."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: its shape, and its place in the tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> "Piece":
        return cls(name, tensor.dtype, tuple(tensor.shape), (0,) * tensor.ndim)


def write_tensors(path: Path, pieces: Sequence[Piece], tensors: Iterable[Tensor]) -> Checksum:
    """Write a file of `pieces`, whose values `tensors` yields, to the disk."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    keyed = _keyed(pieces)
    if any(any(piece.offsets) for piece in pieces):
        places = {
            key: {"saved_offsets": piece.offsets, **({} if key == piece.name else {OF: piece.name})}
            for key, piece in keyed.items()
        }
        entries["__metadata__"] |= {OFFSETS: json.dumps(places), VERSION: "1.0"}
    end = 0
    for key, piece in keyed.items():
        begin, end = end, end + piece.num_bytes
        entries[key] = {
            "dtype": NAMES[piece.dtype],
            "shape": piece.shape,
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with CheckedWriter(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in zip(pieces, tensors, strict=True):
            flat = tensor.detach().cpu().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy())
        return file.checksum()


def _keyed(pieces: Sequence[Piece]) -> dict[str, Piece]:
    """From a tensor's second piece on, an entry's name has its number."""
    found: dict[str, Piece] = {}
    counts = Counter[str]()
    for piece in pieces:
        number = counts[piece.name]
        found[f"{piece.name}[{number}]" if number else piece.name] = piece
        counts[piece.name] += 1
    return found


@dataclass(frozen=True)
class _Stored:
    """A piece in a file, where its bytes begin at `position`."""

    file: CheckedFile
    piece: Piece
    position: int

    def read(self, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        piece = self.piece
        inner = _slices(begins, ends, piece.offsets)
        first, last = (inner[0].start, inner[0].stop) if inner else (0, 1)
        row = math.prod(piece.shape[1:]) * piece.dtype.itemsize
        data = self.file.read(self.position + first * row, self.position + last * row)
        rows = torch.frombuffer(data, dtype=piece.dtype).view(
            (last - first, *piece.shape[1:]) if inner else ()
        )
        return rows[(slice(None), *inner[1:])] if inner else rows


class TensorFiles:
    """The tensors in a set of files, wherever their pieces are.

    With `checksums`, by file name, each byte is checked when it is read. Tensors may be views of
    the files. Raises DamagedFile where a file is not whole or not as it was written.
    """

    def __init__(
        self, paths: Iterable[Path], checksums: Mapping[str, Checksum] | None = None
    ) -> None:
        self._pieces: dict[str, dict[tuple[int, ...], _Stored]] = {}
        for path in sorted(paths):
            file = CheckedFile(path, None if checksums is None else checksums.get(path.name))
            for stored in _stored(file):
                # Ranks that hold the same piece may both have written it.
                self._pieces.setdefault(stored.piece.name, {})[stored.piece.offsets] = stored

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors by name."""
        return {name: self._shape(name) for name in self._pieces}

    def read(
        self, name: str, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return a box of a tensor, or all of it. Raises DamagedFile where a part is missing."""
        shape = self._shape(name) if shape is None else tuple(shape)
        offsets = (0,) * len(shape) if offsets is None else tuple(offsets)
        found = self._found(name)
        box: Tensor | None = None
        missing = math.prod(shape)
        for stored in found:
            piece = stored.piece
            begins = [max(a, b) for a, b in zip(offsets, piece.offsets, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(offsets, shape, piece.offsets, piece.shape, strict=True)
            ]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            inside = stored.read(begins, ends)
            if tuple(inside.shape) == shape:
                return inside
            box = torch.empty(shape, dtype=piece.dtype) if box is None else box
            box[_slices(begins, ends, offsets)] = inside
            missing -= inside.numel()
        if missing:
            raise DamagedFile(
                f"{name} must be there in full, but a part of {list(shape)} from"
                f" {list(offsets)} on is missing"
            )
        return torch.empty(shape, dtype=found[0].piece.dtype) if box is None else box

    def _found(self, name: str) -> list[_Stored]:
        if name not in self._pieces:
            raise DamagedFile(f"{name} must be there, but is in none of the files")
        return list(self._pieces[name].values())

    def _shape(self, name: str) -> tuple[int, ...]:
        pieces = [stored.piece for stored in self._found(name)]
        ends = [[a + n for a, n in zip(p.offsets, p.shape, strict=True)] for p in pieces]
        shape = tuple(map(max, zip(*ends, strict=True)))
        if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
            raise DamagedFile(
                f"{name} must be there in full, but a part is missing: was a file lost?"
            )
        return shape


def _stored(file: CheckedFile) -> Iterator[_Stored]:
    try:
        begin = 8 + int.from_bytes(file.read(0, 8), "little")
        header = json.loads(bytes(file.read(8, begin)))
        offsets = json.loads(header.pop("__metadata__", {}).get(OFFSETS, "{}"))
        size = begin + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{file.path} is not a safetensors file ({error!r})") from error
    if size != file.size:
        raise DamagedFile(f"{file.path} is incomplete: it has {file.size} bytes instead of {size}")
    for key, entry in header.items():
        shape, place = tuple(entry["shape"]), offsets.get(key, {})
        begins = tuple(place.get("saved_offsets", (0,) * len(shape)))
        piece = Piece(place.get(OF, key), DTYPES[entry["dtype"]], shape, begins)
        yield _Stored(file, piece, begin + entry["data_offsets"][0])


def _slices(begins: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin - start, end - start)
        for begin, end, start in zip(begins, ends, origin, strict=True)
    )


def file_name(kind: str, index: int, count: int) -> str:
    """Return Hugging Face's name of the `index`-th of `count` files, counted from 0."""
    numbers = "" if count == 1 else f"-{index + 1:05}-of-{count:05}"
    return f"{kind}{numbers}.safetensors"


def write_index(folder: Path, files: Mapping[str, Sequence[Piece]]) -> None:
    places = {piece.name: file for file, pieces in files.items() for piece in pieces}
    total = sum(piece.num_bytes for pieces in files.values() for piece in pieces)
    values = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_model_files(
    folder: Path, weights: Iterable[tuple[str, Tensor]], *, max_bytes: float = 5e9
) -> None:
    """Write weights as `transformers` loads them, with one file's tensors in memory at a time."""
    written: list[list[Piece]] = []
    for tensors in _batches(weights, max_bytes):
        pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
        write_tensors(folder / f".{len(written)}", pieces, tensors.values())
        written.append(pieces)
    names = [file_name("model", index, len(written)) for index in range(len(written))]
    for index, name in enumerate(names):
        (folder / f".{index}").rename(folder / name)
    if len(names) > 1:
        write_index(folder, dict(zip(names, written, strict=True)))


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


def require_shapes(
    stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError unless the expected tensors are stored, in these shapes."""
    wrong = []
    for name, shape in expected.items():
        if (found := stored.get(name)) is None:
            wrong.append(f"{name} is missing")
        elif found != shape:
            wrong.append(f"{name} is {list(found)}, where {list(shape)} is expected")
    if wrong:
        raise ValueError(f"{'; '.join(wrong[:3])} ({len(wrong)} in all)")
