"""The reward `code`: columns it reads, programs it accepts, and verdicts that can't be forged."""

import json

import pytest

from nemorl.rollout.code_reward import judge_program, program_of, read_tests
from nemorl.rollout.environments import make_environment
from nemorl.rollout.sandbox import ProgramLimits
from tests.rollout import talk

LIMITS = ProgramLimits(cpu=2, wall=20)


def reward(response: str, answer, prompt: str = "?", *, settings=None, **columns) -> float:
    environment = make_environment("code", settings=settings or {})
    rows = [{"answer": answer, **columns}]
    environment.check(rows)
    return environment.step([talk(prompt, response)], rows).rewards[0]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)", "print(1)"),
        ("a\n```python\n1\n```\nb\n```py\n2\n```\nc", "2\n"),
        ("```python\n1\n```\n```text\n2\n```", "1\n"),
        ("```python\n1\n", "1\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```\n", "if x:\n    y\n"),
        ('def f(x):\n    """\n    ```\n    f(1)\n    ```\n    """\n', None),
        ('```python\ns = """\n    ```\n    """\n```', 's = """\n    ```\n    """\n'),
    ],
)
def test_a_program_is_the_last_block(text: str, program: str | None):
    assert program_of(text) == (text if program is None else program)


def test_a_block_that_shows_how_it_is_used_is_no_program():
    used = "```python\ndef f(x): return 2 * x\n```\nUse it:\n```python\nprint(f(3))\n```"
    assert reward(used, "assert f(1) == 2") == 1
    stub = 'def f(x):\n    """Double."""\n'
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert reward(used, check, stub, entry_point="f") == 1
    checked = f"{used}\n```python\ndef check(f): pass\n```"
    assert reward(checked, check, stub, entry_point="f") == 1
    assert program_of(used) == program_of(used, "g") == "print(f(3))\n"


MBPP = [
    "assert remove_Occ('hello','l') == 'heo'",
    "assert remove_Occ('lll','l') == 'l'",
]
SOLUTION = """
def remove_Occ(s, ch):
    first, last = s.find(ch), s.rfind(ch)
    return ''.join(c for i, c in enumerate(s) if i not in (first, last))
"""
POLY = (
    'import math\nfrom typing import List\n\n\ndef poly(xs: List[float], x: float):\n    """Value'
    ' of a polynomial."""\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\ndef'
    ' find_zero(xs: List[float]):\n    """Find x such that poly(x) = 0."""\n'
)
CHECK = """
METADATA = {}

def check(candidate):
    import random
    import copy
    rng = random.Random(42)
    for _ in range(20):
        coeffs = [rng.randint(-10, 10), rng.randint(1, 10)]
        solution = candidate(copy.deepcopy(coeffs))
        assert math.fabs(poly(coeffs, solution)) < 1e-4
"""


def test_asserts_as_of_mbpp():
    assert reward(f"So:\n```python\n{SOLUTION}```", MBPP) == 1
    assert reward(SOLUTION, json.dumps(MBPP)) == 1
    wrong = "def remove_Occ(s, ch):\n    return s.replace(ch, '')"
    assert reward(wrong, MBPP) == 0
    assert reward(wrong, MBPP, settings={"share": True}) == 0.5
    assert reward("no program", MBPP, settings={"share": True}) == 0
    assert reward(SOLUTION, MBPP[0]) == 1


def test_a_check_of_a_candidate_as_of_humaneval():
    """As HumanEval/32, whose check uses what the prompt defines."""
    body = "    return -xs[0] / xs[1]\n"
    whole = f"```python\ndef find_zero(xs: List[float]):\n{body}```"
    for response in (body, whole):
        assert reward(response, CHECK, POLY, entry_point="find_zero") == 1
        asked = f"Complete this:\n```python\n{POLY}```"
        assert reward(response, CHECK, asked, entry_point="find_zero") == 1
    assert reward("    return xs[0] / xs[1]\n", CHECK, POLY, entry_point="find_zero") == 0
    cheats = "poly = lambda xs, x: 0\nmath.fabs = lambda x: 0\ndef find_zero(xs): return 5.0"
    assert reward(cheats, CHECK, POLY, entry_point="find_zero") == 0
    assert reward("    pass\n", CHECK, POLY, entry_point="find_zero") == 0
    asked = "Please write def find_zero(xs): the root of a line."
    check = CHECK.replace("poly(coeffs, solution)", "0")
    assert reward(whole, check, asked, entry_point="find_zero") == 0, "List is not there"
    whole = whole.replace(": List[float]", "")
    assert reward(whole, check, asked, entry_point="find_zero") == 1
    assert reward("def f(x): return x", "def check(c):\n    assert c(1) == 1", entry_point="f") == 1


