"""OpenAI's chat completions."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from nemorl.data.templates import Message
from nemorl.runtime.serve.wire import (
    MOST_TOOLS,
    Ask,
    Body,
    Dialect,
    Event,
    Refused,
    Sampled,
    arguments_in,
    demand,
    new_id,
    text_in,
    tool,
)

FIELDS = "role", "content", "tool_calls", "tool_call_id", "name"
TEMPLATES_TAKE = "system", "user", "assistant", "tool"


class Shared(Body):
    """Fields of both of OpenAI's dialects; those from `user` on change nothing."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None


class ChatBody(Shared):
    """Fields of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None


def read(body: ChatBody, earlier: Mapping[str, Sequence[Message]]) -> Ask:
    """Return a request as an Ask. Raises: Refused for what can't be obeyed."""
    check_output(body.response_format, body.top_logprobs, "response_format")
    return Ask(
        messages=[message(each, f"messages.{i}") for i, each in enumerate(body.messages)],
        tools=tools_in(body),
        n=1 if body.n is None else body.n,
        stop=stops(body.stop),
        max_tokens=body.max_tokens if (m := body.max_completion_tokens) is None else m,
        sampling=body.given(),
    )


def stops(found: str | list[str] | None) -> tuple[str, ...]:
    """Return a stop string, or several, as a tuple."""
    return (found,) if isinstance(found, str) else tuple(found or ())


def check_output(form: Any, top_logprobs: int | None, field: str) -> None:
    """Raise Refused for a form other than text, and for other tokens' log-probabilities."""
    kind = form.get("type", "text") if isinstance(form, Mapping) else form or "text"
    free = (
        "ask for the form in a message: decoding is never constrained, as that changes the policy"
    )
    demand(kind == "text", field, f"must be text, but is {kind!r}", free)
    demand(not top_logprobs, "top_logprobs", "must be 0", "sampled tokens' alone are kept")


def tools_in(body: Shared) -> Sequence[dict[str, Any]]:
    """Return the tools that the model is shown. Raises: Refused for what can't be obeyed."""
    check_tools(body.tools, body.parallel_tool_calls)
    return chosen(body.tool_choice, [*map(_tool, body.tools or (), range(MOST_TOOLS))])


def check_tools(tools: Sequence[Any] | None, parallel: bool | None) -> None:
    """Raise Refused for too many tools, and where only one call is wanted."""
    demand(len(tools or ()) <= MOST_TOOLS, "tools", f"must be at most {MOST_TOOLS}", "give fewer")
    one, must = "parallel_tool_calls", "must be true: the model calls as many tools as it likes"
    demand(parallel is not False or not tools, one, must, "leave it out")


def chosen(choice: Any, tools: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the tools that the model is shown. "required" is as "auto", because forcing a call
    would change the policy.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    known = ("auto", "none", "required", "any", None)
    must = f"must be auto, none or required, but is {choice!r}"
    demand(kind in known, "tool_choice", must, "offer the one tool alone")
    return () if kind == "none" else tools


def _tool(found: Mapping[str, Any], number: int) -> dict[str, Any]:
    place, kind, function = f"tools.{number}", found.get("type"), found.get("function", found)
    fits = kind == "function" and isinstance(function, Mapping)
    demand(fits, place, f"must be a function, but is of type {kind!r}", "leave it out")
    place = place if function is found else f"{place}.function"
    name, about, schema = map(function.get, ("name", "description", "parameters"))
    return tool(name, about, schema, place)


def message(found: Mapping[str, Any], place: str) -> Message:
    """Return a message as `Policy.chat` takes it."""
    role = "system" if found.get("role") == "developer" else found.get("role")
    known = role in TEMPLATES_TAKE
    must = f"must be one of developer, {', '.join(TEMPLATES_TAKE)}, but is {role!r}"
    demand(known, f"{place}.role", must, "correct it")
    other = next((name for name, value in found.items() if value and name not in FIELDS), "")
    demand(not other, f"{place}.{other}", "is no field that the model can be shown", "leave it out")
    made = {"role": role, "content": text_in(found.get("content"), f"{place}.content")}
    calls, asked = [], found.get("tool_calls") or []
    fits = isinstance(asked, list) and all(isinstance(each, Mapping) for each in asked)
    demand(fits, f"{place}.tool_calls", "must be a list of calls", "correct it")
    for i, each in enumerate(asked):
        where, function = f"{place}.tool_calls.{i}", each.get("function")
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        demand(named, where, "must have a function's name", "name it")
        arguments = arguments_in(function.get("arguments"), f"{where}.function.arguments")
        function = {"name": function.get("name"), "arguments": arguments}
        calls.append({"id": each.get("id"), "type": "function", "function": function})
    if calls:
        made["tool_calls"] = calls
    if role == "tool":
        made["tool_call_id"] = found.get("tool_call_id")
    return made


def reply(body: ChatBody, ask: Ask, answers: Sequence[Sampled]) -> dict[str, Any]:
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
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": choices,
        "usage": usage,
    }


def _message(answer: Sampled) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": written(call)}}
        for call in answer.calls
    ]
    content = answer.content or (None if calls else "")
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def written(call: Mapping[str, Any]) -> str:
    """Return a call's arguments as JSON."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def logprobs(answer: Sampled) -> list[dict[str, Any]]:
    """Return the log-probability of each sampled token, with its text and bytes."""
    found, tokenizer = answer.completion, answer.tokenizer
    texts = [tokenizer.decode([token]) if tokenizer else "" for token in found.token_ids]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, found.logprobs, strict=True)
    ]


def events(body: ChatBody, found: dict[str, Any]) -> Iterator[Event]:
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


KINDS: dict[int, Literal["authentication_error", "permission_error", "server_error"]] = {
    401: "authentication_error",
    403: "permission_error",
}


def failure(error: Refused) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    usual = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = KINDS.get(error.status, usual)
    parts = {"message": str(error), "type": kind, "param": error.field, "code": error.code}
    return {"error": parts}


CHAT = Dialect(
    path="/v1/chat/completions",
    body=ChatBody,
    read=read,
    reply=reply,
    events=events,
    failure=failure,
)
