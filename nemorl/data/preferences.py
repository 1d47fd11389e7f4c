"""Preferences: pairs of a better and a worse answer, ranked answers, or labelled single answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from nemorl.checks import is_number, short
from nemorl.data.datasets import answered, are_mappings, as_messages, prompt_of, with_standard_names
from nemorl.data.example import Example
from nemorl.data.rows import Row, for_rows, origin_of


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two tokenized answers to the same prompt; only the answers are trained on."""

    chosen: Example
    rejected: Example

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer of the two."""
        return max(self.chosen.num_tokens, self.rejected.num_tokens)


def pair_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return each pair as a row with `prompt`, `chosen` and `rejected` besides the other columns.

    A row has `chosen` and `rejected`, each text or messages, and a `prompt` (text or messages): the
    messages that both begin with are the prompt, after what the column has before them (a system
    message). Or it has a `context` and `completions`, a list of {"rank": 0, "completion": text or
    messages}, 0 is best: two of different rank are a pair.
    Raises: ValueError that names the row.

    >>> answers = [{"rank": 1, "completion": "3"}, {"rank": 0, "completion": "2"}]
    >>> row, = pair_rows([{"context": "1+1=", "completions": answers}])
    >>> row["prompt"], row["chosen"], row["rejected"]
    ('1+1=', '2', '3')
    """
    return _expanded(rows, _pairs)


def labelled_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return each labelled answer as a row with `prompt`, `response`, `label`, and the rest.

    A row has a `response` and a `label` (true: desirable), or is a preference as in `pair_rows`,
    whose chosen answer is desirable and rejected one undesirable. Raises: ValueError that names the
    row.

    >>> rows = labelled_rows([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    >>> [(row["response"], row["label"]) for row in rows]
    [('2', True), ('3', False)]
    """
    return _expanded(rows, _verdicts)


def to_pairs(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_eos: bool = True, **template: Any
) -> Sequence[Pair]:
    """Return the pairs of `pair_rows(rows)` as tokens. Arguments, Raises: as `to_examples`.

    >>> from transformers import ByT5Tokenizer
    >>> pair, = to_pairs([{"prompt": "a", "chosen": "b", "rejected": "cd"}], ByT5Tokenizer())
    >>> pair.chosen.input_ids, pair.rejected.loss_mask
    ([100, 101, 1], [False, True, True, True])
    """
    side = partial(answered, tokenizer=tokenizer, add_eos=add_eos, template=template)
    return for_rows(
        pair_rows(rows),
        lambda row: Pair(chosen=side(row, "chosen"), rejected=side(row, "rejected")),
    )


def to_labelled(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_eos: bool = True, **template: Any
) -> Sequence[tuple[Example, bool]]:
    """Return the answers of `labelled_rows(rows)` as tokens, each with whether it is desirable.

    >>> from transformers import ByT5Tokenizer
    >>> to_labelled([{"prompt": "a", "response": "b", "label": False}], ByT5Tokenizer())[0][1]
    False
    """
    answer = partial(answered, tokenizer=tokenizer, add_eos=add_eos, template=template)
    return for_rows(labelled_rows(rows), lambda row: (answer(row, "response"), row["label"]))


def _expanded(rows: Sequence[Mapping[str, Any]], parts: Any) -> list[Row]:
    placed = [
        with_standard_names(Row(row, origin=origin_of(row, n), source=getattr(row, "source", 0)))
        for n, row in enumerate(rows)
    ]
    return [
        row.but(**part)
        for row, own in zip(placed, for_rows(placed, parts), strict=True)
        for part in own
    ]


def _verdicts(row: Row) -> list[dict[str, Any]]:
    if row.get("label") is None:
        return [
            {"prompt": pair["prompt"], "response": pair[side], "label": side == "chosen"}
            for pair in _pairs(row)
            for side in ("chosen", "rejected")
        ]
    labels = {"true": True, "false": False, "1": True, "0": False}
    label = labels.get(str(row["label"]).strip().lower())
    if label is None:
        raise ValueError(
            f"label must be true or false, got {row['label']!r} (data.label_column names another"
            " column)"
        )
    return [{"prompt": prompt_of(row), "response": row.get("response"), "label": label}]


def _pairs(row: Row) -> list[dict[str, Any]]:
    if row.get("completions") is not None and row.get("chosen") is None:
        return _ranked(row)
    if row.get("chosen") is None or row.get("rejected") is None:
        raise ValueError(
            "a preference must have chosen and rejected, or context and completions, got columns"
            f" {', '.join(row)}; name them with data.chosen_column and data.rejected_column"
        )
    chosen, rejected = row["chosen"], row["rejected"]
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        chosen, rejected = as_messages(chosen, "chosen"), as_messages(rejected, "rejected")
        if not chosen[0]["role"] == rejected[0]["role"] == "assistant":
            begin = _shared(chosen, rejected)
            prompt = _with_column(chosen[:begin], row)
            return [{"prompt": prompt, "chosen": chosen[begin:], "rejected": rejected[begin:]}]
    return [{"prompt": prompt_of(row), "chosen": chosen, "rejected": rejected}]


def _with_column(shared: list[Any], row: Row) -> list[Any]:
    """The messages that both answers begin with, after the missing ones of the column `prompt`."""
    if not row.get("prompt"):
        return shared
    before = as_messages(prompt_of(row), "prompt", "user")
    ours, theirs = ([*map(_said, part)] for part in (before, shared))
    for overlap in range(min(len(ours), len(theirs)), 0, -1):
        if ours[-overlap:] == theirs[:overlap]:
            return [*before[:-overlap], *shared]
    if any(theirs[start : start + len(ours)] == ours for start in range(len(theirs))):
        return shared
    raise ValueError(
        "prompt must be what chosen and rejected begin with, or end with that, got prompt"
        f" {short(row['prompt'])}, while they begin with {short(shared)}: correct it, or omit it"
    )


def _said(message: Mapping[str, Any]) -> tuple[str, Any]:
    role, content = message["role"], message.get("content")
    return role, content.strip() if isinstance(content, str) else content


def _ranked(row: Row) -> list[dict[str, Any]]:
    prompt, completions = prompt_of(row), row["completions"]
    if not are_mappings(completions, "rank", "completion"):
        raise ValueError(
            'completions must be a list of {"rank": 0, "completion": text or messages}, got'
            f" {short(completions)}"
        )
    ranks = [part["rank"] for part in completions]
    if not all(map(is_number, ranks)):
        raise ValueError(f"rank must be a number, 0 for the best, got ranks {ranks}")
    ordered = sorted(completions, key=lambda part: part["rank"])
    pairs = [
        {"prompt": prompt, "chosen": better["completion"], "rejected": worse["completion"]}
        for better, worse in combinations(ordered, 2)
        if better["rank"] < worse["rank"]
    ]
    if not pairs:
        raise ValueError(
            f"completions must have two of unlike rank, got ranks {ranks}: leave the row out"
        )
    return pairs


def _shared(chosen: list[Any], rejected: list[Any]) -> int:
    ours, theirs = ([message["role"] for message in part] for part in (chosen, rejected))
    shared = 0
    while shared < min(len(ours), len(theirs)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    while shared and ours[shared - 1] == "assistant" and ours[shared] != "assistant":
        shared -= 1
    if not shared or not ours[shared] == theirs[shared] == "assistant":
        raise ValueError(
            "chosen and rejected must begin with the same prompt and continue with the assistant's"
            f" messages, or be the assistant's messages alone, got roles {ours} and {theirs}"
        )
    return shared
