"""From token ids to log-probabilities of tokens: the decoder, then a head that works in chunks."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind, flat_linear_logprobs
from nemorl.losses.vocab_parallel import vocab_parallel_linear_logprobs
from nemorl.models.causal_lm import decoder_of, head_weight
from nemorl.parallel.dtensor.collectives import all_gather, all_gather_same, sum_backward
from nemorl.parallel.dtensor.context_parallel import ContextState, RowSplit
from nemorl.parallel.dtensor.mesh import DTYPES, World
from nemorl.parallel.dtensor.tokens import Work


@dataclass(frozen=True)
class HeadInputs:
    """The head's inputs besides hidden states: which of them are read, and how."""

    states: Int[Tensor, "tokens"]
    """Places in the flattened hidden states."""
    next_ids: Int[Tensor, "tokens"]
    """The token that each one predicts."""
    kind: LogprobKind
    chunk: int
    with_entropy: bool


def plain_logprobs(
    model: nn.Module, batch: TokenBatch, work: Work, *, chunk: int, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return token log-probabilities and entropies `[batch, seq]` of a model that is not sharded,
    as `work` says; 0 elsewhere.

    chunk: tokens whose logits are held at a time.
    """
    # With an attention mask or a cache transformers would ignore the segments.
    hidden = decoder_of(model)(
        input_ids=work.input_ids,
        position_ids=work.position_ids,
        use_cache=False,
        segment_buckets=work.buckets,
    )[0]
    found = flat_linear_logprobs(
        hidden.flatten(0, 1).index_select(0, work.states),
        head_weight(model),
        work.next_ids,
        kind=batch.logprob_kind,
        chunk=chunk,
        with_entropy=with_entropy,
    )
    logprobs, entropy = (work.rows(values, batch.input_ids) for values in found)
    return logprobs, entropy


def sharded_logprobs(
    model: nn.Module, world: World, batch: TokenBatch, work: Work, *, chunk: int, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return the same, of all of the rows, of a model that `build.shard` has spread; a collective
    call.
    """
    options = (batch.logprob_kind, chunk, with_entropy)
    if world.cp_group is None:
        found = model(
            input_ids=work.input_ids,
            position_ids=work.position_ids,
            head_inputs=HeadInputs(work.states, work.next_ids, *options),
            segment_buckets=work.buckets,
        )
        logprobs, entropy = (work.rows(values, batch.input_ids) for values in found)
        return logprobs, entropy
    ids, segments, positions = batch.input_ids, batch.segment_ids, batch.position_ids
    split = RowSplit.of(ids.shape[1], world.cp_rank, world.cp_group, ids.device)
    wanted = work.rows(torch.ones_like(work.targets), ids).bool()
    next_ids, predicts = split.take(shift(ids)), split.take(shift(wanted))
    states = predicts.flatten().nonzero()[:, 0]
    found = model(
        input_ids=split.take(ids),
        position_ids=split.take(positions),
        head_inputs=HeadInputs(states, next_ids.flatten()[states], *options),
        context=ContextState.of(
            segments, positions, split, world.plan.cp_method, DTYPES[world.plan.param_dtype]
        ),
    )
    # Every rank computes the same loss of whole rows: a sequence's ratio needs all its tokens.
    # Gathered one by one: where a loss has no entropy, the head computes no gradient of it.
    parts = (
        x.new_zeros(next_ids.numel()).scatter(0, states, x).view(next_ids.shape) for x in found
    )
    whole = (all_gather_same(part, 1, world.cp_group).index_select(1, split.back) for part in parts)
    logprobs, entropy = (nn.functional.pad(x[:, :-1], (1, 0)) for x in whole)
    return logprobs, entropy


def shift(values: Tensor) -> Tensor:
    """Return at each token the next one's value; 0 at the last."""
    return nn.functional.pad(values[:, 1:], (0, 1))


def install_head(
    model: Any, tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> None:
    """Have `model(input_ids, position_ids, head_inputs, …)` return log-probabilities and entropies
    of the next tokens after the states that are read, `[tokens]`.

    The head stays a module of its own, so that FSDP2 gathers its weight.
    """

    def of_head(
        self: nn.Module, hidden: Float[Tensor, "batch part hidden"], inputs: HeadInputs
    ) -> tuple[Tensor, Tensor]:
        whole: Any = self.weight
        weight = whole.to_local() if isinstance(whole, DTensor) else whole
        if tp_group is not None and sequence_parallel:
            hidden = all_gather(hidden, 1, tp_group)
        elif tp_group is not None:
            hidden = sum_backward(hidden, tp_group)
        return vocab_parallel_linear_logprobs(
            hidden.flatten(0, 1).index_select(0, inputs.states),
            weight,
            inputs.next_ids,
            tp_group,
            kind=inputs.kind,
            chunk=inputs.chunk,
            with_entropy=inputs.with_entropy,
        )

    def of_model(
        self: Any, *, input_ids: Tensor, position_ids: Tensor, head_inputs: HeadInputs, **rows: Any
    ) -> tuple[Tensor, Tensor]:
        hidden = decoder_of(self)(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **rows
        )[0]
        return self.get_output_embeddings()(hidden, head_inputs)

    head = model.get_output_embeddings()
    head.forward = types.MethodType(of_head, head)
    model.forward = types.MethodType(of_model, model)