def test_pairs_of_stdin_and_stdout():
    pairs = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10 \n"}]
    good = "print(sum(map(int, input().split())))"
    assert reward(good, pairs) == reward(good, json.dumps(pairs)) == 1
    assert reward("if __name__ == '__main__': " + good, pairs) == 1
    assert reward("print(3)", pairs) == 0
    assert reward("print(3)", pairs, settings={"share": True}) == 0.5
    assert reward(f"{good}; raise SystemExit(1)", pairs) == 0


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "def f(x): return {x: [x, (x, None)], 'a': {1.5, 2}}",
            "f(1)=={1:[1,(1,None)],'a':{2,1.5}}",
        ),
        (
            "from collections import *\nP = namedtuple('P', 'x')\ndef f(x): return P(x)",
            "f(1) == (1,)",
        ),
        ("import numpy\ndef f(x): return numpy.arange(x)", "f(2) == [0, 1]"),
        ("def f(x): return float('inf')", "f(1) == float('inf') and math.isinf(f(1))"),
        ("def f(x): print('noise'); return x", "list(map(f, [1, 2])) == [1, 2]"),
    ],
)
def test_results_are_plain_data(program: str, test: str):
    assert list(judge_program(program, [f"assert {test}", f"assert not ({test})"])) == [True, False]


def test_errors_of_a_program_reach_its_test():
    program = "class Own(Exception): pass\ndef f(x):\n    raise (ValueError if x else Own)('no')"
    test = (
        "try:\n    f(ARG)\n    assert False\nexcept KIND as error:\n    assert 'no' in str(error)"
    )
    kinds = [("1", "ValueError"), ("0", "RuntimeError"), ("1", "KeyError")]
    tests = [test.replace("ARG", argument).replace("KIND", kind) for argument, kind in kinds]
    assert list(judge_program(program, tests)) == [True, True, False]


EXPECTED = "try:\n    f(1)\nexcept KIND:\n    pass\nelse:\n    assert False"
RAISE = "def f(x): raise KIND"
SWALLOWED = [
    ("StopIteration", "for a, b in zip(map(f, [1, 2]), [1, 2]): assert a == b"),
    (
        "StopIteration",
        "try:\n    for a in map(f, [1]): assert a\nexcept Exception as e:\n    assert not e",
    ),
    ("IndexError", "class A:\n    __getitem__ = lambda _, i: f(i)\nfor a in A(): assert a == 1"),
    ("AttributeError", "class A:\n    x = property(f)\nassert getattr(A(), 'x', 1) == 1"),
    *((end, EXPECTED.replace("KIND", "")) for end in ("SystemExit(0)", "GeneratorExit")),
]


@pytest.mark.parametrize(("kind", "test"), SWALLOWED)
def test_an_error_that_python_takes_for_an_end_passes_no_test(kind: str, test: str):
    tests = [test, EXPECTED.replace("KIND", "IndexError")]
    passes = list(judge_program(RAISE.replace("KIND", kind), tests))
    assert passes == [False, kind == "IndexError"]


@pytest.mark.parametrize("program", ["import os; os._exit(0)", "g = 1", "def f(:", "exit()"])
def test_a_function_that_is_not_there_raises_no_expected_error(program: str):
    assert list(judge_program(program, [EXPECTED.replace("KIND", "")])) == [False]


@pytest.mark.parametrize("named", ["", "Exception", "LookupError", "(ValueError, KeyError)"])
def test_an_error_that_a_test_expects_passes_it(named: str):
    program = RAISE.replace("KIND", "KeyError")
    assert list(judge_program(program, [EXPECTED.replace("KIND", named)])) == [True]


