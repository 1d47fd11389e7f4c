"""Chat templates by every way they can be given, passthrough among them, with masks as exact as
ever.
"""

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from nemorl.data.messages import tokenize_messages, tokenize_prompt, tokenize_prompt_response
from nemorl.data.templates import PASSTHROUGH, with_chat_template
from tests.data.tokenizers_small import (
    CHATML,
    FORGETFUL,
    MARKED,
    character_tokenizer,
    talk,
    trained_text,
    word_tokenizer,
)

THINKING = "{% if thinking %}{{ '<s>' }}{% endif %}" + CHATML + "{{ suffix }}"
TALK = talk("a", "b")


def test_a_template_as_text_file_or_name(tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    own = character_tokenizer(None)
    for given, wanted in (
        (CHATML, CHATML),
        (str(tmp_path / "chat.jinja"), CHATML),
        ("passthrough", PASSTHROUGH),
    ):
        assert with_chat_template(own, given).chat_template == wanted
    assert own.chat_template is None, "the caller's tokenizer stays as it is"
    assert with_chat_template(own) is own


@pytest.mark.parametrize(
    ("kwargs", "wanted"),
    [
        ({"thinking": True}, "<s>{}"),
        ({"thinking": False, "suffix": 'it\'s "ü" \\ 😀'}, '{}it\'s "ü" \\ 😀'),
        ({"suffix": ["x", {"y": True}]}, "{}['x', {'y': True}]"),
    ],
)
def test_arguments_become_the_templates_defaults(kwargs, wanted, tmp_path):
    tokenizer = with_chat_template(character_tokenizer(THINKING), None, kwargs)
    text = tokenizer.apply_chat_template(TALK[:1], tokenize=False)
    assert text == wanted.replace("{}", "<|im_start|>user\na<|im_end|>\n")
    tokenizer.save_pretrained(tmp_path)
    assert (
        AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TALK[:1], tokenize=False)
        == text
    ), "also whoever loads it later"
    assert tokenizer.apply_chat_template(
        TALK[:1], tokenize=False, thinking=False, suffix="!"
    ).endswith("<|im_end|>\n!"), "what a call says wins"


def test_arguments_reach_every_one_of_several_templates():
    tokenizer = character_tokenizer(None)
    tokenizer.chat_template = {"default": "{{ a }}", "tool_use": "{{ a }}{{ b }}"}
    assert all(
        "set a = 1" in text
        for text in with_chat_template(tokenizer, None, {"a": 1}).chat_template.values()
    )


def test_what_cannot_be_a_template_is_refused(tmp_path):
    own = character_tokenizer(THINKING)
    cases = [
        (
            lambda: with_chat_template(own, str(tmp_path / "none.jinja")),
            r"model\.chat_template must be a Jinja template, a file with one, or passthrough",
        ),
        (
            lambda: with_chat_template(own, "{% for %}"),
            r"model\.chat_template must be a Jinja template, but its line 1 isn't",
        ),
        (
            lambda: with_chat_template(own, None, {"thinkin": True}),
            r"has 'thinkin', .*; it uses suffix, thinking",
        ),
        (
            lambda: with_chat_template(character_tokenizer(None), None, {"a": 1}),
            "the tokenizer has none.*add model.chat_template",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("by_name", [True, False])
def test_passthrough_is_the_contents_and_nothing_else(by_name):
    tokenizer = (
        character_tokenizer(None)
        if by_name
        else with_chat_template(character_tokenizer(), "passthrough")
    )
    options = {"chat_template": "passthrough"} if by_name else {}
    whole = talk("a", "b", "c", "d", system="s:")
    example = tokenize_messages(tokenizer, whole, **options)
    assert tokenizer.decode(example.input_ids) == "s:abcd<|im_end|>"
    assert trained_text(tokenizer, example) == ["b", "d<|im_end|>"]
    assert example.response_mask.index(True) == 3 and all(example.response_mask[3:])
    assert trained_text(
        tokenizer, tokenize_messages(tokenizer, whole, given=3, add_eos=False, **options)
    ) == ["d"]
    assert tokenizer.decode(tokenize_prompt(tokenizer, whole[:4], **options)) == "s:abc"
    assert tokenizer.decode(tokenize_prompt(tokenizer, whole[:3], **options)) == "s:ab"
    assert tokenize_messages(tokenizer, TALK, **options) == tokenize_prompt_response(
        tokenizer, "a", "b"
    ), "as plain text"


def test_passthrough_makes_no_token_across_a_turns_border():
    tokenizer = word_tokenizer([" hi", "hi", "you", " you", "youhi", " youhi"], None)
    example = tokenize_messages(tokenizer, talk("you", "hi"), chat_template="passthrough")
    assert tokenizer.convert_ids_to_tokens(example.input_ids) == ["you", "hi", "<|im_end|>"]
    prompt = tokenize_prompt(tokenizer, talk("you"), chat_template="passthrough")
    assert example.input_ids[:1] == prompt


def test_passthrough_begins_with_what_the_tokenizer_puts_in_front():
    class Opening(ByT5Tokenizer):
        def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
            return [99, *token_ids_0]

    messages = talk("", "a", "b", "c")[1:]
    example = tokenize_messages(Opening(), messages, chat_template="passthrough")
    assert example.input_ids == [99, 100, 101, 102, 1]
    assert example.loss_mask == [False, True, False, True, True]


def test_messages_that_are_given_are_not_trained_on():
    whole = talk("a", "b", "c", "d")
    marked_twice = MARKED.replace(
        "{% generation %}{{ m.content + '<|im_end|>' }}",
        "{% generation %}{% endgeneration %}{% generation %}{{ m.content + '<|im_end|>' }}",
    )
    for template in (CHATML, MARKED, marked_twice, FORGETFUL):
        tokenizer = character_tokenizer(template)
        for given, said in ((3, ["d<|im_end|>"]), (1, ["b<|im_end|>", "d<|im_end|>"])):
            example = tokenize_messages(tokenizer, whole, given=given)
            assert trained_text(tokenizer, example) == said
    thoughtful = talk("a", "hm</think>b", "c", "d")
    example = tokenize_messages(character_tokenizer(FORGETFUL), thoughtful, given=3)
    assert trained_text(character_tokenizer(), example) == ["d<|im_end|>"], (
        "a template may forget what was thought before"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(9999999) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_computes_too_much_is_refused(template, reason):
    with pytest.raises(ValueError, match=f"the chat template refuses messages .*{reason}"):
        tokenize_messages(character_tokenizer(template), TALK)
