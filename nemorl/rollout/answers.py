"""Rewards that need nothing but the response and the row's `answer`."""

import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar

from nemorl.checks import closest, require
from nemorl.data.sources import task_of
from nemorl.rollout.code_reward import code_tests
from nemorl.rollout.conversation import ConversationFailed
from nemorl.rollout.processes import judged_in_processes

NEEDS_SENTENCES = "length_constraints:number_sentences", "change_case:capital_word_frequency"
"""Instructions whose check splits sentences."""


@judged_in_processes(
    seconds=20, imports=("if_verifiable.common", "if_verifiable.ifeval", "nltk.tokenize")
)
def instructions_followed(
    prompt: str, response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Any]
) -> float:
    """Return the share, from 0 to 1, of a prompt's instructions that a response follows after its
    reasoning; 0 if that has no end.

    `instruction_id_list` names them, as `punctuation:no_comma`; `kwargs` are the parameters of
    each. Needs if-verifiable. Source: IFEval (Zhou et al. 2023, arXiv 2311.07911); its strict
    accuracy by prompt is the share of responses with reward 1.
    """
    from if_verifiable.common import evaluate_instructions
    from langdetect import DetectorFactory

    if prompt.rstrip().endswith("<think>") and "</think>" not in response:
        return 0.0
    DetectorFactory.seed = 0  # else one text has one language now and another then
    names, given = list(instruction_id_list), [settings or {} for settings in kwargs]
    _, scores = evaluate_instructions(response, names, given, prompt, _checkers())
    return float(scores.partial_strict)


@functools.cache
def _checkers() -> Mapping[str, Any]:
    from if_verifiable.ifeval import INSTRUCTION_DICT

    name = "keywords:letter_frequency"
    plain: Any = INSTRUCTION_DICT[name]

    class Frequency(plain):
        """Counts any symbol; for one, the package would count a letter that it draws."""

        def build_description(self, *, letter: str, **given: Any) -> str:
            if len(letter) != 1:
                raise ValueError("letter must be one symbol")
            description: str = super().build_description(letter=letter, **given)
            self._letter = letter.lower()
            return description

    return {**INSTRUCTION_DICT, name: Frequency}


def _check_row(row: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("if_verifiable") is None:
        raise ValueError(
            "ifeval needs the package if-verifiable, which is not installed: pip install"
            " 'nemorl[ifeval]'"
        )
    names, given, known = row["instruction_id_list"], row["kwargs"], _checkers()
    fits = f"must have one entry for each of {len(names)} instructions"
    require(len(names) == len(given), "kwargs", fits, len(given), "add {} or null")
    require(len(names) > 0, "instruction_id_list", "must name instructions", names, "leave it out")
    for name, settings in zip(names, given, strict=True):
        remedy = f"name one of IFEval's{closest(name, known)}"
        require(name in known, "instruction_id_list", "must have known instructions", name, remedy)
        there = {key: value for key, value in (settings or {}).items() if value is not None}
        checker = known[name](name)
        lacks = sorted({*checker.get_instruction_args_keys()} - {*there})
        require(not lacks, "kwargs", f"must have {', '.join(lacks)} for {name}", settings, "add it")
        try:
            checker.build_description(**there)
        except Exception as error:
            raise ValueError(f"kwargs must fit {name}, but {settings} gives {error!r}") from error
        if name in NEEDS_SENTENCES:
            _require_sentences(name)


@functools.cache
def _require_sentences(name: str) -> None:
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        raise ValueError(
            f"{name} needs NLTK's data of sentences, which are not on this machine: python -m"
            " nltk.downloader punkt_tab"
        ) from None


vars(instructions_followed)["check_row"] = _check_row


NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]}])[-−])?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:[eE][-−+]?\d{1,9}(?!\w))?"
)
"""After a digit, letter or closing bracket, - or − (U+2212) is a minus or hyphen, not a sign.
Commas stand alone, between digits. `Decimal` could not hold a longer exponent.
"""
SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
"""Of thousands, other than a comma: LaTeX's {,}, \\, and \\!, and narrow or unbreakable spaces."""
LATEX = re.compile(
    r"\$\$(.+?)\$\$|\$(?![\s$])([^$]+?)(?<!\s)\$(?!\d)"
    r"|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]",
    re.DOTALL,
)
"""A formula; two prices in dollars are none."""
MONEY = r"\$"

