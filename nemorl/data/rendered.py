"""Refuses what a chat template would leave out of a conversation without a word."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nemorl.checks import short
from nemorl.data.templates import Message, Template

Visit = Callable[[str, Any], Any]
"""Returns what to put in place of a part, by its name and value; None removes it."""

ROLES = ("system", "developer", "user", "assistant", "tool")
RENAMED = {
    "assistant": ("ai", "bot", "chatbot", "chatgpt", "gpt", "model"),
    "user": ("human",),
    "tool": ("function", "ipython", "observation"),
}
BOOKKEEPING = ("role", "name", "id", "tool_call_id")
"""Keys of a message that many templates leave out, and that may be left out."""
REASONING = ("reasoning", "reasoning_content", "thinking")
"""Keys that templates leave out of turns before the last question, on purpose."""
END_OF_THOUGHT = "</think>"
TOOLS = "the tools"
MARK = "7c1e4a90b2d8"
"""Begins what is added to a part to find it in the rendered text."""


def require_rendered(template: Template, messages: Sequence[Message]) -> None:
    """Raise ValueError for a text, key, kind of content or tools that a template leaves out.

    A part whose mark is missing from a rendering is left out if the text is the same without it.

    >>> from transformers import ByT5Tokenizer
    >>> template = Template(ByT5Tokenizer(), "{{ messages[0].content }}", None, {})
    >>> require_rendered(template, [{"role": "user", "content": "hi"}])  # is there
    """
    names = list[str]()

    def mark(name: str, value: Any) -> Any:
        names.append(name)
        return _marked(value, f"{MARK}_{len(names)}_")

    text = _rendered(template, messages, mark) or ""
    missing = [n for n in range(1, len(names) + 1) if f"{MARK}_{n}_" not in text]
    whole = template.render(messages) if missing else None
    for number in missing:
        numbers = iter(range(1, len(names) + 1))

        def without(_: str, value: Any, number: int = number, numbers: Any = numbers) -> Any:
            return None if next(numbers) == number else value

        if _rendered(template, messages, without) == whole:
            remedy = "remove it from the data"
            if names[number - 1] == TOOLS:
                remedy = "give no tools (docs/environments.md)"
            raise ValueError(
                f"the chat template leaves out {names[number - 1]}: choose one that renders it"
                f" (--model.chat-template), or {remedy}"
            )


def require_roles(template: Template, messages: Sequence[Message]) -> None:
    """Raise ValueError for a role that is none of `ROLES` and that the template does not name.

    >>> from transformers import ByT5Tokenizer
    >>> template = Template(ByT5Tokenizer(), "{{ messages[0].content }}", None, {})
    >>> require_roles(template, [{"role": "user", "content": "hi"}])  # is one
    """
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


def _rendered(template: Template, messages: Sequence[Message], visit: Visit) -> str | None:
    question = max((n for n, each in enumerate(messages) if each["role"] == "user"), default=-1)
    changed = [_visited(each, n, n < question, visit) for n, each in enumerate(messages)]
    if template.tools:
        template = replace(template, tools=visit(TOOLS, template.tools))
    try:
        return template.render(changed)
    except ValueError:
        return None


def _visited(message: Message, number: int, past: bool, visit: Visit) -> Message:
    """past: a question follows, so templates may drop the reasoning."""
    role, changed = message["role"], dict[str, Any]()
    said = f"what the role {role!r} says"
    if message.get("tool_calls"):
        said = "the content beside tool_calls"

    def part(name: str, value: Any) -> Any:
        return visit(f"{name} (message {number})", value) if _says_something(value) else value

    def text(value: str) -> str:
        thought, end, answer = value.rpartition(END_OF_THOUGHT)
        if role != "assistant":
            thought, end, answer = "", "", value
        elif not past and thought.strip() != "<think>":
            thought = part("the reasoning in the content", thought) or ""
        return f"{thought}{end}{part(said, answer) or ''}"

    def content(value: Any) -> Any:
        if isinstance(value, str):
            return text(value)
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "text" and isinstance(value.get("text"), str):
            return {**value, "text": text(value["text"])}
        return part(f"content of the type {kind!r}", value) if isinstance(kind, str) else value

    for key, value in message.items():
        if key in BOOKKEEPING or (past and key in REASONING):
            changed[key] = value
            continue
        of_one = content if key == "content" else partial(part, key)
        if isinstance(value, list | tuple):
            changed[key] = [new for each in value if (new := of_one(each)) is not None]
        elif (new := of_one(value)) is not None or value is None:
            changed[key] = new
    return changed


def _marked(value: Any, mark: str) -> Any:
    """The value with the mark behind each text but ids and types, which templates compare."""
    if isinstance(value, Mapping):
        return {
            key: each if key in ("id", "type") else _marked(each, mark)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_marked(each, mark) for each in value]
    return value + mark if isinstance(value, str) else value


def _says_something(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value not in (None, [], {}, ())
