"""Safetensors written as a stream and read by slices, checked on the way."""

import json
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nemorl.models import tensor_files
from nemorl.models.tensor_files import (
    DTYPES,
    Checksum,
    DamagedFile,
    Piece,
    TensorFiles,
    checksum,
    file_name,
    write_model_files,
    write_tensors,
)


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"matrix": (5, 7), "vector": (3,), "scalar": (), "nothing": (0, 4), "cube": (2, 3, 4)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in DTYPES.values()}
    return tensors | {"transposed": torch.randn(4, 6).T}


def write_whole(path: Path, tensors: dict[str, torch.Tensor]) -> Checksum:
    return write_tensors(
        path, [Piece.whole(name, tensor) for name, tensor in tensors.items()], tensors.values()
    )


def test_what_is_written_is_read_by_others_and_the_other_way_round(tmp_path: Path):
    tensors = some_tensors()
    write_whole(tmp_path / "ours", tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    torch.testing.assert_close(load_file(tmp_path / "ours"), tensors, atol=0, rtol=0)
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        stored = TensorFiles([path])
        assert stored.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            torch.testing.assert_close(stored.read(name), tensor, atol=0, rtol=0)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tensor_files, "BLOCK", 64)


def test_checksums_are_those_of_the_file(tmp_path: Path, small_blocks):
    written = write_whole(tmp_path / "file", some_tensors())
    content = (tmp_path / "file").read_bytes()
    blocks = [content[i : i + 64] for i in range(0, len(content), 64)]
    assert written == Checksum(
        len(content), "".join(f"{zlib.crc32(block):08x}" for block in blocks)
    )
    assert written == checksum(tmp_path / "file")


def write_two(folder: Path) -> tuple[Path, dict[str, Checksum], torch.Tensor]:
    tensors = {"a": torch.arange(64.0).reshape(16, 4), "b": torch.zeros(16, 4)}
    return folder / "file", {"file": write_whole(folder / "file", tensors)}, tensors["a"]


def test_what_is_read_is_checked_and_the_rest_is_not(tmp_path: Path, small_blocks):
    path, checksums, a = write_two(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the last row of b
    path.write_bytes(content)
    stored = TensorFiles([path], checksums)
    assert torch.equal(stored.read("a"), a)
    assert torch.equal(stored.read("b", (0, 0), (8, 4)), torch.zeros(8, 4))
    for begin in (0, 15):
        with pytest.raises(DamagedFile, match=r"file is damaged \(its CRC-32"):
            stored.read("b", (begin, 0), (16 - begin, 1))
    assert TensorFiles([path]).read("b")[-1, -1] != 0, "without checksums nothing is checked"


@pytest.mark.parametrize("place", range(0, 760, 40))
@pytest.mark.parametrize("how", ["flipped", "zeroed"])
def test_no_damage_is_missed(tmp_path: Path, small_blocks, place, how):
    path, checksums, _ = write_two(tmp_path)
    content = bytearray(path.read_bytes())
    content[place : place + 4] = bytes(4) if how == "zeroed" else content[place : place + 4][::-1]
    changed = bytes(content) != path.read_bytes()
    path.write_bytes(content)
    try:
        stored = TensorFiles([path], checksums)
        for name in stored.shapes:
            stored.read(name)
        assert not changed
    except DamagedFile:
        assert changed


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_file_that_is_cut_is_an_error_with_and_without_checksums(tmp_path: Path, size):
    path, checksums, _ = write_two(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedFile, match=r"incomplete|is damaged|not a safetensors file"):
        TensorFiles([path], checksums)
    with pytest.raises(DamagedFile, match=r"incomplete|not a safetensors file"):
        TensorFiles([path])


def cut(size: int, points: list[int]) -> list[tuple[int, int]]:
    places = sorted({0, size, *(point % (size + 1) for point in points)})
    return list(pairwise(places))


def write_pieces(
    folder: Path, tensor: torch.Tensor, rows: list[int], columns: list[int]
) -> list[Path]:
    """The tensor cut into boxes, each in a file."""
    boxes = [
        (slice(*row), slice(*column))
        for row in cut(tensor.shape[0], rows)
        for column in cut(tensor.shape[1], columns)
    ]
    paths = []
    for index, (row, column) in enumerate(boxes):
        part = tensor[row, column]
        paths.append(folder / f"{index}.safetensors")
        write_tensors(
            paths[-1],
            [Piece("x", part.dtype, tuple(part.shape), (row.start, column.start))],
            [part],
        )
    return paths


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    rows=st.lists(st.integers(0, 20), max_size=3),
    columns=st.lists(st.integers(0, 20), max_size=3),
)
def test_any_box_is_read_from_any_pieces(tmp_path_factory, data, rows, columns):
    folder = tmp_path_factory.mktemp("pieces")
    tensor = torch.arange(6 * 5).reshape(6, 5)
    stored = TensorFiles(write_pieces(folder, tensor, rows, columns))
    assert stored.shapes == {"x": (6, 5)}
    begins = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
    shape = [
        data.draw(st.integers(1, size - begin))
        for size, begin in zip(tensor.shape, begins, strict=True)
    ]
    found = stored.read("x", begins, shape)
    assert torch.equal(
        found, tensor[begins[0] : begins[0] + shape[0], begins[1] : begins[1] + shape[1]]
    )
    assert torch.equal(stored.read("x"), tensor)


