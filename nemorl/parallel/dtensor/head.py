"""From token ids to log-probabilities of tokens: the decoder, then a head that works in chunks."""

from __future__ import annotations

import types
from typing import Any

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import flat_linear_logprobs
from nemorl.losses.vocab_parallel import vocab_parallel_linear_logprobs
from nemorl.models.causal_lm import decoder_of, head_weight
from nemorl.parallel.collectives import all_gather, sum_backward
from nemorl.parallel.head import HeadInputs, RankInputs
from nemorl.parallel.tokens import Work
from nemorl.parallel.world import World


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
    inputs = RankInputs.of(batch, work, world, chunk=chunk, with_entropy=with_entropy)
    logprobs, entropy = inputs.whole(model(**inputs.values), batch)
    return logprobs, entropy


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
