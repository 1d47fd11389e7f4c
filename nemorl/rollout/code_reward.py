"""The reward `code`: a program passes its tests, in sandboxes."""

import ast
import asyncio
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemorl.checks import short
from nemorl.data.datasets import as_messages
from nemorl.rollout.sandbox import ProgramLimits, ProgramResult, check_sandbox, parse, run_program

SIDES = Path(__file__).with_name("code_sides.py").read_text()
FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
BLOCK = re.compile(r"^([ \t]*)```(\w*)[^\n]*\n(.*?)(?:^\1```|\Z)", re.DOTALL | re.MULTILINE)
DEFINED = re.compile(r"^(?:def|class)\s+(\w+)", re.MULTILINE)
STORED = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


def program_of(text: str, tests: str = "") -> str:
    """Return a text's last block of Python, else its last block, else the text; rather a block that
    defines what tests in Python name.

    >>> program_of("So:\\n```python\\nprint(1)\\n```\\n")
    'print(1)\\n'
    """
    found = BLOCK.findall(text)
    if found and _parses(text):
        found = []  # blocks of a docstring
    blocks = [
        (kind.lower(), re.sub(f"^{indent}", "", code, flags=re.MULTILINE))
        for indent, kind, code in found
    ]
    python = [code for kind, code in blocks if kind in ("python", "python3", "py")]
    every = [text, *(code for _, code in blocks), *python]
    named = {*re.findall(r"\w+", tests)} - {*DEFINED.findall(tests)}
    return [*every, *(code for code in every[1:] if named & {*DEFINED.findall(code)})][-1]


def _parses(text: str) -> bool:
    try:
        return bool(parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def read_tests(answer: Any) -> list[Any]:
    """Return tests: texts of Python, or pairs of stdin and stdout. Raises: ValueError.

    >>> read_tests([{"input": "1", "output": "2"}])
    [('1', '2')]
    """
    try:
        if isinstance(answer, str):
            answer = json.loads(answer) if answer.lstrip()[:1] in ("[", "{") else [answer]
        if isinstance(answer, Mapping):  # APPS's
            if answer.get("fn_name") or isinstance(answer["inputs"], str):
                raise ValueError("it needs lists of texts, and no fn_name")
            pairs = zip(answer["inputs"], answer["outputs"], strict=True)
            answer = [{"input": given, "output": wanted} for given, wanted in pairs]
        tests = [
            each if isinstance(each, str) else (each["input"], each["output"]) for each in answer
        ]
        kinds = {
            _checks(each) if isinstance(each, str) else tuple(map(type, each)) for each in tests
        }
        if kinds not in ({True}, {(str, str)}):
            raise ValueError("they are none, or mixed, or not of texts")
    except (TypeError, KeyError, ValueError, SyntaxError) as error:
        raise ValueError(
            "code needs tests, Python or a list of it or of {'input': text, 'output': text}, but"
            f" the answer is {short(answer)} ({error}): see docs/rewards.md"
        ) from error
    return tests


def _nodes_that_run(test: str) -> list[ast.AST]:
    statements = [each for each in parse(test).body if not isinstance(each, STORED)]
    return [node for each in statements for node in ast.walk(each)]


def _lacks_call(test: str) -> bool:
    functions = {
        each.name: {getattr(node, "id", "") for node in ast.walk(each)}
        for each in parse(test).body
        if isinstance(each, STORED)
    }
    run = {getattr(node, "id", "") for node in _nodes_that_run(test)}
    called = run.union(*(names for name, names in functions.items() if name in run))
    return "check" in functions and "check" not in called


def _checks(test: str) -> bool:
    kinds = ast.Call, ast.Assert, ast.Raise
    nodes = ast.walk(parse(test)) if _lacks_call(test) else _nodes_that_run(test)
    if not any(isinstance(node, kinds) for node in nodes):
        raise ValueError("nothing that could fail runs: call the functions of the tests")
    return True


def judge_program(
    program: str,
    tests: list[Any],
    *,
    head: str = "",
    entry_point: str = "",
    limits: ProgramLimits | None = None,
) -> Iterator[bool]:
    """Yield for each test of `read_tests` whether a program passes it; arguments as `code_tests`.

    head: Python before the program, for tests, too.

    >>> list(judge_program("def twice(x): return 2 * x", ["assert twice(2) == 4"]))
    [True]
    """
    limits = limits or ProgramLimits()
    if isinstance(tests[0], str):
        called = f"\ncheck({entry_point})" * bool(entry_point)
        asked = [test + called * _lacks_call(test) for test in tests]
        known = f"{head}\ndel {entry_point}" if head else ""
        if head:  # after what Python wants at the beginning
            program = "\n".join([*FUTURE.findall(program), head, FUTURE.sub("", program)])
        yield from _judged(program, (asked, known), limits)
        return
    for stdin, wanted in tests:
        result = run_program(program, stdin=stdin, limits=limits)
        yield result.outcome == "ok" and _lines(result.stdout) == _lines(wanted)


async def code_tests(
    prompt: Any,
    response: Any,
    answer: Any,
    entry_point: str = "",
    *,
    share: bool = False,
    limits: Mapping[str, Any] | None = None,
) -> float:
    """Return 1 if the response's program passes all tests in `answer` (`read_tests`), else 0.

    prompt, response: messages, or their texts. What the model or a tool said before is not read.
    entry_point: the function that a prompt begins and tests call by `check` (HumanEval). share:
    return the share of tests passed. limits: fields of `ProgramLimits`, for each test of stdin, or
    all in Python.
    """
    asked = [
        each.get("content")
        for each in as_messages(prompt, "prompt", "user")
        if each["role"] in ("system", "user")
    ]
    tests, head = read_tests(answer), program_of("\n".join(filter(None, asked)))
    program = program_of(
        as_messages(response, "response")[-1]["content"] or "",
        "\n".join([entry_point, *(each for each in tests if isinstance(each, str))]),
    )
    if not (entry_point and f"def {entry_point}(" in head and _parses(head)):
        head = ""  # which may only mention the function
    allowed = ProgramLimits(**limits or {})

    def judge() -> float:
        passes = judge_program(program, tests, head=head, entry_point=entry_point, limits=allowed)
        return sum(passes) / len(tests) if share else float(all(passes))

    return await asyncio.get_running_loop().run_in_executor(_threads(), judge)


def _check_row(row: Mapping[str, Any]) -> None:
    for test in read_tests(row["answer"]):
        if isinstance(test, str) and _lacks_call(test) and not row.get("entry_point"):
            raise ValueError(
                "code needs the column entry_point, the function that a test's check(candidate) is"
                f" called with, but has {', '.join(row)}"
            )
    check_sandbox()


vars(code_tests).update(check_row=_check_row, reads_messages=True, has_own_limit=True)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _judged(program: str, tests: tuple[list[str], str], limits: ProgramLimits) -> list[bool]:
    (calls, asks), (answers, replies) = os.pipe(), os.pipe()

    def side(name: str, stdin: str, files: tuple[int, int], limits: ProgramLimits) -> ProgramResult:
        arguments = [name, *map(str, files)]
        try:
            return run_program(
                SIDES, stdin=stdin, arguments=arguments, descriptors=files, limits=limits
            )
        finally:
            for file in files:
                os.close(file)

    with ThreadPoolExecutor(1) as other:
        judged = other.submit(
            side, "tests", json.dumps(tests), (answers, asks), replace(limits, wall=limits.wall + 5)
        )
        side("program", program, (calls, replies), limits)
    result = judged.result()
    good = result.outcome == "ok" and result.stdout
    return json.loads(good) if good else [False] * len(tests[0])
