"""Calls of tools in what a model says, by the conventions of its chat template."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from nemorl.data.templates import Message

Call = dict[str, Any]
"""{"type": "function", "function": {"name": text, "arguments": {name: value}}}; of a call that
can't be read {"type": "error", "error": why, "text": what was said}.
"""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas."""
Reader = Callable[[str], Iterator[Call]]
TAGGED = {
    "<function=": (
        r"\s*<function=([^>]+)>(.*)</function>\s*",
        r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>",
        "<function=NAME><parameter=NAME>value</parameter></function>",
    ),
    "<arg_key>": (
        r"\s*([^<\s]+)\s*(.*)",
        r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>",
        "NAME<arg_key>name</arg_key><arg_value>value</arg_value>",
    ),
}
"""Calls with a tag for each argument, of Qwen 3.5 and of GLM 4.5: the call, an argument, and how
it is written.
"""
LLAMA = re.compile(r'\{"name": [^,{}]+, "parameters"|<\|python_tag\|>')
"""What a template says about calls that are JSON alone."""
CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def read_message(said: str, text: str, tools: Tools, template: str) -> Message:
    """Return what a model said as a message, with `tool_calls` if it calls tools.

    `said` has the special tokens, which may mark calls; `text` has none. `template` shows how calls
    are written: <tool_call>{"name": …, "arguments": …}</tool_call>, as Hermes and Qwen do, or with
    tags in it (`TAGGED`); [TOOL_CALLS][…], as Mistral; {"name": …, "parameters": …}, as Llama.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reader = _reader(template, tools)
    if tools and reader and (calls := list(reader(said))):
        message["tool_calls"] = calls
    return message


def require_readable(template: str | None) -> None:
    """Raise ValueError for a chat template whose calls of tools can't be read, and for none."""
    if _reader(template or "", ()) is None:
        raise ValueError(
            "an environment of tools needs a chat template with tools, which writes calls as Qwen,"
            " Hermes, GLM, Mistral or Llama do (docs/environments.md), but it has none of their"
            " marks: choose another one (--model.chat-template), or lead the conversation with"
            " step(response)"
        )


def _reader(template: str, tools: Tools) -> Reader | None:
    if "<tool_call>" in template:
        marks = [mark for mark in TAGGED if mark in template]
        return partial(_within, read=partial(_tagged, marks[0], tools) if marks else _call)
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else _mistral
    return _llama if LLAMA.search(template) else None


def _within(said: str, *, read: Callable[[str], Call]) -> Iterator[Call]:
    for found in re.finditer(r"<tool_call>(.*?)(</tool_call>|$)", said, re.DOTALL):
        yield read(found[1]) if found[2] else _error(found[1], "it must end with </tool_call>")


def _tagged(mark: str, tools: Tools, text: str) -> Call:
    call, argument, written = TAGGED[mark]
    found = re.fullmatch(call, text, re.DOTALL)
    if found is None or re.sub(argument, "", found[2], flags=re.DOTALL).strip():
        return _error(text, f"it must be {written}")
    said = dict(re.findall(argument, found[2], re.DOTALL))
    types = _types(tools, found[1])
    arguments = {key: _value(value, types.get(key)) for key, value in said.items()}
    return {"type": "function", "function": {"name": found[1], "arguments": arguments}}


def _types(tools: Tools, name: str) -> dict[str, Any]:
    schemas = [tool.get("function", tool) for tool in tools]
    schema: Mapping[str, Any] = next((each for each in schemas if each.get("name") == name), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}
    return {key: each.get("type") for key, each in properties.items() if isinstance(each, Mapping)}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(CONSTANTS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def _mistral(said: str) -> Iterator[Call]:
    _, mark, calls = said.partition("[TOOL_CALLS]")
    if mark:
        yield from _listed(calls)


def _llama(said: str) -> Iterator[Call]:
    text = said.replace("<|python_tag|>", "").strip()
    if text.startswith("{") and '"name"' in text:
        yield _call(text)
    elif said.lstrip().startswith("<|python_tag|>"):
        yield _error(text, 'it must be {"name": …, "parameters": …}')


def _listed(text: str) -> Iterator[Call]:
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield _error(text, f"it is not JSON ({error})")
        return
    for call in calls if isinstance(calls, list) else [calls]:
        yield _call_of(call, text)


def _call(text: str) -> Call:
    try:
        return _call_of(json.loads(text), text)
    except (ValueError, RecursionError) as error:
        return _error(text, f"it is not JSON ({error})")


def _call_of(found: Any, text: str) -> Call:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return _error(text, 'it must be an object with "name" and "arguments"')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI has them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _error(text, f"its arguments are not JSON ({error})")
    if not isinstance(arguments, Mapping):
        return _error(text, "its arguments must be an object")
    function = {"name": found["name"], "arguments": dict(arguments)}
    return {"type": "function", "function": function}


def _error(text: str, reason: str) -> Call:
    return {"type": "error", "error": f"the call can't be read: {reason}", "text": text.strip()}