# Too long to be part of an address or a time by chance, as six digits are.
WANTED = 424242424242424242
FORGERIES = {
    "exits": "import os; os._exit(0)",
    "exits when called": "def f(x):\n    import os; os._exit(0)",
    "equals everything": (
        "class A(int):\n    __eq__ = __ne__ = lambda *_: True\n    __hash__ = int.__hash__\n"
        "def f(x): return A(1)"
    ),
    "writes everywhere": (
        "import os\nfor n in range(100):\n    for text in (b'[true, true]\\n', b'true'):\n"
        "        try: os.write(n, text)\n        except OSError: pass\ndef f(x): return 1"
    ),
    "sends code": (
        "import os, pickle, sys\n"
        "run = \"import os; os.write(1, b'[true, true]'); os._exit(0)\"\n"
        "class A: __reduce__ = lambda s: (exec, (run,))\n"
        "def f(x):\n    os.write(int(sys.argv[3]), pickle.dumps(('', A()))); return 1"
    ),
    "replaces builtins": (
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.print = lambda *a, **k: 0\n"
        "import json; json.dumps = lambda x: '[true, true]'\ndef f(x): return 1"
    ),
    "looks for the tests": (
        "import gc, sys\ndef f(x):\n    frame, seen = sys._getframe(), [str(sys.argv)]\n"
        "    while frame:\n        seen += map(str, [frame.f_locals, frame.f_globals])\n"
        "        frame = frame.f_back\n"
        "    seen = ''.join([*seen, *map(str, gc.get_objects())])\n"
        "    wanted = str(42) * 9\n    return int(wanted) if wanted in seen else 0"
    ),
    "hangs": "def f(x):\n    while True: pass",
    "returns what never ends": "def f(x):\n    y = []; y.append(y); return y",
    "returns too much": "def f(x): return bytes(1 << 29)",
    "closes its files": "import os; os.closerange(0, 100)\ndef f(x): return int('42' * 9)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_is_not_forged(name: str):
    program = FORGERIES[name]
    tests = [f"assert f(1) == {WANTED}", f"assert f(2) == {WANTED} and f(3) == {WANTED}"]
    assert list(judge_program(program, tests, limits=LIMITS)) == [False, False]


def test_a_program_that_looks_for_the_tests_sees_what_it_is_given():
    tests = [f"assert f({WANTED}) == {WANTED}"]
    assert list(judge_program(FORGERIES["looks for the tests"], tests)) == [True]


def test_tests_that_do_not_end_or_fail_are_not_passed():
    tests = ["assert f(1) == 1", "while True: pass"]
    assert list(judge_program("def f(x): return x", tests, limits=LIMITS)) == [False, False]
    tests = ["import os; os._exit(0)", "assert f(1) == 1"]
    assert list(judge_program("def f(x): return x", tests, limits=LIMITS)) == [False, False]


def test_a_batch_is_judged_at_once():
    environment = make_environment("code")
    logs = [talk("?", f"print({n})") for n in range(12)]
    rows = [{"answer": [{"input": "", "output": str(n // 2 * 2)}]} for n in range(12)]
    assert environment.step(logs, rows).rewards == [1.0, 0.0] * 6


@pytest.mark.parametrize(
    "answer",
    [
        *("", [], "assert (", 3, "f", ["assert f()", ""], [{"input": [1], "output": "1"}]),
        *({"inputs": ["1"], "outputs": []}, {"inputs": "12", "outputs": "34"}),
        *("def check(candidate): pass", "def test_f():\n    assert f(1) == 2"),
        {"inputs": ["1"], "outputs": ["2"], "fn_name": "f"},
    ],
)
def test_rows_that_cannot_be_judged_are_refused_before_a_run(answer):
    with pytest.raises(ValueError, match="code needs tests, Python or a list of it"):
        make_environment("code").check([{"answer": answer}])


def test_limits_come_from_the_settings():
    settings = {"limits": {"cpu": 1, "wall": 1.5}}
    assert reward("import time; time.sleep(1000)", ["assert f()"], settings=settings) == 0


def test_tests_are_read():
    assert read_tests("assert f() == 1") == ["assert f() == 1"]
    apps = {"inputs": ["1", "3"], "outputs": ["2", "4"]}
    assert read_tests(apps) == read_tests(json.dumps(apps)) == [("1", "2"), ("3", "4")]


def test_what_the_model_said_before_is_not_run_beside_the_tests():
    """Neither a verdict of its own nor a draft whose asserts fail."""
    forged = 'def f(x): return 0\nimport os\nos.write(1, b"[true]")\nos._exit(0)'
    draft = "def f(x): return x\nassert f(1) == 2"
    environment, row = make_environment("code"), {"answer": "assert f(1) == 2", "entry_point": "f"}
    for said in (forged, draft):
        before = "Write f.", f"```python\n{said}\n```", f"```python\n{said}\n```"
        logs = [talk(*before, f"def f(x): return x + {n}") for n in (0, 1)]
        for log in logs:
            log[2]["role"] = "tool"
        assert environment.step(logs, [row] * 2).rewards == [0.0, 1.0]


def test_a_check_is_called_by_itself_or_by_its_entry_point():
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    through = "def test():\n    check(f)\n\ntest()"
    for called in ("check(f)", through, "if __name__ == '__main__':\n    check(f)"):
        assert reward("def f(x): return x + 1", check + called) == 1
        assert reward("def f(x): return x", check + called) == 0
    unused = f"{check}def test():\n    check(f)\n"
    assert reward("def f(x): return x + 1", unused, entry_point="f") == 1
    assert reward("def f(x): return x", unused, entry_point="f") == 0
    with pytest.raises(ValueError, match=r"needs the column entry_point, the function that a test"):
        reward("def f(x): return x + 1", check)


def test_a_whole_program_may_import_from_the_future():
    program = "from __future__ import annotations\n\ndef f(x: Later): return x + 1"
    check = "def check(candidate):\n    assert candidate(1) == 2 and one() == 1\n"
    prompt = 'def one(): return 1\n\ndef f(x):\n    """Add 1."""\n'
    assert reward(program, check, prompt, entry_point="f") == 1
