"""The oracle (oracle/) without its peers: nothing is forgotten, and its page is of these rows."""

import inspect
import re
from dataclasses import replace
from importlib import import_module

import pytest

from oracle import __main__ as oracle
from oracle import notes, peers
from oracle.compare import Found, compare
from tests.packages import ROOT

ROWS = [row for table in oracle.TABLES.values() for row in table]
PAGE = (ROOT / "docs" / "oracle.md").read_text()
MODULES = (
    "advantages",
    "distillation",
    "importance",
    "kl",
    "masks",
    "policy",
    "preference",
    "supervised",
    "value",
)


@pytest.mark.parametrize("name", MODULES)
def test_every_function_is_compared_or_left_out_for_a_reason(name: str):
    module = import_module(f"nemorl.losses.{name}")
    public = {
        name
        for name, each in inspect.getmembers(module, inspect.isfunction)
        if each.__module__ == module.__name__ and not name.startswith("_")
    }
    compared = set(re.findall(r"\w+", " ".join(row.ours for row in ROWS)))
    assert public <= compared | set(notes.NOT_COMPARED)
    assert not public & compared & set(notes.NOT_COMPARED), "compared, and yet left out"


def test_the_page_has_these_rows():
    found = re.findall(r"^\| `(.+?)` \| ((?:TRL|verl|OpenRLHF) .+?) \|", PAGE, re.MULTILINE)
    assert found == [(row.ours, f"{oracle.TITLES[row.peer]} {row.theirs}") for row in ROWS]
    assert all(note.title in PAGE for note in notes.NOTES.values())
    pins = (ROOT / "oracle" / "requirements.txt", ROOT / "oracle" / "alone.txt")
    pinned = dict(re.findall(r"(\w+)==(\S+)", "".join(path.read_text() for path in pins)))
    assert all(f"{title} {pinned[name]}" in PAGE for name, title in oracle.TITLES.items())


def test_a_difference_needs_a_note_and_a_note_a_difference():
    row = replace(ROWS[0], other=ROWS[0].mine, notes=())
    found = compare(row)
    assert all(each.agrees for each in found.values()) and not oracle.problems(row, found)
    noted = replace(row, notes=("empty",))
    assert "explains nothing" in oracle.problems(noted, found)[0]
    doubled = replace(row, other=lambda batch: 2 * row.mine(batch))
    assert "unexplained on 'random'" in oracle.problems(doubled, compare(doubled))[0]
    assert not oracle.problems(noted, {"empty mask": Found(1.0, 0.0)})


def test_missing_peers_are_named(monkeypatch, capsys):
    monkeypatch.setattr(peers, "installed", dict)
    monkeypatch.setattr("sys.argv", ["oracle"])
    assert oracle.main() == 1
    assert "Not installed, so not compared: TRL, verl, OpenRLHF" in capsys.readouterr().out
