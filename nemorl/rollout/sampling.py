"""Responses in progress, and how the next token of each is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemorl.data.transfer import to_device
from nemorl.losses.logprobs import filter_logits, running_mass
from nemorl.rollout.generation import FinishReason, SamplingParams
from nemorl.rollout.random import uniform
from nemorl.rollout.scheduler import Request

FILTERS_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class Slot:
    """A response in progress, on the host."""

    request: Request
    sample: int
    limit: int
    """Its most tokens."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    """`[tokens, layers, topk]`: experts that computed prompt and response so far, if recorded."""
    finish_reason: FinishReason | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def length(self) -> int:
        """With the prompt."""
        return len(self.request.prompt) + len(self.token_ids)


@dataclass
class SlotTensors:
    """The active slots on the device; from token to token only the last four fields change."""

    slots: list[Slot]
    seeds: Tensor
    samples: Tensor
    greedy: Tensor | None
    """Rows that take the most likely token; None: no row."""
    filters: dict[str, Any]
    """temperature, top_k, top_p and min_p: a number for all slots, or one for each."""
    places: Tensor
    """Tokens that each has so far."""
    positions: Tensor
    """Of the newest token of each."""
    tokens: Tensor
    """The newest of each; 0 after a prompt."""
    width: int
    """The largest position + 1."""

    @classmethod
    def of(cls, slots: list[Slot], device: torch.device) -> SlotTensors:
        def column(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        def same_or_column(values: list[Any], dtype: torch.dtype) -> Any:
            return values[0] if len(set(values)) == 1 else column(values, dtype)

        params = [s.params for s in slots]
        greedy = [p.temperature == 0 for p in params]
        return cls(
            slots=slots,
            seeds=column([p.seed for p in params]),
            samples=column([s.sample for s in slots]),
            greedy=column(greedy, torch.bool) if any(greedy) else None,
            filters={
                name: same_or_column(
                    [getattr(p, name) if p.temperature else off for p in params],
                    torch.int64 if name == "top_k" else torch.float32,
                )
                for name, off in FILTERS_OFF.items()
            },
            places=column([len(s.token_ids) for s in slots]),
            positions=column([s.length - 1 for s in slots]),
            tokens=column([s.token_ids[-1] if s.token_ids else 0 for s in slots]),
            width=max(s.length for s in slots),
        )

    def advance(self, tokens: Tensor) -> None:
        self.tokens, self.width = tokens, self.width + 1
        self.places, self.positions = self.places + 1, self.positions + 1


def sample_tokens(logits: Tensor, batch: SlotTensors) -> tuple[Tensor, Tensor]:
    """Return each row's next token and its logprob under the distribution that it was drawn from.

    Sampling inverts the cumulative distribution at the row's `uniform(seed, sample, place)`; greedy
    rows take the best and the model's own logprob.
    """
    logits = filter_logits(logits.float(), **batch.filters)
    logprobs = logits.log_softmax(-1)
    cumulative = running_mass(logprobs.exp())
    threshold = (uniform(batch.seeds, batch.samples, batch.places) * cumulative[:, -1]).long()
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
