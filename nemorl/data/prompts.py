"""What becomes of a row's prompt before it is tokenized: a template, a system message, a chat."""

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nemorl.checks import closest, require, short
from nemorl.data.rows import Row
from nemorl.data.templates import PASSTHROUGH
from nemorl.warn import warn


def parts_of(template: str) -> list[tuple[str, str | None]]:
    """Return a prompt template as texts, each with the column that follows it.

    >>> parts_of("Q: {prompt} {{A}}")
    [('Q: ', 'prompt'), (' {', None), ('A}', None)]
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        parts = []
    names = [part[1:] for part in parts if part[1] is not None]
    require(
        bool(names) and all(name and not spec and not how for name, spec, how in names),
        "data.prompt_template",
        "must name the column of the prompt as {prompt}, or others in the same way",
        template,
        'write one like "Question: {prompt}", and {{ }} for braces that are text',
    )
    return [(text, name) for text, name, _, _ in parts]


def with_prompt(
    row: Row, *, template: str | None = None, system: str | None = None, chat: bool = False
) -> Row:
    """Return the row with its prompt in the template, then in a chat (see `load_rows`).

    >>> with_prompt(Row({"prompt": "1+1"}), template="{prompt}=", system="Add.", chat=True)
    ... # doctest: +NORMALIZE_WHITESPACE
    {'prompt': [{'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '1+1='}]}
    """
    found = dict(row)
    if template is not None:
        found["prompt"] = "".join(
            text + ("" if name is None else _text_in(row, name))
            for text, name in parts_of(template)
        )
        found.pop("messages", None)
    if isinstance(text := found.get("prompt"), str):
        if chat:
            found["prompt"] = [{"role": "user", "content": text}]
        elif system is not None:
            raise ValueError(
                "data.system_prompt is for chats, but the prompt is a string: add --data.chat, or"
                " put the text into data.prompt_template"
            )
    if system is not None:
        for column in ("prompt", "messages", "chosen", "rejected"):
            first = _first_role(found.get(column))
            answers = column in ("chosen", "rejected") and first == "assistant"
            if first not in (None, "system", "developer") and not answers:
                found[column] = [{"role": "system", "content": system}, *found[column]]
    return Row(found, origin=row.origin, source=row.source)


def warn_of_strings(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> None:
    """Warn of prompts that are strings where the tokenizer has a chat template.

    >>> from transformers import ByT5Tokenizer
    >>> warn_of_strings([{"prompt": "1+1="}], ByT5Tokenizer())  # which has none
    """
    if getattr(tokenizer, "chat_template", None) in (None, "", PASSTHROUGH):
        return
    chats = ("messages", "response", "chosen")
    if any(
        isinstance(row.get("prompt"), str) and not any(_first_role(row.get(c)) for c in chats)
        for row in rows
    ):
        warn(
            "prompts are strings and given to the model as they are: --data.chat puts each into the"
            " tokenizer's chat template, as the user's message"
        )


def _text_in(row: Row, column: str) -> str:
    value, there = row.get(column), [*map(str, row)]
    if not isinstance(value, str | int | float):
        got = f"{short(value)}: use another column, or remove the template"
        if column not in row:
            got = f"the columns {', '.join(there)}{closest(column, there)}"
        raise ValueError(
            f"data.prompt_template needs a text or number in the column {column!r}, got {got}"
        )
    return str(value)


def _first_role(value: Any) -> Any:
    messages = isinstance(value, Sequence) and not isinstance(value, str) and len(value)
    first = value[0] if messages else None
    return first.get("role") if isinstance(first, Mapping) else None
