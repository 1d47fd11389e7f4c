"""From token ids to log-probabilities of tokens: the decoder, then a head that works in chunks."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind, flat_linear_logprobs
from nemorl.losses.vocab_parallel import vocab_parallel_linear_logprobs
from nemorl.models.causal_lm import decoder_of, head_weight
from nemorl.parallel.dtensor.collectives import all_gather, all_gather_same, sum_backward
from nemorl.parallel.dtensor.context_parallel import ContextState, RowSplit
from nemorl.parallel.dtensor.mesh import DTYPES, World
from nemorl.parallel.dtensor.tokens import Work, split_work, work_of


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


@dataclass(frozen=True)
class RankInputs:
    """What a model that is spread over ranks gets of a microbatch, and what becomes of its results.

    `values` are keyword arguments: with cp of this rank's tokens, otherwise of whole rows.
    """

    values: dict[str, Any]
    work: Work

    @classmethod
    def of(
        cls, batch: TokenBatch, work: Work, world: World, *, chunk: int, with_entropy: bool
    ) -> RankInputs:
        head = HeadInputs(work.states, work.next_ids, batch.logprob_kind, chunk, with_entropy)
        values: dict[str, Any] = {"input_ids": work.input_ids, "position_ids": work.position_ids}
        if work.split is None:
            return cls({**values, "head_inputs": head, "segment_buckets": work.buckets}, work)
        context = ContextState(work.split, work.buckets)
        if world.plan.cp_method == "allgather":
            dtype = DTYPES[world.plan.param_dtype]
            rows = (batch.segment_ids, batch.position_ids)
            context = ContextState.with_bias(*rows, work.split, dtype)
        return cls({**values, "head_inputs": head, "context": context}, work)

    def whole(
        self, found: Iterable[Float[Tensor, "tokens"]], batch: TokenBatch
    ) -> Iterator[Float[Tensor, "batch seq"]]:
        """Yield what the model found (log-probabilities, entropies) in the microbatch's layout, 0
        where none was asked for; with cp a collective call.
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


def planned(
    part: TokenBatch, wanted: Bool[Tensor, "batch seq"], world: World, *, share: bool
) -> Work:
    """Return what this rank computes of a microbatch for the `wanted` tokens, in main memory.

    share: compute equal prompts once, unless cp splits the rows.
    """
    plan = world.plan
    if world.cp_group is None:
        return work_of(part, wanted, share=share, multiple_of=plan.row_multiple)
    cpu = torch.device("cpu")
    rows = RowSplit.of(part.input_ids.shape[1], world.cp_rank, world.cp_group, cpu)
    return split_work(part, wanted, rows, in_buckets=plan.cp_method == "ulysses")


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
