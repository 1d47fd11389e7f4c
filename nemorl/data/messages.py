"""Conversations and plain text as token ids with exact masks: which tokens are the response, and which the model is trained to say (SPEC §1)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from nemorl.data.batch import Example

Message = Mapping[str, Any]
LengthPolicy = Literal["error", "truncate", "drop"]
Item = TypeVar("Item", Example, list[int])

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def tokenize_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    tools: Sequence[dict | Callable] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Example:
    """A conversation through its chat template; the loss mask is True on what the assistant says, and nowhere else.

    A turn is what stands between `{% generation %}` marks where the template has them. Otherwise it is what the template adds to the conversation so
    far with its generation prompt, up to and including the turn's end token (white space that the template puts behind that isn't the model's). The
    response mask begins with the first of these tokens and includes all that follows (user and tool messages too).
    Each turn's begin and end are verified by tokenising the text up to there anew: what is trained on is, to the token, what a sampler would have
    returned for what it would have been given. `chat_template` replaces the tokenizer's own; `template_kwargs` are passed to the template.

    Raises ValueError where there is no assistant message or no template, where a template without marks renders earlier turns differently later on,
    and where a token crosses a turn's border.

    >>> from transformers import ByT5Tokenizer
    >>> tokenizer = ByT5Tokenizer()
    >>> tokenizer.chat_template = (
    ...     "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    ... )
    >>> example = tokenize_messages(tokenizer, [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}])
    >>> tokenizer.decode([token for token, trained in zip(example.input_ids, example.loss_mask) if trained])
    '2</s>'
    """
    if not any(message.get("role") == "assistant" for message in messages):
        raise ValueError(f"messages must hold an assistant message to train on, got roles {_roles(messages)}; use tokenize_prompt for a prompt")
    template = _Template(tokenizer, chat_template, tools, template_kwargs or {})
    text, turns = template.marked(messages) if template.has_marks else template.rendered(messages)
    ids = _ids(tokenizer, text)
    loss_mask = [False] * len(ids)
    for turn in turns:
        begin, end = (_tokens_before(tokenizer, ids, text, place) for place in turn)
        loss_mask[begin:end] = [True] * (end - begin)
    loss_mask[:1] = [False] * len(ids[:1])  # nothing comes before it
    if not any(loss_mask):
        raise ValueError("messages must hold a non-empty assistant message: the chat template gives no token to train on")
    first = loss_mask.index(True)
    return Example(input_ids=ids, loss_mask=loss_mask, response_mask=[place >= first for place in range(len(ids))])


def tokenize_prompt(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    *,
    chat_template: str | None = None,
    tools: Sequence[dict | Callable] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """What a sampler is given: plain text with the tokenizer's own special tokens in front, or messages with the chat template's generation prompt.

    Messages that end with the assistant's are continued where they stop. Raises ValueError where messages meet a tokenizer without a chat template.

    >>> from transformers import ByT5Tokenizer
    >>> tokenize_prompt(ByT5Tokenizer(), "ab")
    [100, 101]
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
        eos = tokenizer.eos_token_id
        # Some tokenizers close every text; a prompt goes on.
        return ids[:-1] if ids and ids[-1] == eos and not prompt.endswith(tokenizer.eos_token) else ids
    template = _Template(tokenizer, chat_template, tools, template_kwargs or {})
    continued = bool(prompt) and prompt[-1].get("role") == "assistant"
    return _ids(tokenizer, template.render(prompt, continue_final_message=True) if continued else template.render(prompt, add_generation_prompt=True))


def tokenize_prompt_response(tokenizer: Any, prompt: str | Sequence[Message], response: str, *, add_eos: bool = True, **template: Any) -> Example:
    """A prompt and its response, tokenised apart and put together, just as a sampler sees them. Trained on: the response and its end token.

    The prompt is plain text, or messages (`template` takes `tokenize_prompt`'s other arguments). Raises ValueError where `add_eos` meets a tokenizer
    without an end token, and where there is nothing to train on.

    >>> from transformers import ByT5Tokenizer
    >>> example = tokenize_prompt_response(ByT5Tokenizer(), "ab", "c")
    >>> example.input_ids, example.loss_mask
    ([100, 101, 102, 1], [False, False, True, True])
    """
    given = tokenize_prompt(tokenizer, prompt, **template)
    answer = _ids(tokenizer, response)
    if add_eos:
        if tokenizer.eos_token_id is None:
            raise ValueError("add_eos needs a tokenizer with an eos_token: set tokenizer.eos_token, or pass add_eos=False")
        if answer[-1:] != [tokenizer.eos_token_id]:
            answer.append(tokenizer.eos_token_id)
    ids = given + answer
    response_mask = [place >= len(given) for place in range(len(ids))]
    loss_mask = [place > 0 and included for place, included in enumerate(response_mask)]
    if not any(loss_mask):
        raise ValueError(f"response must give a token to train on after the first of the sequence, got prompt {prompt!r} and response {response!r}")
    return Example(input_ids=ids, loss_mask=loss_mask, response_mask=response_mask)


@dataclass(frozen=True)
class LengthReport:
    """What `limit_length` did. `kept` are the indices of what it returned, so that other columns can follow."""

    kept: tuple[int, ...]
    num_truncated: int
    num_dropped: int
    num_tokens_cut: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{len(self.kept)} sequences kept, of which {self.num_truncated} truncated ({self.num_tokens_cut} tokens cut); "
            f"{self.num_dropped} dropped; the longest had {self.longest} tokens"
        )


