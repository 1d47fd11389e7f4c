"""A limit to the length of sequences, with a count of what it cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from nemorl.data.example import Example
from nemorl.data.preferences import Pair
from nemorl.data.rows import origin_of

Item = TypeVar("Item", Example, list[int], Pair, tuple[Example, bool])


@dataclass(frozen=True)
class LengthReport:
    """What `limit_length` did; `kept` are the indices of what it returned."""

    kept: tuple[int, ...]
    num_truncated: int
    num_dropped: int
    num_tokens_cut: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{len(self.kept)} sequences kept, of which {self.num_truncated} truncated"
            f" ({self.num_tokens_cut} tokens cut); {self.num_dropped} dropped; the longest had"
            f" {self.longest} tokens"
        )


def limit_length(
    items: Sequence[Item],
    *,
    max_length: int,
    policy: Literal["error", "truncate", "drop"] = "error",
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[Item], LengthReport]:
    """Return the items of at most `max_length` tokens, and a report: nothing is cut silently.

    Args:
        items: examples, prompts as lists of ids, preference pairs or labelled examples.
        policy: for a longer one. `error` names it (by its row, if `rows` are given); `drop`;
            `truncate` keeps a prompt's last tokens, or an example's first ones, but drops it if
            none is left to train on. A pair counts its longer side, and stays or goes whole.

    >>> kept, report = limit_length([[1, 2, 3], [4]], max_length=2, policy="truncate")
    >>> kept, report.num_truncated
    ([[2, 3], [4]], 1)
    """
    kept: dict[int, Item] = {}
    num_truncated = num_tokens_cut = longest = 0
    for index, item in enumerate(items):
        length = num_tokens(item)
        longest = max(longest, length)
        if length > max_length:
            if policy == "error":
                which = f"sequence {index}"
                if rows is not None:
                    which = f"{origin_of(rows[index], index)}: the sequence"
                raise ValueError(
                    f"{which} has {length} tokens, but the maximum is {max_length}:"
                    ' raise data.max_total_sequence_length, or set data.too_long to "truncate" or'
                    ' "drop"'
                )
            shorter = _truncated(item, max_length) if policy == "truncate" else None
            if shorter is None:
                continue
            num_truncated += 1
            num_tokens_cut += _all_tokens(item) - _all_tokens(shorter)
            item = shorter
        kept[index] = item
    num_dropped = len(items) - len(kept)
    report = LengthReport(tuple(kept), num_truncated, num_dropped, num_tokens_cut, longest)
    return list(kept.values()), report


def num_tokens(item: Any) -> int:
    """Return the tokens of an example, a prompt, the longer side of a pair, or a labelled example.

    >>> num_tokens([5, 6, 7])
    3
    """
    if isinstance(item, tuple):
        item = item[0]
    return item.num_tokens if isinstance(item, Example | Pair) else len(item)


def _all_tokens(item: Any) -> int:
    if isinstance(item, Pair):
        return item.chosen.num_tokens + item.rejected.num_tokens
    return num_tokens(item)


def _truncated(item: Any, max_length: int) -> Any:
    if isinstance(item, Pair):
        chosen, rejected = (_truncated(x, max_length) for x in (item.chosen, item.rejected))
        return Pair(chosen=chosen, rejected=rejected) if chosen and rejected else None
    if isinstance(item, tuple):
        shorter = _truncated(item[0], max_length)
        return shorter and (shorter, item[1])
    if not isinstance(item, Example):
        return item[-max_length:]
    shorter = Example(**{name: values[:max_length] for name, values in item.arrays().items()})
    return shorter if any(shorter.loss_mask) else None
