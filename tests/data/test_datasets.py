"""Columns under the names that the library knows, and rows as prompts and examples."""

import pytest

from nemorl.data.datasets import load_rows, messages_of, to_examples, to_prompts
from tests.data.tokenizers_small import (
    MARKED,
    assistant,
    character_tokenizer,
    talk,
    trained_text,
)

TOKENIZER = character_tokenizer()


def test_columns_are_mapped_and_kept():
    rows = [{"question": "1+1", "gold": "2", "prompt": "old"}]
    assert load_rows(rows, prompt_column="question", answer_column="gold") == [
        {"question": "1+1", "gold": "2", "prompt": "1+1", "answer": "2"}
    ]
    assert rows == [{"question": "1+1", "gold": "2", "prompt": "old"}], "the source stays as it was"


def test_rows_become_prompts_and_examples():
    asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    rows = [
        {"prompt": "a"},
        {"prompt": talk("a")},
        {"messages": talk("a", "b")},
        {"messages": talk("a"), "prompt": None},
    ]
    assert [TOKENIZER.decode(ids) for ids in to_prompts(rows, TOKENIZER)] == ["a", *[asked] * 3]
    rows = [
        {"prompt": "a", "response": "b"},
        {"prompt": talk("a"), "response": "b"},
        {"messages": talk("a", "b")},
    ]
    examples = to_examples(rows, TOKENIZER)
    assert [trained_text(TOKENIZER, example) for example in examples] == [["b<|im_end|>"]] * 3
    assert examples[1] == examples[2]
    assert trained_text(TOKENIZER, to_examples(rows, TOKENIZER, add_eos=False)[0]) == ["b"]


def test_keys_that_arrow_filled_with_none_do_not_reach_the_template():
    template = (
        "{% for m in messages %}{{ m.role }}{{ ' CALLS' if 'tool_calls' in m }}{{ m.content }}{%"
        " endfor %}{{ '>' if add_generation_prompt }}"
    )
    rows = [{"prompt": [{"role": "user", "content": "a", "tool_calls": None}]}]
    assert TOKENIZER.decode(to_prompts(rows, TOKENIZER, chat_template=template)[0]) == "usera>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "row 2: response must be text or messages, got None"),
        ({"messages": "hello"}, "row 2: messages must be a list of messages"),
        ({"messages": [{"content": "a"}]}, "row 2: messages must be a list of messages"),
        ({"messages": talk("a")}, "row 2: messages must hold an assistant message"),
    ],
)
def test_rows_that_make_no_example_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        to_examples([{"prompt": "a", "response": "b"}, row], TOKENIZER)


SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"input": "a", "output": "b"}, {"prompt": "a", "response": "b"}),
        ({"prompt": "a", "output": "b", "completion": "c"}, {"response": "b"}),
        ({"prompt": "a", "response": "b", "input": "c", "output": "d"}, {}),
        (
            {"instruction": "do", "input": "a", "output": "b"},
            {"prompt": "do\n\na", "response": "b"},
        ),
        ({"instruction": "do", "output": "b", "text": "t"}, {"prompt": "do", "response": "b"}),
        ({"instruction": "do", "input": "a", "output": "b", "prompt": "p"}, {}),
        (
            {"conversations": SHAREGPT, "system": "Be brief."},
            {"messages": talk("a", "b", system="Be brief.")},
        ),
        ({"conversations": ["a", "b"]}, {}),
        ({"context": "a", "input": "b"}, {}),
    ],
)
def test_names_of_other_libraries_stand_in_for_absent_ones(row, names):
    assert load_rows([row]) == [row | names]


def test_every_column_can_be_renamed():
    names = ("prompt", "response", "answer", "messages", "chosen", "rejected", "label")
    row = {f"my_{name}": name.upper() for name in names}
    mapped = load_rows([row], **{f"{name}_column": f"my_{name}" for name in names})
    assert mapped == [row | {name: name.upper() for name in names}]
    with pytest.raises(ValueError, match=r"data\.label_column.*; did you mean my_label\?"):
        load_rows([row], label_column="my_labl")


def test_of_several_sets_one_may_have_the_standard_name():
    assert load_rows([[{"question": "a"}], [{"prompt": "b"}]], prompt_column="question") == [
        {"question": "a", "prompt": "a"},
        {"prompt": "b"},
    ]
    with pytest.raises(ValueError, match="row 1 of data set 2 has the columns text"):
        load_rows([[{"question": "a"}], [{"text": "b"}]], prompt_column="question")


def test_a_prompt_is_not_trained_on_even_where_the_assistant_says_something_in_it():
    for tokenizer in (TOKENIZER, character_tokenizer(MARKED)):
        row = {"prompt": talk("a", "b", "c"), "response": "d"}
        example = to_examples([row], tokenizer)[0]
        assert trained_text(tokenizer, example) == ["d<|im_end|>"]
        assert list(example.response_mask) == [*list(example.loss_mask)[:-1], True]
        whole = to_examples([{"messages": talk("a", "b", "c", "d")}], tokenizer)[0]
        assert whole.input_ids == example.input_ids
        assert trained_text(tokenizer, whole) == ["b<|im_end|>", "d<|im_end|>"]


def test_a_prompt_of_the_assistants_own_words_is_not_trained_on():
    tokenizer = character_tokenizer(MARKED)
    row = {"prompt": [assistant("b")], "response": "d"}
    assert trained_text(tokenizer, to_examples([row], tokenizer)[0]) == ["d<|im_end|>"]


def test_a_response_may_be_messages():
    said, tool = [assistant("b")], [{"role": "tool", "content": "42"}, assistant("c")]
    text, whole, plain, long = to_examples(
        [
            {"prompt": talk("a"), "response": "b"},
            {"prompt": talk("a"), "response": said},
            {"prompt": "a", "response": said},
            {"prompt": talk("a"), "response": said + tool},
        ],
        TOKENIZER,
    )
    assert text == whole == plain
    assert trained_text(TOKENIZER, long) == ["b<|im_end|>", "c<|im_end|>"]


def test_a_rows_tools_reach_the_template():
    tokenizer = character_tokenizer(
        "{% for t in tools %}{{ t.name }} {% endfor %}{% for m in messages %}{{ m.role }}{{"
        " m.content }}{% endfor %}{{ 'assistant' if add_generation_prompt }}"
    )
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {}}}]
    for given in (tools, '[{"name": "add"}]'):
        row = {"messages": talk("a", "b"), "tools": given}
        assert tokenizer.decode(to_prompts([row], tokenizer)[0]) == "add useraassistant"
        (example,) = to_examples([row], tokenizer)
        assert tokenizer.decode(example.input_ids) == "add useraassistantb"
    for wrong, message in (("[", "JSON text"), (["add"], "a list of tools")):
        with pytest.raises(ValueError, match=f"row 1: tools must be .*{message}"):
            to_prompts([{"prompt": talk("a"), "tools": wrong}], tokenizer)


def test_a_message_may_have_no_content_but_keeps_the_key():
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "name": None}
    assert messages_of([calls], "messages") == [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    ]


def test_without_an_end_token_where_nobody_wants_one():
    for row in ({"messages": talk("a", "b")}, {"prompt": talk("a"), "response": "b"}):
        for add_eos, said in ((True, "b<|im_end|>"), (False, "b")):
            example = to_examples([row], TOKENIZER, add_eos=add_eos, chat_template="passthrough")[0]
            assert trained_text(TOKENIZER, example) == [said]
