"""From token ids to what a loss needs of each token: the decoder, then the head."""

from __future__ import annotations

import types
from typing import Any

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import flat_linear_logprobs, vocab_parallel_linear_logprobs
from nemorl.losses.types import Needs
from nemorl.models.causal_lm import Logits, decoder_of, head_of, is_scalar
from nemorl.parallel.tokens import HeadInputs, RankInputs, Work, values_of
from nemorl.parallel.world import World, all_gather, all_gather_same, sum_backward


def plain_outputs(
    model: Any, batch: TokenBatch, work: Work, *, chunk: int, needs: Needs
) -> list[Tensor]:
    """Return the outputs that `needs` names, each `[batch, seq]`, of a model that is not sharded,
    as `work` says; 0 elsewhere.
    """
    # With an attention mask or a cache transformers would ignore the segments.
    hidden = decoder_of(model)(
        input_ids=work.input_ids,
        position_ids=work.position_ids,
        use_cache=False,
        segments=work.segments,
    )[0]
    states, head = hidden.flatten(0, 1).index_select(0, work.states), head_of(model)
    found: tuple[Tensor, ...]
    if needs.values:
        found = (values_of(states, head.weight, head.bias),)
    else:
        logits = Logits.of(model.config)
        found = flat_linear_logprobs(
            logits.scaled(states),
            head.weight,
            work.next_ids,
            kind=batch.logprob_kind,
            chunk=chunk,
            with_entropy=needs.entropy,
            softcap=logits.softcap,
        )
    return [work.rows(each, batch.input_ids) for each in found[: len(needs.outputs)]]


def sharded_outputs(
    model: nn.Module, world: World, batch: TokenBatch, work: Work, *, chunk: int, needs: Needs
) -> list[Tensor]:
    """Return the same, of all of the rows, of a model that `build.shard` has spread; a collective
    call.
    """
    inputs = RankInputs.of(batch, work, world, chunk=chunk, needs=needs)
    return list(inputs.whole(model(**inputs.values), batch))


def install_head(
    model: Any, tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> None:
    """Have `model(input_ids, position_ids, head_inputs, …)` return the outputs that
    `head_inputs.needs` names, for the next tokens after the states that are read, `[tokens]`.

    The head stays a module of its own, so that FSDP2 gathers its weight.
    """

    def logprobs(
        self: nn.Module, hidden: Float[Tensor, "batch part hidden"], inputs: HeadInputs
    ) -> tuple[Tensor, ...]:
        if tp_group is not None and sequence_parallel:
            hidden = all_gather(hidden, 1, tp_group)
        elif tp_group is not None:
            hidden = sum_backward(hidden, tp_group)
        found = vocab_parallel_linear_logprobs(
            logits.scaled(hidden.flatten(0, 1).index_select(0, inputs.states)),
            _local(self.weight),
            inputs.next_ids,
            tp_group,
            kind=inputs.kind,
            chunk=inputs.chunk,
            with_entropy=inputs.needs.entropy,
            softcap=logits.softcap,
        )
        return found[: len(inputs.needs.outputs)]

    def values(
        self: nn.Module, hidden: Float[Tensor, "batch part hidden"], inputs: HeadInputs
    ) -> tuple[Tensor, ...]:
        # All ranks of tensor parallelism have the whole weight, and compute the same values.
        if tp_group is not None and sequence_parallel:
            hidden = all_gather_same(hidden, 1, tp_group)
        states = hidden.flatten(0, 1).index_select(0, inputs.states)
        return (values_of(states, _local(self.weight), _local(self.bias)),)

    def of_model(
        self: Any, *, input_ids: Tensor, position_ids: Tensor, head_inputs: HeadInputs, **rows: Any
    ) -> tuple[Tensor, ...]:
        hidden = decoder_of(self)(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **rows
        )[0]
        return head_of(self)(hidden, head_inputs)

    head, logits = head_of(model), Logits.of(model.config)
    head.forward = types.MethodType(values if is_scalar(model) else logprobs, head)
    model.forward = types.MethodType(of_model, model)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
