"""OpenAI's chat completions."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, PositiveInt

from nemorl.data.templates import Message
from nemorl.runtime.serve import wire

FIELDS = "role", "content", "tool_calls", "tool_call_id", "name"
TEMPLATES_TAKE = "system", "user", "assistant", "tool"
KINDS = {401: "authentication_error", 403: "permission_error"}


class Shared(wire.Body):
    """Fields of both of OpenAI's dialects; those from `user` on change nothing."""

    tools: list[wire.Json] | None = Field(default=None, max_length=wire.MOST_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Literal[0] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None


class ChatBody(Shared):
    """Fields of /v1/chat/completions."""

    messages: list[wire.Json]
    n: int | None = None
    stop: wire.Stops = ()
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    response_format: wire.Json | None = None
    stream_options: wire.Json | None = None


def read(body: ChatBody, earlier: wire.Earlier) -> wire.Ask:
    """Return a request as an Ask. Raises: Refused."""
    check_output(body.response_format, "response_format")
    return wire.Ask(
        messages=[message(each, f"messages.{i}") for i, each in enumerate(body.messages)],
        tools=tools_in(body),
        n=1 if body.n is None else body.n,
        stop=body.stop,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        sampling=body.given(),
    )


def check_output(form: Any, field: str) -> None:
    """Raise Refused for a form other than text."""
    kind = form.get("type", "text") if isinstance(form, Mapping) else form or "text"
    free = "ask for it in a message: decoding is never constrained, as that changes the policy"
    wire.demand(kind == "text", field, f"must be text, but is {kind!r}", free)


def tools_in(body: Shared) -> Sequence[wire.Json]:
    """Return the tools that the model is shown. Raises: Refused."""
    one, must = "parallel_tool_calls", "must be true: the model calls as many tools as it likes"
    wire.demand(body.parallel_tool_calls is not False or not body.tools, one, must, "leave it out")
    tools = []
    for i, each in enumerate(body.tools or ()):
        place, kind, function = f"tools.{i}", each.get("type"), each.get("function", each)
        fits = kind == "function" and isinstance(function, Mapping)
        wire.demand(fits, place, f"must be a function, but is of type {kind!r}", "leave it out")
        tools.append(wire.tool(function, place if function is each else f"{place}.function"))
    return chosen(body.tool_choice, tools)


def chosen(choice: Any, tools: Sequence[wire.Json]) -> Sequence[wire.Json]:
    """Return the tools that a choice leaves. "required" is as "auto": a forced call would change
    the policy.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    fits = kind in ("auto", "none", "required", "any", None)
    must = f"must be auto, none or required, but is {choice!r}"
    wire.demand(fits, "tool_choice", must, "offer the one tool alone")
    return () if kind == "none" else tools


def message(found: wire.Json, place: str) -> Message:
    """Return a message as `Policy.chat` takes it."""
    role = "system" if found.get("role") == "developer" else found.get("role")
    must = f"must be one of developer, {', '.join(TEMPLATES_TAKE)}, but is {role!r}"
    wire.demand(role in TEMPLATES_TAKE, f"{place}.role", must, "correct it")
    other = next((name for name, value in found.items() if value and name not in FIELDS), "")
    must = "is no field that the model can be shown"
    wire.demand(not other, f"{place}.{other}", must, "leave it out")
    made = {"role": role, "content": wire.text_in(found.get("content"), f"{place}.content")}
    calls = found.get("tool_calls") or []
    place = f"{place}.tool_calls"
    wire.demand(isinstance(calls, list), place, "must be a list of calls", "correct it")
    if calls:
        made["tool_calls"] = [_call(each, f"{place}.{i}") for i, each in enumerate(calls)]
    if role == "tool":
        made["tool_call_id"] = found.get("tool_call_id")
    return made


def _call(found: Any, place: str) -> wire.Json:
    function: Any = found.get("function") if isinstance(found, Mapping) else None
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    wire.demand(named, place, "must have a function's name", "name it")
    arguments, field = function.get("arguments"), f"{place}.function.arguments"
    try:
        if isinstance(arguments, str | None):
            arguments = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        wire.demand(False, field, f"must be JSON, but is not ({error})", "correct it")
    wire.demand(isinstance(arguments, dict), field, "must be a JSON object", "name the arguments")
    function = {"name": function["name"], "arguments": arguments}
    return {"id": found.get("id"), "type": "function", "function": function}


def reply(body: ChatBody, answers: Sequence[wire.Sampled]) -> wire.Json:
    """Return answers as a chat.completion."""
    choices = [
        {
            "index": i,
            "message": _message(each),
            "logprobs": {"content": logprobs(each)} if body.logprobs else None,
            "finish_reason": each.finish,
        }
        for i, each in enumerate(answers)
    ]
    prompt, said = answers[0].prompt_tokens, sum(each.tokens for each in answers)
    usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    return {
        "id": wire.new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": choices,
        "usage": usage,
    }


def _message(answer: wire.Sampled) -> wire.Json:
    if not answer.calls:
        return answer.message
    calls = [
        {**call, "function": {**call["function"], "arguments": written(call)}}
        for call in answer.calls
    ]
    return {"role": "assistant", "content": answer.content or None, "tool_calls": calls}


def written(call: wire.Json) -> str:
    """Return a call's arguments as JSON."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def logprobs(answer: wire.Sampled) -> list[wire.Json]:
    """Return the log-probability of each sampled token, with its text and bytes."""
    found, tokenizer = answer.completion, answer.tokenizer
    texts = [tokenizer.decode([token]) if tokenizer else "" for token in found.token_ids]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, found.logprobs, strict=True)
    ]


def events(body: ChatBody, found: wire.Json) -> Iterator[wire.Event]:
    """Yield a finished answer as chunks of chat.completion.chunk."""
    head = {name: found[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    for choice in found["choices"]:
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        first = {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"]}
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield None, {**head, "choices": [{**first, "finish_reason": None}]}
        yield None, {**head, "choices": [last]}
    if (body.stream_options or {}).get("include_usage"):
        yield None, {**head, "choices": [], "usage": found["usage"]}
    yield None, "[DONE]"


def failure(error: wire.Refused) -> wire.Json:
    """Return an error as OpenAI's clients read it."""
    usual = "server_error" if error.status >= 500 else "invalid_request_error"
    about = {"type": KINDS.get(error.status, usual), "param": error.field, "code": error.code}
    return {"error": {"message": str(error), **about}}


CHAT = wire.Dialect(
    path="/v1/chat/completions",
    body=ChatBody,
    read=read,
    reply=reply,
    events=events,
    failure=failure,
)
