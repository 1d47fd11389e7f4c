"""How a batch is cut for the model: packed rows, ranks and microbatches, and the way back to the
batch's own layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from nemorl.data.batch import TokenBatch, take
from nemorl.data.packing import Plan, pack, pack_plan, unpack
from nemorl.data.sharding import shard_by_rank, split, split_microbatches
from nemorl.parallel.config import TrainerConfig


@dataclass(frozen=True)
class Layout:
    """A batch's rows as the model sees them, and which of them go through it together on each rank."""

    rows: TokenBatch
    """Packed, where that is asked for."""
    microbatches: tuple[Plan, ...]
    """Per rank its microbatches, as many on each, as indices of `rows`; one may be empty."""
    packing: Plan | None
    lengths: tuple[int, ...]
    width: int
    multiple_of: int

    def parts(self, rank: int = 0) -> tuple[TokenBatch, ...]:
        """The microbatches of a rank.

        An empty one is a row of padding, so that the rank takes part in what all do together.
        """
        plan = self.microbatches[rank]
        found = split(self.rows, plan, multiple_of=self.multiple_of)
        return tuple(
            part if rows else padding_like(self.rows, self.multiple_of)
            for part, rows in zip(found, plan, strict=True)
        )

    def place(
        self, values: Sequence[Shaped[Tensor, "_ _"]], rank: int = 0
    ) -> Shaped[Tensor, "rows width"]:
        """What a rank's model made of each of its microbatches, in the rows' own places; 0 in those
        of other ranks, so that ranks add up.
        """
        placed = values[0].new_zeros(self.rows.input_ids.shape)
        for rows, value in zip(self.microbatches[rank], values, strict=True):
            if rows:
                width = min(value.shape[1], placed.shape[1])
                placed[torch.tensor(rows), :width] = value[:, :width]
        return placed

    def restore(self, placed: Shaped[Tensor, "rows width"]) -> Shaped[Tensor, "batch seq"]:
        """All rows' values in the batch's own layout; 0 on padding."""
        if self.packing is not None:
            return unpack(placed, self.packing, self.lengths, length=self.width)
        return pad(placed, (0, self.width - placed.shape[1]))


def cut(
    batch: TokenBatch, config: TrainerConfig, *, num_ranks: int = 1, multiple_of: int = 1
) -> Layout:
    """Cut a batch as the configuration says, but never a row of it: several sequences in a row (a
    preference pair) stay together.

    Rows are dealt to the ranks by what they cost, then cut into microbatches whose width is a
    multiple of `multiple_of`. No number of a training step depends on how it is cut
    (docs/numerics.md, Weighted sums).
    Raises ValueError that names a row longer than `packed_row_tokens` or `micro_batch_tokens`.
    """
    lengths = tuple(batch.lengths.tolist())
    packing, rows = None, batch
    if config.sequence_packing:
        capacity = config.packed_row_tokens or config.micro_batch_tokens or max(lengths, default=1)
        packing = pack_plan(lengths, capacity, num_rows_multiple=num_ranks)
        rows = pack(batch, packing)
    dealt = shard_by_rank(rows, num_ranks) if num_ranks > 1 else (tuple(range(len(rows))),)
    count = max((len(_microbatches(rows, config, own, 1)) for own in dealt), default=1)
    microbatches = tuple(_microbatches(rows, config, own, count) for own in dealt)
    return Layout(rows, microbatches, packing, lengths, batch.input_ids.shape[1], multiple_of)


def _microbatches(
    rows: TokenBatch, config: TrainerConfig, own: Sequence[int], at_least: int
) -> Plan:
    """The rows of one rank in microbatches, as indices of all rows."""
    if not own:
        return ((),) * at_least
    mine = take(rows, own)
    if config.micro_batch_tokens is not None:
        plan = split_microbatches(
            mine, token_budget=config.micro_batch_tokens, min_microbatches=at_least
        )
    else:
        plan = split_microbatches(
            mine, rows=config.train_micro_batch_size or max(1, len(mine)), min_microbatches=at_least
        )
    return tuple(tuple(own[row] for row in part) for part in plan)


def padding_like(rows: TokenBatch, width: int) -> TokenBatch:
    """A row of nothing but padding, with the arrays that `rows` have."""
    return pytree.tree_map_only(Tensor, lambda x: x.new_zeros(1, width), rows)
