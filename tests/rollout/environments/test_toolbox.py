"""The calculator against exact arithmetic, Python in the sandbox, and conversations that use both,
in the formats of Qwen and Llama.
"""

import json
import re
from fractions import Fraction
from functools import partial
from threading import Semaphore
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.rollout.environments import make_environment, toolbox
from nemorl.rollout.environments.toolbox import Calculator, PythonTool, Toolbox
from nemorl.rollout.environments.tools import schemas_of, tools_of
from nemorl.rollout.sandbox import ProgramLimits
from tests.rollout.chats import call, played, tokenizer_of

SMALL = ProgramLimits(cpu=1, wall=60, output=10_000, memory=256 << 20)
calculate, run = Calculator().calculate, PythonTool(limits=SMALL).python

NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.tuples(st.integers(0, 999), st.integers(0, 99)).map("{0[0]}.{0[1]:02}".format),
)
POWERS = st.tuples(NUMBERS, st.integers(-3, 3)).map("{0[0]} ** {0[1]}".format)
OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%"])
EXPRESSIONS = st.recursive(
    NUMBERS | POWERS,
    lambda inner: st.one_of(
        st.tuples(inner, OPERATORS, inner).map("({0[0]} {0[1]} {0[2]})".format),
        st.tuples(inner, OPERATORS, inner).map("{0[0]}{0[1]}{0[2]}".format),
        inner.map("-({})".format),
    ),
    max_leaves=8,
)


@given(expression=EXPRESSIONS)
def test_the_calculator_is_pythons_arithmetic_of_fractions(expression: str):
    exact = re.sub(r"(?<!\*\* )(?<!\*\* -)\b\d+(\.\d+)?", r'Fraction("\g<0>")', expression)
    try:
        value = Fraction(eval(exact))
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            calculate(expression)
        return
    found = calculate(expression)
    assert Fraction(found) == value if value.denominator == 1 else float(found) == float(value)
    assert ("." in found or "e" in found) == (value.denominator > 1)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333333333"),
        ("-2**2", "-4"),
        ("+1_000 % 0x10", "8"),
        ("10**300 + 1", "1" + "0" * 299 + "1"),
        ("(-1)**(2**1000 + 1)", "-1"),
        ("4**0.5", "2"),
        ("(1 + 0.05/12)**360 * 1000", "4467.744314006109"),  # too long for a fraction
    ],
)
def test_what_it_computes(expression: str, result: str):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("x + 1", r"'x' is not \+ - \* / // % \*\* of numbers"),
        ("__import__('os').system('true')", "is not"),
        ("lambda: 1", "is not"),
        ("True + 1", "'True' is not"),
        ("7 ^ 2", "'7 \\^ 2' is not"),
        ("1; 2", "invalid syntax"),
        ("", "invalid syntax"),
        ("1\0", "null bytes"),
        ("(" * 300 + ")" * 300, "too many nested parentheses"),
        ("-" * 999 + "1", "recursion"),
        ("1" * 1001, "an expression must have at most 1000 characters"),
        ("9**9**9**9", "range error"),
        ("*".join(["7**364"] * 100), "too large for a float"),
        ("(1/3)**-(10**9)", "range error"),
        ("1 / (1 - 1)", "0"),
        ("(-8)**0.5", "math domain error"),
    ],
    ids=lambda text: text[:20],
)
def test_what_it_refuses(expression: str, error: str):
    with pytest.raises((ValueError, SyntaxError, ArithmeticError, RecursionError), match=error):
        calculate(expression)


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "(no output)"),
        ("print(1", "SyntaxError: '(' was never closed\n\nFailed: error"),
        ("print('before')\n1 / 0", "before\nTraceback"),
        ("while True: pass", "Failed: time"),
        ("while True: print('x' * 1000)", "Failed: output"),
        ("open('/etc/hostname').read()", "Error"),
    ],
)
def test_python(code: str, result: str):
    assert result in run(code)


def test_long_results_lose_their_middle():
    short = PythonTool(limits=SMALL, longest=20).python
    assert short("print('a' * 10 + 'b' * 10)") == "a" * 10 + "b" * 10
    assert short("print('a' * 11 + 'b' * 10)") == "a" * 10 + "\n…\n" + "b" * 10


def test_programs_wait_for_a_place(monkeypatch):
    places = Semaphore(1)

    def running(code, limits):
        assert not places.acquire(blocking=False)
        return SimpleNamespace(stdout=code, outcome="ok")

    monkeypatch.setattr(toolbox, "PROGRAMS_AT_A_TIME", places)
    monkeypatch.setattr(toolbox, "run_program", running)
    assert [run("1"), run("2")] == ["1", "2"]


def as_llama(name: str, **arguments) -> str:
    return json.dumps({"name": name, "parameters": arguments})


@pytest.mark.parametrize(
    ("template", "write", "broken"),
    [
        ("qwen2_5", call, "<tool_call>\n{calculate 6*7}\n</tool_call>"),
        ("qwen3", call, '<tool_call>\n{"name": "calculate"'),
        ("llama3_1", as_llama, '{"name": "calculate", "parameters": {"expression": 6*7}}'),
        ("llama3_2", as_llama, '{"name": "calculate", "parameters": '),
    ],
)
def test_a_conversation_of_each_format(template: str, write, broken: str):
    tokenizer = tokenizer_of(template)
    turns = {
        broken: "Error: the call can't be read: ",
        write("multiply", a=6, b=7): "Error: there is no tool 'multiply'; there are calculate, pyt",
        write("calculate", code="6*7"): "Error: calculate can't be called so: missing a required",
        write("calculate", expression="six*7"): "Error: ValueError: 'six' is not + - * /",
        write("python", code="print('thirty', 'six')"): "thirty six",
        write("calculate", expression="36 + 6"): "42",
    }
    script, prompts = [*turns, "42"], list[str]()

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return script[sum(text in prompt for text in turns)]

    environment = make_environment("exact_match", environment=partial(Toolbox, limits=SMALL))
    row = {"answer": "42", "prompt": [{"role": "user", "content": "What is six times seven?"}]}
    found = played(environment, answer, row, tokenizer=tokenizer)
    assert found.rewards.tolist() == [1.0] * 2 and found.answers == [None] * 2
    assert found.num_turns.tolist() == [7] * 2 and not found.failed
    assert found.metrics == {"tool_calls": 6.0, "tool_errors": pytest.approx(4 / 6)}
    for said, result in turns.items():
        followed = prompts[-1].partition(said)[2]
        assert result in followed.replace('\\"', '"')
    batch = found.to_batch()
    pairs = zip(batch.input_ids, batch.loss_mask, strict=True)
    trained = [token for ids, mask in pairs for token in ids[mask].tolist()]
    sampled = "".join(text + tokenizer.eos_token for text in script)
    assert trained == tokenizer(sampled)["input_ids"] * 2
    assert all(schema["function"]["name"] in prompts[0] for schema in schemas_of(tools_of(Toolbox)))
