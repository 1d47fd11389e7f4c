"""Safetensors files, written one tensor or one piece of a tensor at a time and read by slices.

A file of pieces says in its header where each belongs, as torch's HuggingFaceStorageWriter does.
"""

import json
import mmap
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemorl.data.batch import to_device
from nemorl.models.adapters import live_tensors
from nemorl.models.hub import INDEX

FORMAT = 4
"""Format of a manifest and of the checkpoint that it describes."""
MANIFEST = "manifest.json"
BLOCK = 1 << 22
"""Bytes that share a CRC-32: a rank that reads a part of a file checks that part."""


class DamagedFile(OSError):
    """A file that is not as it was written."""


@dataclass(frozen=True)
class Checksum:
    """The bytes in a file, and the CRC-32 of each `BLOCK` of them in eight hexadecimal digits."""

    size: int
    crc32: str


class CheckedWriter:
    """A new file, which is on the disk once its `checksum` is returned."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._size, self._crc32 = 0, list[int]()

    def __enter__(self) -> "CheckedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> None:
        rest = memoryview(data)
        while len(rest):
            if self._size % BLOCK == 0:
                self._crc32.append(0)
            room = BLOCK - self._size % BLOCK
            part, rest = rest[:room], rest[room:]
            self._file.write(part)
            self._crc32[-1] = zlib.crc32(part, self._crc32[-1])
            self._size += len(part)

    def checksum(self) -> Checksum:
        self._file.flush()
        os.fsync(self._file.fileno())
        return Checksum(self._size, "".join(f"{crc32:08x}" for crc32 in self._crc32))


class CheckedFile:
    """A file of which each block is compared with `expected`, if given, when it is first read."""

    def __init__(self, path: Path, expected: Checksum | None = None) -> None:
        self.path, self._expected, self._checked = path, expected, set[int]()
        with path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            # A private copy of what is written to, as torch has no tensors that are read-only.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b""
        self._data = memoryview(mapped)

    def read(self, begin: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes from `begin` to `end`. Raises DamagedFile where they are others."""
        end = self.size if end is None else end
        if self._expected is not None and begin < end:
            for block in range(begin // BLOCK, (end - 1) // BLOCK + 1):
                if block not in self._checked:
                    crc32 = zlib.crc32(self._data[block * BLOCK : (block + 1) * BLOCK])
                    if f"{crc32:08x}" != self._expected.crc32[8 * block : 8 * block + 8]:
                        raise DamagedFile(
                            f"{self.path} is damaged (its CRC-32 is not the manifest's)"
                        )
                    self._checked.add(block)
        return self._data[begin:end]


def checksum(path: Path) -> Checksum:
    """Flush a file that others wrote to the disk and return its checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        crc32 = "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(BLOCK), b""))
        return Checksum(file.tell(), crc32)


def write_manifest(folder: Path, files: Mapping[str, Checksum]) -> None:
    values = {"format": FORMAT, "files": {name: asdict(file) for name, file in files.items()}}
    with CheckedWriter(folder / MANIFEST) as file:
        file.write(json.dumps(values).encode())
        file.checksum()


def read_manifest(folder: Path) -> dict[str, Checksum]:
    """Return the checksums of a folder's files by name.

    Raises: DamagedFile where it cannot be read, has another format, or a file is missing or cut.
    """
    try:
        if not (folder / MANIFEST).is_file():  # opening a FIFO would wait for ever
            raise OSError("no file")
        values = json.loads((folder / MANIFEST).read_bytes())
        version = values["format"]
        files = {
            name: Checksum(int(file["size"]), str(file["crc32"]))
            for name, file in (values["files"].items() if version == FORMAT else ())
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"its {MANIFEST} is missing or damaged ({error!r})") from error
    if version != FORMAT:
        raise DamagedFile(
            f"it has format {version}, and this version of nemorl reads format {FORMAT}"
        )
    for name, file in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedFile(f"{name} can't be read ({error})") from error
        if size != file.size:
            raise DamagedFile(f"{name} has {size} bytes instead of {file.size}")
    return files


Groups = tuple[tuple[str, ...], ...]
Stored = Mapping[str, Groups]
"""By the name of a live tensor, where files have others: of each part of its rows the name of each
expert's tensor. A tensor that only has another name is one group of one.
"""


def stored_names(model: Any) -> Stored:
    """Return the tensors of a model that files have otherwise, by transformers' own conversions."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    own = getattr(model, "_weight_conversions", None)
    rules = get_model_conversion_mapping(model, add_legacy=False)
    if not (rules := [rule for rule in rules if not isinstance(rule, PrefixChange)]):
        return {}
    found: dict[str, Groups] = {}
    model._weight_conversions = rules
    try:
        for name, tensor in live_tensors(model).items():
            outline = torch.empty(tensor.shape, device="meta")
            groups: dict[str, list[str]] = {}
            for each in revert_weight_conversion(model, {name: outline}):
                groups.setdefault(re.sub(r"^(.*)\.\d+\.", r"\1.*.", each), []).append(each)
            if [*groups.values()] != [[name]]:
                found[name] = tuple(map(tuple, groups.values()))
    finally:
        model._weight_conversions = own
    return found


def names_in_files(name: str, stored: Stored) -> list[str]:
    return list(chain(*stored.get(name, ((name,),))))


def of_parameters(keys: Iterable[str], stored: Stored) -> Stored:
    """Return how files have what belongs to live tensors, by keys `<live tensor's name>.<what>`.

    >>> of_parameters(["e.up.step", "norm.step"], {"e.up": (("e.0.up", "e.1.up"),)})
    {'e.up.step': (('e.0.up.step', 'e.1.up.step'),)}
    """
    return {
        key: tuple(tuple(f"{each}.{what}" for each in group) for group in stored[name])
        for key in keys
        for name, _, what in [key.rpartition(".")]
        if name in stored
    }


def as_stored(
    tensors: Iterable[tuple[str, Tensor]], stored: Stored
) -> Iterator[tuple[str, Tensor]]:
    """Yield live tensors as files have them; parts of fused ones are views."""
    for name, tensor in tensors:
        groups = stored.get(name, ((name,),))
        if groups == ((groups[0][0],),):
            yield groups[0][0], tensor
        else:
            yield from of_experts(groups, tensor)


def of_experts(groups: Groups, tensor: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a fused tensor with the experts from `first` on, by files' names."""
    for names, part in zip(groups, tensor.chunk(len(groups), 1), strict=True):
        yield from zip(names[first : first + len(part)], part.unbind(), strict=True)


def as_live(
    groups: Groups, read: Callable[[str], Tensor], *, first: int = 0, count: int | None = None
) -> Tensor:
    """Return a live tensor, or `count` of its experts from the `first` on."""
    end = None if count is None else first + count
    return torch.cat(
        [torch.stack([read(name) for name in names[first:end]]) for names in groups], 1
    )


def shapes_of(tensors: Mapping[str, Tensor], stored: Stored) -> dict[str, tuple[int, ...]]:
    outlines = ((name, torch.empty(x.shape, device="meta")) for name, x in tensors.items())
    return {name: tuple(tensor.shape) for name, tensor in as_stored(outlines, stored)}


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
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> "Piece":
        return cls(name, tensor.dtype, tuple(tensor.shape), (0,) * tensor.ndim)


def write_tensors(path: Path, pieces: Sequence[Piece], tensors: Iterable[Tensor]) -> Checksum:
    """Write a file of `pieces`, whose values `tensors` yields, to the disk."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    keyed, counts = dict[str, Piece](), Counter[str]()
    for piece in pieces:  # from a tensor's second one on, its entry's name has a number
        number = counts[piece.name]
        keyed[f"{piece.name}[{number}]" if number else piece.name] = piece
        counts[piece.name] += 1
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
        row = prod(piece.shape[1:]) * piece.dtype.itemsize
        data = self.file.read(self.position + first * row, self.position + last * row)
        flat = torch.frombuffer(data, dtype=piece.dtype)
        if not inner:
            return flat.view(())
        return flat.view(last - first, *piece.shape[1:])[(slice(None), *inner[1:])]


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
        missing = prod(shape)
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
        if sum(prod(piece.shape) for piece in pieces) != prod(shape):
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
        files = zip(names, written, strict=True)
        places = {piece.name: file for file, pieces in files for piece in pieces}
        total = sum(piece.num_bytes for piece in chain(*written))
        values = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


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


SIDE = 8
"""Rows and columns of each matrix in a receipt of weights, and the square of it of each vector."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STRIDE = 2654435761
"""Odd and large: the positions of consecutive versions are spread over the tensor."""


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits, an int64 on its device, which is the same on all kinds:
    `Σᵢ (2i + 1) Σⱼ words[i, j]` modulo 2^64, over rows of the last dimension.

    >>> [tensor_checksum(torch.tensor(rows)) for rows in ([[1, 2], [3, 4]], [[3, 4], [1, 2]])]
    [tensor(24), tensor(16)]
    """
    size, width = tensor.element_size(), tensor.shape[-1] if tensor.ndim else 1
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * size % 8:
        flat = flat.clone()  # its words must be aligned
    words = flat.view(BITS[size if width * size % 8 else 8])
    rows = words.view(len(flat) // width if tensor.ndim > 1 else len(words), -1)
    sums = rows.sum(1, dtype=torch.int64)
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def spread(size: int, count: int, shift: int = 0) -> list[int]:
    """Return up to `count` positions below `size`, evenly spaced.

    >>> spread(10, 3), spread(10, 3, shift=1), spread(2, 3)
    ([1, 5, 8], [2, 6, 9], [0, 1])
    """
    count = min(count, size)
    found = ((2 * i + 1) * size // (2 * count) + shift * STRIDE for i in range(count))
    return sorted({position % size for position in found})


def grid(shape: Sequence[int], version: int = 0, side: int = SIDE) -> tuple[list[int], list[int]]:
    """Return rows and columns to sample a tensor at, as a matrix whose columns are the last
    dimension's; a vector is one column.
    """
    if len(shape) < 2:
        return spread(prod(shape), side * side, version), [0]
    return spread(prod(shape[:-1]), side, version), spread(shape[-1], side, version)


def sampled(tensor: Tensor, version: int = 0, side: int = SIDE) -> Tensor:
    """Return the numbers of a tensor at its `grid`, `[rows * columns]`, on its device."""
    rows, columns = grid(tensor.shape, version, side)
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    # A copy of rows first: an index of both is far slower.
    at = to_device((torch.tensor(rows), torch.tensor(columns)), tensor.device)
    return matrix.index_select(0, at[0]).index_select(1, at[1]).flatten()


def sampled_box(
    box: Tensor, offsets: Sequence[int], shape: Sequence[int], side: int = SIDE
) -> tuple[Tensor, Tensor]:
    """Return what a box of a tensor has of its `sampled` numbers: their places among these, and the
    numbers, on its device.

    offsets: where the box begins in the tensor, whose shape is `shape`.
    """
    rows, columns = grid(shape, side=side)
    leading, first, width = tuple(shape), 0, 1
    if len(shape) > 1:
        leading, first, width = leading[:-1], offsets[-1], box.shape[-1]
    at, inside = torch.zeros(len(rows), dtype=torch.long), torch.ones(len(rows), dtype=torch.bool)
    coordinates = torch.unravel_index(torch.tensor(rows), leading)
    for place, begin, size in zip(coordinates, offsets, box.shape, strict=False):
        inside &= (place >= begin) & (place < begin + size)
        at = at * size + place - begin
    column = torch.tensor(columns) - first
    there = (column >= 0) & (column < width)
    places = torch.arange(len(rows) * len(columns)).view(len(rows), -1)[inside][:, there]
    chosen = to_device((at[inside], column[there]), box.device)
    matrix = box.detach().reshape(-1, width)
    return places.flatten(), matrix.index_select(0, chosen[0]).index_select(1, chosen[1]).flatten()


def differences(
    sent: Mapping[str, Tensor], found: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> str:
    """Return which tensors differ, in words; nothing if none does.

    NaN and infinity count as equal to each other, and as different from all other numbers.

    >>> differences({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 3.0])})
    "'a' has 3 where 1 was sent"
    """
    wrong = []
    for name, values in dict(found).items():
        expected, values = sent[name].float().cpu(), values.float().cpu()
        other = (values != expected) & (values.isfinite() | expected.isfinite())
        if other.any():
            at = int(other.nonzero()[0])
            wrong.append(f"{name!r} has {values[at]:g} where {expected[at]:g} was sent")
    return ", ".join(wrong[:5]) + f" and {len(wrong) - 5} more" * (len(wrong) > 5)


class WeightsDiffer(RuntimeError):
    """An engine that took an update holds other weights than it was sent."""


def check_held(holder: str, sent: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    if wrong := differences(sent, found):
        raise WeightsDiffer(f"{holder} must hold the weights that came, but it does not: {wrong}")


def misfits(wrong: Sequence[str]) -> ValueError:
    return ValueError(
        f"weights must fit the generator's model, but {', '.join(wrong)}: use the same"
        " model on both sides"
    )
