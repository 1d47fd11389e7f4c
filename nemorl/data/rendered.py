"""Refuses what a chat template would leave out of a conversation without a word."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemorl.checks import short
from nemorl.data.templates import Message, Template

Change = Callable[[int, Message], Message]
"""A message by its number, without something; itself where it doesn't have that."""

ROLES = ("system", "developer", "user", "assistant", "tool")
RENAMED = {
    "assistant": ("ai", "bot", "chatbot", "gpt", "model"),
    "user": ("human",),
    "tool": ("function", "ipython", "observation"),
}
BOOKKEEPING = ("role", "content", "name", "id", "tool_call_id")
"""Keys of a message that many templates leave out, and that may be left out."""
REASONING = ("reasoning", "reasoning_content", "thinking")
"""Keys that templates leave out of turns before the last question, on purpose."""


def require_rendered(template: Template, messages: Sequence[Message]) -> None:
    """Raise ValueError for a role, key, kind of content or tools that a template leaves out.

    Each is found by rendering the conversation with it and without it. A conversation of plain
    messages by user and assistant costs no rendering.

    >>> from transformers import ByT5Tokenizer
    >>> template = Template(ByT5Tokenizer(), "{{ messages[0].content }}", None, {})
    >>> require_rendered(template, [{"role": "user", "content": "hi", "tool_calls": ["x"]}])
    Traceback (most recent call last):
    ValueError: the chat template leaves out tool_calls (message 0): choose ...
    """
    _require_roles(template, messages)
    parts = [
        (f"{part} (message {number})", template, without)
        for part, number, without in _unusual(messages)
    ]
    if template.tools:
        parts.append(("the row's tools", replace(template, tools=None), list(messages)))
    text = template.render(messages) if parts else ""
    for part, other, without in parts:
        if _renders(other, without, text):
            raise ValueError(
                f"the chat template leaves out {part}: choose one that renders it"
                " (--model.chat-template), or remove it from the data"
            )


def _require_roles(template: Template, messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        role = message.get("role")
        if role in ROLES or (isinstance(role, str) and _names(template.source(), role)):
            continue
        ours = next((known for known, others in RENAMED.items() if role in others), None)
        raise ValueError(
            f"message {number}: role must be one of {', '.join(ROLES)}, or one that the chat"
            f" template names, got {short(role)}: rename it{f' to {ours!r}' if ours else ''}"
        )


def _names(source: str, role: str) -> bool:
    return f"'{role}'" in source or f'"{role}"' in source


def _renders(template: Template, messages: Sequence[Message], text: str) -> bool:
    try:
        return template.render(messages) == text
    except ValueError:  # it misses a part
        return False


def _unusual(messages: Sequence[Message]) -> Iterator[tuple[str, int, list[Message]]]:
    """What templates differ in: its name, its first message, and the conversation without it."""
    last_question = max(
        (n for n, message in enumerate(messages) if message["role"] == "user"), default=-1
    )

    def without_key(key: str) -> Change:
        def change(number: int, message: Message) -> Message:
            past = key in REASONING and number < last_question
            if past or not _says_something(message.get(key)):
                return message
            return {name: value for name, value in message.items() if name != key}

        return change

    def silent(role: str) -> Change:
        return lambda _, m: {**m, "content": ""} if m["role"] == role and _speaks(m) else m

    def without_kind(kind: str) -> Change:
        def change(_: int, message: Message) -> Message:
            if kind not in _kinds(message):
                return message
            return {**message, "content": [p for p in message["content"] if p.get("type") != kind]}

        return change

    keys = dict.fromkeys(key for message in messages for key in message if key not in BOOKKEEPING)
    roles = dict.fromkeys(m["role"] for m in messages if m["role"] not in ("user", "assistant"))
    kinds = dict.fromkeys(kind for message in messages for kind in _kinds(message))
    for part, change in (
        *((key, without_key(key)) for key in keys),
        *((f"what the role {role!r} says", silent(role)) for role in roles),
        *((f"content of the type {kind!r}", without_kind(kind)) for kind in kinds),
        (
            "the content beside tool_calls",
            lambda _, m: {**m, "content": ""} if m.get("tool_calls") and _speaks(m) else m,
        ),
    ):
        changed = [change(number, message) for number, message in enumerate(messages)]
        places = [
            n for n, (one, own) in enumerate(zip(changed, messages, strict=True)) if one is not own
        ]
        if places:
            yield part, places[0], changed


def _kinds(message: Message) -> list[str]:
    """The types of a message's content other than text."""
    content = message.get("content")
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    types = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return [kind for kind in types if isinstance(kind, str) and kind != "text"]


def _speaks(message: Message) -> bool:
    return _says_something(message.get("content"))


def _says_something(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value not in (None, [], {}, ())
