"""Chat templates: rendered with the places of every turn."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nemorl.checks import short

Message = Mapping[str, Any]

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK_TURNS = "mark what the assistant says with {% generation %} and {% endgeneration %}"
PASSTHROUGH = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""What `passthrough` stands for: the messages' contents, one behind the other."""


def with_chat_template(
    tokenizer: Any, template: str | None = None, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Return a copy of the tokenizer with this chat template, and defaults for its names.

    Args:
        template: a Jinja template, the path of a file with one, or `passthrough`; None: its own.
        kwargs: the template's defaults (`{"enable_thinking": False}`), saved with the tokenizer.
    Raises: ValueError for an unreadable file, a template that is not Jinja, an unknown name.

    >>> from transformers import ByT5Tokenizer
    >>> template = "{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}"
    >>> tokenizer = with_chat_template(ByT5Tokenizer(), template, {"end": "!"})
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    'hi!'
    """
    if template is None and not kwargs:
        return tokenizer
    own = tokenizer.chat_template if template is None else _text_of(template)
    if not own:
        raise ValueError(
            "chat_template_kwargs are for a chat template, but the tokenizer has none, got"
            f" {kwargs}: add model.chat_template"
        )
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = (
        {name: _with_defaults(text, kwargs) for name, text in own.items()}
        if isinstance(own, Mapping)
        else _with_defaults(own, kwargs)
    )
    return tokenizer


def _text_of(template: str) -> str:
    if template == "passthrough":
        return PASSTHROUGH
    if "{" in template:  # a template has braces, a path hasn't
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            "model.chat_template must be a Jinja template, a file with one, or passthrough, but"
            f" {template!r} can't be read ({error})"
        ) from error


def _with_defaults(template: str, kwargs: Mapping[str, Any] | None) -> str:
    known, defaults = _variables(template), ""
    for name, value in (kwargs or {}).items():
        if name not in known:
            own = sorted(known - {"messages", "tools", "add_generation_prompt"})
            raise ValueError(
                f"model.chat_template_kwargs has {name!r}, but the chat template doesn't use"
                f" it; it uses {', '.join(own) or 'none'}"
            )
        defaults += f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
    return defaults + template


def _variables(template: str) -> set[str]:
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment
    except TemplateSyntaxError as error:
        raise ValueError(
            f"model.chat_template must be a Jinja template, but its line {error.lineno} isn't"
            f" ({error.message}): correct it"
        ) from error
    return meta.find_undeclared_variables(environment.parse(template))


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template with its arguments; renders to text."""

    tokenizer: Any
    chat_template: str | None
    tools: Any
    kwargs: Mapping[str, Any]

    def source(self) -> str:
        try:
            source = self.tokenizer.get_chat_template(
                PASSTHROUGH if self.chat_template == "passthrough" else self.chat_template,
                self.tools,
            )
            if not isinstance(source, str):
                raise ValueError(f"its chat_template is not text: {short(source)}")
            return source
        except (AttributeError, ValueError) as error:
            raise ValueError(
                "messages need a chat template, and the tokenizer has none to use: pass"
                f" chat_template (--model.chat-template), or give plain text ({error})"
            ) from error

    @property
    def is_passthrough(self) -> bool:
        return self.source() == PASSTHROUGH

    def render(self, messages: Sequence[Message], **options: bool) -> str:
        source = self.source()
        with _refusal(messages):
            return self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                chat_template=source,
                tools=self.tools,
                **options,
                **self.kwargs,
            )

    def turns(
        self, messages: Sequence[Message], *, given: int = 0
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the character ranges of assistant turns after `given`."""
        if not GENERATION.search(self.source()):
            return self._rendered(messages, given)
        text, spans = self._marked(messages)
        if any(message.get("role") == "assistant" for message in messages[:given]):
            spans = spans[len(self._marked(messages[:given])[1]) :]
        return text, [(begin, end) for begin, end in spans if begin < end]

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self.source()
        with _refusal(messages):
            rendered: Any = render_jinja_template(
                conversations=[list(map(dict, messages))],
                tools=self.tools,
                chat_template=source,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.kwargs},
            )
        (text,), (spans,) = rendered
        return text, spans

    def _rendered(
        self, messages: Sequence[Message], given: int
    ) -> tuple[str, list[tuple[int, int]]]:
        text = self.render(messages)
        turns = []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant" and number >= given:
                if not number:
                    raise ValueError(
                        "message 0 is the assistant's, and the chat template doesn't say where it"
                        f" begins: put a message before it, or {MARK_TURNS}"
                    )
                before = self.render(messages[:number], add_generation_prompt=True)
                through = self.render(messages[: number + 1])
                if not (through.startswith(before) and text.startswith(through)):
                    raise ValueError(
                        f"message {number}: the chat template renders the conversation up to here"
                        f" differently than within the whole; {MARK_TURNS}, or change"
                        " template_kwargs"
                    )
                turn = through[len(before) :].rstrip()
                # A sampler stops at the token that ends a turn, before white space.
                if not turn.endswith(tuple(self.tokenizer.all_special_tokens)):
                    turn = through[len(before) :]
                turns.append((len(before), len(before) + len(turn)))
        return text, turns


@contextmanager
def _refusal(messages: Sequence[Message]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what a template may compute may raise anything
        raise ValueError(
            f"the chat template refuses messages with the roles {roles(messages)}: {error}"
        ) from error


def roles(messages: Sequence[Message]) -> str:
    """Return who speaks, in order, for errors.

    >>> roles([{"role": "user"}, {"role": "assistant"}])
    'user, assistant'
    """
    return ", ".join(str(message.get("role")) for message in messages) or "(none)"


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

    def without(number: int) -> str | None:
        return _rendered(template, messages, lambda n, value: None if n == number else value)[0]

    text, names = _rendered(template, messages, lambda n, value: _marked(value, f"{MARK}_{n}_"))
    missing = [n for n in range(len(names)) if f"{MARK}_{n}_" not in (text or "")]
    whole = template.render(messages) if missing else None
    for number in missing:
        if without(number) == whole:
            remedy = "remove it from the data"
            if names[number] == TOOLS:
                remedy = "give no tools (docs/environments.md)"
            raise ValueError(
                f"the chat template leaves out {names[number]}: choose one that renders it"
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
        own = (f"{quote}{role}{quote}" for quote in "'\"" if isinstance(role, str))
        if role in ROLES or any(name in template.source() for name in own):
            continue
        ours = next((known for known, others in RENAMED.items() if role in others), None)
        raise ValueError(
            f"message {number}: role must be one of {', '.join(ROLES)}, or one that the chat"
            f" template names, got {short(role)}: rename it{f' to {ours!r}' if ours else ''}"
        )


def _rendered(
    template: Template, messages: Sequence[Message], change: Callable[[int, Any], Any]
) -> tuple[str | None, list[str]]:
    """Return the text with each part's value as `change(n, value)`, None removes it, and the names
    of the parts; no text if the template refuses it.
    """
    names = list[str]()

    def visit(name: str, value: Any) -> Any:
        names.append(name)
        return change(len(names) - 1, value)

    question = max((n for n, each in enumerate(messages) if each["role"] == "user"), default=-1)
    changed = [_visited(each, n, n < question, visit) for n, each in enumerate(messages)]
    if template.tools:
        template = replace(template, tools=visit(TOOLS, template.tools))
    try:
        return template.render(changed), names
    except ValueError:
        return None, names


def _visited(message: Message, number: int, past: bool, visit: Callable) -> Message:
    """past: a question follows, so templates may drop the reasoning."""
    role, changed = message["role"], dict[str, Any]()
    said = f"what the role {role!r} says"
    if message.get("tool_calls"):
        said = "the content beside tool_calls"

    def part(name: str, value: Any) -> Any:
        empty = not value.strip() if isinstance(value, str) else value in (None, [], {}, ())
        return value if empty else visit(f"{name} (message {number})", value)

    def text(value: str) -> str:
        thought, end, answer = value.rpartition("</think>")
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
    """Return the value with the mark behind each text but ids and types, which are compared."""
    if isinstance(value, Mapping):
        return {k: x if k in ("id", "type") else _marked(x, mark) for k, x in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each, mark) for each in value]
    return value + mark if isinstance(value, str) else value
