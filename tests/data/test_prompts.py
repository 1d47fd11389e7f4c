"""What becomes of a row's prompt: a template with columns, a system message, a chat."""

import warnings

import pytest

from nemorl.data import load_rows, to_pairs
from nemorl.data.datasets import warn_of_strings
from nemorl.runtime.config.base import DataConfig
from tests.data.tokenizers_small import CHATML, character_tokenizer, talk

SYSTEM, USER, ANSWER = talk("u", "a", system="s")
PAIR = {"chosen": "a", "rejected": "b"}
TOKENIZER = character_tokenizer()


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"prompt": "u"}, {"prompt_template": "{prompt}{{{n}}}"}, {"prompt": "u{3}"}),
        ({"prompt": "u"}, {"chat": True}, {"prompt": [USER]}),
        ({"prompt": "u"}, {"chat": True, "system_prompt": "s"}, {"prompt": [SYSTEM, USER]}),
        ({"prompt": [USER]}, {"system_prompt": "s"}, {"prompt": [SYSTEM, USER]}),
        ({"prompt": [SYSTEM, USER]}, {"system_prompt": "x"}, {"prompt": [SYSTEM, USER]}),
        ({"messages": [USER, ANSWER]}, {"system_prompt": "s"},
         {"messages": [SYSTEM, USER, ANSWER]}),
        ({"input": "u"}, {"prompt_template": "<{prompt}>", "chat": True},
         {"prompt": [{"role": "user", "content": "<u>"}]}),
        ({"context": "u", "completions": []}, {"chat": True}, {"prompt": [USER]}),
        ({"chosen": [USER, ANSWER], "rejected": [ANSWER]}, {"system_prompt": "s"},
         {"chosen": [SYSTEM, USER, ANSWER], "rejected": [ANSWER]}),
        ({"a": "x", "messages": [USER]}, {"prompt_template": "{a}."}, {"prompt": "x."}),
    ],
)  # fmt: skip
def test_a_row_becomes_a_prompt(row, options, expected):
    (found,) = load_rows([row | {"n": 3}], **options)
    assert {name: found[name] for name in expected} == expected
    assert ("messages" in found) == ("messages" in expected)
    assert found.origin == "row 1"


def test_a_chat_of_pairs_has_one_prompt():
    row = {"prompt": "u", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "b"}]}
    rows = load_rows([row, {"prompt": "u", **PAIR}], system_prompt="s", chat=True)
    first, second = to_pairs(rows, TOKENIZER)
    assert first == second
    text = TOKENIZER.decode(first.rejected.input_ids)
    assert text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>")


@pytest.mark.parametrize("template", ["no column", "{", "{prompt} {}", "{n:>3}"])
def test_a_template_without_columns_is_refused(template):
    with pytest.raises(ValueError, match=r"data\.prompt_template must name the column .* as \{pro"):
        DataConfig(prompt_template=template)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "u"}, {"prompt_template": "{promt}"},
         r"needs .* 'promt', got the columns prompt; did you mean prompt\?"),
        ({"prompt": [USER]}, {"prompt_template": "{prompt}"}, r"needs a text .*, got \[\{'role"),
        ({"prompt": "u"}, {"system_prompt": "s"}, r"is for chats, .* add --data\.chat"),
    ],
)  # fmt: skip
def test_what_a_row_can_not_become(row, options, message):
    with pytest.raises(ValueError, match=rf"^row 1: data\.{next(iter(options))} {message}"):
        load_rows([row], **options)


@pytest.mark.parametrize(
    ("row", "template", "warned"),
    [
        ({"prompt": "u", **PAIR}, CHATML, True),
        ({"prompt": "u"}, None, False),
        ({"prompt": [USER]}, CHATML, False),
        ({"prompt": "u", "messages": [USER, ANSWER]}, CHATML, False),
        ({"prompt": "u", "chosen": [ANSWER], "rejected": [ANSWER]}, CHATML, False),
    ],
)
def test_strings_for_a_model_of_chats_are_said(row, template, warned):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_strings(load_rows([row] * 2), character_tokenizer(template))
    assert [str(each.message)[:19] for each in said] == ["prompts are strings"] * warned
