"""The mutants of small sources, and that a mutant is really in the way when the tests run."""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutation import run, session
from tests.mutation.mutate import mutants_of


def changes(line: str) -> list[str]:
    """Every mutated form of `line`, in the body of `def f(x, y)`."""
    source = f"def f(x, y):\n    {line}\n".encode()
    mutants = [mutant for mutant in mutants_of("a.py", source) if mutant.line == 2]
    return [mutant.apply(source).decode().splitlines()[-1].strip() for mutant in mutants]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("g(x < y)", ["g((x <= y))", "g((x >= y))"]),
        ("g(x is y)", ["g((x is not y))"]),
        ("g(x + y)", ["g((x - y))"]),
        ("g(x & y)", ["g((x | y))"]),
        ("g(x and y)", ["g((x or y))"]),
        ("g(not x)", ["g(x)"]),
        ("g(3)", ["g(4)", "g(2)"]),
        ("g(0)", ["g(1)"]),
        ("g(-1)", ["g(0)", "g(-2)"]),
        ("g(0.0, 1e-6)", ["g(1.0, 1e-6)", "g(0.0, 2e-06)"]),
        ("g(True)", ["g(False)"]),
        ("g('a')", ["g('XXa')"]),
        ("g(x if y else 'a')", ["g(x if (not y) else 'a')", "g(x if y else 'XXa')"]),
        ("g([z for z in x if z])", ["g([z for z in x if (not z)])"]),
        ("g(x[y:])", ["g(x[:])"]),
        ("g(x, dim=y)", ["g(x)"]),
        ("g(x, keepdim=True)", ["g(x, keepdim=False)"]),
        ("g(x.min(y))", ["g(x.max(y))"]),
        ("g(x.detach())", ["g(x)"]),
        ("g(torch.where(x, y, z))", ["g(y)"]),
        ("g(torch.float32)", ["g(torch.float64)"]),
        ("x = y", ["pass"]),
        ("z = y", []),  # without it there is no z: any test would see that
        ("x += y", ["pass", "x -= y"]),
        ("raise ValueError('text')", ["pass"]),
        ("return x", ["return None"]),
        ("return None", []),
        ("'a docstring'", []),
        ("assert x > 1", []),
        ("del x", []),
        ("z = f'{x + 1}'", []),
        ("z: list[int] = y", []),
        ("g(zip(x, y, strict=True))", []),
        ("g(torch.zeros(x, device=y))", ["g(torch.ones(x, device=y))"]),
    ],
)
def test_operators(line: str, expected: list[str]):
    assert [text for text in changes(line) if text != "pass" or line[0] != "g"] == expected


def test_a_condition_is_negated_at_its_border_or_as_a_whole():
    source = b"def f(x):\n    if x:\n        g()\n    while x < 1:\n        g()\n"
    found = [(mutant.line, mutant.text) for mutant in mutants_of("a.py", source)]
    assert [text for line, text in found if line == 2] == ["(not x)"]
    assert [text for line, text in found if line == 4] == ["(x <= 1)", "(x >= 1)", "2", "0"]


def test_what_is_not_executed_as_it_stands_is_left_alone():
    source = (
        b"from a import b\n__all__ = ['b']\nA = Literal['a']\nB = int | str\n@overload\ndef f(x:"
        b" int = 1): ...\nif TYPE_CHECKING:\n    C = 1\n"
    )
    assert mutants_of("a.py", source) == []


def test_where_a_mutant_is():
    source = """class A:
    b = 1

    def f(self, x=7):
        # π
        def g():
            return x * 'é' * 4
        return g""".encode()
    mutants = {mutant.text: mutant for mutant in mutants_of("a.py", source)}
    places = {text: (each.where, each.in_body, each.lines) for text, each in mutants.items()}
    assert places["5"] == ("A.f", True, (7, 7))
    assert places["8"] == ("A.f", False, (6, 8)), "a default matters wherever the body runs"
    assert places["0"] == ("", False, (2, 2))
    mutated = mutants["'XXé'"].apply(source)
    assert b"'XX\xc3\xa9'" in mutated and b"* 4" in mutated


def test_names_are_unique_and_stay_when_other_lines_change():
    source = b"def f(x):\n    g(1, 1)\n"
    names = [mutant.name for mutant in mutants_of("a.py", source)]
    assert len(set(names)) == len(names) and any("(#2)" in name for name in names)
    assert [mutant.name for mutant in mutants_of("a.py", b"import b\n\n\n" + source)] == names


def test_the_live_function_gets_the_mutants_code(monkeypatch: pytest.MonkeyPatch):
    from nemorl.data import batch
    from nemorl.data.padding import round_up as as_imported

    path = session.ROOT / "nemorl/data/padding.py"
    source = path.read_bytes()
    mutants = mutants_of("nemorl/data/padding.py", source)
    mutant = next(m for m in mutants if m.where == "round_up" and m.operator == "unary")
    function = inspect.unwrap(as_imported)
    monkeypatch.setattr(function, "__code__", function.__code__)  # put back after the test
    assert as_imported(5, 4) == 8
    place = (str(path), "round_up", function.__code__.co_firstlineno)
    assert session.swap(mutant, source, {place: [function]})
    assert as_imported(5, 4) == -8 and batch.round_up is as_imported


def test_results_of_a_fork(monkeypatch: pytest.MonkeyPatch):
    assert session.in_fork(lambda: "test_x") == ("killed", "test_x")
    assert session.in_fork(lambda: "") == ("survived", "")
    assert session.in_fork(lambda: sys.exit(3))[0] == "crash"
    monkeypatch.setattr(session, "MEMORY", 1 << 28)
    result = session.in_fork(lambda: str(len(bytearray(1 << 30))))
    assert result == ("crash", "1"), "memory has a bound"


def test_an_endless_test_is_ended():
    def endless(*_: Any, **__: Any) -> Any:
        while True:
            pass

    def work() -> str:
        session.runtestprotocol = endless
        return session.first_failure([SimpleNamespace(nodeid="endless")], {"endless": -0.25})

    assert session.in_fork(work) == ("timeout", "")


def test_what_survives_no_more_is_taken_off_the_table(tmp_path: Path, monkeypatch):
    group = '[[group]]\nreason = """\n{}"""\nmutants = [\n{}]\n'
    names = ["a.py f:  ['x' -> 1]", "a.py f:  [1 -> 2]", "a.py g:  [1 -> 2] (#2)", "b.py h:  [1]"]
    entries = [f"    '''{name}''',\n" for name in names]
    text = "# Why\n\n" + group.format("one", "".join(entries[:3])) + "\n"
    table = tmp_path / "survivors.toml"
    table.write_text(text + group.format("other", entries[3]))
    monkeypatch.setattr(run, "REASONS", table)
    mutants: dict[str, Any] = dict.fromkeys(names[:3])
    results = {names[0]: {"result": "survived"}, names[1]: {"result": "killed"}}
    run.prune(run.stale(mutants, results))
    assert table.read_text() == "# Why\n\n" + group.format("one", entries[0] + entries[2])
