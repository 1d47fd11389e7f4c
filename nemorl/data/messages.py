"""Conversations and plain text as token ids, with exact masks of what is trained on."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nemorl.checks import short
from nemorl.data.example import Example
from nemorl.data.templates import Message, Template, require_rendered, require_roles, roles


def tokenize_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    tools: Sequence[dict | Callable] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    given: int = 0,
    add_eos: bool = True,
) -> Example:
    """Return a conversation through its chat template; trained on is what the assistant says.

    A turn is what stands between `{% generation %}` marks, or else what the template adds to the
    conversation so far with its generation prompt, up to and including the turn's end token. Each
    border is verified by tokenizing the text up to there: what is trained on is, to the token, what
    a sampler would have returned. The response mask begins with the first trained token.

    Args:
        messages: the conversation.
        chat_template: replaces the tokenizer's own. "passthrough" takes the contents as they are,
            each assistant message tokenized apart.
        tools, template_kwargs: passed to the template.
        given: so many first messages are not trained on.
        add_eos: with passthrough, add the end token to the last message.
    Raises: ValueError where there is no assistant message or no template, for an unknown role and
    what the template leaves out, where a template without marks renders earlier turns differently
    later, and where a token crosses a turn's border.

    >>> from transformers import ByT5Tokenizer
    >>> tokenizer = ByT5Tokenizer()
    >>> chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    >>> example = tokenize_messages(tokenizer, chat, chat_template="passthrough")
    >>> tokenizer.decode(example.input_ids), example.loss_mask
    ('1+12</s>', [False, False, False, True, True])
    """
    template = Template(tokenizer, chat_template, tools, template_kwargs or {})
    require_roles(template, messages)
    if not any(message.get("role") == "assistant" for message in messages[given:]):
        raise ValueError(
            "messages must hold an assistant message to train on, got roles"
            f" {roles(messages[given:])}; end each row with the answer to learn"
        )
    require_rendered(template, messages)
    if template.is_passthrough:
        ids, turns = _passed_through(tokenizer, messages, given, add_eos)
    else:
        text, places = template.turns(messages, given=given)
        ids = _ids(tokenizer, text)
        tokens_before = partial(_tokens_before, tokenizer, ids, text)
        turns = [(tokens_before(begin), tokens_before(end)) for begin, end in places]
    loss_mask = [False] * len(ids)
    for begin, end in turns:
        loss_mask[begin:end] = [True] * (end - begin)
    loss_mask[:1] = [False] * len(ids[:1])  # nothing comes before it
    if not any(loss_mask):
        raise ValueError(
            "messages must hold a non-empty assistant message: no token would be trained on"
        )
    first = loss_mask.index(True)
    response_mask = [number >= first for number in range(len(ids))]
    return Example(input_ids=ids, loss_mask=loss_mask, response_mask=response_mask)


def tokenize_prompt(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    *,
    chat_template: str | None = None,
    tools: Sequence[dict | Callable] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return what a sampler is given, as token ids.

    Plain text gets the tokenizer's own special tokens in front, messages the chat template's
    generation prompt; messages that end with the assistant's are continued.
    Raises: ValueError where messages meet a tokenizer without a chat template, and text meets
    tools; for an unknown role, and for what the template leaves out.

    >>> from transformers import ByT5Tokenizer
    >>> tokenize_prompt(ByT5Tokenizer(), "ab")
    [100, 101]
    """
    if isinstance(prompt, str):
        if tools:
            raise ValueError(
                f"a prompt must be messages where there are tools, got the text {short(prompt)}:"
                " add --data.chat"
            )
        return _plain_prompt(tokenizer, prompt)
    template = Template(tokenizer, chat_template, tools, template_kwargs or {})
    require_roles(template, prompt)
    require_rendered(template, prompt)
    if template.is_passthrough:
        return _passed_through(tokenizer, prompt, len(prompt), False)[0]
    continued = bool(prompt) and prompt[-1].get("role") == "assistant"
    end = "continue_final_message" if continued else "add_generation_prompt"
    return _ids(tokenizer, template.render(prompt, **{end: True}))


def tokenize_prompt_response(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    response: str,
    *,
    add_eos: bool = True,
    **template: Any,
) -> Example:
    """Return a prompt and its response, tokenized apart and joined, as a sampler sees them.

    Trained on: the response and its end token. `template` takes `tokenize_prompt`'s arguments.
    Raises: ValueError without an end token for `add_eos`, or if nothing is trained on.

    >>> from transformers import ByT5Tokenizer
    >>> example = tokenize_prompt_response(ByT5Tokenizer(), "ab", "c")
    >>> example.input_ids, example.loss_mask
    ([100, 101, 102, 1], [False, False, True, True])
    """
    given = tokenize_prompt(tokenizer, prompt, **template)
    answer = _answer(tokenizer, response, add_eos)
    response_mask = [False] * len(given) + [True] * len(answer)
    loss_mask = [False, *response_mask[1:]]
    if not any(loss_mask):
        raise ValueError(
            "response must give a token to train on after the sequence's first, got prompt"
            f" {prompt!r} and response {response!r}"
        )
    return Example(input_ids=given + answer, loss_mask=loss_mask, response_mask=response_mask)


def _passed_through(
    tokenizer: Any, messages: Sequence[Message], given: int, add_eos: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    ids: list[int] | None = None
    turns, between = [], ""
    # One message more, to close what comes before it.
    for number, message in enumerate([*messages, {"role": "assistant", "content": None}]):
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise ValueError(
                f"message {number}: content must be text where the chat template is passthrough,"
                f" got {content!r}"
            )
        if message.get("role") != "assistant":
            between += content
            continue
        ids = _plain_prompt(tokenizer, between) if ids is None else ids + _ids(tokenizer, between)
        between, begin = "", len(ids)
        ids = ids + _answer(tokenizer, content, add_eos and number == len(messages) - 1)
        if given <= number < len(messages):
            turns.append((begin, len(ids)))
    return ids or [], turns


def _plain_prompt(tokenizer: Any, text: str) -> list[int]:
    ids = _ids(tokenizer, text, add_special_tokens=True)
    # Some tokenizers close every text; a prompt goes on.
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        return ids[:-1]
    return ids


def _answer(tokenizer: Any, text: str, add_eos: bool) -> list[int]:
    ids = _ids(tokenizer, text)
    if add_eos and tokenizer.eos_token_id is None:
        raise ValueError(
            "add_eos needs a tokenizer with an eos_token: set tokenizer.eos_token, or pass"
            " add_eos=False"
        )
    end = [tokenizer.eos_token_id]
    return ids + end if add_eos and ids[-1:] != end else ids


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "text must be Unicode, but it has half a character (a lone surrogate) in"
            f" {text[max(0, error.start - 20) : error.start + 20]!r}: repair the text or leave the"
            " row out"
        ) from error
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _tokens_before(tokenizer: Any, ids: list[int], text: str, place: int) -> int:
    before = _ids(tokenizer, text[:place])
    if ids[: len(before)] != before:
        raise ValueError(
            "a token crosses the border of an assistant turn between"
            f" {text[max(0, place - 20) : place]!r} and {text[place : place + 20]!r}; end headers"
            " and turns of the chat template with a special token or a line break"
        )
    return len(before)
