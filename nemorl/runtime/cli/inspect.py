"""`nemorl data inspect`: training data as a model sees them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from nemorl.checks import require
from nemorl.data.datasets import load_rows, stream_rows, to_examples, to_prompts
from nemorl.data.example import Example
from nemorl.data.lengths import num_tokens
from nemorl.data.preferences import Pair, labelled_rows, pair_rows, to_labelled, to_pairs
from nemorl.data.prompts import warn_of_strings
from nemorl.data.rows import Row
from nemorl.data.statistics import Lengths, LengthStatistics, length_statistics
from nemorl.data.stream import first_of
from nemorl.data.templates import with_chat_template
from nemorl.runtime.cli.settings import InspectConfig
from nemorl.runtime.start.lengths import print_lengths

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
    kind: Kind
    rows: Sequence[Row]
    items: Sequence[Any]
    """Token ids, Examples, Pairs, or Examples with their verdicts."""
    statistics: LengthStatistics
    tokenizer: Any


def inspect_data(config: InspectConfig, *, tokenizer: Any = None, train: Any = None) -> Inspection:
    """Return the rows of `data.train` (or `train`) as tokens; nothing is cut."""
    from nemorl.models.pretrained import load_tokenizer, model_folder

    model, data = config.model, config.data
    given = train is not None or bool(data.train)
    require(given, "data.train", "must be given", data.train, "add --data.train FILE")
    source = data.train if train is None else train
    read: Any = stream_rows if data.streaming else load_rows
    rows = first_of(read(source, split=data.split, **data.reading()))
    if tokenizer is None:
        require(
            bool(model.path or model.tokenizer),
            "model.path",
            "must be given",
            model.path,
            "add --model.path, or --model.tokenizer",
        )
        name = model.tokenizer or model_folder(model.path)
        tokenizer = load_tokenizer(name, trust_remote_code=model.trust_remote_code)
    tokenizer = with_chat_template(tokenizer, model.chat_template, model.chat_template_kwargs)
    warn_of_strings(rows, tokenizer)
    kind = kind_of(rows[0]) if config.kind == "auto" else config.kind
    rows = pair_rows(rows) if kind == "pairs" else labelled_rows(rows) if kind == "labels" else rows
    make: dict[str, Callable[..., Sequence[Any]]] = {
        "prompt": to_prompts,
        "sft": to_examples,
        "pairs": to_pairs,
        "labels": to_labelled,
    }
    items = make[kind](rows, tokenizer)
    tokens = [num_tokens(item) for item in items]
    statistics = length_statistics(Lengths(tokens=tokens, limit=data.max_total_sequence_length))
    return Inspection(kind, rows, items, statistics, tokenizer)


def kind_of(row: Mapping[str, Any]) -> Kind:
    """Return what a row looks like it is for.

    >>> kind_of({"prompt": "1+1=", "answer": "2"}), kind_of({"prompt": "1+1=", "response": "2"})
    ('prompt', 'sft')
    """
    if row.get("chosen") is not None or row.get("completions") is not None:
        return "pairs"
    if row.get("response") is not None:
        return "labels" if row.get("label") is not None else "sft"
    last = (row.get("messages") or [{}])[-1]
    return "sft" if isinstance(last, Mapping) and last.get("role") == "assistant" else "prompt"


def print_inspection(
    config: InspectConfig, found: Inspection, console: "Console | None" = None
) -> None:
    """Print the first rows, trained tokens in color or brackets, and the lengths of all."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    styled = console.is_terminal and console.color_system is not None
    legend = Text("trained on: ⟦like this⟧")
    if styled:
        legend = Text("trained on: ") + Text("like this", style="bold green")
    if found.kind == "prompt":
        legend = Text("prompts are not trained on")
    console.print(Text(f"{len(found.items)} {TITLES[found.kind]}; ") + legend)
    for row, item in list(zip(found.rows, found.items, strict=True))[: config.rows]:
        for name, example in _parts(found.kind, item):
            count = f"{example.num_tokens} tokens"
            if any(example.loss_mask):
                count += f", {sum(example.loss_mask)} trained on"
            heading = Text(f"\n{row.origin}{name}: {count}", style="bold cyan")
            console.print(heading, soft_wrap=True)
            text = shown(example, found.tokenizer, styled=styled)
            console.print(text, soft_wrap=True)
    console.print()
    print_lengths(console, {TITLES[found.kind]: found.statistics})
    _print_histogram(console, found.statistics)
    if found.kind != "prompt" and found.statistics.count > 1:
        padded, packed = found.statistics.padded_fill, found.statistics.packed_fill
        console.print(
            f"rows padded to the longest are {padded:.0%} full, with --trainer.sequence-packing"
            f" {packed:.0%}"
        )


def shown(example: Example, tokenizer: Any, *, styled: bool) -> "Text":
    """Return an example as text, what is trained on green if `styled`, else in brackets."""
    from rich.text import Text

    text, begin = Text(), 0
    for trained, places in groupby(range(example.num_tokens), key=lambda i: example.loss_mask[i]):
        end = begin + len(list(places))
        part = _decoded(tokenizer, example.input_ids, begin, end)
        part = part.replace("\x1b", "␛").replace("\n", "↵\n")
        if trained and not styled:
            part = f"⟦{part}⟧"
        style = "bold green" if trained else "" if example.response_mask[begin] else "dim"
        text.append(part, style=style)
        begin = end
    return text


def _parts(kind: Kind, item: Any) -> list[tuple[str, Example]]:
    if isinstance(item, Pair):
        return [(", chosen", item.chosen), (", rejected", item.rejected)]
    if kind == "labels":
        return [(", wanted" if item[1] else ", not wanted", item[0])]
    if isinstance(item, Example):
        return [("", item)]
    nothing = [False] * len(item)
    return [("", Example(input_ids=item, loss_mask=nothing, response_mask=nothing))]


def _decoded(tokenizer: Any, ids: Sequence[int], begin: int, end: int) -> str:
    """Return the text of some tokens, which alone might lose their first space."""

    def decode(first: int, last: int) -> str:
        part = list(ids[first:last])
        return tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    before, through = decode(0, begin), decode(0, end)
    return through[len(before) :] if through.startswith(before) else decode(begin, end)


def _print_histogram(console: "Console", statistics: LengthStatistics) -> None:
    most = max((count for _, count in statistics.histogram), default=0)
    below = 0
    for edge, count in statistics.histogram:
        bar = "█" * max(round(40 * count / most), int(count > 0))
        console.print(f"{below + 1:>7} - {edge:<7} {count:>8} {bar}")
        below = edge
