"""The reward "ifeval": whether a response follows instructions that a program can verify."""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.checks import closest, require
from nemorl.rollout.processes import judged_in_processes

NEEDS_SENTENCES = "length_constraints:number_sentences", "change_case:capital_word_frequency"
"""Instructions whose check splits sentences, by data of NLTK's."""


@judged_in_processes(
    seconds=20, imports=("if_verifiable.common", "if_verifiable.ifeval", "nltk.tokenize")
)
def instructions_followed(
    prompt: str, response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Any]
) -> float:
    """Return the share, from 0 to 1, of a prompt's instructions that a response follows; its
    reasoning is left out, and 0 if it has an open <think>.

    `instruction_id_list` names them, as `punctuation:no_comma`, and `kwargs` has the parameters of
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
        """Counts a symbol as it is, for which the package would count a letter that it draws."""

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
    fits, remedy = f"must have one entry for each of {len(names)} instructions", "add {} or null"
    require(len(names) == len(given), "kwargs", fits, len(given), remedy)
    require(len(names) > 0, "instruction_id_list", "must name instructions", names, "leave it out")
    for name, settings in zip(names, given, strict=True):
        what, one = "instruction_id_list", f"name one of IFEval's{closest(name, known)}"
        require(name in known, what, "must have known instructions", name, one)
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
