import shutil
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.report import Gathered, pieces
from tests.runtime.runs import grpo_config, start


@given(st.text(max_size=30))
def test_pieces_of_bytes_make_the_text(text):
    """The worst case: a token per byte, so that most characters are spread over several."""
    ids = list(text.encode("utf-8", "replace"))
    found = pieces(lambda part: bytes(part).decode(errors="replace"), ids)
    assert len(found) == len(ids) and "".join(found) == bytes(ids).decode()


def test_spaces_that_a_decoder_adds_belong_to_the_token_before_them():
    words = ["a", "whole", "sentence"]
    found = pieces(lambda ids: " ".join(words[index] for index in ids), [0, 1, 2])
    assert found == ["a", " whole", " sentence"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sums"
    start(grpo_config(folder, steps=4))
    return RunDirectory.open(folder)


@pytest.mark.parametrize(
    "missing",
    ["metrics.jsonl", "run.json", "log.jsonl", "config.yaml", "tokenizer", "samples", "data.json"],
)
@pytest.mark.parametrize("damaged", [True, False])
def test_a_part_that_is_missing_or_damaged_is_left_out(run, tmp_path, missing, damaged):
    folder = tmp_path / "copy"
    shutil.copytree(run.path, folder)
    path = folder / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if damaged and missing != "samples":
        path.write_text("{ no: [valid\n")
    told = pytest.warns(UserWarning, match="is not a JSON object")
    with told if damaged and missing.endswith(".jsonl") else nullcontext():
        found = Gathered(folder)
    assert found.name == "copy"
    if missing == "run.json":
        assert found.status == "unknown"
