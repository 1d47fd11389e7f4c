"""Files whose CRC-32 is computed while they are written and checked while they are read."""

import json
import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        """Flush the file to the disk and return its checksum."""
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
        blocks = iter(lambda: file.read(BLOCK), b"")
        crc32 = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
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