def test_a_file_may_have_several_pieces_of_a_tensor(tmp_path: Path):
    tensor = torch.randn(6, 4)
    boxes = [(slice(0, 1), slice(2, 4)), (slice(1, 5), slice(0, 4)), (slice(5, 6), slice(0, 3))]
    rest = [(slice(0, 1), slice(0, 2)), (slice(5, 6), slice(3, 4))]
    for index, part in enumerate((boxes, rest)):
        pieces = [
            Piece("x", tensor.dtype, tuple(tensor[box].shape), (box[0].start, box[1].start))
            for box in part
        ]
        values = [tensor[box] for box in part]
        write_tensors(tmp_path / f"{index}.safetensors", pieces, values)
    stored = TensorFiles(tmp_path.glob("*.safetensors"))
    assert stored.shapes == {"x": (6, 4)} and torch.equal(stored.read("x"), tensor)
    assert torch.equal(stored.read("x", (0, 1), (6, 3)), tensor[:, 1:])
    with pytest.raises(DamagedFile, match="x must be there in full"):
        _ = TensorFiles([tmp_path / "0.safetensors"]).shapes


def test_pieces_are_torchs_own_form(tmp_path: Path):
    """torch.distributed.checkpoint's reader puts them together."""
    import torch.distributed.checkpoint as dcp

    tensor = torch.randn(6, 4)
    write_pieces(tmp_path, tensor, [2, 3], [1])
    found = {"x": torch.zeros(6, 4)}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(found["x"], tensor)


@pytest.mark.parametrize(("begin", "size"), [(0, 6), (3, 2)])
def test_a_box_that_nobody_wrote_is_not_made_up(tmp_path: Path, begin, size):
    path = tmp_path / "file"
    write_tensors(path, [Piece("x", torch.float32, (4,), (0,))], [torch.ones(4)])
    stored = TensorFiles([path])
    with pytest.raises(DamagedFile, match=rf"x must be there in full.* of \[{size}\] from"):
        stored.read("x", (begin,), (size,))
    with pytest.raises(DamagedFile, match="y must be there, but is in none of the files"):
        stored.read("y", (), ())
    assert torch.equal(stored.read("x", (1,), (3,)), torch.ones(3))


@pytest.mark.parametrize(("max_bytes", "files"), [(1e9, 1), (100, 4), (200, 2), (1, 4)])
def test_a_model_is_written_in_files_that_are_not_too_large(tmp_path: Path, max_bytes, files):
    tensors = {name: torch.randn(5, 5) for name in "abcd"}
    given = iter(tensors.items())
    write_model_files(tmp_path, given, max_bytes=max_bytes)
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in paths] == [
        file_name("model", index, files) for index in range(files)
    ]
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() is (files > 1)
    if files > 1:
        values = json.loads(index.read_text())
        assert values["metadata"]["total_size"] == 400
        for name, file in values["weight_map"].items():
            assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert TensorFiles(paths).shapes.keys() == tensors.keys()
    assert len(list(tmp_path.iterdir())) == files + (files > 1)


def test_no_more_than_a_file_is_held(tmp_path: Path):
    """The next one's tensors are made when the last file is on the disk."""
    seen = []

    def tensors():
        for index in range(6):
            seen.append(len(list(tmp_path.iterdir())))
            yield str(index), torch.zeros(25)

    write_model_files(tmp_path, tensors(), max_bytes=200)
    assert seen == [0, 0, 0, 1, 1, 2]
