"""From token ids to the log-probabilities of tokens, on every plan: the decoder, then a chunked
head that knows its part of rows and vocabulary.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprob_kind import LogprobKind
from nemorl.losses.logprobs import linear_token_logprobs
from nemorl.losses.segments import same_segment
from nemorl.losses.vocab_parallel import vocab_parallel_linear_logprobs
from nemorl.models.causal_lm import decoder_of, head_weight
from nemorl.parallel.dtensor.attention import segment_buckets
from nemorl.parallel.dtensor.collectives import all_gather, all_gather_same, sum_backward
from nemorl.parallel.dtensor.context_parallel import ContextState, RowSplit
from nemorl.parallel.dtensor.mesh import DTYPES, World


@dataclass(frozen=True)
class HeadInputs:
    """What the head needs besides the hidden states of this rank's tokens: which token each of them
    predicts, and under which distribution.
    """

    next_ids: Int[Tensor, "batch part"]
    predicts: Bool[Tensor, "batch part"]
    """False where the next token is of another segment, or there is none; the hidden state there is
    not read.
    """
    kind: LogprobKind
    chunk: int
    with_entropy: bool


def plain_logprobs(
    model: nn.Module, batch: TokenBatch, *, chunk: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Token log-probabilities and entropies `[batch, seq]` of a model that is whole in this
    process.
    """
    # No attention mask and no cache: with either, transformers would drop the separation of the
    # segments without a word.
    segments = {"segment_buckets": segment_buckets(batch.segment_ids)}
    hidden = decoder_of(model)(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **segments
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
    """The same of a model that `build.shard` has spread; the whole result on each of the ranks that
    share these rows. A collective call.
    """
    ids, segments = batch.input_ids, batch.segment_ids
    inputs = HeadInputs(
        shift(ids), shift(same_segment(segments)), batch.logprob_kind, chunk, with_entropy
    )
    if world.cp_group is None:
        known: dict[str, Any] = {"segment_buckets": segment_buckets(segments)}
        logprobs, entropy = model(
            input_ids=ids, position_ids=batch.position_ids, head_inputs=inputs, **known
        )
    else:
        split = RowSplit.of(ids.shape[1], world.cp_rank, world.cp_group, ids.device)
        known = {
            "context": ContextState.of(
                segments,
                batch.position_ids,
                split,
                world.plan.cp_method,
                DTYPES[world.plan.param_dtype],
            )
        }
        inputs = HeadInputs(
            split.take(inputs.next_ids),
            split.take(inputs.predicts),
            inputs.kind,
            chunk,
            with_entropy,
        )
        parts = model(
            input_ids=split.take(ids),
            position_ids=split.take(batch.position_ids),
            head_inputs=inputs,
            **known,
        )
        # Every rank of the group goes on to the same loss, of whole rows: a sequence's ratio or a
        # pair of sequences needs all of their tokens. Each by itself: where a loss has no entropy,
        # the head need not compute its gradient.
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
    """What is said of the next token, at each token; 0 at the last."""
    return nn.functional.pad(values[:, 1:], (0, 1))


def install_head(model: Any, world: World) -> None:
    """Have `model(input_ids, position_ids, head_inputs, …)` return log-probabilities and entropies
    of the next tokens, `[batch, part]`.

    The head runs as a module of its own, so that FSDP2 gathers its weight. Under tensor parallelism
    that is this rank's part of the vocabulary.
    """
    group, sequence_parallel = world.tp_group, world.plan.sequence_parallel

    def of_head(
        self: nn.Module, hidden: Float[Tensor, "batch part hidden"], inputs: HeadInputs
    ) -> tuple[Tensor, Tensor]:
        whole: Any = self.weight
        weight = whole.to_local() if isinstance(whole, DTensor) else whole
        if group is not None:
            hidden = (
                all_gather(hidden, 1, group) if sequence_parallel else sum_backward(hidden, group)
            )
        states = torch.where(inputs.predicts[..., None], hidden, 0.0).flatten(0, 1)
        options: dict[str, Any] = {
            "kind": inputs.kind,
            "chunk": inputs.chunk,
            "with_entropy": inputs.with_entropy,
        }
        found = vocab_parallel_linear_logprobs(
            states, weight, inputs.next_ids.flatten(), group, **options
        )
        logprobs, entropies = (
            values.view(inputs.next_ids.shape).clone() for values in found
        )  # FSDP2 warns of views, which hooks can't be put on
        return logprobs, entropies

    def of_model(
        self: Any, *, input_ids: Tensor, position_ids: Tensor, head_inputs: HeadInputs, **known: Any
    ) -> tuple[Tensor, Tensor]:
        hidden = decoder_of(self)(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **known
        )[0]
        return self.get_output_embeddings()(hidden, head_inputs)

    head = model.get_output_embeddings()
    head.forward = types.MethodType(of_head, head)
    model.forward = types.MethodType(of_model, model)
