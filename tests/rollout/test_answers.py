"""Rewards by name, case by case."""

import re

import pytest

from nemorl.rollout.answers import (
    choice,
    contains_answer,
    final_of,
    last_number,
    letter_of,
    math_equal,
    think_format,
)
from nemorl.rollout.environments import make_environment
from tests.rollout import talk


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The answer is 72.", "48/2 = 24\n48+24 = 72\n#### 72", 1.0),
        ("72 and then 73", 72, 0.0),
        ("about -1,234.50", -1234.5, 1.0),
        ("it falls by .5", "0.5", 1.0),
        ("3 apples (5.)", "5", 1.0),
        ("", "5", 0.0),
        ("3-1", "1", 1.0),
        ("(x+2)-4", 4, 1.0),
        (r"x=-4, so \boxed{-4}", -4, 1.0),
        ("0.1000000000000000000001", 0.1, 0.0),
        ("1e5", "5", 0.0),
        ("about 1.5E-3.", 0.0015, 1.0),
        ("10000000000000000", 1e16, 1.0),  # which Python writes as 1e+16
        ("1e999999999", "2e999999999", 0.0),
        ("x = −5", -5, 1.0),  # U+2212, as in typeset text
        ("it is -5.", "−5", 1.0),
        ("1,,2", 2, 1.0),
        (r"\boxed{70{,}000}", "#### 70,000", 1.0),
        (r"$70\,000$ in all", 70000, 1.0),
        ("1\u202f234\u202f567", 1234567, 1.0),
    ],
)
def test_last_number(response, answer, expected):
    assert last_number("", response, answer) == expected


def test_last_number_compares_what_no_float_can_hold():
    assert last_number("", "9" * 400, "8" * 400) == 0.0
    assert last_number("", "9" * 400, "9" * 400) == 1.0


def test_contains_answer_needs_one():
    assert contains_answer("", "It is 2.", " 2 ") == 1.0
    assert contains_answer("", "It is 3.", 2) == 0.0
    with pytest.raises(ValueError, match="needs an answer, because every response contains ''"):
        contains_answer("", "2", "")


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"so $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        ("so it is 1/2", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{x^2+1}", "1+x^2", 1.0),
        (r"\boxed{x^2-1}", "1+x^2", 0.0),
        (r"either \boxed{3} or \boxed{4}", 4, 0.0),
        ("The answer is 72", "48 + 24 = 72\n#### 72", 1.0),
        ("The answer is 48", "48 + 24 = 72\n#### 72", 0.0),
        (r"\boxed{6}", r"We add. Thus $\boxed{6}$.", 1.0),
        (r"It costs \boxed{\$18.90}.", r"\$18.90", 1.0),
        (r"\boxed{32348}", r"\$32,\!348", 1.0),
        (r"It costs \$18.90.", r"\$18.90", 1.0),
        (r"so \(\frac{1}{2}\)", r"Thus \(0.5\).", 1.0),
        ("", "7", 0.0),
    ],
)
def test_math(response, answer, expected):
    assert math_equal("", response, answer) == expected


def test_an_answer_that_math_cannot_read_fails_its_conversation_alone():
    judge = make_environment("math")
    rows = [{"answer": answer} for answer in ("7", r"\boxed{}", "8")]
    judge.check(rows)
    judged = judge.step([talk("?", "7")] * 3, rows)
    assert judged.rewards == [1.0, 0.0, 0.0]
    (_, failure, _) = judged.failures
    assert re.match(r"math needs an answer that can be read, .* leave the row out", str(failure))


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("", "<think>one\nand one</think>\n2", 1.0),
        ("", " <think>1</think>2 ", 1.0),
        ("", "2", 0.0),
        ("", "<think>1</think> \n", 0.0),
        ("", "well <think>1</think>2", 0.0),
        ("", "<think>1</think>2<think>3</think>4", 0.0),
        ("", "<think>1</think><think>2", 0.0),
        ("Add.\n<think>\n", "1</think>2", 1.0),
        ("Add.\n<think>\n", "<think>1</think>2", 0.0),
    ],
)
def test_think_format(prompt, response, expected):
    assert think_format(prompt, response) == expected


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" (c) ", None),
        ("(C)", "C"),
        ("The answer is A.", "A"),
        ("Option A fails, so the answer is (C)", "C"),
        ("**Answer:** B", "B"),
        ("\\boxed{\\text{E}}", "E"),
        ("\\boxed{(F)}", "F"),
        ('the correct choice is "G"', "G"),
        ("A good question. Answers vary.", None),
        ("I think that A. is it", None),
        ("The answer is Apple", None),
        ("answer: K", None),
        ("Answer: B\n\nOption A is incorrect because of x.", "B"),
        ("The answer to the question is B.", "B"),
        ("Answer B is correct.", "B"),
        ("Therefore, option I is correct.", "I"),
        ("The answer is A.\n\nWait, actually option B is correct.", "B"),
        ("To find the correct answer:\n\nA. No.\nB. No.\n\nSo option C is correct.", "C"),
        ("If the answer is A then x=2, which fails. **Correct option: (C)**", "C"),
        ("The answer is not A. It is B.", None),
        ("The answer is I.", "I"),
        ("Answer: C. I'd say so: the answer: I'm sure.", "C"),
        (r"Answer: \( C \)", "C"),
        (r"Answer: $\mathbf{C}$", "C"),
        ("<answer>C</answer>\nI checked it.", "C"),
        ("", None),
    ],
)
def test_choice_reads_the_last_letter_that_is_called_the_answer(response: str, letter: str | None):
    assert letter_of(response) == letter
    for answer in "ABCDEFGHIJ":
        assert choice("", response, answer) == float(answer == letter)


@pytest.mark.parametrize(
    ("reward", "response", "answer"),
    [
        ("exact_match", " 2\n", None),
        ("last_number", "a-0.50", "0.50"),
        ("last_number", "1,000 or 2,000.0", "2000.0"),
        ("last_number", "1e999999999", "1e999999999"),
        ("math", "\\boxed{1} then \\boxed{ \\frac{1}{2} }.", "\\frac{1}{2}"),
        ("math", "\\boxed{\\frac{\\sqrt{2}}{3}}", "\\frac{\\sqrt{2}}{3}"),
        ("math", r"So it is $\frac{1}{2}$.", r"\frac{1}{2}"),
        ("math", r"It is \(x + 1\), or \[y\].", "y"),
        ("math", r"They cost \$5 and \$6.", "6"),
        ("math", "Each costs $5, so two cost $10. The answer is 10.", "10"),
        ("math", "We have $x = 5$. So the answer is 10.", "10"),
        ("math", "\\[ 9 \\times 2 = 18 \\]\n\nJanet makes $18 every day.", "18"),
        ("math", "She makes 9*$2=$<<9*2=18>>18 every day.\n#### 18", "18"),
        ("choice", "Answer: C", "C"),
        ("contains_answer", "2", None),
    ],
)
def test_what_was_read_as_the_answer_is_returned(reward: str, response: str, answer: str | None):
    row = {"answer": "C" if reward == "choice" else "2"}
    assert make_environment(reward).step([talk("?", response)], [row]).answers == [answer]


def test_formulas_that_do_not_end_are_looked_for_once():
    """Else a response that repeats itself takes minutes."""
    assert final_of("\\(" * 100_000) is None
    assert final_of("\\[ x " * 100_000) is None
