"""The reward "ifeval": instructions that a program can verify."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from nemorl.data.datasets import load_rows
from nemorl.data.rows import Row
from nemorl.rollout.answers import _require_sentences, instructions_followed
from nemorl.rollout.environments import make_environment
from tests.data.known_samples import hub

NO_COMMA: tuple[str, Any] = ("punctuation:no_comma", {})
AT_LEAST = ("length_constraints:number_words", {"relation": "at least", "num_words": 3})
JSON = ("detectable_format:json_format", {})
FRENCH = ("language:response_language", {"language": "fr"})
SENTENCES = ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 3})


def row(*instructions: tuple[str, dict[str, Any] | None]) -> Row:
    names, given = [name for name, _ in instructions], [given for _, given in instructions]
    return Row({"prompt": "Write.", "instruction_id_list": names, "kwargs": given})


def reward(response: str, *instructions: tuple[str, dict[str, Any]]) -> float:
    """What the function returns in this process."""
    asked = row(*instructions)
    instructions_followed.check_row(asked)
    return instructions_followed("Write.", response, asked["instruction_id_list"], asked["kwargs"])


@pytest.mark.parametrize(
    ("response", "instructions", "expected"),
    [
        ("Five eggs are here", [NO_COMMA], 1.0),
        ("Five eggs are here", [("punctuation:no_comma", None)], 1.0),
        ("two words", [NO_COMMA, AT_LEAST], 0.5),
        ('```json\n{"a": 1}\n```', [JSON], 1.0),
        ("{a: 1}", [JSON], 0.0),
        ("<think>one, two</think>Plain words here", [NO_COMMA, AT_LEAST], 1.0),
        ("Je ne sais pas ce que vous voulez dire par cette question.", [FRENCH], 1.0),
    ],
)
def test_the_share_of_instructions_followed(response, instructions, expected):
    assert reward(response, *instructions) == expected


def test_a_known_set_is_judged(tmp_path: Path, monkeypatch):
    hub(tmp_path, monkeypatch)
    rows = load_rows("google/IFEval", split="train")
    for each in rows:
        instructions_followed.check_row(each)
    given = [(each["instruction_id_list"], each["kwargs"]) for each in rows]
    assert [instructions_followed("", "egg egg", *each) for each in given] == [1, 1, 1, 0.5]
    logs = [[{"role": "assistant", "content": "egg egg"}]] * 4
    assert list(make_environment("ifeval").step(logs, rows).rewards) == [1, 1, 1, 0.5]


def test_one_text_has_one_language():
    """langdetect draws at random unless it has a seed."""
    english = ("language:response_language", {"language": "en"})
    assert len({reward("Je suis ok hello my friend", english) for _ in range(40)}) == 1


@pytest.mark.parametrize(("response", "expected"), [("## #", 1.0), ("aeiou" * 9, 0.0)])
def test_a_symbol_is_counted_as_it_is(response: str, expected: float):
    """The package would draw a letter in its place."""
    hashes = {"letter": "#", "let_frequency": 3, "let_relation": "at least"}
    asked = ("keywords:letter_frequency", hashes)
    assert {reward(response, asked) for _ in range(40)} == {expected}
    with pytest.raises(ValueError, match="kwargs must fit keywords:letter_frequency"):
        reward(response, ("keywords:letter_frequency", {**hashes, "letter": "ab"}))


def test_reasoning_that_does_not_end_is_no_answer():
    asked = row(NO_COMMA)
    given = asked["instruction_id_list"], asked["kwargs"]
    for response, expected in (("Let me see", 0.0), ("I see, so</think>Yes", 1.0)):
        assert instructions_followed("Write.<think>\n", response, *given) == expected


def punkt(folder: Path) -> None:
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    (english / "abbrev_types.txt").write_text("mr\n")
    for name in ("collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (english / name).write_text("")


def test_sentences_need_data(tmp_path: Path, monkeypatch):
    import nltk

    _require_sentences.cache_clear()
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"nltk\.downloader punkt_tab"):
        instructions_followed.check_row(row(SENTENCES))
    punkt(tmp_path)
    assert reward("One is Mr. Two. Another.", SENTENCES) == 1
    assert reward("One. Two. Three.", SENTENCES) == 0
    _require_sentences.cache_clear()


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ([], "instruction_id_list must name instructions"),
        ([("punctuation:no_coma", {})], r"known instructions.*did you mean punctuation:no_comma"),
        ([("length_constraints:number_words", None)], "kwargs must have num_words, relation"),
    ],
)
def test_rows_that_cant_be_judged(instructions, message):
    with pytest.raises(ValueError, match=message):
        instructions_followed.check_row(row(*instructions))


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'nemorl\[ifeval\]'"):
        instructions_followed.check_row(row(NO_COMMA))
