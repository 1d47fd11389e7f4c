"""Receipts of a step's tokens: what was sampled, and not too early, the loss was computed from.

The sampler's side is hashed from the conversations alone (`Rollouts.to_batch`), the trainer's
inside the loss, on each microbatch, behind collating, packing, cutting and ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch

from nemorl.checks import warn
from nemorl.data.batch import TokenBatch
from nemorl.losses.importance import BITS, gap_by_depth, support_ratio, token_receipt
from nemorl.losses.types import LossOutput, Mean, Metric, Metrics, Sum, merge, needs_of
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.rollout.conversation import Conversation
from nemorl.runtime.config.grpo import ReceiptsConfig
from nemorl.runtime.store.files import ReceiptError

PREFIX = "receipts/"
"""Begins the names of the metrics of receipts."""


class Receipts:
    """Stops a run, or warns, as `receipts.on_failure` says."""

    def __init__(self, config: ReceiptsConfig) -> None:
        self.config = config
        self._failures = Counter[str]()

    def require(self, holds: bool, name: str, step: int, found: str, remedy: str) -> None:
        """Unless a receipt holds, raise ReceiptError or warn of such steps 1, 2, 4, …"""
        if holds:
            return
        self._failures[name] += 1
        message = f"step {step}: the receipt {name} does not hold: {found}. {remedy}"
        if self.config.on_failure == "stop":
            raise ReceiptError(f"{message}; --receipts.on-failure warn continues in spite of it.")
        if (count := self._failures[name]).bit_count() == 1:
            warn(f"{message}; {count} such steps so far (receipts.on_failure is warn).")


def with_receipts(loss_fn: LossFn, *, compares: bool = True) -> LossFn:
    """Return the loss with the metrics that `TokenReceipt` reads.

    compares: whether sampler and trainer are compared, too: not after updates on the step's samples
        without `prev_logprobs`.
    """
    found: Any = partial(_with_receipts, loss_fn=loss_fn, compares=compares)
    found.needs = needs_of(loss_fn)
    return found


def _with_receipts(
    output: ForwardOutput, batch: TokenBatch, *, loss_fn: LossFn, compares: bool
) -> LossOutput:
    result = loss_fn(output, batch)
    sampled, weights = batch.generation_logprobs, batch.loss_weights
    assert sampled is not None and weights is not None
    mask = weights != 0
    with torch.no_grad():
        found = dict(token_receipt(batch.input_ids, batch.position_ids, sampled, mask))
        if compares:
            prev = output.token_logprobs if batch.prev_logprobs is None else batch.prev_logprobs
            found |= gap_by_depth(prev, sampled, mask, batch.response_mask, batch.segment_ids)
            if batch.logprob_kind.filtered:
                found |= support_ratio(prev, sampled, mask)
    return replace(result, metrics=merge(result.metrics, found))


class TokenReceipt:
    """The tokens of a step, as they were sampled and as the loss had them."""

    def __init__(self) -> None:
        self.hash = self.tokens = 0
        """Of what was sampled to train on."""
        self.seen: Metrics = {}
        """What the loss had, by the end of the step in main memory."""

    def expect(self, batch: TokenBatch) -> None:
        """Add the tokens that a batch trains on, as they were sampled."""
        assert batch.sampled_hashes is not None and batch.loss_weights is not None
        mask = batch.loss_weights != 0
        self.hash += int(batch.sampled_hashes[mask].sum())
        self.tokens += int(mask.sum())

    def add(self, metrics: Mapping[str, Metric | float]) -> dict[str, Metric | float]:
        """Add an optimizer step's metrics; return those of no receipt."""
        for name, each in metrics.items():
            if name in (f"{PREFIX}tokens", f"{PREFIX}hash") and not isinstance(each, Metric):
                each = Sum(torch.tensor(each, dtype=torch.float64))
            if isinstance(each, Metric) and name.startswith(PREFIX):
                self.seen = merge(self.seen, {name: each})
        return {name: each for name, each in metrics.items() if not name.startswith(PREFIX)}

    def check(self, receipts: Receipts, step: int, *, stale: bool = False) -> dict[str, float]:
        """Return the step's metrics, and require that tokens and support are the sampler's.

        stale: older weights sampled some tokens, so there is no support to compare.
        """
        seen = self.seen
        if f"{PREFIX}hash" not in seen:  # nothing was trained on, or by a backend of another kind
            return {}
        numbers = {
            name: each.finalize()
            for name, each in seen.items()
            if not isinstance(each, Mean) or float(each.count)
        }
        trained, found = int(numbers.pop(f"{PREFIX}tokens")), int(numbers.pop(f"{PREFIX}hash"))
        same = (trained, found & BITS) == (self.tokens, self.hash & BITS)
        receipts.require(
            same,
            "tokens",
            step,
            f"the loss was computed from {trained} tokens whose hash is {found & BITS:08x}, but"
            f" {self.tokens} were sampled for it, of hash {self.hash & BITS:08x}",
            "A token, its place, its context or its log-probability changed: look for what changes"
            " the batch (a loop, training backend or callback of your own), and resume from the"
            " last checkpoint",
        )
        numbers[f"{PREFIX}tokens"] = float(trained if same else 0)
        numbers[f"{PREFIX}tokens_unproved"] = float(0 if same else trained)
        square = numbers.pop(f"{PREFIX}support_square", 0.0)
        ratio = numbers.pop(f"{PREFIX}support_ratio", None)
        if ratio is None or stale:
            return numbers
        mean = seen[f"{PREFIX}support_ratio"]
        assert isinstance(mean, Mean)
        error, limit = sqrt(square / float(mean.count)), receipts.config.support
        receipts.require(
            limit is None or abs(ratio - 1) <= limit + 4 * error,
            "support",
            step,
            f"the mean of π_trainer/π_sampler is {ratio:.4g} ± {error:.2g}, not within"
            f" {limit or 0:g} of 1: the sampler draws from other tokens than the trainer keeps",
            "Look how the engine applies generation.top_p, top_k and min_p and whether its logprobs"
            " are of the filtered distribution, or turn them off",
        )
        return numbers | {f"{PREFIX}support_ratio": ratio, f"{PREFIX}support_error": error}


