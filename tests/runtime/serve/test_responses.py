"""Responses: what OpenAI's own client makes of the answers, and what is read of its requests."""

import json

import httpx2
import pytest
from openai import OpenAI
from openai.types.responses import Response
from pydantic import ValidationError

from nemorl.rollout.generation import Completion
from nemorl.runtime.serve.responses import RESPONSES
from nemorl.runtime.serve.wire import Refused, Sampled

CALLS = [
    {"id": x, "type": "function", "function": {"name": "add", "arguments": {"a": x}}} for x in "cd"
]
MADE = [
    {"type": "function_call", "call_id": x, "name": "add", "arguments": json.dumps({"a": x})}
    for x in "cd"
]
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
KNOWN = {"r": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
SYSTEM, USER = {"role": "system", "content": "be"}, {"role": "user", "content": "hi"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "3"}
GOT = {"role": "tool", "content": "3", "tool_call_id": "c"}


def answer(content, calls=(), finish="stop"):
    found = Completion(token_ids=(5, 6), logprobs=(-0.5, -1), finish_reason=finish, text=content)
    return Sampled(
        content=content, calls=calls, stop_string=None, prompt_tokens=7, completion=found
    )


def ask(**fields):
    body = RESPONSES.body(**{"model": "policy", "input": "hi", **fields})
    return body, RESPONSES.read(body, KNOWN)


def assistant(*calls):
    return {"role": "assistant", "content": "", "tool_calls": [*calls]}


SAID = [
    answer("yes"),
    answer("so", CALLS),
    answer("", CALLS[:1]),
    answer(""),
    answer("so long", finish="length"),
]


@pytest.mark.parametrize("said", SAID)
def test_the_client_reads_an_answer_at_once_and_streamed_and_gives_it_back(said):
    body, _ = ask(tools=[TOOL], include=["message.output_text.logprobs"])
    found = RESPONSES.reply(body, [said])
    events = list(RESPONSES.events(body, found))
    lines = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)

    def handle(request):
        plain = not json.loads(request.content).get("stream")
        return httpx2.Response(200, json=found) if plain else httpx2.Response(200, text=lines)

    http = httpx2.Client(transport=httpx2.MockTransport(handle))
    responses = OpenAI(base_url="http://x", api_key="k", http_client=http).responses
    wish = {"model": "policy", "input": "hi"}
    whole = responses.create(**wish)
    assert Response.model_validate(found, strict=True) == whole
    assert (whole.output_text, whole.usage.total_tokens) == (said.content, 9)
    assert whole.status == ("incomplete" if said.finish == "length" else "completed")
    told = list(responses.create(**wish, stream=True))
    for i, (event, (name, data)) in enumerate(zip(told, events, strict=True)):
        assert type(event).model_validate(data, strict=True) == event
        assert (event.type, event.sequence_number) == (name, i)
    assert told[-1].response == whole and told[-1].type == f"response.{whole.status}"
    names = [name for name, _ in events]
    assert all(each.replace("added", "done") in names for each in names)
    done = [each.item for each in told if each.type == "response.output_item.done"]
    assert done == whole.output
    with responses.stream(**wish) as stream:
        texts = [each.snapshot for each in stream if each.type.endswith(".delta")]
    assert texts == [x.arguments if "call" in x.type else x.content[0].text for x in done]
    if said.content:
        assert [each.logprob for each in done[0].content[0].logprobs] == [-0.5, -1]
    _, again = ask(input=[USER, *(each.to_dict() for each in done)])
    assert again.messages == [USER, said.message]


@pytest.mark.parametrize(
    "fields, messages",
    [
        ({"instructions": "be"}, [SYSTEM, USER]),
        ({"input": [{**SYSTEM, "role": "developer"}, USER]}, [SYSTEM, USER]),
        ({"input": [{**USER, "content": [{"type": "input_text", "text": "hi"}]}]}, [USER]),
        ({"instructions": "be", "previous_response_id": "r"}, [SYSTEM, *KNOWN["r"], USER]),
        ({"input": [USER, THOUGHT, MADE[0], THOUGHT, MADE[1]]}, [USER, assistant(*CALLS)]),
        ({"input": [MADE[0], OUTPUT, MADE[1]]}, [assistant(CALLS[0]), GOT, assistant(CALLS[1])]),
    ],
)
def test_items_are_read_as_messages(fields, messages):
    _, asked = ask(**fields)
    assert asked.messages == messages and asked.instructed == ("instructions" in fields)


def test_what_codex_and_openai_agents_send_is_taken():
    wish = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": True}
    wish |= {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    wish |= {"store": False, "prompt_cache_key": "k", "client_metadata": {"thread_id": "t"}}
    wish |= {"text": {"format": {"type": "text"}}, "truncation": "disabled"}
    _, asked = ask(**wish, max_output_tokens=9, temperature=0.5)
    assert (asked.max_tokens, asked.sampling) == (9, {"temperature": 0.5})
    function = {"name": "add", "description": "", "parameters": {"type": "object"}}
    assert list(asked.tools) == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"input": [THOUGHT]}, "must not be empty"),
        ({"input": ""}, "input must not be empty"),
        ({"input": [{**USER, "role": "bard"}]}, "input.0.role .* 'bard'"),
        ({"input": [{**USER, "content": [{"type": "input_image"}]}]}, "input.0.* 'input_image'"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type .* 'web_search_call'"),
        ({"input": [{**MADE[0], "call_id": None}]}, "input.0.call_id must be text"),
        ({"input": [{**MADE[0], "name": None}]}, "input.0.* must have a function's name"),
        ({"previous_response_id": "r2"}, "previous_response_id .* 'r2'"),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools.1 .* 'web_search'"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format .* 'json_object'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity .* 'low'"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort .* 'high'"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(fields, part):
    with pytest.raises((Refused, ValidationError), match=part):
        ask(**fields)
