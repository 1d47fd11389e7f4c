"""From token ids to log-probabilities of tokens: the decoder, then a head that works in chunks."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind, linear_token_logprobs
from nemorl.losses.segments import same_segment
from nemorl.losses.vocab_parallel import vocab_parallel_linear_logprobs
from nemorl.models.causal_lm import decoder_of, head_weight
from nemorl.parallel.dtensor.attention import segment_buckets
from nemorl.parallel.dtensor.collectives import all_gather, all_gather_same, sum_backward
from nemorl.parallel.dtensor.context_parallel import ContextState, RowSplit
from nemorl.parallel.dtensor.mesh import DTYPES, World


@dataclass(frozen=True)
class HeadInputs:
    """The head's inputs besides hidden states: the token that each one predicts, and how."""

    next_ids: Int[Tensor, "batch part"]
    predicts: Bool[Tensor, "batch part"]
    """False where the next token is of another segment or missing; the state is not read there."""
    kind: LogprobKind
    chunk: int
    with_entropy: bool


def plain_logprobs(
    model: nn.Module, batch: TokenBatch, *, chunk: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return token log-probabilities and entropies `[batch, seq]` of a model that is not sharded.

    chunk: tokens whose logits are held at a time.
    """
    # With an attention mask or a cache transformers would ignore the segments.
    hidden = decoder_of(model)(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        segment_buckets=segment_buckets(batch.segment_ids),
    )[0]
    return linear_token_logprobs(
        hidden,
        head_weight(model),
        batch.input_ids,
        segment_ids=batch.segment_ids,
        kind=batch.logprob_kind,
        chunk=chunk,
        with_entropy=with_entropy,
    )


def sharded_logprobs(
    model: nn.Module, world: World, batch: TokenBatch, *, chunk: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the same, of all of the rows, of a model that `build.shard` has spread; a collective
    call.
    """
    ids, segments, positions = batch.input_ids, batch.segment_ids, batch.position_ids
    next_ids, predicts = shift(ids), shift(same_segment(segments))
    options = (batch.logprob_kind, chunk, with_entropy)
    if world.cp_group is None:
        logprobs, entropy = model(
            input_ids=ids,
            position_ids=positions,
            head_inputs=HeadInputs(next_ids, predicts, *options),
            segment_buckets=segment_buckets(segments),
        )
    else:
        split = RowSplit.of(ids.shape[1], world.cp_rank, world.cp_group, ids.device)
        dtype = DTYPES[world.plan.param_dtype]
        parts = model(
            input_ids=split.take(ids),
            position_ids=split.take(positions),
            head_inputs=HeadInputs(split.take(next_ids), split.take(predicts), *options),
            context=ContextState.of(segments, positions, split, world.plan.cp_method, dtype),
        )
        # Every rank computes the same loss of whole rows: a sequence's ratio needs all its tokens.
        # Gathered one by one: where a loss has no entropy, the head computes no gradient of it.
        logprobs, entropy = (
            all_gather_same(part, 1, world.cp_group).index_select(1, split.back) for part in parts
        )
    describes = same_segment(segments)[:, 1:]
    logprobs, entropy = (
        nn.functional.pad(torch.where(describes, x[:, :-1], 0.0), (1, 0))
        for x in (logprobs, entropy)
    )
    return logprobs, entropy if with_entropy else None


def shift(values: Tensor) -> Tensor:
    """Return at each token the next one's value; 0 at the last."""
    return nn.functional.pad(values[:, 1:], (0, 1))


def install_head(
    model: Any, tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> None:
    """Have `model(input_ids, position_ids, head_inputs, …)` return log-probabilities and entropies
    of the next tokens, `[batch, part]`.

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
        found = vocab_parallel_linear_logprobs(
            torch.where(inputs.predicts[..., None], hidden, 0.0).flatten(0, 1),
            weight,
            inputs.next_ids.flatten(),
            tp_group,
            kind=inputs.kind,
            chunk=inputs.chunk,
            with_entropy=inputs.with_entropy,
        )
        # Cloned, because FSDP2's hooks can't be put on views.
        logprobs, entropies = (values.view(inputs.next_ids.shape).clone() for values in found)
        return logprobs, entropies

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
