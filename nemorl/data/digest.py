"""Digests of rows: whether a data set is the same as before."""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypedDict

from nemorl.checks import short


class Digest(TypedDict):
    """One data set."""

    rows: int
    digest: str


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
    'sums: other rows'
    """
    parts = _parts(*rows)
    if len(parts) != len(saved):
        return f"the number of data sets is {len(parts)} instead of {len(saved)}"
    for number, (before, part) in enumerate(zip(saved, parts, strict=True)):
        if _digest(part) != before:
            name = names[number] if number < len(names) else f"data set {number + 1}"
            if len(part) == before["rows"]:
                return f"{name}: other rows"
            return f"{name}: {len(part)} rows instead of {before['rows']}"
    return None


def _parts(*rows: Sequence[Any]) -> list[list[Any]]:
    return [
        list(part)
        for each in rows
        for _, part in groupby(each, key=lambda row: getattr(row, "source", 0))
    ]


def _digest(rows: Sequence[Mapping[str, Any]]) -> Digest:
    found = hashlib.blake2b(digest_size=8)
    for row in rows:
        found.update(_bytes(row))
    return Digest(rows=len(rows), digest=found.hexdigest())


def _bytes(row: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(row, ensure_ascii=False, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys of several types, a cycle, too deep
        shown = short(sorted(row.items(), key=short), sys.maxsize)
        text = re.sub(" at 0x[0-9a-f]+", "", shown)
    return text.encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return hashlib.blake2b(value).hexdigest()
    return value.tolist() if hasattr(value, "tolist") else f"<{type(value).__name__}>"
