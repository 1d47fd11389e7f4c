import asyncio
import json

import pytest

from nemorl.rollout.generation import Completion
from nemorl.runtime.serve.messages import MESSAGES
from nemorl.runtime.serve.wire import Refused, Sampled

anthropic = pytest.importorskip("anthropic", reason="vLLM's")
httpx = pytest.importorskip("httpx2", reason="vLLM's")

ASKED = {"role": "user", "content": "1+1?"}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
ADD = {"name": "add", "arguments": {"b": 1, "a": ["é", None]}}
CALL = {"id": "call_1", "type": "function", "function": ADD}
USE = {"type": "tool_use", "id": "call_1", "name": "add", "input": ADD["arguments"]}


def body(*messages, **fields):
    said = {"model": "policy", "messages": [ASKED, *messages], "max_tokens": 9}
    return MESSAGES.body.model_validate(said | fields)


def read(*messages, **fields):
    return MESSAGES.read(body(*messages, **fields), {})


def answer(content="2", calls=(), finish="stop", stop=None):
    made = Completion(token_ids=(5, 6), logprobs=(-1, -2), finish_reason=finish, text=content)
    return Sampled(content=content, calls=calls, stop_string=stop, prompt_tokens=3, completion=made)


async def streamed(status, content, kind="text/event-stream"):
    response = httpx.Response(status, content=content, headers={"content-type": kind})
    http = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: response))
    client = anthropic.AsyncAnthropic(api_key="k", max_retries=0, http_client=http)
    async with client.messages.stream(model="m", max_tokens=9, messages=[ASKED]) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize(
    "said, reason",
    [
        (answer(), "end_turn"),
        (answer(""), "end_turn"),
        (answer("2", (CALL, CALL), stop="END"), "tool_use"),
        (answer("", (CALL,)), "tool_use"),
        (answer(finish="length"), "max_tokens"),
        (answer(stop="END"), "stop_sequence"),
    ],
)
def test_the_client_reads_what_was_sampled_and_gives_it_back(said, reason):
    found = MESSAGES.reply(body(), [said])
    parsed = anthropic.types.Message.model_validate(found)
    stop = {"stop_sequence": "END"}.get(reason)
    assert (parsed.stop_reason, parsed.stop_sequence) == (reason, stop)
    assert (parsed.usage.input_tokens, parsed.usage.output_tokens) == (3, 2)
    sent = list(MESSAGES.events(body(), found))
    assert sent[1][1]["content_block"] in ({"type": "text", "text": ""}, USE | {"input": {}})
    lines = [f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in sent]
    whole = asyncio.run(streamed(200, "".join(lines)))
    assert whole.model_dump(exclude_unset=True, exclude={"stop_details"}) == found
    back = {"role": "assistant", "content": [each.model_dump() for each in whole.content]}
    assert read(back, ASKED).messages[1] == said.message


def test_messages_become_those_of_chat_templates():
    text, mark = {"type": "text", "text": "Be"}, {"cache_control": {"type": "ephemeral"}}
    bill = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text], "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "call_2"}
    ask = read(
        {"role": "assistant", "content": [{"type": "redacted_thinking"}, USE]},
        {"role": "user", "content": [result, text, empty]},
        {"role": "user", "content": [empty]},
        system=[bill, text | mark, text],
        tools=[TOOL],
        tool_choice={"type": "any"},
        stop_sequences=["END"],
        top_k=3,
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
        output_config={"effort": "low"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    said = {"role": "tool", "content": "", "tool_call_id": "call_2"}
    assert ask.messages == [
        {"role": "system", "content": "BeBe"},
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "Be", "tool_call_id": "call_1"},
        said,
        {"role": "user", "content": "Be"},
        said,
    ]
    function = {"name": "add", "description": "", "parameters": TOOL["input_schema"]}
    assert ask.tools == [{"type": "function", "function": function}]
    assert (ask.stop, ask.max_tokens, ask.sampling) == (("END",), 9, {"top_k": 3})


def part(kind, role="user", **fields):
    return {"messages": [{"role": role, "content": [{"type": kind, **fields}]}, ASKED]}


@pytest.mark.parametrize(
    "fields, pattern",
    [
        (part("image"), r"messages\.0\.content\.0 must be text, but is of type 'image'"),
        (part("tool_result", "assistant"), r"content\.0 .* 'tool_result'"),
        (part("tool_result", content=[{"type": "image"}]), r"0\.content\.0\.content\.0 .*'image'"),
        ({"tools": [{"type": "web_search_20250305"}]}, r"tools\.0\.type\n.*web_search_20250305"),
        ({"tools": [TOOL | {"input_schema": {}}]}, r"tools\.0\.input_schema must be a JSON schema"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice must be auto"),
        ({"tool_choice": {"disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
        ({"thinking": {"type": "enabled"}}, r"thinking\.type"),
        ({"output_config": {"format": {}}}, r"output_config\.format"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(fields, pattern):
    with pytest.raises((Refused, ValueError), match=pattern):
        read(**fields)


@pytest.mark.parametrize(
    "status, kind",
    [(413, "request_too_large"), (500, "api_error")],
)
def test_the_exception_shows_the_sentence(status, kind):
    found = MESSAGES.failure(Refused("must be 1: lower it", field="n", status=status))
    with pytest.raises(anthropic.APIStatusError, match=f"{kind}.*n: must be 1: lower it"):
        asyncio.run(streamed(status, json.dumps(found), "application/json"))