def limit_length(items: Sequence[Item], *, max_length: int, policy: LengthPolicy = "error") -> tuple[list[Item], LengthReport]:
    """Examples, or prompts as lists of ids, of at most `max_length` tokens, and a count of what that took; nothing is cut silently.

    `error`: a longer one is an error that names it. `drop`: it goes. `truncate`: an example keeps its first tokens, and goes if none is left to train
    on; a prompt keeps its last tokens.

    >>> kept, report = limit_length([[1, 2, 3], [4]], max_length=2, policy="truncate")
    >>> kept, str(report)
    ([[2, 3], [4]], '2 sequences kept, of which 1 truncated (1 tokens cut); 0 dropped; the longest had 3 tokens')
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if policy not in ("error", "truncate", "drop"):
        raise ValueError(f"policy must be error, truncate or drop, got {policy!r}")
    result: list[Item] = []
    kept: list[int] = []
    num_truncated = num_tokens_cut = longest = 0
    for index, item in enumerate(items):
        length = item.num_tokens if isinstance(item, Example) else len(item)
        longest = max(longest, length)
        if length > max_length:
            if policy == "error":
                raise ValueError(f'sequence {index} has {length} tokens, max_length is {max_length}: raise it, or choose policy="truncate" or "drop"')
            shorter = _truncated(item, max_length) if policy == "truncate" else None
            if shorter is None:
                continue
            item = shorter
            num_truncated += 1
            num_tokens_cut += length - max_length
        result.append(item)
        kept.append(index)
    return result, LengthReport(tuple(kept), num_truncated, len(items) - len(kept), num_tokens_cut, longest)


def _truncated(item: Any, max_length: int) -> Any:
    if not isinstance(item, Example):
        return item[-max_length:]
    shorter = Example(**{name: values[:max_length] for name, values in item.arrays().items()})
    return shorter if any(shorter.loss_mask) else None


@dataclass(frozen=True)
class _Template:
    """A tokenizer's chat template with its arguments; renders to text."""

    tokenizer: Any
    chat_template: str | None
    tools: Sequence[dict | Callable] | None
    kwargs: Mapping[str, Any]

    def source(self) -> str:
        try:
            return self.tokenizer.get_chat_template(self.chat_template, self.tools)
        except (AttributeError, ValueError) as error:
            raise ValueError(
                "messages need a chat template, and the tokenizer has none to use: pass chat_template, or give prompt and response as plain text "
                f"({error})"
            ) from error

    @property
    def has_marks(self) -> bool:
        return GENERATION.search(self.source()) is not None

    def render(self, messages: Sequence[Message], **options: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, chat_template=self.source(), tools=self._tools(), **options, **self.kwargs
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses messages with the roles {_roles(messages)}: {error}") from error

    def marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges between the template's {% generation %} marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        kwargs = {**self.tokenizer.special_tokens_map, **self.kwargs}
        try:
            texts, turns = render_jinja_template(  # type: ignore[str-unpack]  # it returns a pair, whatever its annotation says
                conversations=[list(map(dict, messages))],
                tools=self._tools(),
                chat_template=self.source(),
                return_assistant_tokens_mask=True,
                **kwargs,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses messages with the roles {_roles(messages)}: {error}") from error
        spans: Any = turns[0]
        return texts[0], [(begin, end) for begin, end in spans if begin < end]

    def rendered(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges that each assistant message adds to the conversation before it with its generation prompt."""
        text = self.render(messages)
        turns = []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                if not number:
                    raise ValueError(
                        "message 0 is the assistant's, and the chat template doesn't say where it begins: put a message before it, or mark what the "
                        "assistant says in the template with {% generation %} and {% endgeneration %}"
                    )
                before = self.render(messages[:number], add_generation_prompt=True)
                through = self.render(messages[: number + 1])
                if not text.startswith(before) or not text.startswith(through) or len(before) > len(through):
                    raise ValueError(
                        f"message {number}: the chat template renders the conversation up to here differently than within the whole, so the "
                        "assistant's tokens can't be told apart; mark them in the template with {% generation %} and {% endgeneration %}, or "
                        "change template_kwargs"
                    )
                turns.append((len(before), self._end_of_turn(text, len(before), len(through))))
        return text, turns

    def _end_of_turn(self, text: str, begin: int, end: int) -> int:
        """Without the white space that a template puts behind the token that ends a turn: a sampler stops at that token."""
        turn = text[begin:end].rstrip()
        return begin + len(turn) if turn.endswith(tuple(self.tokenizer.all_special_tokens)) else end

    def _tools(self) -> list | None:
        return None if self.tools is None else list(self.tools)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokens_before(tokenizer: Any, ids: list[int], text: str, place: int) -> int:
    """How many tokens the text before `place` has; an error where they aren't the first of the whole text's."""
    before = _ids(tokenizer, text[:place])
    if ids[: len(before)] != before:
        raise ValueError(
            f"a token crosses the border of an assistant turn between {text[max(0, place - 20) : place]!r} and {text[place : place + 20]!r}, so a "
            "sampler would see other tokens than those trained on; end headers and turns of the chat template with a special token or a line break"
        )
    return len(before)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.get("role")) for message in messages) or "(none)"
