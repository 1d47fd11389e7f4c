"""Which tokens are the assistant's: exact for several chat templates, verified by tokenising what a
sampler would have seen.
"""

import string

import hypothesis.strategies as st
import pytest
from hypothesis import given
from transformers import ByT5Tokenizer

from nemorl.data.batch import Example
from nemorl.data.datasets import to_examples, to_prompts
from nemorl.data.lengths import limit_length
from nemorl.data.messages import tokenize_messages, tokenize_prompt, tokenize_prompt_response
from tests.data.tokenizers_small import (
    CHATML,
    FORGETFUL,
    MARKED,
    PLAIN,
    STRIPPING,
    WITH_SYSTEM,
    assistant,
    character_tokenizer,
    talk,
    trained_text,
    word_tokenizer,
)

CHARACTERS = character_tokenizer()
TEXT = st.text(string.ascii_letters + string.digits + " \n.?", min_size=1, max_size=12)
STABLE = {"chatml": CHATML, "marked": MARKED, "with_system": WITH_SYSTEM, "stripping": STRIPPING}


@pytest.mark.parametrize("template", STABLE.values(), ids=STABLE)
@given(contents=st.lists(TEXT, min_size=2, max_size=5), system=st.one_of(st.none(), TEXT))
def test_trained_tokens_are_what_a_sampler_would_have_returned(template, contents, system):
    messages = talk(*contents, system=system)
    example = tokenize_messages(CHARACTERS, messages, chat_template=template)
    said = [content.strip() if template is STRIPPING else content for content in contents[1::2]]
    assert trained_text(CHARACTERS, example) == [content + "<|im_end|>" for content in said]
    whole = CHARACTERS.apply_chat_template(messages, tokenize=False, chat_template=template)
    assert list(example.input_ids) == CHARACTERS(whole, add_special_tokens=False).input_ids
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenize_prompt(CHARACTERS, messages[:number], chat_template=template)
            assert list(example.input_ids[: len(prompt)]) == prompt
            assert example.loss_mask[len(prompt)]
            assert not example.loss_mask[len(prompt) - 1]
    first = example.loss_mask.index(True)
    assert list(example.response_mask) == [
        place >= first for place in range(len(example.input_ids))
    ]


HALF = "half \ud800 of it"


def test_half_a_character_is_refused_with_its_row():
    tokenizer = CHARACTERS
    row, template = {"prompt": "1+1", "response": "2"}, {"chat_template": "passthrough"}
    message = r"row 2: text must be Unicode, .*lone surrogate\) in 'half \\ud800 of it': repair"
    with pytest.raises(ValueError, match=message):
        to_prompts([row, {"prompt": HALF}], tokenizer)
    for wrong in ({**row, "response": HALF}, {"messages": talk("1", HALF)}):
        with pytest.raises(ValueError, match=message):
            to_examples([row, wrong], tokenizer, **template)


def test_the_first_token_of_all_is_never_trained_on():
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    example = tokenize_messages(CHARACTERS, [assistant("abc")], chat_template=template)
    assert list(example.loss_mask) == [False, True, True]


def test_tool_messages_are_response_but_not_trained_on():
    messages = [
        *talk("a", "call"),
        {"role": "tool", "content": "42"},
        assistant("it is 42"),
    ]
    example = tokenize_messages(CHARACTERS, messages)
    assert trained_text(CHARACTERS, example) == ["call<|im_end|>", "it is 42<|im_end|>"]
    untrained = [
        token
        for token, response, trained in zip(
            example.input_ids, example.response_mask, example.loss_mask, strict=True
        )
        if response and not trained
    ]
    assert "tool\n42" in CHARACTERS.decode(untrained)


def test_template_without_end_token_keeps_its_line_break():
    tokenizer = character_tokenizer(PLAIN.replace("': '", "':'"))
    example = tokenize_messages(tokenizer, talk("a", "b", "c", "d"))
    assert trained_text(tokenizer, example) == ["b\n", "d\n"]


def test_slow_tokenizers_work_too():
    tokenizer = ByT5Tokenizer()
    for template in (CHATML, MARKED):
        example = tokenize_messages(
            tokenizer, talk("a", "b"), chat_template=template.replace("<|im_end|>", "</s>")
        )
        assert trained_text(tokenizer, example) == ["b</s>"]


