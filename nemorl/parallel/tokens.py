"""Which tokens of a microbatch the model computes: what several sequences begin with once, and the
head only where log-probabilities are asked for. Planned on the CPU: no GPU is waited for.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from nemorl.data.batch import TokenBatch
from nemorl.data.padding import round_up
from nemorl.losses.segments import same_segment
from nemorl.losses.types import register_pytree
from nemorl.parallel.attention import (
    FlatSegments,
    SegmentBuckets,
    Segments,
    begins_and_lengths,
    laid_out,
    segments_of,
)
from nemorl.parallel.context_parallel import RowSplit
from nemorl.parallel.varlen import Kernel


@dataclass(frozen=True)
class Work:
    """A microbatch as the decoder and the head get it."""

    input_ids: Int[Tensor, "_ _"]
    """The microbatch's own rows; of shared tokens one row with each once."""
    position_ids: Int[Tensor, "_ _"]
    segments: Segments | None
    targets: Int[Tensor, "tokens"]
    """Places of the results in the flattened microbatch: the indices of the tokens whose
    log-probability is computed. With context parallelism, of the states that predict them.
    """
    states: Int[Tensor, "tokens"]
    """Indices, into the flattened `input_ids`, of the hidden states that predict these tokens."""
    next_ids: Int[Tensor, "tokens"]
    copied: int = 0
    """Repeated tokens, which are not computed again."""
    split: RowSplit | None = None
    """With context parallelism: how rows lie on ranks. `input_ids` and `position_ids` are this
    rank's.
    """
    shared: tuple[Tensor, Tensor] | None = None
    """With shared tokens, what `once` returns; it stays in main memory."""

    def rows(self, values: Float[Tensor, "tokens"], like: Tensor) -> Float[Tensor, "batch seq"]:
        empty = values.new_zeros(like.numel())
        return empty.scatter(0, self.targets, values).view(like.shape)

    def computed(
        self, values: Shaped[Tensor, "batch seq *rest"], *, free: int
    ) -> Shaped[Tensor, "_ _ *rest"]:
        """Return a microbatch's values of the tokens in `input_ids`, in its layout.

        free: the value of padding.
        """
        if self.split is not None:
            return self.split.take(values)
        if self.shared is None:
            return values
        return _in_one_row(values, self.shared[0], self.input_ids.shape[1], free=free)

    def copies(self, real: Bool[Tensor, "batch seq"]) -> Float[Tensor, "_ _"]:
        """Return for how many `real` tokens of the microbatch each one in `input_ids` stands."""
        if self.shared is None:
            return self.computed(real, free=False).float()
        place = self.shared[1][real.flatten()]
        return place.bincount(minlength=self.input_ids.shape[1]).float()[None]


register_pytree(SegmentBuckets)
register_pytree(FlatSegments, constant="kernel")
register_pytree(RowSplit)
register_pytree(Work, constant="shared")


def work_of(
    batch: TokenBatch,
    wanted: Bool[Tensor, "batch seq"],
    *,
    share: bool,
    multiple_of: int = 1,
    kernel: Kernel = "buckets",
) -> Work:
    """Return what is computed for the log-probabilities of the `wanted` tokens of a microbatch."""
    ids, positions, segment_ids = (
        values.cpu() for values in (batch.input_ids, batch.position_ids, batch.segment_ids)
    )
    targets = (wanted.cpu() & same_segment(segment_ids)).flatten().nonzero()[:, 0]
    next_ids = ids.flatten()[targets]
    found = once(batch) if share else None
    if found is None:
        segments = segments_of(segment_ids, kernel)
        return Work(ids, positions, segments, targets, targets - 1, next_ids)
    kept, place = found
    width = round_up(len(kept), multiple_of)
    return Work(
        input_ids=_in_one_row(ids, kept, width),
        position_ids=_in_one_row(positions, kept, width),
        segments=laid_out(*begins_and_lengths(segment_ids), place, width, kernel),
        targets=targets,
        states=place[targets - 1],
        next_ids=next_ids,
        copied=int((segment_ids > 0).sum()) - len(kept),
        shared=found,
    )


