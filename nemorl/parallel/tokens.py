"""Which tokens of a microbatch the model computes: shared beginnings once, and the head only where
log-probabilities are asked for. Planned on the CPU: no GPU is waited for.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from nemorl.data.batch import TokenBatch, round_up
from nemorl.losses.logprobs import LogprobKind, flat_linear_logprobs
from nemorl.losses.types import Needs, TokenIds, at_least_float32, register_pytree, same_segment
from nemorl.models.causal_lm import decoder_of, head_of, is_scalar, logits_of
from nemorl.parallel.attention import (
    ContextState,
    FlatSegments,
    Kernel,
    RowSplit,
    SegmentBuckets,
    Segments,
    begins_and_lengths,
    laid_out,
    segments_of,
)
from nemorl.parallel.world import DTYPES, World, all_gather, all_gather_same, sum_backward


@dataclass(frozen=True)
class Work:
    """A microbatch as the decoder and the head get it."""

    input_ids: Int[Tensor, "_ _"]
    """The microbatch's own rows; of shared tokens one row with each once."""
    position_ids: Int[Tensor, "_ _"]
    segments: Segments | None
    targets: Int[Tensor, "tokens"]
    """Indices, in the flattened microbatch, of the tokens whose log-probability is computed; with
    context parallelism of the states that predict them.
    """
    states: Int[Tensor, "tokens"]
    """Indices, in the flattened `input_ids`, of the hidden states that predict them."""
    next_ids: Int[Tensor, "tokens"]
    """The tokens whose log-probability is computed: `predicted`."""
    target_ids: Int[Tensor, "tokens k"] | None = None
    """Of soft targets."""
    target_weights: Float[Tensor, "tokens k"] | None = None
    copied: int = 0
    """Repeated tokens, which are not computed again."""
    split: RowSplit | None = None
    """With context parallelism: how rows lie on ranks; the ids and positions are this rank's."""
    shared: tuple[Tensor, Tensor] | None = None
    """With shared tokens, what `once` returns; it stays in main memory."""

    def rows(
        self, values: Shaped[Tensor, "tokens *rest"], like: Tensor
    ) -> Shaped[Tensor, "batch seq *rest"]:
        empty = values.new_zeros(like.numel(), *values.shape[1:])
        return empty.index_copy(0, self.targets, values).view(*like.shape, *values.shape[1:])

    def computed(
        self, values: Shaped[Tensor, "batch seq *rest"], *, free: int
    ) -> Shaped[Tensor, "_ _ *rest"]:
        """Return a microbatch's values in the layout of `input_ids`; `free` is that of padding."""
        if self.split is not None:
            return self.split.take(values)
        if self.shared is None:
            return values
        return _in_one_row(values, self.shared[0], self.input_ids.shape[1], free=free)

    def copies(self, real: Bool[Tensor, "batch seq"]) -> Float[Tensor, "_ _"]:
        """Return for how many `real` tokens each one in `input_ids` stands."""
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
    """Return what is computed for a microbatch's `wanted` tokens."""
    ids, positions, segment_ids = (
        values.cpu() for values in (batch.input_ids, batch.position_ids, batch.segment_ids)
    )
    targets = (wanted.cpu() & same_segment(segment_ids)).flatten().nonzero()[:, 0]
    next_ids = predicted(batch).flatten()[targets]
    soft: dict[str, Any] = {
        name: x.flatten(0, 1)[targets] for name, x in soft_targets(batch).items()
    }
    found = once(batch) if share else None
    if found is None:
        segments = segments_of(segment_ids, kernel)
        return Work(ids, positions, segments, targets, targets - 1, next_ids, **soft)
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
        **soft,
    )


def soft_targets(batch: TokenBatch) -> dict[str, Any]:
    """Return the fields of a batch with k targets at each place, in main memory."""
    if batch.target_ids is None or batch.target_ids.ndim < 3:
        return {}
    found = {"target_ids": batch.target_ids, "target_weights": batch.target_weights}
    return {name: values.cpu() for name, values in found.items() if values is not None}


def predicted(batch: TokenBatch) -> TokenIds:
    """Return the token that each place predicts, in main memory: a hard target, or its own."""
    targets = batch.target_ids
    return (batch.input_ids if targets is None or targets.ndim > 2 else targets).cpu()


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
    """Return what this rank computes of a microbatch that the ranks of `split` share.

    kernel: of attention on whole rows of some heads; None: it works on parts of rows.
    """
    ids, positions, segment_ids, wanted = (
        x.cpu() for x in (batch.input_ids, batch.position_ids, batch.segment_ids, wanted)
    )
    next_ids = split.take(shift(predicted(batch)))
    predicts = split.take(shift(wanted & same_segment(segment_ids)))
    states = predicts.flatten().nonzero()[:, 0]
    soft: dict[str, Any] = {
        name: split.take(shift(x)).flatten(0, 1)[states] for name, x in soft_targets(batch).items()
    }
    return Work(
        input_ids=split.take(ids),
        position_ids=split.take(positions),
        segments=None if kernel is None else segments_of(segment_ids, kernel),
        targets=states,
        states=states,
        next_ids=next_ids.flatten()[states],
        split=split,
        **soft,
    )


