"""Preference pairs from every form that data sets have, with masks that hold the answers alone."""

import pytest

from nemorl.data.datasets import load_rows
from nemorl.data.preferences import labelled_rows, pair_rows, to_labelled, to_pairs
from nemorl.data.rows import Row
from tests.data.tokenizers_small import (
    CHATML,
    MARKED,
    assistant,
    character_tokenizer,
    talk,
    trained_text,
    user,
)

TOKENIZER = character_tokenizer()


FORMS = {
    "messages": {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("cd")]},
    "messages and text": {"prompt": [user("a")], "chosen": "b", "rejected": "cd"},
    "half text": {"prompt": [user("a")], "chosen": "b", "rejected": [assistant("cd")]},
    "text and messages": {"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("cd")]},
    "prompt inside": {"chosen": talk("a", "b"), "rejected": talk("a", "cd")},
    "prompt inside and beside": {
        "prompt": "a",
        "chosen": talk("a", "b"),
        "rejected": talk("a", "cd"),
    },
    "conversation as prompt": {"messages": [user("a")], "chosen": "b", "rejected": "cd"},
    "ranked, worst first": {
        "context": user("a"),
        "completions": [
            {"rank": 2.0, "completion": [assistant("cd")]},
            {"rank": 1, "completion": "b"},
        ],
    },
}


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["rendered", "marked"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pair(form, template):
    tokenizer = character_tokenizer(template)
    rows = load_rows([FORMS[form]])
    (pair,) = to_pairs(rows, tokenizer)
    asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(pair.chosen.input_ids) == asked + "b<|im_end|>\n"
    assert tokenizer.decode(pair.rejected.input_ids) == asked + "cd<|im_end|>\n"
    assert trained_text(tokenizer, pair.chosen) == ["b<|im_end|>"]
    assert trained_text(tokenizer, pair.rejected) == ["cd<|im_end|>"]
    assert pair.num_tokens == pair.rejected.num_tokens == pair.chosen.num_tokens + 1
    assert to_pairs(pair_rows(rows), tokenizer) == [pair], "its own rows make the same pairs"


WHOLE = talk("x", "y", "a", system="Be terse.")


@pytest.mark.parametrize(
    ("prompt", "begin", "expected"),
    [
        (talk("a", system="s"), talk("a"), talk("a", system="s")),
        (WHOLE[:2], WHOLE[1:], WHOLE),
        (" x\n", WHOLE, WHOLE),
        ("", talk("a"), talk("a")),
    ],
)
def test_a_column_prompt_beside_whole_conversations(prompt, begin, expected):
    """What it says more goes before them."""
    (row,) = pair_rows(
        [
            {
                "prompt": prompt,
                "chosen": [*begin, assistant("b")],
                "rejected": [*begin, assistant("cd")],
            }
        ]
    )
    assert (row["prompt"], row["chosen"], row["rejected"]) == (
        expected,
        [assistant("b")],
        [assistant("cd")],
    )
    assert pair_rows([row]) == [row]


def test_plain_text_goes_past_the_template():
    (pair,) = to_pairs(
        [{"prompt": "a", "chosen": "b", "rejected": "cd"}], character_tokenizer(None)
    )
    assert TOKENIZER.decode(pair.chosen.input_ids) == "ab<|im_end|>"
    assert trained_text(TOKENIZER, pair.rejected) == ["cd<|im_end|>"]


def test_a_conversation_before_the_answers_is_not_trained_on():
    begin = talk("a", "b", "c")
    for template in (CHATML, MARKED):
        tokenizer = character_tokenizer(template)
        (pair,) = to_pairs(
            [{"chosen": [*begin, assistant("d")], "rejected": [*begin, assistant("e")]}], tokenizer
        )
        assert trained_text(tokenizer, pair.chosen) == ["d<|im_end|>"]
        assert trained_text(tokenizer, pair.rejected) == ["e<|im_end|>"]


def test_conversations_part_where_the_assistant_last_said_the_same():
    chosen, rejected = talk("a", "b", "c", "d"), talk("a", "b", "x", "e")
    (row,) = pair_rows([{"chosen": chosen, "rejected": rejected}])
    assert row["prompt"] == [user("a")]
    assert (row["chosen"], row["rejected"]) == (chosen[1:], rejected[1:])


def test_an_answer_that_goes_on_where_the_other_ends():
    long = talk("a", "b", "c", "d")
    (row,) = pair_rows([{"chosen": long[:2], "rejected": long}])
    assert (row["prompt"], row["chosen"], row["rejected"]) == (long[:1], long[1:2], long[1:])


def test_two_messages_of_the_assistant_in_a_row():
    begin = talk("a", "b")
    (row,) = pair_rows([{"chosen": [*begin, assistant("c")], "rejected": [*begin, assistant("d")]}])
    assert (row["prompt"], row["chosen"], row["rejected"]) == (
        begin,
        [assistant("c")],
        [assistant("d")],
    )


def test_a_verdict_on_a_conversation():
    (row,) = labelled_rows([{"messages": [user("a")], "response": "b", "label": " true "}])
    assert (row["prompt"], row["response"], row["label"]) == ([user("a")], "b", True)


def test_all_pairs_of_unlike_rank():
    completions = [
        {"rank": rank, "completion": str(rank) + suffix}
        for rank, suffix in ((2, ""), (0, ""), (1, "x"), (1, "y"))
    ]
    columns = {"context": "a", "completions": completions, "id": 7}
    rows = pair_rows([Row(columns, origin="a.jsonl, line 3", source=1)])
    assert [(row["chosen"], row["rejected"]) for row in rows] == [
        ("0", "1x"),
        ("0", "1y"),
        ("0", "2"),
        ("1x", "2"),
        ("1y", "2"),
    ]
    assert {(row.origin, row.source, row["id"], row["prompt"]) for row in rows} == {
        ("a.jsonl, line 3", 1, 7, "a")
    }
    assert len(to_pairs(rows, TOKENIZER)) == 5


def test_answers_with_a_verdict(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,completion,label\na,b,True\na,cd,0\n")
    found = to_labelled(load_rows(tmp_path / "rows.csv"), TOKENIZER)
    assert [(trained_text(TOKENIZER, example), label) for example, label in found] == [
        (["b<|im_end|>"], True),
        (["cd<|im_end|>"], False),
    ]
    rows = [{"prompt": [user("a")], "completion": [assistant("b")], "label": True}]
    assert [
        (trained_text(TOKENIZER, example), label) for example, label in to_labelled(rows, TOKENIZER)
    ] == [(["b<|im_end|>"], True)]


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_is_a_desirable_and_an_undesirable_answer(form):
    (pair,) = to_pairs([FORMS[form]], TOKENIZER)
    assert to_labelled([FORMS[form]], TOKENIZER) == [(pair.chosen, True), (pair.rejected, False)]


def test_arguments_reach_the_template():
    row = {"prompt": [user("a")], "chosen": "b", "rejected": "c", "tools": [{"name": "add"}]}
    template = "{{ extra }}{{ tools[0].name }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (pair,) = to_pairs([row], TOKENIZER, chat_template=template, template_kwargs={"extra": "x"})
    assert TOKENIZER.decode(pair.chosen.input_ids) == "xaddab"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            r"a preference must have chosen and rejected, .* prompt, chosen; .*data\.chosen_column",
        ),
        ({"chosen": "b", "rejected": "c"}, "a row needs a prompt"),
        ({"prompt": "a", "chosen": 5, "rejected": "c"}, "chosen must be"),
        (
            {"chosen": talk("a", "b"), "rejected": talk("x", "b")},
            "must begin with the same prompt .*got roles",
        ),
        (
            {"chosen": talk("a", "b"), "rejected": talk("a", "c"), "prompt": "x"},
            "prompt must be what chosen and rejected",
        ),
        (
            {"context": "a", "completions": [{"rank": 0, "completion": "b"}] * 2},
            r"two of unlike rank, got ranks \[0, 0\]",
        ),
        (
            {"context": "a", "completions": [{"rank": True, "completion": "b"}]},
            "rank must be a number",
        ),
        (
            {"prompt": [user("a")], "chosen": [assistant("")], "rejected": [assistant("b")]},
            "non-empty assistant message",
        ),
    ],
)
def test_rows_that_hold_no_pair_are_named(row, message):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=f"^row 2: .*{message}"):
        to_pairs(
            [{"prompt": "a", "chosen": "b", "rejected": "c"}, row],
            TOKENIZER,
            chat_template=template,
        )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "response": "b", "label": "good"},
            r"label must be true or false, got 'good' \(data\.label_column",
        ),
        ({"prompt": "a", "label": True}, "response must be text or messages, got None"),
    ],
)
def test_rows_without_a_verdict_are_named(row, message):
    with pytest.raises(ValueError, match=f"^row 1: {message}"):
        to_labelled([row], TOKENIZER)
