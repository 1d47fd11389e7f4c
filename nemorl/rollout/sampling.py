"""The responses on their way, and how the next token of each is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemorl.losses.logprobs import filter_logits
from nemorl.rollout.generation import FinishReason, SamplingParams
from nemorl.rollout.random import uniform


@dataclass
class Slot:
    """One response on its way: what the host knows of a slot."""

    request: int
    sample: int
    params: SamplingParams
    seed: int
    prompt_length: int
    limit: int
    """Tokens that it may have: max_new_tokens, or what the model's positions leave."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def position(self) -> int:
        """Where the newest token stands, prompt included."""
        return self.prompt_length + len(self.token_ids) - 1


@dataclass
class SlotTensors:
    """What the device knows of the active slots.

    Made anew when slots come or go; from token to token only the last four change.
    """

    slots: list[Slot]
    seeds: Tensor
    samples: Tensor
    greedy: Tensor | None
    """Which rows take the likeliest token; None: none does."""
    filters: dict[str, Any]
    """temperature, top_k, top_p and min_p: numbers where all slots have the same, otherwise a value
    for each.
    """
    places: Tensor
    """Tokens that each has so far."""
    positions: Tensor
    """Where the newest token of each stands."""
    tokens: Tensor
    """The newest token of each; of a prompt's end, which is no response's, 0."""
    width: int
    """The largest position + 1."""

    @classmethod
    def of(cls, slots: list[Slot], device: torch.device) -> SlotTensors:
        def column(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def same_or_column(values: list[Any], dtype: torch.dtype) -> Any:
            return values[0] if len(set(values)) == 1 else column(values, dtype)

        params = [s.params for s in slots]
        greedy = [p.temperature == 0 for p in params]
        return cls(
            slots=slots,
            seeds=column([s.seed for s in slots]),
            samples=column([s.sample for s in slots]),
            greedy=column(greedy, torch.bool) if any(greedy) else None,
            filters={
                "temperature": same_or_column(
                    [p.temperature or 1.0 for p in params], torch.float32
                ),
                "top_k": same_or_column(
                    [0 if p.temperature == 0 else p.top_k for p in params], torch.int64
                ),
                "top_p": same_or_column(
                    [1.0 if p.temperature == 0 else p.top_p for p in params], torch.float32
                ),
                "min_p": same_or_column(
                    [0.0 if p.temperature == 0 else p.min_p for p in params], torch.float32
                ),
            },
            places=column([len(s.token_ids) for s in slots]),
            positions=column([s.position for s in slots]),
            tokens=column([s.token_ids[-1] if s.token_ids else 0 for s in slots]),
            width=max(s.position for s in slots) + 1,
        )

    def advance(self, tokens: Tensor) -> None:
        """Each slot has one more token."""
        self.tokens, self.places, self.positions, self.width = (
            tokens,
            self.places + 1,
            self.positions + 1,
            self.width + 1,
        )


def sample_tokens(logits: Tensor, batch: SlotTensors) -> tuple[Tensor, Tensor]:
    """The next token of each row and its logprob under the distribution that it was sampled from
    (greedy: the model's own, at temperature 1).

    Sampling inverts the cumulative distribution at the row's own number of `uniform(seed, sample,
    place)`.
    """
    logits = filter_logits(logits.float(), **batch.filters)
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform(batch.seeds, batch.samples, batch.places) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
