"""Rewards that need nothing but the response and, most of them, the row's `answer`."""

import importlib.util
import re
import threading
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def exact_match(prompt: str, response: str, answer: Any) -> float:
    """1 where the response, without white space around it, is the answer; else 0.

    >>> exact_match("1+1=", " 2\\n", "2")
    1.0
    """
    return float(response.strip() == str(answer).strip())


def contains_answer(prompt: str, response: str, answer: Any) -> float:
    """1 where the response contains the answer; else 0.

    >>> contains_answer("1+1=", "It is 2.", 2)
    1.0
    """
    return float(str(answer).strip() in response)


def last_number(prompt: str, response: str, answer: Any) -> float:
    """1 where the last number of the response equals the last one of the answer (which may be GSM8K's, with its solution); else 0.

    >>> last_number("", "So it costs $1,000.50 today.", "500 + 500.5 = 1000.5 #### 1000.5")
    1.0
    >>> last_number("", "I don't know.", 3)
    0.0
    """
    given, wanted = NUMBER.findall(response), NUMBER.findall(str(answer))
    if not wanted:
        raise ValueError(f"last_number needs an answer with a number in it, but the answer is {answer!r}: use exact_match")
    return float(bool(given) and float(given[-1].replace(",", "")) == float(wanted[-1].replace(",", "")))


def math_equal(prompt: str, response: str, answer: Any) -> float:
    """1 where the response's final answer (boxed, in LaTeX, or as plain text) is the same mathematically as `answer`; else 0. Needs math-verify.

    `answer` is plain text or LaTeX, or a solution that ends in `#### answer` (GSM8K) or holds `\\boxed{answer}` (MATH).

    >>> math_equal("", r"Thus the probability is $\\boxed{0.5}$.", r"\\frac{1}{2}")
    1.0
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the reward math needs the package math-verify, which is not installed: pip install 'nemorl[math]'")
    from math_verify import parse, verify

    # math-verify stops what takes too long by a signal, which only the main thread can have.
    seconds: Any = 5 if threading.current_thread() is threading.main_thread() else None
    gold = str(answer).rpartition("####")[2].strip()
    wrapped = gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}"
    wanted, given = (parse(text, parsing_timeout=seconds) for text in (wrapped, response))
    if not wanted:
        raise ValueError(f"math needs an answer that can be read, but the answer is {answer!r}: give plain text or LaTeX, or leave the row out")
    return float(verify(wanted, given, timeout_seconds=seconds))


def think_format(prompt: str, response: str) -> float:
    """1 where the response is one block of thoughts, <think>...</think>, and an answer after it; else 0. The prompt may hold the opening tag.

    >>> think_format("", "<think>1 and 1 are 2.</think> 2"), think_format("", "<think>2</think>"), think_format("Add. <think>", "two</think>2")
    (1.0, 0.0, 1.0)
    """
    text = "<think>" * prompt.rstrip().endswith("<think>") + response.strip()
    thoughts, _, answer = text.removeprefix("<think>").partition("</think>")
    again = any(tag in part for tag in ("<think>", "</think>") for part in (thoughts, answer))
    return float(text.startswith("<think>") and bool(thoughts.strip()) and bool(answer.strip()) and not again)
