"""Messages as token ids, and what a model says as messages with calls of tools, by the conventions
of its chat template.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nemorl.checks import require
from nemorl.data.messages import tokenize_prompt
from nemorl.data.templates import Message, Template, require_roles
from nemorl.rollout.generation import Completion, first_stop, text_before

CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>((?:(?!<\|).)*)", re.DOTALL)
"""A channel's name, and what is said in it."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas."""
Call = dict[str, Any]
"""{"type": "function", "function": {"name": text, "arguments": {name: value}}}; of a call that
can't be read {"type": "error", "error": why, "text": what was said}.
"""
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
"""In templates whose calls are JSON alone."""
CONSTANTS = {"True": "true", "False": "false", "None": "null"}


@dataclass
class Asked:
    """What a prompt was made of."""

    log: list[str]
    """Tools and messages as they were passed, as JSON."""
    messages: list[Message]
    """The messages, answers among them as they were sampled."""
    tools: Tools
    after: "Spoken | None"
    """The answer that the prompt goes on with, to the token."""
    text: str | None = None
    """The messages as rendered, once needed."""


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """An answer, and all that it continues."""

    asked: Asked
    log: list[str]
    """`asked.log`, and the answer as returned."""
    message: Message
    """The dict that was returned."""
    sampled: Message
    """As it was sampled."""
    tokens: tuple[int, ...]
    """Up to its end."""
    said: str
    end: str
    """Text of its end token."""


@dataclass
class Context:
    """Renders messages to token ids, and keeps what was sampled.

    A prompt continues the answer that ends the longest recorded beginning of its messages under the
    same tools, with its tokens; of equal answers the one whose dict is passed, else the latest.
    Where the chat template renders that beginning differently now, white space around answers
    aside, the next shorter one is taken. Without any, the template's rendering begins a segment.
    """

    tokenizer: Any
    messages: Sequence[Message]
    """Of the row's prompt."""
    prompt: Sequence[int]
    """Token ids of `messages`."""
    plain: bool = False
    """The prompt is text without a chat template; what follows is appended."""
    tools: Tools = ()
    most: int = sys.maxsize
    """Answers that are kept."""
    _answers: list[Spoken] = field(default_factory=list)
    """The latest first."""

    def prompt_of(
        self, messages: Sequence[Message], tools: Tools = ()
    ) -> tuple[tuple[int, ...], Asked]:
        """Return the token ids of messages, and what `add` needs."""
        usable = list(tools or self.tools)
        log = [_json(usable), *map(_json, messages)]
        found = max(
            (each for each in self._answers if each.log == log[: len(each.log)]),
            key=lambda each: (len(each.log), each.message is messages[len(each.log) - 2]),
            default=None,
        )
        before = [*found.asked.messages, found.sampled] if found else []
        new = [self._as_sampled(message) for message in messages[len(before) :]]
        asked = Asked(log, before + new, usable, found)
        prompt = self._prompt(asked, new)
        if tools and self.tokenizer is not None:
            require_readable(self._template(tools).source())
        return prompt, asked

    def _prompt(self, asked: Asked, new: Sequence[Message]) -> tuple[int, ...]:
        if asked.messages == list(self.messages) and asked.tools == list(self.tools):
            return tuple(self.prompt)
        remedy = "give Prompts the tokenizer, or use sample"
        require(
            self.tokenizer is not None,
            "chat",
            "needs the prompts' tokenizer",
            self.tokenizer,
            remedy,
        )
        answer = asked.after
        if answer is None:
            options: dict[str, Any] = {"tools": asked.tools} if asked.tools else {}
            if self.plain:
                options["chat_template"] = "passthrough"
            return tuple(tokenize_prompt(self.tokenizer, asked.messages, **options))
        text, rest = self._text(asked), None
        while answer:
            rest = following(
                text, self._text(answer.asked), answer.said, answer.end, plain=self.plain
            )
            if rest is not None:
                break
            answer = answer.asked.after
        asked.after = answer
        given = text if rest is None else rest
        for message in new:
            self._require_said(message, given)
        return (*(answer.tokens if answer else ()), *_ids(self.tokenizer, given))

    def _as_sampled(self, message: Message) -> Message:
        if message in self.messages:
            return dict(message)
        said = _json(message)
        equal = [each for each in self._answers if each.log[-1] == said]
        equal.sort(key=lambda each: each.message is not message)
        return equal[0].sampled if equal else dict(message)

    def _require_said(self, message: Message, text: str) -> None:
        said = message.get("content")
        if self.plain or message.get("role") == "assistant" or not isinstance(said, str):
            return
        require_roles(self._template(()), [message])
        quoted = json.dumps(said.strip(), ensure_ascii=False)[1:-1]
        if said.strip() not in text and quoted not in text:
            raise ValueError(
                f"the chat template leaves out what the role {message['role']!r} says: choose one"
                " that renders it (--model.chat-template), or another role"
            )

    def add(
        self,
        prompt: tuple[int, ...],
        asked: Asked,
        completion: Completion,
        stop_strings: Sequence[str] = (),
    ) -> Message:
        """Keep an answer to a prompt, and return it as a message."""
        self.tokenizer = self.tokenizer or completion.tokenizer
        if self.tokenizer is None:
            return {"role": "assistant", "content": completion.text}
        said, end = self._spoken(prompt, completion)
        source = self._template(asked.tools).source() if asked.tools else ""
        message = read_message(said, completion.text, asked.tools, source)
        sampled: Message = {"role": "assistant", "content": said.strip() or said}
        spoken = not self.plain and CHANNEL.search(said)
        if spoken and "<|channel|>" in self._template(()).source():  # which takes the parts
            message = {**message, **channels(text_before(stop_strings, said))}
            sampled = dict(message)
        if stop := first_stop(stop_strings, said):
            message = {**message, "stop_string": stop}
        self._answers.insert(
            0,
            Spoken(
                asked=asked,
                log=[*asked.log, _json(message)],
                message=message,
                sampled=sampled,
                tokens=(*prompt, *completion.token_ids),
                said=said,
                end=end,
            ),
        )
        del self._answers[self.most :]
        return message

    def _spoken(self, prompt: tuple[int, ...], completion: Completion) -> tuple[str, str]:
        ids, tokenizer = completion.token_ids, self.tokenizer
        ended = bool(ids) and not completion.truncated
        if ended:  # Llama 3.1's <|eom_id|> is special, but has no name
            added = tokenizer.added_tokens_decoder.get(ids[-1])
            ended = ids[-1] in tokenizer.all_special_ids or bool(added and added.special)
        # With the token before it, of which some tokenizers make a space.
        before = self._decoded(prompt[-1:])
        said = self._decoded((*prompt[-1:], *(ids[:-1] if ended else ids)))
        return said.removeprefix(before), self._decoded(ids[-1:]) if ended else ""

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _text(self, asked: Asked) -> str:
        if asked.text is None and self.plain:
            asked.text = "".join(str(message.get("content") or "") for message in asked.messages)
        elif asked.text is None:
            template = self._template(asked.tools)
            asked.text = template.render(asked.messages, add_generation_prompt=True)
        return asked.text

    def _template(self, tools: Tools) -> Template:
        return Template(self.tokenizer, None, [dict(tool) for tool in tools] or None, {})


