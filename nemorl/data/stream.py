"""Rows of data sets too large to list, in a seeded order, read as they are needed."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count, islice
from typing import Any, NoReturn

FIRST = 1000
"""Rows of a stream that are checked before a run."""


class Places:
    """An endless run through the rows of `read(epoch)`, epoch after epoch, that `keep` accepts."""

    def __init__(self, read: Callable[[int], Iterable[Any]], keep: Any = None) -> None:
        self.read, self.keep = read, keep
        self._rows, self._row, self._place = iter(()), None, sys.maxsize

    @cached_property
    def first(self) -> list[Any]:
        return [*islice(filter(self.keep, self.read(0)), FIRST)]

    def __getitem__(self, place: int) -> Any:
        if place < self._place:
            self._rows = filter(self.keep, chain.from_iterable(map(self.read, count())))
            self._place = -1
        while self._place < place:
            following, self._place = self._place + 1, sys.maxsize  # stays so after an error
            self._row, self._place = next(self._rows), following
        return self._row


@dataclass(frozen=True)
class StreamedRows(Sequence[Any]):
    """Rows of a stream, or what is built of them, by place; also their `RowOrder`.

    What is at a place depends on the seed alone: a resumed run reads up to its own again.
    """

    places: Places
    build: Callable[[Any], Any] = lambda row: row

    num_rows = sys.maxsize
    """Unknown, so endless."""

    def take(self, cursor: int, count: int) -> list[int]:
        return [*range(cursor, cursor + count)]

    def mapped(self, build: Callable[[Any], Any]) -> Any:
        return replace(self, build=lambda row: build(self.build(row)))

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> NoReturn:
        raise ValueError("data.streaming is for sft, grpo, run.prompts and run.order: remove it")

    def __getitem__(self, place: Any) -> Any:
        return self.build(self.places[place])


def first_of(rows: Any) -> Any:
    """Return rows; of a stream the first 1,000.

    >>> first_of(StreamedRows(Places(lambda epoch: [1, 2]), str)), first_of([1])
    (['1', '2'], [1])
    """
    return [*map(rows.build, rows.places.first)] if isinstance(rows, StreamedRows) else rows


def shuffled(shards: Sequence[Any], epoch: int, *, seed: int, shuffle_buffer: int) -> Iterator[Any]:
    """Yield an epoch's rows; `datasets` shuffles shards and, in a buffer (0: neither), rows.

    >>> list(shuffled([lambda: [1, 2], lambda: [3]], 0, seed=0, shuffle_buffer=0))
    [1, 2, 3]
    """
    from datasets import IterableDataset

    data = IterableDataset.from_generator(
        lambda shards: ({"row": row} for shard in shards for row in shard()),
        gen_kwargs={"shards": [*shards]},
    )
    if shuffle_buffer:
        data = data.shuffle(seed=seed, buffer_size=shuffle_buffer)
        data.set_epoch(epoch)
    empty = True
    for example in data:
        empty = False
        yield example["row"]
    if empty:
        raise ValueError("data.train holds no rows: name another file or split")
