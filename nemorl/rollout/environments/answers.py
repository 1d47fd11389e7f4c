"""Rewards that need nothing but the response and, most of them, the row's `answer`."""

import importlib.util
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

MINUS = r"(?:(?<![0-9A-Za-z)\]}])-)?"
"""The sign of a number; behind a digit, a letter or a closing bracket it is a minus between two
things, or a hyphen.
"""
NUMBER = re.compile(rf"{MINUS}(?:\d[\d,]*(?:\.\d+)?|\.\d+)")

Function = TypeVar("Function", bound=Callable[..., float])


def checking(read: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Have a reward function's rows looked at before a run:

    `read(answer)` raises ValueError for an answer that it can't compare with.
    """

    def with_check(fn: Function) -> Function:
        def check_row(row: Mapping[str, Any]) -> None:
            read(row["answer"])

        vars(fn)["check_row"] = check_row
        return fn

    return with_check


def exact_match(prompt: str, response: str, answer: Any) -> float:
    """1 where the response, without white space around it, is the answer; else 0.

    >>> exact_match("1+1=", " 2\\n", "2")
    1.0
    """
    return float(response.strip() == str(answer).strip())


def _some_text(answer: Any) -> str:
    text = str(answer).strip()
    if not text:
        raise ValueError(
            f"contains_answer needs an answer, because every response contains {answer!r}: give"
            " one, or leave the row out"
        )
    return text


@checking(_some_text)
def contains_answer(prompt: str, response: str, answer: Any) -> float:
    """1 where the response contains the answer; else 0.

    >>> contains_answer("1+1=", "It is 2.", 2)
    1.0
    """
    return float(_some_text(answer) in response)


def _number_of(answer: Any) -> float:
    found = NUMBER.findall(str(answer))
    if not found:
        raise ValueError(
            f"last_number needs an answer with a number in it, but the answer is {answer!r}: use"
            " exact_match"
        )
    return float(found[-1].replace(",", ""))


@checking(_number_of)
def last_number(prompt: str, response: str, answer: Any) -> float:
    """1 where the last number of the response equals the last one of the answer (which may be
    GSM8K's, with its solution); else 0.

    A minus is a sign where no digit, letter or closing bracket stands before it.

    >>> last_number("", "So it costs $1,000.50 today.", "500 + 500.5 = 1000.5 #### 1000.5")
    1.0
    >>> last_number("", "I don't know.", 3)
    0.0
    """
    given, wanted = NUMBER.findall(response), _number_of(answer)
    return float(bool(given) and float(given[-1].replace(",", "")) == wanted)


def _solution(answer: Any) -> str:
    """The answer at the end of a solution, as LaTeX."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "the reward math needs the package math-verify, which is not installed: pip install"
            " 'nemorl[math]'"
        )
    gold = str(answer).rpartition("####")[2].strip()
    if not gold:
        raise _unreadable(answer)
    return gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}"


def _unreadable(answer: Any) -> ValueError:
    return ValueError(
        f"math needs an answer that can be read, but the answer is {answer!r}: give plain text or"
        " LaTeX, or leave the row out"
    )


@checking(_solution)
def math_equal(prompt: str, response: str, answer: Any) -> float:
    """1 where the response's final answer (boxed, in LaTeX, or as plain text) is the same
    mathematically as `answer`; else 0. Needs math-verify.

    `answer` is plain text or LaTeX, or a solution that ends in `#### answer` (GSM8K) or holds
    `\\boxed{answer}` (MATH).

    >>> math_equal("", r"Thus the probability is $\\boxed{0.5}$.", r"\\frac{1}{2}")
    1.0
    """
    solution = _solution(answer)
    from math_verify import parse, verify

    # math-verify stops what takes too long by a signal, which only the main thread can have.
    seconds: Any = 5 if threading.current_thread() is threading.main_thread() else None
    wanted, given = (parse(text, parsing_timeout=seconds) for text in (solution, response))
    if not wanted:
        raise _unreadable(answer)
    return float(verify(wanted, given, timeout_seconds=seconds))


def think_format(prompt: str, response: str) -> float:
    """1 where the response is one block of thoughts, <think>...</think>, and an answer after it;
    else 0. The prompt may hold the opening tag.

    >>> think_format("", "<think>1 and 1 are 2.</think> 2"), think_format("", "<think>2</think>"), think_format("Add. <think>", "two</think>2")
    (1.0, 0.0, 1.0)
    """
    text = "<think>" * prompt.rstrip().endswith("<think>") + response.strip()
    thoughts, _, answer = text.removeprefix("<think>").partition("</think>")
    again = any(tag in part for tag in ("<think>", "</think>") for part in (thoughts, answer))
    return float(
        text.startswith("<think>") and bool(thoughts.strip()) and bool(answer.strip()) and not again
    )
