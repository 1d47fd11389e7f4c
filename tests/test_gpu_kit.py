"""The GPU kit (benchmarks/gpu)."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import MARK, __main__, part
from benchmarks.gpu.__main__ import Options
from tests.forked import succeeded

ROWS = {
    "first": 6,
    "correct": 10,
    "train": 4,
    "generate": 2,
    "memory": 4,
    "head": 3,
}
"""Parts, and how many values their small forms measure at least."""


@pytest.mark.slow_cases(but=["first"])
@pytest.mark.parametrize("name", ROWS)
def test_a_part_runs_on_a_cpu(name: str, forked: Path):
    command = [forked / "python", "-m", "benchmarks.gpu.part", name, "--small"]
    done = succeeded(*command, OMP_NUM_THREADS="1")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    device, *rows = [json.loads(line.removeprefix(MARK)) for line in lines]
    assert device["device"].startswith("CPU")
    assert not [row for row in rows if "failed" in row], done.stderr[-4000:]
    values = [row for row in rows if "value" in row]
    assert len(values) >= ROWS[name] and all(row["value"] >= 0 for row in values)
    if name in ("first", "correct", "memory"):
        assert not [row for row in values if row["met"] is False]


@pytest.mark.slow
def test_the_runner_writes_the_page_and_a_json(tmp_path: Path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"# Mine\n\n{__main__.BEGIN}\nold\n{__main__.END}\n\nkept\n")
    assert __main__.main(Options(part=("weights",), small=True, write=page)) == 0
    text = page.read_text()
    assert text.startswith("# Mine") and text.endswith("kept\n") and "old" not in text
    assert "| weights | object store, transport: × the speed of a copy |" in text
    assert "| weights | NCCL | skipped |  | NCCL needs a GPU" in text
    assert list(json.loads(page.with_suffix(".json").read_text())) == ["CPU, small form"]


def script(*rows: dict, then: str = "") -> list[str]:
    lines = [f"print({MARK + json.dumps(row)!r}, flush=True)" for row in rows]
    return [sys.executable, "-c", "\n".join([*lines, then])]


def test_a_part_that_takes_too_long_or_dies_keeps_its_rows():
    first = part.row("speed", 2.0, at_least=1)
    late = list(__main__.rows(script(first, then="import time; time.sleep(60)"), 3))
    assert late == [first, {"what": "the rest", "skipped": "the part's 3 s were over"}]
    dead = list(__main__.rows(script(first, then="import os; os._exit(7)"), 60))
    assert dead == [first, {"what": "the rest", "failed": "the process ended with code 7"}]


def test_a_minute_gives_a_first_page_and_says_what_it_leaves_out(tmp_path: Path, monkeypatch):
    begun = []

    def measured(command, limit_s):
        begun.append((command[3], limit_s))
        now[0] += 35.0
        yield {"device": "a GPU", "versions": {}}
        yield part.row("speed", 2.0, at_least=1)

    now = [0.0]
    monkeypatch.setattr(__main__.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(__main__, "rows", measured)
    page = tmp_path / "page.md"
    old = {"a GPU": {"parts": {"train": [part.row("old", 3.0)]}}}
    page.with_suffix(".json").write_text(json.dumps(old))
    assert __main__.main(Options(minutes=1, write=page)) == 0
    assert begun == [("first", 40.0), ("head", 25.0)]
    text = page.read_text()
    assert "| first | speed | 2 | ≥ 1: met |  |" in text and "| train | old | 3 |" in text
    left = "| all of it | skipped |  | needs 60 s, and 25 are left: raise --minutes |"
    assert all(f"| {name} {left}" in text for name in ("correct", "generate", "memory", "weights"))
    assert text.index("| first ") < text.index("| correct ") < text.index("| head ")


@pytest.mark.parametrize(
    ("version", "cuda", "error", "said"),
    [
        ("2.10.0", "13.0", None, "PyTorch must be 2.11 or newer, but it is 2.10.0: update it"),
        ("2.11.0", "13.0", "Found no NVIDIA driver", "must find a GPU, .* Found no NVIDIA driver"),
        ("2.11.0", "13.0", None, "^$"),
    ],
)
def test_what_is_refused(version, cuda, error, said, monkeypatch):
    def init() -> None:
        if error:
            raise RuntimeError(error + "\nmore")

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert re.search(said, part.refusal(small=False))


@pytest.mark.slow
def test_what_can_not_be_measured_is_a_row():
    def without_titan():
        raise ValueError("needs torchtitan: pip install") from ImportError()

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    def fine():
        yield part.row("speed", float("nan"), at_most=1)

    def wrong():
        yield {}["speed"]

    makers = {each.__name__: each for each in (without_titan, out_of_memory, wrong, fine)}
    found = list(part.rows(iter(makers.items())))
    assert [row.get("skipped") for row in found[:2]] == [
        "needs torchtitan: pip install",
        "CUDA out of memory.",
    ]
    assert found[2]["failed"] == "KeyError: 'speed'"
    assert found[3]["met"] is False and found[3]["goal"] == "≤ 1"
