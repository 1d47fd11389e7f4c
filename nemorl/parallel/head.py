"""What a model on ranks gets of a microbatch, and what its head reads and computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind
from nemorl.losses.segments import at_least_float32
from nemorl.losses.types import Needs
from nemorl.parallel.collectives import all_gather_same
from nemorl.parallel.context_parallel import ContextState, RowSplit
from nemorl.parallel.tokens import Work, split_work, work_of
from nemorl.parallel.varlen import Kernel
from nemorl.parallel.world import DTYPES, World


@dataclass(frozen=True)
class HeadInputs:
    """The head's inputs besides hidden states: which of them are read, and how."""

    states: Int[Tensor, "tokens"]
    """Places in the flattened hidden states."""
    next_ids: Int[Tensor, "tokens"]
    """The token that each one predicts."""
    kind: LogprobKind
    chunk: int
    """Tokens whose logits are in memory at a time."""
    needs: Needs


@dataclass(frozen=True)
class RankInputs:
    """What a model that is spread over ranks gets of a microbatch, and what becomes of its
    results.
    """

    values: dict[str, Any]
    work: Work

    @classmethod
    def of(
        cls, batch: TokenBatch, work: Work, world: World, *, chunk: int, needs: Needs
    ) -> RankInputs:
        head = HeadInputs(work.states, work.next_ids, batch.logprob_kind, chunk, needs)
        values: dict[str, Any] = {"input_ids": work.input_ids, "position_ids": work.position_ids}
        if work.split is None:
            return cls({**values, "head_inputs": head, "segments": work.segments}, work)
        context = ContextState(work.split, work.segments)
        if world.plan.cp_method == "allgather":
            dtype = DTYPES[world.plan.precision]
            rows = (batch.segment_ids, batch.position_ids)
            context = ContextState.with_bias(*rows, work.split, dtype)
        return cls({**values, "head_inputs": head, "context": context}, work)

    def whole(
        self, found: Iterable[Float[Tensor, "tokens"]], batch: TokenBatch
    ) -> Iterator[Float[Tensor, "batch seq"]]:
        """Yield the model's outputs (log-probabilities, entropies or values) in the microbatch's
        layout, 0 where none was asked for; with cp a collective call.
        """
        for values in found:
            if (split := self.work.split) is None:
                yield self.work.rows(values, batch.input_ids)
                continue
            part = self.work.rows(values, self.work.input_ids)
            # Every rank computes the same loss of whole rows: a sequence's ratio needs all its
            # tokens. Gathered one by one: where a loss has no entropy, the head computes no
            # gradient of it.
            whole = all_gather_same(part, 1, split.group).index_select(1, split.back)
            yield nn.functional.pad(whole[:, :-1], (1, 0))


def values_of(
    states: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "1 hidden"],
    bias: Float[Tensor, "1"],
) -> Float[Tensor, "tokens"]:
    """Return states · weight + bias in float32 at least, also under autocast."""
    states = at_least_float32(states)
    with torch.autocast(states.device.type, enabled=False):
        return nn.functional.linear(states, weight.to(states), bias.to(states))[:, 0]


def planned(
    part: TokenBatch,
    wanted: Bool[Tensor, "batch seq"],
    world: World,
    *,
    share: bool,
    kernel: Kernel = "buckets",
) -> Work:
    """Return what this rank computes of a microbatch for the `wanted` tokens, in main memory."""
    plan = world.plan
    if world.cp_group is None:
        multiple = plan.row_multiple
        return work_of(part, wanted, share=share, multiple_of=multiple, kernel=kernel)
    cpu = torch.device("cpu")
    rows = RowSplit.of(part.input_ids.shape[1], world.cp_rank, world.cp_group, cpu)
    whole_rows = plan.cp_method == "ulysses"
    return split_work(part, wanted, rows, kernel=kernel if whole_rows else None)
