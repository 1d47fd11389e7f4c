"""What a chat template leaves out is an error, and what it may leave out is none."""

import json
from pathlib import Path

import pytest

from nemorl.data.datasets import load_rows, to_examples, to_prompts
from nemorl.data.preferences import to_pairs
from tests.data.tokenizers_small import (
    CHATML,
    FORGETFUL,
    MARKED,
    STRIPPING,
    character_tokenizer,
    talk,
)

SYSTEM, QUESTION, ANSWER = talk("1+1", "2", system="1")
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "7"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
IMAGE = [{"type": "text", "text": "what"}, {"type": "image", "url": "a.png"}]
BY_NAME = (
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}{{ '<|im_start|>' +"
    " m.role + '\n' + m.content + '<|im_end|>\n' }}{% elif m.role == 'critic' %}{{ m.content }}{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role"
    " + '\n' }}{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}{% endif %}{% if"
    " m.tool_calls %}{{ m.tool_calls | tojson }}{% elif m.content is string %}{{ m.content }}{%"
    " else %}{{ m.content[0].text }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + CHATML.replace("messages %}", "messages if m.role != 'system' %}")
)
MERGING = (
    "{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join }}"
    + FIRST_SYSTEM.partition("{% endif %}")[2]
)
THOUGHT = ANSWER | {"content": "<think>\nhm\n</think>\n2"}
LEFT_OUT = {
    "tool_calls": ([QUESTION, CALL], CHATML, r"tool_calls \(message 1\): choose one that renders"),
    "passthrough": ([QUESTION, CALL, ANSWER], "passthrough", r"tool_calls \(message 1\)"),
    "thoughts": (
        [QUESTION, ANSWER | {"thinking": "hm"}],
        CHATML,
        r"thinking \(message 1\).*--model.chat-template\), or remove it from the data",
    ),
    "a role": (
        talk("1+1", "2", system="Be kind."),
        BY_NAME,
        r"what the role 'system' says \(message 0\)",
    ),
    "an image": (
        [QUESTION | {"content": IMAGE}, ANSWER],
        WITH_TOOLS,
        r"content of the type 'image' \(message 0\)",
    ),
    "text beside a call": (
        [QUESTION, CALL | {"content": "I add."}],
        WITH_TOOLS,
        r"the content beside tool_calls \(message 1\)",
    ),
    "a second system message": (
        [SYSTEM, QUESTION, SYSTEM, ANSWER],
        FIRST_SYSTEM,
        r"what the role 'system' says \(message 2\)",
    ),
    "a question": (
        [QUESTION, ANSWER, QUESTION, ANSWER],
        MARKED.replace("in messages", "in messages[-2:]"),
        r"what the role 'user' says \(message 0\)",
    ),
    "thoughts in the content": (
        [QUESTION, THOUGHT],
        MARKED.replace("{{ m.content +", "{{ m.content.split('</think>')[-1] +"),
        r"the reasoning in the content \(message 1\)",
    ),
    "bot": (
        [QUESTION, {"role": "bot", "content": "2"}],
        CHATML,
        r"message 1: role must be one of .*, got 'bot': rename it to 'assistant'$",
    ),
}
RENDERED = {
    "calls and their results": ([QUESTION, CALL, RESULT, ANSWER], WITH_TOOLS),
    "empty parts": ([QUESTION, ANSWER | {"tool_calls": [], "thinking": " "}], CHATML),
    "an empty system message": (talk("1+1", "2", system=" "), BY_NAME),
    "names": ([QUESTION | {"name": "Ann", "id": 3}, ANSWER], CHATML),
    "a role of the template's own": (
        [QUESTION, {"role": "critic", "content": "?"}, ANSWER],
        BY_NAME,
    ),
    "white space": ([QUESTION | {"content": " 1 "}, ANSWER | {"content": "2\n"}], STRIPPING),
    "system messages, merged": ([SYSTEM, QUESTION, SYSTEM, ANSWER], MERGING),
    "thoughts in the content": ([QUESTION, THOUGHT], FORGETFUL),
    "no thoughts": (
        [QUESTION, ANSWER | {"content": "<think>\n\n</think>\n2"}],
        MARKED.replace("{{ m.content +", "{{ m.content.split('</think>')[-1] +"),
    ),
    "earlier thoughts": (
        [QUESTION, ANSWER | {"reasoning_content": "one"}, QUESTION, ANSWER],
        WITH_TOOLS,
    ),
}


def written(folder: Path, row: dict) -> list:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n" + json.dumps(row) + "\n")
    return load_rows(str(file))


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_named_with_its_row(name: str, tmp_path: Path):
    messages, template, message = LEFT_OUT[name]
    tokenizer = character_tokenizer(template)
    message = rf"rows\.jsonl, line 2: .*{message}"
    forms = [
        (to_examples, {"messages": messages}),
        (to_prompts, {"prompt": messages}),
        (to_examples, {"prompt": messages[:-1], "response": messages[-1:]}),
    ]
    options = {"chat_template": "passthrough"} if template == "passthrough" else {}
    for make, row in forms:
        with pytest.raises(ValueError, match=message):
            make(written(tmp_path, row), tokenizer, **options)


@pytest.mark.parametrize("name", RENDERED)
def test_what_may_be_left_out_is_not_refused(name: str, tmp_path: Path):
    messages, template = RENDERED[name]
    tokenizer = character_tokenizer(template)
    assert len(to_prompts(written(tmp_path, {"messages": messages}), tokenizer)) == 2
    if not name.startswith("earlier thoughts"):  # which the turns' borders refuse
        assert len(to_examples(written(tmp_path, {"messages": messages}), tokenizer)) == 2


def test_tools_that_the_template_leaves_out(tmp_path: Path):
    row = {"messages": [QUESTION, ANSWER], "tools": TOOLS}
    for make in (to_examples, to_prompts):
        with pytest.raises(ValueError, match=r"line 2: the chat template leaves out the tools"):
            make(written(tmp_path, row), character_tokenizer(CHATML))
        assert make(written(tmp_path, row), character_tokenizer(WITH_TOOLS))


def test_preferences_as_well():
    row = {"prompt": [QUESTION], "chosen": [CALL], "rejected": [ANSWER]}
    with pytest.raises(ValueError, match=r"row 1: .* leaves out tool_calls \(message 1\)"):
        to_pairs([row], character_tokenizer(CHATML))