def channels(said: str) -> dict[str, str]:
    """Return the content, and any thinking, of what a model said in gpt-oss's channels.

    >>> channels("<|channel|>analysis<|message|>1+1<|end|><|channel|>final<|message|>2")
    {'content': '2', 'thinking': '1+1'}
    """
    parts: dict[str, str] = {"final": ""}
    for name, text in CHANNEL.findall(said):
        parts[name] = parts.get(name, "") + text
    thinking = {"thinking": parts["analysis"]} if "analysis" in parts else {}
    return {"content": parts["final"], **thinking}


def following(text: str, before: str, said: str, end: str, *, plain: bool = False) -> str | None:
    """Return what a rendering adds after an answer, None where it renders what precedes otherwise.

    `before`: the answer's prompt as it was rendered; `said`, `end`: the answer as it was sampled,
    and its end token, which text that is `plain` lacks.

    >>> following("<u>hi<a> yes <e><u>why?<a>", "<u>hi<a>", "yes", "<e>")
    '<u>why?<a>'
    """
    if not text.startswith(before):
        return None
    rest, said = text[len(before) :], said.strip()
    bare = rest.lstrip() if said else rest
    if not bare.startswith(said):
        return None
    rest = bare[len(said) :]
    if plain or not end:
        return rest
    bare = rest.lstrip()
    return bare[len(end) :] if bare.startswith(end) else None


def _json(part: Any) -> str:
    return json.dumps(part, sort_keys=True, default=repr)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_message(said: str, text: str, tools: Tools, template: str) -> Message:
    """Return what a model said as a message, with `tool_calls` if it calls tools.

    `said` has special tokens, which may mark calls; `text` has none. `template` shows how calls are
    written: <tool_call>{"name": …, "arguments": …}</tool_call>, as by Hermes and Qwen, or with tags
    in it (`TAGGED`); [TOOL_CALLS][…], by Mistral; {"name": …, "parameters": …}, by Llama.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reader = _reader(template, tools)
    if tools and reader and (calls := list(reader(said))):
        message["tool_calls"] = calls
    return message


def before_calls(text: str) -> str:
    """Return what a model said before its calls of tools.

    >>> before_calls('Let me see. <tool_call>{"name": "add", "arguments": {}}</tool_call>')
    'Let me see.'
    """
    said = re.split(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>", text)[0].strip()
    return "" if said[:1] in ("{", "[") else said  # a call alone, of Llama's or Mistral's


def require_readable(template: str | None) -> None:
    """Raise ValueError for a chat template whose calls of tools can't be read, and for none."""
    if _reader(template or "", ()) is None:
        raise ValueError(
            "an environment of tools needs a chat template with tools, which writes calls as Qwen,"
            " Hermes, GLM, Mistral or Llama do (docs/environments.md), but it has none of their"
            " marks: choose another (--model.chat-template), or lead the conversation with"
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
    _, mark, text = said.partition("[TOOL_CALLS]")
    if not mark:
        return
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield _error(text, f"it is not JSON ({error})")
        return
    for call in calls if isinstance(calls, list) else [calls]:
        yield _call_of(call, text)


def _llama(said: str) -> Iterator[Call]:
    text = said.replace("<|python_tag|>", "").strip()
    if text.startswith("{") and '"name"' in text:
        yield _call(text)
    elif said.lstrip().startswith("<|python_tag|>"):
        yield _error(text, 'it must be {"name": …, "parameters": …}')


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
    return {"type": "function", "function": {"name": found["name"], "arguments": dict(arguments)}}


def _error(text: str, reason: str) -> Call:
    return {"type": "error", "error": f"the call can't be read: {reason}", "text": text.strip()}
