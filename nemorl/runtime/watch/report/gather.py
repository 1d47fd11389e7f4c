"""What a report shows, read from a run's directory."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.reading import read_run
from nemorl.runtime.store.record import RunRecord
from nemorl.runtime.store.verify import receipts_of

SAMPLE_BYTES = 6_000_000
"""Size of the samples that a page holds."""
SHOWN_TOKENS = 4000
"""Longer responses are cut on the page, which says so."""

STATISTICS = {
    "count": ("sequences", "{:,}"),
    "total_tokens": ("tokens", "{:,}"),
    "mean": ("mean length", "{:,.1f}"),
    "median": ("median", "{:,.0f}"),
    "p95": ("95 of 100 up to", "{:,.0f}"),
    "max": ("longest", "{:,}"),
    "limit": ("limit", "{:,}"),
    "num_truncated": ("cut", "{:,}"),
    "num_dropped": ("omitted", "{:,}"),
    "padded_fill": ("tokens in a padded batch", "{:.0%}"),
    "packed_fill": ("tokens in packed rows", "{:.0%}"),
}
"""Numbers of data.json, with their names on the page and their formats."""


class Gathered:
    """A run as its report shows it. Raises ValueError where there is none.

    sample_step: whose samples are shown in any case.
    """

    def __init__(
        self, path: Path | str, *, now: float | None = None, sample_step: int | None = None
    ) -> None:
        directory = RunDirectory.open(path)
        self.path, self.name = directory.path, directory.name
        self.now = time.time() if now is None else now
        files = read_run(directory)
        self.record, self.metrics, self.log = files.record, files.metrics, files.log
        self.outcomes = files.outcomes
        self.config, self.environment, self.data = files.config, files.environment, files.data
        self.receipts = receipts_of(directory, files)
        self.status = self.record.present_status if self.record else "unknown"
        self.seconds = working_seconds(self.record, self.metrics, now=self.now)
        opened = [step for step in files.samples if step == sample_step]
        # Step → responses, with `pieces`: the text of each token, if the tokenizer is known.
        self.samples = directory.read_samples({*spread(files.samples), *opened})
        self.sample_steps = len(files.samples)
        add_pieces(self.samples, directory.path / "tokenizer")
        # Settings that are not at their default, with that default.
        self.changed: dict[str, Any] = {}
        for line in self.log:
            if line.get("event") == "train_begin":
                self.changed = line.get("defaults", {})

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)


def spread(sizes: Mapping[int, int]) -> list[int]:
    """Return evenly spaced steps whose samples fit, of the sizes by step."""
    steps, size = [*sizes], sum(sizes.values())
    count = min(len(steps), max(2, len(steps) * SAMPLE_BYTES // max(1, size)))
    return [steps[round(place * (len(steps) - 1) / max(1, count - 1))] for place in range(count)]


def working_seconds(
    record: RunRecord | None, metrics: Sequence[Mapping[str, Any]], *, now: float
) -> float:
    """Return how long processes worked on a run."""
    times = [line["time"] for line in metrics]
    if record is None or not record.sessions:
        return max(times) - min(times) if times else 0.0
    end = now if record.present_status == "running" else record.ended
    times += [end] if end else []
    total = 0.0
    for start, following in zip(record.sessions, [*record.sessions[1:], float("inf")], strict=True):
        total += max((each for each in times if start <= each < following), default=start) - start
    return total


def add_pieces(samples: dict[int, list[dict[str, Any]]], tokenizer_folder: Path) -> None:
    """Add each token's text, if known."""
    lines = [line for lines in samples.values() for line in lines if line.get("token_ids")]
    if not lines or not tokenizer_folder.exists():
        return
    with suppress(Exception):  # a report without colors is better than none
        decode = decoder_of(tokenizer_folder)
        for line in lines:
            with suppress(Exception):  # ids that the tokenizer does not know
                line["pieces"] = pieces(decode, line["token_ids"][:SHOWN_TOKENS])


def decoder_of(folder: Path) -> Callable[[list[int]], str]:
    """Return what turns token ids into text, without torch if possible."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    from nemorl.models.pretrained import load_tokenizer

    return load_tokenizer(str(folder)).decode


def pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; together they are the whole text.

    A token is decoded after its neighbors, which a tokenizer may join or space. A character of
    several tokens belongs to the last one.

    >>> pieces(lambda ids: bytes(ids).decode(errors="replace"), list("año".encode()))
    ['a', '', 'ñ', 'o']
    """
    found: list[str] = []
    before = start = 0  # ids[before:start] are decoded again, before ids[start:]
    known = ""
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[before:end]))
        # Half a character, which has no more than 8 tokens.
        if text.endswith("\ufffd") and end < len(ids) and end - start < 8:
            found.append("")
            continue
        found.append(text[len(known) :])
        before, start = start, end
        known = decode(list(ids[before:start]))
    return found
