"""OpenAI's responses."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import PositiveInt

from nemorl.data.templates import Message
from nemorl.runtime.serve import chat, wire

LOGPROBS = "message.output_text.logprobs"
NOTES = "type", "id", "status", "phase"
"""Fields of a message that it isn't shown with."""


class ResponsesBody(chat.Shared):
    """Fields of /v1/responses; those from client_metadata on change nothing."""

    input: str | list[wire.Json]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: PositiveInt | None = None
    include: list[str] | None = None
    """Log-probabilities; all else is of items that aren't made."""
    text: wire.Json | None = None
    reasoning: wire.Json | None = None
    truncation: Literal["disabled"] | None = None
    client_metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


def read(body: ResponsesBody, earlier: wire.Earlier) -> wire.Ask:
    """Return a request as an Ask. Raises: Refused."""
    text, thought = body.text or {}, body.reasoning or {}
    chat.check_output(text.get("format"), "text.format")
    fixed = {"reasoning.effort": thought.get("effort"), "text.verbosity": text.get("verbosity")}
    for field, v in fixed.items():
        wire.demand(v is None, field, f"must be left out, but is {v!r}", "ask for it in a message")
    id = body.previous_response_id
    must, remedy = f"must be of an answer in this session, but is {id!r}", "send its messages"
    wire.demand(id is None or id in earlier, "previous_response_id", must, remedy)
    first = [{"role": "system", "content": body.instructions}] if body.instructions else []
    wire.demand(bool(body.input), "input", "must not be empty", "add a message")
    new = body.input if isinstance(body.input, list) else [{"role": "user", "content": body.input}]
    return wire.Ask(
        messages=[*first, *earlier.get(id or "", ()), *_messages(new)],
        instructed=bool(first),
        tools=chat.tools_in(body),
        max_tokens=body.max_output_tokens,
        sampling=body.given(),
    )


def _messages(items: Sequence[wire.Json]) -> list[Message]:
    """Return items as messages: text and the calls after it are one, as they were sampled."""
    made = list[Message]()
    for i, item in enumerate(items):
        place, kind, call = f"input.{i}", item.get("type") or "message", item.get("call_id")
        if kind == "reasoning":
            continue
        output = {"role": "tool", "content": item.get("output"), "tool_call_id": call}
        calls = {"role": "assistant", "tool_calls": [{"id": call, "function": item}]}
        said = {name: value for name, value in item.items() if name not in NOTES}
        forms = {"message": said, "function_call": calls, "function_call_output": output}
        must = f"must be a message, a function_call or its output, but is {kind!r}"
        wire.demand(str(kind) in forms, f"{place}.type", must, "leave it out")
        there = kind == "message" or isinstance(call, str)
        wire.demand(there, f"{place}.call_id", "must be text", "give back the call's")
        found = chat.message(forms[kind], place)
        if kind == "function_call" and made and made[-1]["role"] == "assistant":
            last = made.pop()
            found = {**last, "tool_calls": [*last.get("tool_calls", ()), *found["tool_calls"]]}
        made.append(found)
    return made


def reply(body: ResponsesBody, answers: Sequence[wire.Sampled]) -> wire.Json:
    """Return an answer as a response."""
    [answer] = answers
    cut = {"reason": "max_output_tokens"} if answer.finish == "length" else None
    status, output = "incomplete" if cut else "completed", list[wire.Json]()
    if answer.content or not answer.calls:
        likely = chat.logprobs(answer) if LOGPROBS in (body.include or ()) else []
        part = {"type": "output_text", "text": answer.content, "annotations": []}
        said = {"type": "message", "id": wire.new_id("msg_"), "role": "assistant", "status": status}
        output.append({**said, "content": [{**part, "logprobs": likely}]})
    for call in answer.calls:
        made = {"type": "function_call", "id": wire.new_id("fc_"), "call_id": call["id"]}
        made |= {"name": call["function"]["name"], "arguments": chat.written(call)}
        output.append({**made, "status": "completed"})
    return {
        **body.model_dump(exclude={"input", "stream", "include", "client_metadata"}),
        "id": wire.new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": cut,
        "output": output,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.tokens,
        },
        "parallel_tool_calls": True,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
    }


def events(body: ResponsesBody, found: wire.Json) -> Iterator[wire.Event]:
    """Yield a finished answer as the events of a response."""
    for number, (kind, data) in enumerate(_steps(found)):
        name = f"response.{kind}"
        yield name, {"type": name, "sequence_number": number, **data}


def _steps(found: wire.Json) -> Iterator[tuple[str, wire.Json]]:
    begun = {"status": "in_progress"}
    nothing = dict.fromkeys(("usage", "incomplete_details"))
    for kind in ("created", "in_progress"):
        yield kind, {"response": {**found, **begun, **nothing, "output": []}}
    for i, item in enumerate(found["output"]):
        place, said = {"output_index": i}, "content" if "content" in item else "arguments"
        yield "output_item.added", {**place, "item": {**item, **begun, said: item[said][:0]}}
        place = {**place, "item_id": item["id"]}
        if said == "arguments":
            yield "function_call_arguments.delta", {**place, "delta": item[said]}
            yield "function_call_arguments.done", {**place, "arguments": item[said]}
        else:
            [part], place["content_index"] = item[said], 0
            text, likely = part["text"], {"logprobs": part["logprobs"]}
            yield "content_part.added", {**place, "part": {**part, "text": "", "logprobs": []}}
            yield "output_text.delta", {**place, **likely, "delta": text}
            yield "output_text.done", {**place, **likely, "text": text}
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {"output_index": i, "item": item}
    yield found["status"], {"response": found}


RESPONSES = wire.Dialect(
    path="/v1/responses",
    body=ResponsesBody,
    read=read,
    reply=reply,
    events=events,
    failure=chat.failure,
)
