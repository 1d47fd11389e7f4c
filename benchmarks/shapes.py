"""How many shapes of dense attention packed rows bring that no row before them had, for each of
which cuDNN makes a plan: with buckets of similar lengths, and with a kernel for all lengths.

    python benchmarks/shapes.py

The lengths are log-normal. Attention runs on the meta device, which has shapes and no numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import command
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from nemorl.data.batch import to_device
from nemorl.parallel.attention import Kernel, segment_attention, segments_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which rows."""

    rows: int = 200
    """Of packed sequences, each a microbatch."""
    width: int = 16_384
    """Tokens of a row, padding included."""
    median: int = 900
    """Of the lengths."""
    sigma: float = 0.8
    """Standard deviation of their logarithms."""


class Shapes(TorchFunctionMode):
    """Keeps the shapes of queries and keys that dense attention gets in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Size, torch.Size]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.found.append((args[0].shape, args[1].shape))
        return func(*args, **(kwargs or {}))


def rows_of(options: Options) -> Iterator[Tensor]:
    """Yield the segment ids of each row, filled with lengths as they are drawn."""
    rng, width = np.random.default_rng(0), options.width
    row: list[int] = []
    for _ in range(options.rows):
        while sum(row) <= width:
            drawn = rng.lognormal(np.log(options.median), options.sigma)
            row.append(max(1, min(int(drawn), width)))
        *full, first = row
        ids = torch.arange(1, len(full) + 1).repeat_interleave(torch.tensor(full))
        yield torch.nn.functional.pad(ids, (0, width - len(ids)))[None]
        row = [first]


def new_shapes(options: Options, kernel: Kernel) -> list[int]:
    """Return for each row how many shapes it has that none before it had."""
    known: set[Any] = set()
    found = []
    for ids in rows_of(options):
        segments = to_device(segments_of(ids, kernel), torch.device("meta"))
        q, k, v = (
            torch.empty(1, heads, ids.shape[1], 64, device="meta", dtype=torch.bfloat16)
            for heads in (4, 2, 2)
        )
        with Shapes() as shapes:
            segment_attention(q, k, v, segments=segments)
        found.append(len({*shapes.found} - known))
        known.update(shapes.found)
    return found


def main(options: Options) -> None:
    for kernel in ("buckets", "varlen_attn"):
        found = new_shapes(options, kernel)
        quarter = max(1, len(found) // 4)
        first, last = (np.mean(part) for part in (found[:quarter], found[-quarter:]))
        print(
            f"{kernel}: {np.mean(found):.1f} new shapes a row of {options.width:,} tokens, in the"
            f" first {quarter} rows {first:.1f}, in the last {last:.1f}"
        )


if __name__ == "__main__":
    command(main, Options, rows=8, width=1024, median=90)
