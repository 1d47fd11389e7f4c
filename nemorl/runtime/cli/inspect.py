"""Data as the model sees them:

`nemorl data inspect`, and the lengths that are shown before a run and kept in its data.json.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nemorl.checks import require
from nemorl.data.batch import Example
from nemorl.data.datasets import to_examples, to_prompts
from nemorl.data.lengths import num_tokens
from nemorl.data.preferences import Pair, labelled_rows, pair_rows, to_labelled, to_pairs
from nemorl.data.rows import Row
from nemorl.data.statistics import Lengths, LengthStatistics, length_statistics
from nemorl.data.templates import with_chat_template
from nemorl.runtime.cli.commands import InspectConfig
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.run.job import Rows, read_rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Kind = Literal["prompt", "sft", "pairs", "labels"]
TITLES = {
    "prompt": "prompts",
    "sft": "demonstrations",
    "pairs": "preference pairs",
    "labels": "answers with a verdict",
}


@dataclass(frozen=True)
class Inspection:
    """What is shown of a data set."""

    kind: Kind
    rows: Sequence[Row]
    """One for each item."""
    items: Sequence[Any]
    """Token ids of prompts, Examples, Pairs, or Examples with their verdict."""
    statistics: LengthStatistics
    tokenizer: Any


def inspect_data(config: InspectConfig, *, tokenizer: Any = None, train: Rows = None) -> Inspection:
    """The rows of `data.train` (or `train`) as the model's tokenizer and chat template make them;
    nothing is cut.
    """
    from nemorl.models.pretrained import load_tokenizer, model_folder

    require(
        train is not None or bool(config.data.train),
        "data.train",
        "must be given",
        config.data.train,
        "add --data.train FILE",
    )
    rows = read_rows(config.data, "train", train) or []
    if tokenizer is None:
        require(bool(config.model.path or config.model.tokenizer), "model.path", "must be given", config.model.path,
                "add --model.path (or --model.tokenizer): its tokenizer makes the tokens")  # fmt: skip
        tokenizer = load_tokenizer(config.model.tokenizer or model_folder(config.model.path))
    tokenizer = with_chat_template(
        tokenizer, config.model.chat_template, config.model.chat_template_kwargs
    )
    kind = kind_of(rows[0]) if config.kind == "auto" else config.kind
    rows = pair_rows(rows) if kind == "pairs" else labelled_rows(rows) if kind == "labels" else rows
    make: Any = {
        "prompt": to_prompts,
        "sft": to_examples,
        "pairs": to_pairs,
        "labels": to_labelled,
    }[kind]
    items = make(rows, tokenizer)
    lengths = Lengths(
        tokens=[num_tokens(item) for item in items], limit=config.data.max_total_sequence_length
    )
    return Inspection(kind, rows, items, length_statistics(lengths), tokenizer)


def kind_of(row: Mapping[str, Any]) -> Kind:
    """What a row looks like it is for.

    >>> kind_of({"prompt": "1+1=", "answer": "2"}), kind_of({"prompt": "1+1=", "response": "2"})
    ('prompt', 'sft')
    """
    if row.get("chosen") is not None or row.get("completions") is not None:
        return "pairs"
    if row.get("response") is not None:
        return "labels" if row.get("label") is not None else "sft"
    messages = row.get("messages") or [{}]
    return (
        "sft"
        if isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant"
        else "prompt"
    )


def print_inspection(
    config: InspectConfig, found: Inspection, console: "Console | None" = None
) -> None:
    """The first rows, with what is trained on in colour (between brackets where there is none), and
    the lengths of all.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    styled = console.is_terminal and console.color_system is not None
    unicode = console.encoding.lower().startswith("utf")
    marks = None if styled else ("⟦", "⟧") if unicode else ("[[", "]]")
    legend = Text("trained on: ") + (
        Text("like this", style="bold green")
        if marks is None
        else Text("{}like this{}".format(*marks))
    )
    console.print(
        Text(f"{len(found.items)} {TITLES[found.kind]}; ")
        + (Text("none of a prompt is trained on") if found.kind == "prompt" else legend)
    )
    for row, item in list(zip(found.rows, found.items, strict=True))[: config.rows]:
        for name, example in _parts(found.kind, item):
            trained = f", {sum(example.loss_mask)} trained on" if any(example.loss_mask) else ""
            console.print(
                Text(
                    f"\n{row.origin}{name}: {example.num_tokens} tokens{trained}", style="bold cyan"
                ),
                soft_wrap=True,
            )
            console.print(shown(example, found.tokenizer, marks, console.encoding), soft_wrap=True)
    console.print()
    report_lengths(console, {TITLES[found.kind]: found.statistics})
    _print_histogram(console, found.statistics, "█" if unicode else "#")
    if found.kind != "prompt" and found.statistics.count > 1:
        padded, packed = found.statistics.padded_fill, found.statistics.packed_fill
        console.print(
            f"rows padded to the longest are {padded:.0%} full, with --trainer.sequence-packing"
            f" {packed:.0%}"
        )


