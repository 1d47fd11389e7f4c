"""Calls of tools in what a model says, by the conventions of its chat template."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nemorl.data.templates import Message

Call = dict[str, Any]
"""{"type": "function", "function": {"name": text, "arguments": {name: value}}}; of a call that
can't be read {"type": "error", "error": why, "text": what was said}.
"""


def read_message(
    said: str, text: str, tools: Sequence[Mapping[str, Any]], template: str
) -> Message:
    """Return what a model said as a message, with `tool_calls` if it calls tools.

    Args:
        said: with the special tokens in it, which may mark calls.
        text: without them.
        tools: JSON schemas of what can be called; none: nothing is.
        template: source of the chat template, which shows how calls are written: as Hermes and Qwen
            do, <tool_call>{"name": …, "arguments": …}</tool_call>; as Mistral, [TOOL_CALLS][…]; or
            as Llama, {"name": …, "parameters": …} alone.

    >>> said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    >>> message = read_message(said, said, [{"name": "add"}], "<tool_call>")
    >>> message["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if tools and (calls := list(_reader(template)(said))):
        message["tool_calls"] = calls
    return message


def _reader(template: str) -> Callable[[str], Iterator[Call]]:
    if "<tool_call>" in template:
        return _hermes
    return _mistral if "[TOOL_CALLS]" in template else _llama


def _hermes(said: str) -> Iterator[Call]:
    for found in re.finditer(r"<tool_call>(.*?)(</tool_call>|$)", said, re.DOTALL):
        yield _call(found[1]) if found[2] else _error(found[1], "it must end with </tool_call>")


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