def shift(values: Tensor) -> Tensor:
    """Return at each token the next one's value; 0 at the last."""
    return pad(values[:, 1:], (0, 0) * (values.ndim - 2) + (0, 1))


def once(batch: TokenBatch) -> tuple[Int[Tensor, "kept"], Int[Tensor, "places"]] | None:
    """Return the tokens of a microbatch without repeated beginnings of sequences, and where each
    token is in them; None unless a sixteenth of the tokens is repeated.

    Equal beginnings (prompts, earlier turns) computed by the same experts have equal hidden states.

    >>> from nemorl.data.batch import collate
    >>> last = [False, False, True]
    >>> rows = [{"input_ids": [5, 6, x], "loss_mask": last, "response_mask": last} for x in (7, 8)]
    >>> kept, place = once(collate(rows))
    >>> kept.tolist(), place.tolist()
    ([0, 1, 2, 5], [0, 1, 2, 0, 1, 3])
    """
    alike = batch.input_ids.cpu().flatten()[:, None].numpy().view(np.uint8)
    if batch.route_ids is not None:  # bytes in the order of the numbers
        routes = batch.route_ids.cpu().flatten().numpy().astype(">i4")[:, None]
        alike = np.concatenate((alike, routes.view(np.uint8)), axis=1)
    elif batch.routed_experts is not None:
        assert isinstance(batch.routed_experts, Tensor)
        experts = batch.routed_experts.cpu().flatten(0, 1).flatten(1).contiguous().numpy()
        alike = np.concatenate((alike, experts.view(np.uint8)), axis=1)
    owner, real = np.arange(len(alike)), (batch.segment_ids.cpu() > 0).flatten().numpy()
    begins, lengths = (found.tolist() for found in begins_and_lengths(batch.segment_ids.cpu()))
    spans = [slice(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)]
    # In this order a sequence has its longest common beginning with a neighbor.
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
    target_ids: Int[Tensor, "tokens k"] | None = None
    """Given if `needs` or `target_weights` ask for them."""
    target_weights: Float[Tensor, "tokens k"] | None = None

    @classmethod
    def of(cls, batch: TokenBatch, work: Work, *, chunk: int, needs: Needs) -> "HeadInputs":
        weights = work.target_weights
        ids = work.target_ids if needs.targets or weights is not None else None
        return cls(work.states, work.next_ids, batch.logprob_kind, chunk, needs, ids, weights)

    def outputs(
        self,
        states: Float[Tensor, "tokens hidden"],
        weight: Float[Tensor, "shard hidden"],
        group: dist.ProcessGroup | None,
        *,
        softcap: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs of a language model's head that `needs` names."""
        found = flat_linear_logprobs(
            states,
            weight,
            self.next_ids,
            kind=self.kind,
            chunk=self.chunk,
            with_entropy=self.needs.entropy,
            softcap=softcap,
            targets=self.target_ids,
            top_k=self.needs.top_k,
            group=group,
        )
        weights, logprobs = self.target_weights, found.target_logprobs
        if weights is not None and logprobs is not None:
            each = torch.where(weights > 0, weights * logprobs, 0.0)
            found = found._replace(token_logprobs=each.sum(-1))
        return tuple(getattr(found, name) for name in self.needs.outputs)


@dataclass(frozen=True)
class RankInputs:
    """A spread model's inputs of a microbatch, and the layout of its results."""

    values: dict[str, Any]
    work: Work

    @classmethod
    def of(
        cls, batch: TokenBatch, work: Work, world: World, *, chunk: int, needs: Needs
    ) -> "RankInputs":
        head = HeadInputs.of(batch, work, chunk=chunk, needs=needs)
        values: dict[str, Any] = {"input_ids": work.input_ids, "position_ids": work.position_ids}
        if work.split is None:
            return cls({**values, "head_inputs": head, "segments": work.segments}, work)
        context = ContextState(work.split, work.segments)
        if world.plan.cp_method == "allgather":
            rows, dtype = (batch.segment_ids, batch.position_ids), DTYPES[world.plan.precision]
            context = ContextState.with_bias(*rows, work.split, dtype)
        return cls({**values, "head_inputs": head, "context": context}, work)

    def whole(
        self, found: Iterable[Shaped[Tensor, "tokens *rest"]], batch: TokenBatch
    ) -> Iterator[Shaped[Tensor, "batch seq *rest"]]:
        """Yield the model's outputs in the microbatch's layout, 0 where none was asked for; with
        cp a collective call.
        """
        for values in found:
            if (split := self.work.split) is None:
                yield self.work.rows(values, batch.input_ids)
                continue
            part = self.work.rows(values, self.work.input_ids)
            # Every rank computes the same loss of whole rows, as a sequence's ratio needs all its
            # tokens; outputs are gathered one by one, so that unused ones get no gradient.
            whole = all_gather_same(part, 1, split.group).index_select(1, split.back)
            yield pad(whole[:, :-1], (0, 0) * (whole.ndim - 2) + (1, 0))


def values_of(
    states: Float[Tensor, "tokens hidden"], weight: Float[Tensor, "1 hidden"]
) -> Float[Tensor, "tokens"]:
    """Return states · weight in float32 at least, also under autocast."""
    states = at_least_float32(states)
    with torch.autocast(states.device.type, enabled=False):
        return nn.functional.linear(states, weight.to(states))[:, 0]


def planned(
    part: TokenBatch,
    wanted: Bool[Tensor, "batch seq"],
    world: World,
    *,
    share: bool,
    kernel: Kernel = "buckets",
) -> Work:
    """Return this rank's work on a microbatch's `wanted` tokens, in main memory."""
    plan = world.plan
    if world.cp_group is None:
        return work_of(part, wanted, share=share, multiple_of=plan.row_multiple, kernel=kernel)
    cpu = torch.device("cpu")
    rows = RowSplit.of(part.input_ids.shape[1], world.cp_rank, world.cp_group, cpu)
    return split_work(part, wanted, rows, kernel=kernel if plan.cp_method == "ulysses" else None)


Outputs = Callable[[TokenBatch, Work, Needs], Iterable[Tensor]]
"""Computes the outputs that `needs` names, each `[batch, seq]` or `[batch, seq, k]`, as `work`
says; 0 elsewhere.
"""


def plain_outputs(model: Any, chunk: int) -> Outputs:
    """Return what computes the outputs of a model that is not sharded."""
    decoder, head, logits = decoder_of(model), head_of(model), logits_of(model.config)

    def outputs(batch: TokenBatch, work: Work, needs: Needs) -> Iterator[Tensor]:
        # With an attention mask or a cache transformers would ignore the segments.
        hidden = decoder(
            input_ids=work.input_ids,
            position_ids=work.position_ids,
            use_cache=False,
            segments=work.segments,
        )[0]
        states = hidden.flatten(0, 1).index_select(0, work.states)
        found: tuple[Tensor, ...]
        if needs.values:
            found = (values_of(states, head.weight),)
        else:
            inputs = HeadInputs.of(batch, work, chunk=chunk, needs=needs)
            scaled = logits.scaled(states)
            found = inputs.outputs(scaled, head.weight, None, softcap=logits.softcap)
        return (work.rows(each, batch.input_ids) for each in found)

    return outputs


def sharded_outputs(model: nn.Module, world: World, chunk: int) -> Outputs:
    """Return what computes all rows' outputs by a model that `build.shard` has spread: a collective
    call.
    """

    def outputs(batch: TokenBatch, work: Work, needs: Needs) -> Iterator[Tensor]:
        inputs = RankInputs.of(batch, work, world, chunk=chunk, needs=needs)
        return inputs.whole(model(**inputs.values), batch)

    return outputs


def install_head(
    model: Any, tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> None:
    """Have `model(input_ids, position_ids, head_inputs, …)` return the outputs, of each token, that
    `head_inputs.needs` names. The head stays a module, so that FSDP2 gathers its weight.
    """

    def outputs(
        self: nn.Module, hidden: Float[Tensor, "batch part hidden"], inputs: HeadInputs
    ) -> tuple[Tensor, ...]:
        if tp_group is not None and sequence_parallel:
            hidden = (all_gather_same if scalar else all_gather)(hidden, 1, tp_group)
        elif tp_group is not None and not scalar:
            hidden = sum_backward(hidden, tp_group)
        states, weight = hidden.flatten(0, 1).index_select(0, inputs.states), _local(self.weight)
        if scalar:
            return (values_of(states, weight),)
        return inputs.outputs(logits.scaled(states), weight, tp_group, softcap=logits.softcap)

    def of_model(
        self: Any, *, input_ids: Tensor, position_ids: Tensor, head_inputs: HeadInputs, **rows: Any
    ) -> tuple[Tensor, ...]:
        hidden = decoder_of(self)(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **rows
        )[0]
        return head_of(self)(hidden, head_inputs)

    head, logits, scalar = head_of(model), logits_of(model.config), is_scalar(model)
    head.forward = types.MethodType(outputs, head)
    model.forward = types.MethodType(of_model, model)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