def shown(
    example: Example, tokenizer: Any, marks: tuple[str, str] | None, encoding: str = "utf-8"
) -> "Text":
    """An example as text: what is trained on between the marks, or green without any; line breaks
    as ↵ besides, and escaped what can't be encoded.
    """
    from rich.text import Text

    text = Text()
    line_break = "↵\n" if encoding.lower().startswith("utf") else "\\n\n"
    begin = 0
    while begin < example.num_tokens:
        trained = example.loss_mask[begin]
        end = next(
            (
                place
                for place in range(begin, example.num_tokens)
                if example.loss_mask[place] != trained
            ),
            example.num_tokens,
        )
        part = (
            _decoded(tokenizer, example.input_ids, begin, end)
            .replace("\x1b", "␛")
            .replace("\n", line_break)
        )
        part = part.encode(encoding, "backslashreplace").decode(encoding)
        if trained and marks is not None:
            part = marks[0] + part + marks[1]
        text.append(
            part, style="bold green" if trained else "" if example.response_mask[begin] else "dim"
        )
        begin = end
    return text


def report_lengths(console: "Console", statistics: Mapping[str, LengthStatistics]) -> None:
    """A line for each data set, and one for what a limit took of it."""
    from rich.table import Table

    table = Table(title="lengths in tokens", title_justify="left")
    table.add_column("data")
    for name in ("sequences", "total", "mean", "median", "95 %", "max", "limit"):
        table.add_column(name, justify="right")
    for name, s in statistics.items():
        table.add_row(
            name,
            str(s.count),
            str(s.total_tokens),
            f"{s.mean:.1f}",
            f"{s.median:g}",
            f"{s.p95:g}",
            str(s.max),
            str(s.limit),
        )
    console.print(table)
    for name, s in statistics.items():
        taken = [f"{s.num_truncated} cut to it"] * bool(s.num_truncated) + [
            f"{s.num_dropped} left out"
        ] * bool(s.num_dropped)
        if s.num_over_limit:
            console.print(
                f"{name}: {s.num_over_limit} over the limit of {s.limit} tokens"
                + f" ({', '.join(taken)})" * bool(taken),
                style="yellow",
            )


def show_lengths(
    lengths: Mapping[str, Lengths | Sequence[int]], config: BaseConfig
) -> dict[str, Any]:
    """Before a run: the lengths of its data sets on the screen, unless run.display is none;
    returned is what data.json holds.
    """
    limit = config.data.max_total_sequence_length
    statistics = {
        name: length_statistics(given, None if isinstance(given, Lengths) else limit)
        for name, given in lengths.items()
    }
    statistics = {
        name: found for name, found in statistics.items() if found.count or found.num_dropped
    }
    if statistics and config.run.display != "none":
        from rich.console import Console

        report_lengths(Console(highlight=False), statistics)
    return {
        name: {**found.to_dict(), "hash": _hash(lengths[name])}
        for name, found in statistics.items()
    }


def _hash(lengths: Lengths | Sequence[int]) -> str:
    """Of the lengths in their order: it tells other data, though not data of the very same lengths."""
    tokens = lengths.tokens if isinstance(lengths, Lengths) else lengths
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def _parts(kind: Kind, item: Any) -> list[tuple[str, Example]]:
    """What is shown of an item, each with its name."""
    if isinstance(item, Pair):
        return [(", chosen", item.chosen), (", rejected", item.rejected)]
    if kind == "labels":
        return [(", wanted" if item[1] else ", not wanted", item[0])]
    if isinstance(item, Example):
        return [("", item)]
    nothing = [False] * len(item)
    return [("", Example(input_ids=item, loss_mask=nothing, response_mask=nothing))]


def _decoded(tokenizer: Any, ids: Sequence[int], begin: int, end: int) -> str:
    """The text of some tokens within their sequence: a tokenizer may leave out a space in front of
    what it takes for the beginning.
    """
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before, through = (
        tokenizer.decode(list(ids[:begin]), **options),
        tokenizer.decode(list(ids[:end]), **options),
    )
    return (
        through[len(before) :]
        if through.startswith(before)
        else tokenizer.decode(list(ids[begin:end]), **options)
    )


def _print_histogram(console: "Console", statistics: LengthStatistics, mark: str) -> None:
    most = max((count for _, count in statistics.histogram), default=0)
    below = 0
    for edge, count in statistics.histogram:
        bar = mark * max(round(40 * count / most), int(count > 0))
        console.print(f"{below + 1:>7} - {edge:<7} {count:>8} {bar}")
        below = edge
