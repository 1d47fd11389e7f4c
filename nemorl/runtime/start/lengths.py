"""How long the sequences of a run's data are, as shown and kept in data.json."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemorl.data.statistics import Lengths, LengthStatistics, length_statistics

if TYPE_CHECKING:
    from rich.console import Console


def show_lengths(lengths: Mapping[str, Lengths], *, quiet: bool) -> dict[str, Any]:
    """Print the lengths of a run's data sets, and return the contents of data.json."""
    statistics = {name: length_statistics(given) for name, given in lengths.items()}
    statistics = {name: s for name, s in statistics.items() if s.count or s.num_dropped}
    if statistics and not quiet:
        from rich.console import Console

        print_lengths(Console(highlight=False), statistics)
    return {name: s.to_dict() for name, s in statistics.items()}


def print_lengths(console: "Console", statistics: Mapping[str, LengthStatistics]) -> None:
    """Print a line for each data set."""
    from rich.table import Table

    table = Table("data", title="lengths in tokens", title_justify="left")
    for name in ("sequences", "total", "mean", "median", "95 %", "max", "limit"):
        table.add_column(name, justify="right")
    for name, s in statistics.items():
        values = (s.count, s.total_tokens, f"{s.mean:.1f}", f"{s.median:g}", f"{s.p95:g}", s.max)
        table.add_row(name, *map(str, values), str(s.limit))
    console.print(table)
    for name, s in statistics.items():
        parts = {"cut to it": s.num_truncated, "left out": s.num_dropped}
        taken = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
        if s.num_over_limit:
            console.print(
                f"{name}: {s.num_over_limit} over the limit of {s.limit} tokens"
                + (f" ({taken})" if taken else ""),
                style="yellow",
            )