def _in_one_row(values: Tensor, kept: Tensor, width: int, *, free: int = 0) -> Tensor:
    row = values.flatten(0, 1)[kept]
    return pad(row, (*(0, 0) * (row.ndim - 1), 0, width - len(row)), value=free)[None]


def split_work(
    batch: TokenBatch,
    wanted: Bool[Tensor, "batch seq"],
    split: RowSplit,
    *,
    kernel: Kernel | None = None,
) -> Work:
    """Return what this rank computes of a microbatch of which all ranks of `split` have parts.

    kernel: computes attention on whole rows of some heads; None: it works on parts of rows.
    """
    ids, positions, segment_ids, wanted = (
        x.cpu() for x in (batch.input_ids, batch.position_ids, batch.segment_ids, wanted)
    )
    next_ids, predicts = (
        split.take(shift(ids)),
        split.take(shift(wanted & same_segment(segment_ids))),
    )
    states = predicts.flatten().nonzero()[:, 0]
    return Work(
        input_ids=split.take(ids),
        position_ids=split.take(positions),
        segments=None if kernel is None else segments_of(segment_ids, kernel),
        targets=states,
        states=states,
        next_ids=next_ids.flatten()[states],
        split=split,
    )


def _comparable_routes(batch: TokenBatch) -> np.ndarray | None:
    """Return bytes per token that are equal where its experts are; None without experts."""
    if batch.route_ids is not None:  # bytes in the order of the numbers
        return batch.route_ids.cpu().flatten().numpy().astype(">i4")[:, None].view(np.uint8)
    if batch.routed_experts is None:
        return None
    assert isinstance(batch.routed_experts, Tensor)
    routed = batch.routed_experts.cpu().flatten(0, 1).flatten(1).contiguous()
    return routed.numpy().view(np.uint8)


def shift(values: Tensor) -> Tensor:
    """Return at each token the next one's value; 0 at the last."""
    return pad(values[:, 1:], (0, 1))


def once(batch: TokenBatch) -> tuple[Int[Tensor, "kept"], Int[Tensor, "places"]] | None:
    """Return the tokens of a microbatch without repeated beginnings of sequences, and where each
    token is in them; None where it does not pay: unless a sixteenth of the tokens is repeated.

    A token depends on those before it alone, so that what sequences begin with alike, computed by
    the same experts, has the same hidden states: prompts, and earlier turns.

    >>> from nemorl.data.batch import collate
    >>> last = [False, False, True]
    >>> rows = [{"input_ids": [5, 6, x], "loss_mask": last, "response_mask": last} for x in (7, 8)]
    >>> kept, place = once(collate(rows))
    >>> kept.tolist(), place.tolist()
    ([0, 1, 2, 5], [0, 1, 2, 0, 1, 3])
    """
    alike = batch.input_ids.cpu().flatten()[:, None].numpy().view(np.uint8)
    if (routes := _comparable_routes(batch)) is not None:
        alike = np.concatenate((alike, routes), axis=1)
    owner, real = np.arange(len(alike)), (batch.segment_ids.cpu() > 0).flatten().numpy()
    begins, lengths = (found.tolist() for found in begins_and_lengths(batch.segment_ids.cpu()))
    spans = [slice(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)]
    # In this order, no other has a longer beginning in common with a sequence than its neighbors.
    spans.sort(key=lambda span: alike[span].tobytes())
    for before, span in pairwise(spans):
        shorter = min(span.stop - span.start, before.stop - before.start)
        same = (alike[before][:shorter] == alike[span][:shorter]).all(1)
        common = int(np.append(same, False).argmin())
        owner[span][:common] = owner[before][:common]
    first = real & (owner == np.arange(len(owner)))
    kept, total = np.flatnonzero(first), real.sum()
    if total - len(kept) < max(total / 16, 1):
        return None
    place = np.where(real, (first.cumsum() - 1)[owner], 0)
    return torch.from_numpy(kept), torch.from_numpy(place)
