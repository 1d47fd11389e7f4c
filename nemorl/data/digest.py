"""Digests of rows: whether a data set is the same as before, and from which row on it is not."""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import Any, TypedDict

from nemorl.checks import short
from nemorl.data.rows import origin_of

MOST_BLOCKS = 256


class Digest(TypedDict):
    """One data set: its number of rows, and a digest of each `block` of them."""

    rows: int
    block: int
    digests: list[str]


def digests_of(*rows: Sequence[Mapping[str, Any]]) -> list[Digest]:
    """Return the digest of each data set; of values that JSON can't have, only the type counts.

    >>> digests_of([{"prompt": "1+1="}, {"prompt": "1+2="}])[0]["rows"]
    2
    """
    return [_digest(part) for part in _parts(*rows)]


def difference(
    saved: Sequence[Digest], *rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()
) -> str | None:
    """Return how rows differ from the rows that were digested as `saved`; None if they do not.

    >>> difference(digests_of([{"prompt": "1+2="}]), [{"prompt": "1+3="}], names=["sums"])
    'sums: row 1 differs'
    """
    parts = _parts(*rows)
    if len(parts) != len(saved):
        return f"the number of data sets is {len(parts)} instead of {len(saved)}"
    for number, (before, part) in enumerate(zip(saved, parts, strict=True)):
        if _digest(part, before["block"]) != before:
            name = names[number] if number < len(names) else f"data set {number + 1}"
            return f"{name}: {_difference(before, part)}"
    return None


def _difference(before: Digest, rows: Sequence[Mapping[str, Any]]) -> str:
    block, common = before["block"], min(before["rows"], len(rows))
    if common < before["rows"]:  # the rest of a block has no digest
        common -= common % block
    now = _digest(rows[:common], block)["digests"]
    pairs = zip(before["digests"], now, strict=False)
    found = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
    count = "" if len(rows) == before["rows"] else f"{len(rows)} rows instead of {before['rows']}"
    if found is None:
        return f"{count}; the first {common} are as they were"
    first, last = found * block, min((found + 1) * block, common)
    where, origin = f"row {first + 1}", origin_of(rows[first], first)
    if last - first > 1:
        where = f"a row among {first + 1} to {last}"
    elif origin != where:
        where = f"{where} ({origin})"
    return f"{count}{', and ' * bool(count)}{where} differs"


def _parts(*rows: Sequence[Any]) -> list[list[Any]]:
    return [
        list(part)
        for each in rows
        for _, part in groupby(each, key=lambda row: getattr(row, "source", 0))
    ]


def _digest(rows: Sequence[Mapping[str, Any]], block: int | None = None) -> Digest:
    if block is None:
        block = 1
        while len(rows) > block * MOST_BLOCKS:
            block *= 2
    iterator, digests = iter(rows), list[str]()
    while part := list(islice(iterator, block)):
        digests.append(hashlib.blake2b(_bytes(part), digest_size=8).hexdigest())
    return Digest(rows=len(rows), block=block, digests=digests)


def _bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    try:
        text = json.dumps(rows, ensure_ascii=False, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys of several types, a cycle, too deep
        shown = [short(sorted(row.items(), key=short), sys.maxsize) for row in rows]
        text = re.sub(" at 0x[0-9a-f]+", "", "".join(shown))
    return text.encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return hashlib.blake2b(value).hexdigest()
    return value.tolist() if hasattr(value, "tolist") else f"<{type(value).__name__}>"