def test_forgetful_template_is_an_error_with_its_remedy_but_works_for_the_last_turn():
    messages = talk("a", "hm</think>b", "c", "hm</think>d")
    with pytest.raises(ValueError, match=r"message 1: .* differently .*generation"):
        tokenize_messages(CHARACTERS, messages, chat_template=FORGETFUL)
    only = tokenize_messages(CHARACTERS, messages[:2], chat_template=FORGETFUL)
    assert trained_text(CHARACTERS, only) == ["hm</think>b<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("assistant:{", "{{ 'assistant: ' }}{"),
        (
            "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation"
            " %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{%"
            " endfor %}"
        ),
    ],
    ids=["rendered", "marked"],
)
def test_a_token_across_the_border_is_an_error(template):
    tokenizer = word_tokenizer(["user:", "assistant:", " hi", " you", " ", "hi", "you"], template)
    with pytest.raises(ValueError, match="a token crosses the border"):
        tokenize_messages(tokenizer, talk("hi", "you"))


def test_prompt_response_is_exact():
    example = tokenize_prompt_response(CHARACTERS, "1+1=", "2")
    assert CHARACTERS.decode(example.input_ids) == "1+1=2<|im_end|>"
    assert trained_text(CHARACTERS, example) == ["2<|im_end|>"]
    assert list(example.response_mask) == list(example.loss_mask)
    for prompt, response, add_eos, said in (
        ("1+1=", "2<|im_end|>", True, "2<|im_end|>"),
        ("1+1=", "2", False, "2"),
        (talk("1+1="), "2", True, "2<|im_end|>"),
    ):
        example = tokenize_prompt_response(CHARACTERS, prompt, response, add_eos=add_eos)
        assert trained_text(CHARACTERS, example) == [said]
    loss_mask = tokenize_prompt_response(CHARACTERS, "", "22").loss_mask
    assert list(loss_mask) == [False, True, True], "nothing comes before the first token"


@given(TEXT, TEXT)
def test_prompt_response_begins_with_the_samplers_prompt(prompt, response):
    example = tokenize_prompt_response(CHARACTERS, prompt, response)
    given_ids = tokenize_prompt(CHARACTERS, prompt)
    assert list(example.input_ids) == given_ids + CHARACTERS(
        response, add_special_tokens=False
    ).input_ids + [CHARACTERS.eos_token_id]


def test_prompts():
    asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    for begun in ("", "well, "):
        messages = talk("a", begun) if begun else talk("a")
        assert CHARACTERS.decode(tokenize_prompt(CHARACTERS, messages)) == asked + begun
    ids = tokenize_prompt(ByT5Tokenizer(), "ab")
    assert ids == [100, 101], "the end token that this tokenizer adds does not belong to a prompt"
    assert tokenize_prompt(ByT5Tokenizer(), "ab</s>")[-1] == 1, (
        "one that the prompt itself ends with does"
    )


def test_limit_length_cuts_ends_of_examples_and_begins_of_prompts():
    examples = [
        tokenize_prompt_response(CHARACTERS, prompt, response)
        for prompt, response in (("ab", "cd"), ("a", "b"), ("abcd", "e"))
    ]
    kept, _ = limit_length(examples, max_length=4, policy="truncate")
    assert [CHARACTERS.decode(item.input_ids) for item in kept] == ["abcd", "ab<|im_end|>"]
    assert limit_length([[1, 2, 3]], max_length=2, policy="truncate")[0] == [[2, 3]]
    mask = [False, True, True]
    arrays = Example(
        input_ids=[1, 2, 3], loss_mask=mask, response_mask=mask, advantages=[0.0, 1.0, 2.0]
    )
    assert limit_length([arrays], max_length=2, policy="truncate")[0][0].advantages == [0.0, 1.0]


def test_errors_say_what_is_wrong():
    bare = character_tokenizer(None)
    endless = character_tokenizer(None, eos_token=None)
    cases = [
        (lambda: tokenize_messages(CHARACTERS, talk("a")), "got roles user; end each row with"),
        (lambda: tokenize_prompt(bare, talk("a")), "pass chat_template"),
        (lambda: tokenize_messages(CHARACTERS, talk("a", "b")[1:]), "message 0 is the assistant's"),
        (
            lambda: tokenize_messages(
                CHARACTERS, talk("a", "b"), chat_template="{{ raise_exception('no') }}"
            ),
            "refuses messages with the roles user, assistant: no",
        ),
        (lambda: tokenize_prompt_response(endless, "a", "b"), "set tokenizer.eos_token"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert tokenize_messages(CHARACTERS, talk("a", "b")[1:], chat_template=MARKED).loss_mask[-2], (
        "marks say where a first message begins"
    )
