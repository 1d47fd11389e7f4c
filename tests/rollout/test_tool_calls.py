"""Calls of tools, written by the chat templates of models, and read again."""

from typing import Any

import pytest

from nemorl.rollout.context import Context, read_message, require_readable
from tests.rollout.chats import text_of, tokenizer_of

ARGUMENTS: dict[str, Any] = {
    "count": -3,
    "ratio": 0.5,
    "text": 'a "b"\n c: 1',
    "number": "007",
    "sure": True,
    "names": ["a", "1"],
    "deep": {"a": [1, {"b": "c"}]},
}
TYPES = dict(
    zip(
        ARGUMENTS,
        ["integer", "number", "string", "string", "boolean", "array", "object"],
        strict=True,
    )
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add_all",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind, "description": ""} for key, kind in TYPES.items()},
            "required": [*TYPES],
        },
    },
}
READ = [
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"),
    *("nemotron_3_nano", "nemotron_3_super", "glm4moe", "llama3_1", "llama3_2"),
]
"""Templates, by TRL's names, whose calls are read."""


@pytest.mark.parametrize("name", READ)
def test_what_a_template_writes_is_read(name: str):
    tokenizer = tokenizer_of(name)
    call = {"type": "function", "function": {"name": "add_all", "arguments": ARGUMENTS}}
    asked = [{"role": "user", "content": "Go."}]
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    before, whole = (
        tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
        for messages in (asked, [*asked, answer])
    )
    assert whole.startswith(before)
    said = whole.removeprefix(before)
    if name.startswith("llama"):  # its calls are all that is said
        said = said[said.index("{") : said.rindex("}") + 1]
    message = read_message(said, said, [TOOL], text_of(name))
    assert message["tool_calls"] == [call]
    assert "tool_calls" not in read_message("Three.", "Three.", [TOOL], text_of(name))


TAGS, GLM = text_of("qwen3_6"), text_of("glm4moe")


@pytest.mark.parametrize(
    ("said", "template"),
    [
        ("<tool_call>\n<function=add_all>\n<parameter=a>1\n</function>\n</tool_call>", TAGS),
        ("<tool_call>\n<function=add_all>\n", TAGS),
        ("<tool_call>add_all\n<arg_key>a</arg_key>1</tool_call>", GLM),
    ],
)
def test_a_call_with_tags_that_are_wrong_is_an_error(said: str, template: str):
    (call,) = read_message(said, said, [TOOL], template)["tool_calls"]
    assert call["type"] == "error" and call["error"].startswith("the call can't be read: it must")


def test_an_argument_of_another_type_is_text():
    """The tool, or the check of its parameters, says what is wrong."""
    parameters = "<parameter=count>\nmany\n</parameter>\n<parameter=sure>\nTrue\n</parameter>"
    said = f"<tool_call>\n<function=add_all>\n{parameters}\n</function>\n</tool_call>"
    (call,) = read_message(said, said, [TOOL], TAGS)["tool_calls"]
    assert call["function"]["arguments"] == {"count": "many", "sure": True}


@pytest.mark.parametrize("name", ["gptoss", "gemma4", "lfm2", "muse_glimmer"])
def test_a_template_whose_calls_are_not_read_is_an_error(name: str):
    """Where the tools are an environment's; an episode may read what a row's tools are told."""
    first, tokenizer = [{"role": "user", "content": "Go."}], tokenizer_of(name)
    wrong = "needs a chat template with tools, which writes calls as Qwen, .* or Llama do"
    with pytest.raises(ValueError, match=wrong):
        Context(tokenizer, first, [1]).prompt_of(first, [TOOL])
    assert Context(tokenizer, first, [1], tools=[TOOL]).prompt_of(first)[0] == (1,)
    with pytest.raises(ValueError, match=wrong):
        require_readable(text_of(name))