_LETTER = r"[\s:*_$(\[{\"'`“‘>\\–-]*(?:(?:text|math)\w*\{)?\(?([A-J])\b"
_WORD = r"(?!(?<=I)(?:'|\s+(?!(?:is|as|and|because|since)\b)[a-z]))"
"""Where "I" is no letter of an answer."""
ANSWER = re.compile(
    r"(?:(?<!/)(?i:answer)(?=[*_]*\s*[:>–-])"
    r"|(?i:(?:correct|right|best|final|chosen)\s+(?:option|choice))(?=[*_]*\s*[:–-])"
    r"|(?i:(?:answer\b[^.:\n]{0,60}?|option|choice|letter)\sis)\b|\\boxed)"
    rf"{_LETTER}{_WORD}|(?i:answer){_LETTER}(?!'|\s+[a-z])"
    r"|(?i:option|choice|answer)[\s*_(]+([A-J])\b[)\]*_]*\s+(?i:is\s+(?:the\s+)?"
    r"(?:best|correct|right|answer)\b)"
)
"""A letter that is called the answer, or is in a box."""
OPTION = re.compile(rf"(?i:answer|option|choice){_LETTER}{_WORD}")
"""A letter that is only named, and maybe refused."""
ALONE = re.compile(r"\W*([A-J])(?:\W*$|[).:]\s)")
"""A response that is a letter, or begins with one as a list does."""
UNREADABLE = (
    "math needs an answer that can be read, plain text or LaTeX, but the answer is {!r}: leave the"
    " row out"
)
BOX = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")

Function = TypeVar("Function", bound=Callable[..., float])


def reading(
    wanted: Callable[[Any], Any], given: Callable[[str], str | None] = lambda response: None
) -> Callable[[Function], Function]:
    """Check a reward's rows before a run: `wanted(answer)` raises ValueError. `given(response)`
    says what it reads as a response's answer.
    """

    def with_readers(fn: Function) -> Function:
        vars(fn).update(check_row=lambda row: wanted(row["answer"]), answer_of=given)
        return fn

    return with_readers


def exact_match(prompt: str, response: str, answer: Any) -> float:
    """Return 1 if the response, without white space around it, is the answer, else 0.

    >>> exact_match("1+1=", " 2\\n", "2")
    1.0
    """
    return float(response.strip() == str(answer).strip())


def _some_text(answer: Any) -> str:
    text = str(answer).strip()
    if not text:
        raise ValueError(
            f"contains_answer needs an answer, because every response contains {answer!r}: leave"
            " the row out"
        )
    return text


@reading(_some_text)
def contains_answer(prompt: str, response: str, answer: Any) -> float:
    """Return 1 if the response contains the answer, else 0.

    >>> contains_answer("1+1=", "It is 2.", 2)
    1.0
    """
    return float(_some_text(answer) in response)


def _number_of(answer: Any) -> Decimal:
    found = last_number_of(str(answer))
    if found is None:
        raise ValueError(
            f"last_number needs an answer with a number in it, but the answer is {answer!r}: use"
            " exact_match"
        )
    return _decimal(found)


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace("−", "-"))


def last_number_of(response: str) -> str | None:
    """Return the last number of a response."""
    found = NUMBER.findall(SEPARATOR.sub("", response))
    return found[-1].replace(",", "") if found else None


@reading(_number_of, last_number_of)
def last_number(prompt: str, response: str, answer: Any) -> float:
    """Return 1 if the response's last number equals the answer's (or GSM8K solution's), else 0.

    Numbers are compared exactly. A minus after a digit, letter or closing bracket is no sign; 1e5
    is 100000.

    >>> last_number("", "So it costs $1,000.50 today.", "500 + 500.5 = 1000.5 #### 1000.5")
    1.0
    """
    given, wanted = last_number_of(response), _number_of(answer)
    return float(given is not None and _decimal(given) == wanted)


def _solution(answer: Any) -> str:
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "math needs the package math-verify, which is not installed: pip install 'nemorl[math]'"
        )
    gold = str(answer).rpartition("####")[2].replace(MONEY, "").strip()
    if not gold:
        raise ValueError(UNREADABLE.format(answer))
    return gold if LATEX.search(gold) or "\\boxed" in gold else f"\\boxed{{{gold}}}"


def final_of(response: str) -> str | None:
    """Return the last box without spaces, else the last number after the last formula, else that
    formula.
    """
    response = response.replace(MONEY, "")
    boxes, formulas = BOX.findall(response), [*LATEX.finditer(response)]
    if boxes:
        return "".join(boxes[-1].split())
    number = last_number_of(response[formulas[-1].end() :] if formulas else response)
    if number or not formulas:
        return number
    return "".join("".join(filter(None, formulas[-1].groups())).split())


