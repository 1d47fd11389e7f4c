"""Receipts of a step's tokens: what was sampled is what the loss was computed from.

The sampler's side is hashed from the conversations alone, the trainer's inside the loss, on each
microbatch, behind collating, packing, cutting and ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.importance import (
    BITS,
    gap_by_depth,
    support_ratio,
    token_hashes,
    token_receipt,
)
from nemorl.losses.types import (
    LossOutput,
    Mean,
    Metric,
    Metrics,
    Sum,
    in_main_memory,
    merge,
    needs_of,
)
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.rollout.collect import Rollouts
from nemorl.rollout.conversation import segments_of
from nemorl.runtime.run.receipts import Receipts

PREFIX = "receipts/"
"""Begins the names of the metrics of receipts."""


def with_receipts(loss_fn: LossFn, *, fresh: bool = True) -> LossFn:
    """Return the loss with the metrics that `TokenReceipt` reads, of each microbatch.

    fresh: whether the weights have not learned from the step's samples yet. If they have, sampler
    and trainer are compared only where the batch has `prev_logprobs`.
    """
    found: Any = partial(_with_receipts, loss_fn=loss_fn, fresh=fresh)
    found.needs = needs_of(loss_fn)
    return found


def _with_receipts(
    output: ForwardOutput, batch: TokenBatch, *, loss_fn: LossFn, fresh: bool
) -> LossOutput:
    result = loss_fn(output, batch)
    sampled, weights = batch.generation_logprobs, batch.loss_weights
    assert sampled is not None and weights is not None
    mask = weights != 0
    with torch.no_grad():
        found = dict(token_receipt(batch.input_ids, batch.position_ids, sampled, mask))
        if fresh or batch.prev_logprobs is not None:
            prev = output.token_logprobs if batch.prev_logprobs is None else batch.prev_logprobs
            found |= gap_by_depth(prev, sampled, mask, batch.response_mask, batch.segment_ids)
            if batch.logprob_kind.filtered:
                found |= support_ratio(prev, sampled, mask)
    return replace(result, metrics=merge(result.metrics, found))


Results = Sequence[tuple[Mapping[str, Metric | float], Int[Tensor, "_"]]]
"""Metrics of optimizer steps, and the conversations that each had."""


def read_at_once(results: Results) -> Results:
    """Return metrics in main memory, read at once."""
    found = {
        f"{number} {name}": each
        for number, (metrics, _) in enumerate(results)
        for name, each in metrics.items()
        if isinstance(each, Metric)
    }
    read: Mapping[str, Metric | float] = in_main_memory(found)
    return [
        ({name: read.get(f"{number} {name}", each) for name, each in metrics.items()}, rows)
        for number, (metrics, rows) in enumerate(results)
    ]


def sampled_hashes(rollouts: Rollouts) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
    """Return for each conversation the sum of `token_hashes` of its sampled tokens, modulo 2^32,
    and their number.
    """
    ids, places, logprobs, owners = list[int](), list[int](), list[float](), list[int]()
    for row, conversation in enumerate(rollouts.conversations):
        for turns in segments_of(conversation.turns):
            last = turns[-1]
            length = len(last.prompt) + len(last.completion.token_ids)
            begin = len(ids)
            ids += [*last.prompt, *last.completion.token_ids]
            places += range(length)
            logprobs += [0.0] * length
            owners += [-1] * length
            for turn in turns:
                said = turn.completion
                start = begin + len(turn.prompt)
                end = start + len(said.token_ids)
                ids[start:end] = said.token_ids
                logprobs[start:end] = said.logprobs
                owners[start:end] = [row] * len(said.token_ids)
    hashes = token_hashes(
        torch.tensor([ids]), torch.tensor([places]), torch.tensor([logprobs], dtype=torch.float32)
    )[0]
    owner = torch.tensor(owners)
    own, size = owner >= 0, len(rollouts)
    total = torch.zeros(size, dtype=torch.int64).index_add(0, owner[own], hashes[own])
    return total & BITS, torch.bincount(owner[own], minlength=size)


class TokenReceipt:
    """The tokens of a step, as they were sampled and as the loss had them."""

    def __init__(self, rollouts: Rollouts, kept: Bool[Tensor, "batch"] | None = None) -> None:
        """kept: conversations whose tokens are trained on."""
        kept = torch.ones(len(rollouts), dtype=torch.bool) if kept is None else kept
        self.hashes, self.counts = (torch.where(kept, each, 0) for each in sampled_hashes(rollouts))
        self.hash = self.tokens = 0
        """Of what was sampled and given to train on."""
        self.seen: Metrics = {}
        """What the loss had."""

    def add(
        self, metrics: Mapping[str, Metric | float], rows: Int[Tensor, "rows"]
    ) -> dict[str, Metric | float]:
        """Add an optimizer step's metrics on some conversations; return those of no receipt."""
        self.hash += int(self.hashes[rows].sum())
        self.tokens += int(self.counts[rows].sum())
        for name, each in metrics.items():
            if isinstance(each, Metric) and name.startswith(PREFIX):
                self.seen = merge(self.seen, {name: each})
            elif name in (f"{PREFIX}tokens", f"{PREFIX}hash"):
                read = Sum(torch.tensor(each, dtype=torch.float64))
                self.seen = merge(self.seen, {name: read})
        return {name: each for name, each in metrics.items() if not name.startswith(PREFIX)}

    def check(self, receipts: Receipts, step: int, *, stale: bool = False) -> dict[str, float]:
        """Return the step's metrics; where tokens or support are not the sampler's, do what the
        settings say.

        stale: older weights sampled some tokens, so there is no support to compare.
        """
        seen = in_main_memory(self.seen)
        if f"{PREFIX}hash" not in seen:  # nothing was trained on, or by a backend of another kind
            return {}
        numbers = {name: each.finalize() for name, each in seen.items() if not _is_empty(each)}
        trained, found = int(numbers.pop(f"{PREFIX}tokens")), int(numbers.pop(f"{PREFIX}hash"))
        same = (trained, found & BITS) == (self.tokens, self.hash & BITS)
        receipts.require(
            same,
            "tokens",
            step,
            f"the loss was computed from {trained} tokens whose hash is {found & BITS:08x}, but"
            f" {self.tokens} were sampled for it, of hash {self.hash & BITS:08x}",
            "A token, its place, what is before it or its log-probability changed between sampling"
            " and loss: look for what changes the batch (a training backend or callback of your"
            " own), and resume from the last checkpoint",
        )
        numbers[f"{PREFIX}tokens"] = float(trained if same else 0)
        numbers[f"{PREFIX}tokens_unproved"] = float(0 if same else trained)
        if stale:
            names = (f"{PREFIX}support_ratio", f"{PREFIX}support_square")
            return {name: value for name, value in numbers.items() if name not in names}
        return self._support(numbers, seen, receipts, step)

    def _support(
        self, numbers: dict[str, float], seen: Metrics, receipts: Receipts, step: int
    ) -> dict[str, float]:
        name = f"{PREFIX}support_ratio"
        square = numbers.pop(f"{PREFIX}support_square", 0.0)
        if name not in numbers:
            return numbers
        mean = seen[name]
        assert isinstance(mean, Mean)
        ratio, error = numbers[name], sqrt(square / float(mean.count))
        limit = receipts.config.support
        receipts.require(
            limit is None or abs(ratio - 1) <= limit + 4 * error,
            "support",
            step,
            f"the mean of π_trainer/π_sampler is {ratio:.4g} ± {error:.2g}, not within"
            f" {limit or 0:g} of 1, so that the sampler draws from other tokens than the trainer"
            " keeps",
            "Look at how the engine applies generation.top_p, top_k and min_p and whether its"
            " logprobs are of the filtered distribution, or turn them off",
        )
        return numbers | {f"{PREFIX}support_error": error}


def _is_empty(metric: Metric) -> bool:
    return isinstance(metric, Mean) and not float(metric.count)