class Ages:
    """How many of a step's tokens were sampled by weights of so many steps before."""

    def __init__(self) -> None:
        self._counts, self._most = Counter[int](), 0

    def add(
        self,
        conversations: Iterable[Conversation],
        step: int,
        synced_at: Callable[[int], int],
        *,
        most: int,
    ) -> None:
        """Add tokens. Raises: RuntimeError for one that is older than `most`.

        synced_at: finished steps when the generator got a version of the weights.
        """
        for each in conversations:
            for turn in each.turns:
                versions = turn.completion.policy_versions
                if most and len(versions) < len(turn.completion.token_ids):
                    raise RuntimeError(
                        "tokens must carry the version of their weights with async.max_staleness,"
                        f" but {len(turn.completion.token_ids) - len(versions)} do not: give"
                        " completions policy_versions"
                    )
                for version, number in Counter(versions).items():
                    self._counts[step - 1 - synced_at(version)] += number
        self._most = most
        if self.oldest > most:
            raise RuntimeError(
                f"no token of step {step} may be older than {most} steps (async.max_staleness), but"
                f" one is {self.oldest} steps old: resume from the last checkpoint, and report this"
            )

    @property
    def oldest(self) -> int:
        return max(self._counts, default=0)

    def metrics(self) -> dict[str, float]:
        if not (total := self._counts.total()):
            return {}
        return {
            "staleness/mean": sum(age * number for age, number in self._counts.items()) / total,
            "staleness/max": float(self.oldest),
            "staleness/limit": float(self._most),
            **{f"staleness/{age}": count / total for age, count in sorted(self._counts.items())},
        }
