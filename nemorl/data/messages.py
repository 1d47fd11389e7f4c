"""Conversations and plain text as token ids with exact masks: which tokens are the response, and
which the model is trained to say (docs/numerics.md, Conventions).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemorl.data.batch import Example
from nemorl.data.templates import Message, Template, roles


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
    """A conversation through its chat template; the loss mask is True on what the assistant says
    behind the first `given` messages, and nowhere else.

    A turn is what stands between `{% generation %}` marks where the template has them. Otherwise it
    is what the template adds to the conversation so far with its generation prompt, up to and
    including the turn's end token (white space that the template puts behind that isn't the
    model's). The response mask begins with the first of these tokens and includes all that follows
    (user and tool messages too). Each turn's begin and end are verified by tokenising the text up
    to there anew: what is trained on is, to the token, what a sampler would have returned for what
    it would have been given. `chat_template` replaces the tokenizer's own; `template_kwargs` are
    passed to the template. `chat_template="passthrough"` takes the contents as they are, each
    assistant message tokenised apart, and adds the end token to the last one (unless `add_eos` is
    False, which other templates don't ask for).

    Raises ValueError where there is no assistant message or no template, where a template without
    marks renders earlier turns differently later on, and where a token crosses a turn's border.

    >>> from transformers import ByT5Tokenizer
    >>> tokenizer = ByT5Tokenizer()
    >>> tokenizer.chat_template = (
    ...     "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    ... )
    >>> example = tokenize_messages(tokenizer, [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}])
    >>> tokenizer.decode([token for token, trained in zip(example.input_ids, example.loss_mask) if trained])
    '2</s>'
    """
    if not any(message.get("role") == "assistant" for message in messages[given:]):
        raise ValueError(
            "messages must hold an assistant message to train on, got roles"
            f" {roles(messages[given:])}; use tokenize_prompt for a prompt"
        )
    template = Template(tokenizer, chat_template, tools, template_kwargs or {})
    if template.is_passthrough:
        ids, turns = _passed_through(tokenizer, messages, given, add_eos)
    else:
        text, places = template.turns(messages, given=given)
        ids = _ids(tokenizer, text)
        turns = [
            (_tokens_before(tokenizer, ids, text, begin), _tokens_before(tokenizer, ids, text, end))
            for begin, end in places
        ]
    loss_mask = [False] * len(ids)
    for begin, end in turns:
        loss_mask[begin:end] = [True] * (end - begin)
    loss_mask[:1] = [False] * len(ids[:1])  # nothing comes before it
    if not any(loss_mask):
        raise ValueError(
            "messages must hold a non-empty assistant message: the chat template gives no token to"
            " train on"
        )
    first = loss_mask.index(True)
    return Example(
        input_ids=ids,
        loss_mask=loss_mask,
        response_mask=[place >= first for place in range(len(ids))],
    )


def tokenize_prompt(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    *,
    chat_template: str | None = None,
    tools: Sequence[dict | Callable] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """What a sampler is given: plain text with the tokenizer's own special tokens in front, or
    messages with the chat template's generation prompt.

    Messages that end with the assistant's are continued where they stop. Raises ValueError where
    messages meet a tokenizer without a chat template.

    >>> from transformers import ByT5Tokenizer
    >>> tokenize_prompt(ByT5Tokenizer(), "ab")
    [100, 101]
    """
    if isinstance(prompt, str):
        return _plain_prompt(tokenizer, prompt)
    template = Template(tokenizer, chat_template, tools, template_kwargs or {})
    if template.is_passthrough:
        return _passed_through(tokenizer, prompt, len(prompt), False)[0]
    continued = bool(prompt) and prompt[-1].get("role") == "assistant"
    return _ids(
        tokenizer,
        (
            template.render(prompt, continue_final_message=True)
            if continued
            else template.render(prompt, add_generation_prompt=True)
        ),
    )


def tokenize_prompt_response(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    response: str,
    *,
    add_eos: bool = True,
    **template: Any,
) -> Example:
    """A prompt and its response, tokenised apart and put together, just as a sampler sees them.
    Trained on: the response and its end token.

    The prompt is plain text, or messages (`template` takes `tokenize_prompt`'s other arguments).
    Raises ValueError where `add_eos` meets a tokenizer without an end token, and where there is
    nothing to train on.

    >>> from transformers import ByT5Tokenizer
    >>> example = tokenize_prompt_response(ByT5Tokenizer(), "ab", "c")
    >>> example.input_ids, example.loss_mask
    ([100, 101, 102, 1], [False, False, True, True])
    """
    given = tokenize_prompt(tokenizer, prompt, **template)
    answer = _answer(tokenizer, response, add_eos)
    ids = given + answer
    response_mask = [place >= len(given) for place in range(len(ids))]
    loss_mask = [place > 0 and included for place, included in enumerate(response_mask)]
    if not any(loss_mask):
        raise ValueError(
            "response must give a token to train on after the first of the sequence, got prompt"
            f" {prompt!r} and response {response!r}"
        )
    return Example(input_ids=ids, loss_mask=loss_mask, response_mask=response_mask)


def _passed_through(
    tokenizer: Any, messages: Sequence[Message], given: int, add_eos: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """The contents as they are, and the token ranges of what the assistant says behind the first
    `given` messages.

    Each of its messages is tokenised apart, as a sampler would have returned it; what stands
    between them, together.
    """
    ids: list[int] | None = None
    turns, between = [], ""
    for number, message in enumerate(
        [*messages, {"role": "assistant", "content": None}]
    ):  # one more, to close what comes before it
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
    ids = list(tokenizer(text)["input_ids"])
    # Some tokenizers close every text; a prompt goes on.
    return (
        ids[:-1]
        if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
        else ids
    )


def _answer(tokenizer: Any, text: str, add_eos: bool) -> list[int]:
    ids = _ids(tokenizer, text)
    if add_eos and tokenizer.eos_token_id is None:
        raise ValueError(
            "add_eos needs a tokenizer with an eos_token: set tokenizer.eos_token, or pass"
            " add_eos=False"
        )
    return (
        [*ids, tokenizer.eos_token_id] if add_eos and ids[-1:] != [tokenizer.eos_token_id] else ids
    )


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokens_before(tokenizer: Any, ids: list[int], text: str, place: int) -> int:
    """How many tokens the text before `place` has; an error where they aren't the first of the
    whole text's.
    """
    before = _ids(tokenizer, text[:place])
    if ids[: len(before)] != before:
        raise ValueError(
            "a token crosses the border of an assistant turn between"
            f" {text[max(0, place - 20) : place]!r} and {text[place : place + 20]!r}, so a sampler"
            " would see other tokens than those trained on; end headers and turns of the chat"
            " template with a special token or a line break"
        )
    return len(before)
