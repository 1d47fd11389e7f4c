"""Anthropic's messages."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, PositiveInt

from nemorl.data.templates import Message
from nemorl.runtime.serve import chat, wire

NOTHING = {"type": "text", "text": ""}
BILLING = "x-anthropic-billing-header"
"""Begins a text of Claude Code's that differs in each request: with it none continues another."""
BESIDES = {"assistant": ("thinking", "redacted_thinking", "tool_use"), "user": ("tool_result",)}
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class Said(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[wire.Json]


class Tool(BaseModel):
    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: wire.Json


class Choice(BaseModel):
    type: str = "auto"
    disable_parallel_tool_use: Literal[False] = False


class Thinking(BaseModel):
    type: Literal["adaptive", "disabled"]


class Edit(BaseModel):
    type: Literal["clear_thinking_20251015"]


class MessagesBody(wire.Body):
    """Fields of /v1/messages; the last three, and an effort, change nothing."""

    messages: list[Said]
    max_tokens: PositiveInt | None = None
    system: str | list[wire.Json] = ""
    tools: tuple[Tool, ...] = Field(default=(), max_length=wire.MOST_TOOLS)
    tool_choice: Choice = Choice()
    stop_sequences: tuple[str, ...] = ()
    thinking: Thinking | None = None
    context_management: dict[Literal["edits"], list[Edit]] | None = None
    output_config: dict[Literal["effort"], Any] | None = None
    cache_control: Any = None
    metadata: Any = None
    service_tier: Any = None


def read(body: MessagesBody, earlier: wire.Earlier) -> wire.Ask:
    """Return a request as an Ask. Raises: Refused."""
    schema = "input_schema"
    tools = [wire.tool(dict(each), f"tools.{i}", schema) for i, each in enumerate(body.tools)]
    said = _said("system", body.system, "system") if body.system else []
    for i, each in enumerate(body.messages):
        said += _said(each.role, each.content, f"messages.{i}")
    return wire.Ask(
        messages=said,
        tools=chat.chosen(body.tool_choice.type, tools),
        stop=body.stop_sequences,
        max_tokens=body.max_tokens,
        sampling=body.given(),
    )


def _said(role: str, content: str | list[wire.Json], place: str) -> list[Message]:
    """Return a message as `Policy.chat` takes it, after the results of tools in it."""
    texts, calls, results = [], [], []
    parts = content if isinstance(content, list) else [{**NOTHING, "text": content}]
    for i, part in enumerate(parts):
        kind = part.get("type")
        bill = role == "system" and str(part.get("text")).startswith(BILLING)
        texts.append(NOTHING if bill or kind in BESIDES.get(role, ()) else part)
        if kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"id": part.get("id"), "function": function})
        if kind == "tool_result":
            result = {"content": part.get("content"), "tool_call_id": part.get("tool_use_id")}
            results.append(chat.message({"role": "tool", **result}, f"{place}.content.{i}"))
    made = chat.message({"role": role, "content": texts, "tool_calls": calls}, place)
    return results if results and not made["content"] else [*results, made]


def reply(body: MessagesBody, answers: Sequence[wire.Sampled]) -> wire.Json:
    """Return an answer as a message."""
    [answer] = answers
    parts = list[wire.Json]()
    if answer.content or not answer.calls:
        parts.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        parts.append({**use, "input": call["function"]["arguments"]})
    stop = None if answer.calls else answer.stop_string
    return {
        "id": wire.new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": parts,
        "stop_reason": "stop_sequence" if stop else STOPS[answer.finish],
        "stop_sequence": stop,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens},
    }


def events(body: MessagesBody, found: wire.Json) -> Iterator[wire.Event]:
    """Yield a finished answer as the events of its blocks."""
    ends = {name: found[name] for name in ("stop_reason", "stop_sequence")}
    yield _event("message_start", message={**found, **dict.fromkeys(ends), "content": []})
    for i, part in enumerate(found["content"]):
        if part["type"] == "text":
            start, delta = {**part, "text": ""}, {**part, "type": "text_delta"}
        else:
            start = {**part, "input": {}}
            written = json.dumps(part["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": written}
        yield _event("content_block_start", index=i, content_block=start)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    yield _event("message_delta", delta=ends, usage=found["usage"])
    yield _event("message_stop")


def _event(name: str, **data: Any) -> wire.Event:
    return name, {"type": name, **data}


def failure(error: wire.Refused) -> wire.Json:
    """Return an error as Anthropic's clients read it."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    text, field = str(error), error.field or ""
    text = text if field in text else f"{field}: {text}"
    return {"type": "error", "error": {"type": KINDS.get(error.status, usual), "message": text}}


MESSAGES = wire.Dialect(
    path="/v1/messages",
    body=MessagesBody,
    read=read,
    reply=reply,
    events=events,
    failure=failure,
)
