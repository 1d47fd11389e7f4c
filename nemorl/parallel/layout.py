"""How a batch is cut for the model: packed rows and microbatches, and the way back to the batch's own layout."""

from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad

from nemorl.data.batch import TokenBatch
from nemorl.data.bins import Plan
from nemorl.data.packing import pack, pack_plan, unpack
from nemorl.data.sharding import merge, split, split_microbatches
from nemorl.parallel.config import TrainerConfig


@dataclass(frozen=True)
class Layout:
    """The parts of one batch, in the order in which the model sees them, and how they came about."""

    parts: tuple[TokenBatch, ...]
    microbatches: Plan
    packing: Plan | None
    lengths: tuple[int, ...]
    width: int

    def restore(self, values: list[Tensor]) -> Shaped[Tensor, "batch seq"]:
        """What the model made of each part, as one array in the batch's layout; 0 on padding."""
        merged = merge(values, self.microbatches)
        if self.packing is not None:
            return unpack(merged, self.packing, self.lengths, length=self.width)
        return pad(merged, (0, self.width - merged.shape[1]))


def cut(batch: TokenBatch, config: TrainerConfig) -> Layout:
    """Cut a batch as the configuration says, but never a row of it: several sequences in a row (a preference pair) stay together.

    No number of a training step depends on how it is cut (SPEC §2). Raises ValueError that names a row longer than `packed_row_tokens` or
    `micro_batch_tokens`.
    """
    lengths = tuple(batch.lengths.tolist())
    packing, rows = None, batch
    if config.sequence_packing:
        capacity = config.packed_row_tokens or config.micro_batch_tokens or max(lengths, default=1)
        packing = pack_plan(lengths, capacity)
        rows = pack(batch, packing)
    if config.micro_batch_tokens is not None:
        plan = split_microbatches(rows, token_budget=config.micro_batch_tokens)
    else:
        plan = split_microbatches(rows, rows=config.train_micro_batch_size or max(1, len(rows)))
    return Layout(split(rows, plan), plan, packing, lengths, batch.input_ids.shape[1])