@reading(_solution, final_of)
@judged_in_processes(seconds=5, imports=("math_verify",))
def math_equal(prompt: str, response: str, answer: Any) -> float:
    """Return 1 if the response's final answer equals `answer` mathematically, else 0.

    The response's answer is boxed, LaTeX or plain text; `answer` is that, or a solution that ends
    in `#### answer` (GSM8K) or holds `\\boxed{answer}` (MATH). Needs math-verify.

    >>> math_equal("", r"Thus the probability is $\\boxed{0.5}$.", r"\\frac{1}{2}")
    1.0
    """
    solution = _solution(answer)
    from math_verify import parse, verify

    # Its time limit is a signal, for which only a main thread can wait. Ours ends the process.
    untimed: Any = None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of that
    texts = solution, response.replace(MONEY, "")
    wanted, given = (parse(text, parsing_timeout=untimed) for text in texts)
    if not wanted:
        raise ConversationFailed(UNREADABLE.format(answer))
    return float(verify(wanted, given, timeout_seconds=untimed))


def letter_of(response: str) -> str | None:
    """Return the letter, A to J, that a response chooses last."""
    for pattern in (ANSWER, OPTION):
        if found := pattern.findall(response):
            return "".join(found[-1])
    alone = ALONE.match(response)
    return alone and alone[1]


def _letter(answer: Any) -> str:
    text = str(answer).strip()
    if not re.fullmatch("[A-J]", text):
        raise ValueError(
            f"choice needs a letter from A to J, but the answer is {answer!r}: correct the row"
        )
    return text


@reading(_letter, letter_of)
def choice(prompt: str, response: str, answer: Any) -> float:
    """Return 1 if the letter that the response chooses is the answer, else 0.

    >>> choice("", "The answer is (B).", "B")
    1.0
    """
    return float(letter_of(response) == _letter(answer))


def think_format(prompt: str, response: str) -> float:
    """Return 1 if the response is one block <think>...</think> and an answer after it, else 0.

    The prompt may hold the opening tag.

    >>> think_format("", "<think>1 and 1 are 2.</think> 2"), think_format("", "<think>2</think>")
    (1.0, 0.0)
    """
    text = "<think>" * prompt.rstrip().endswith("<think>") + response.strip()
    match re.split("(</?think>)", text):
        case ["", "<think>", thoughts, "</think>", answer]:
            return float(bool(thoughts.strip() and answer.strip()))
    return 0.0


@judged_in_processes(seconds=20, imports=("reasoning_gym",))
def reasoning_gym_score(
    prompt: str, response: str, task: str, metadata: Any, answer: Any = None
) -> float:
    """Return the score, from 0 to 1, that a task of reasoning-gym gives to the response's last
    <answer>…</answer>, else to all of it.
    """
    found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL) or [response]
    entry = {"question": prompt, "answer": answer, "metadata": metadata}
    judge = _task(task).score_answer
    try:
        return float(judge(answer=found[-1].strip(), entry=entry))
    except Exception:  # a few tasks raise for what they can't read
        return 0.0


_task = functools.cache(task_of)


def unjudged(prompt: str, response: str) -> float:
    """Return 0, where nothing is to be judged."""
    return 0.0


REWARDS: dict[str, Any] = {
    "choice": choice,
    "exact_match": exact_match,
    "contains_answer": contains_answer,
    "last_number": last_number,
    "math": math_equal,
    "think_format": think_format,
    "code": code_tests,
    "ifeval": instructions_followed,
    "reasoning_gym": reasoning_gym_score,
}
"""Reward functions, and environments, by name; `nemorl.register_reward` adds yours."""

ENVIRONMENTS = {
    "calculator": "nemorl.rollout.environments.toolbox:Calculator",
    "python": "nemorl.rollout.environments.toolbox:PythonTool",
    "toolbox": "nemorl.rollout.environments.toolbox:Toolbox",
}
"""Environments by name."""

GIVEN = "given in Python"
"""Begins what a run's config keeps of a reward or an environment without a name."""


def require_known(name: str, known: Mapping[str, Any], setting: str, argument: str) -> None:
    """Raise ValueError for what is neither known nor `module:name`, or was given in Python.

    argument: what passes it in Python.
    """
    if name.startswith(GIVEN):
        raise ValueError(
            f"{argument} must be given again, because the run's was {name}: pass it in Python, or"
            f" name it as module:function or ./file.py:function (--{setting})"
        )
    if name not in known and ":" not in name and not name.endswith(".py"):
        raise ValueError(
            f"{setting} must be one of {', '.join(sorted(known))}, ./file.py:function, or"
            f" module:function, but it is {name!r}{closest(name, known)}"
        )
