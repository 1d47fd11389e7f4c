"""Rewards of a small policy that learns from samples of older weights, by correction.

A policy of 7,312 parameters writes 8 tokens of 16, and its reward is the share of them that is
right for the prompt. 64 responses a step, 8 for each of 8 prompts, are sampled by the weights of K
steps before; `clipped` trains on them with the weights of `importance_weights`, or without. The
table holds the reward of the newest weights over the last ten steps, which is the same number of
samples for all: the median of several seeds, and the lowest.
"""

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from common import command
from torch import Tensor, nn

from nemorl.losses import (
    clipped,
    grpo,
    importance_weights,
    interpolated_logprobs,
    on_policy,
    token_mean_weights,
)

VOCABULARY, LENGTH, PROMPTS, GROUP, WIDTH = 16, 8, 8, 8, 64

CORRECTIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "truncate": {"max": 2.0},
    "mask": {"mode": "mask", "min": 0.5, "max": 5.0},
    "sequence": {"level": "sequence", "max": 2.0},
    "probability": {"max": float("inf"), "probability_bounds": (0.2, 0.2)},
}
"""Keywords of `importance_weights`: none, TIS, IcePop, TIS of whole sequences, prime-rl's."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured."""

    staleness: tuple[int, ...] = (0, 2, 4, 8, 16)
    """Steps between the weights that sample and those that are trained."""
    seeds: int = 5
    steps: int = 300
    learning_rate: float = 0.01
    """Adam's."""
    temperature: float = 1.0
    """Of the sampler; the policy's is 1."""
    updates: int = 1
    """Optimizer steps on each batch, which is divided among them. With several, π_prev is computed
    before the first; "interpolated" is truncate with π_prev from versions.
    """


class Policy(nn.Module):
    """Logits of a token from the prompt, the place and the token before it."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Embedding(PROMPTS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.before = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.head = nn.Sequential(
            nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)
        )

    def forward(self, prompts: Tensor, before: Tensor, places: Tensor) -> Tensor:
        return self.head(self.prompt(prompts) + self.place(places) + self.before(before))

    def logprobs(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probability of each token, [batch, seq]."""
        before = nn.functional.pad(tokens[:, :-1], (1, 0), value=VOCABULARY)
        places = torch.arange(LENGTH).expand_as(tokens)
        logits = self(prompts[:, None].expand_as(tokens), before, places)
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    @torch.no_grad()
    def sample(
        self, prompts: Tensor, generator: torch.Generator, *, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return sampled tokens and their log-probabilities, [batch, seq]."""
        tokens, logprobs = [], []
        before = torch.full_like(prompts, VOCABULARY)
        for place in range(LENGTH):
            logits = self(prompts, before, torch.full_like(prompts, place)) / temperature
            found = logits.log_softmax(-1)
            before = torch.multinomial(found.exp(), 1, generator=generator)[:, 0]
            tokens.append(before)
            logprobs.append(found.gather(-1, before[:, None])[:, 0])
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)


def trained(options: Options, *, staleness: int, correction: str, seed: int) -> float:
    """Return the mean reward of the newest weights over the last ten steps."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy, sampler = Policy(), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=options.learning_rate)
    right = torch.randint(0, VOCABULARY, (PROMPTS, LENGTH), generator=generator)
    prompts = torch.arange(PROMPTS).repeat_interleave(GROUP)
    older = deque([_copied(policy)], maxlen=staleness + 1)
    rewards = []
    for step in range(options.steps):
        sampler.load_state_dict(older[0])
        tokens, sampled = sampler.sample(prompts, generator, temperature=options.temperature)
        reward = (tokens == right[prompts]).float().mean(1)
        advantages = grpo(reward, prompts)[:, None].expand_as(sampled)
        before = policy.logprobs(prompts, tokens).detach()
        parts = torch.randperm(len(prompts), generator=generator).chunk(options.updates)
        for update, rows in enumerate(parts):
            logprobs = policy.logprobs(prompts[rows], tokens[rows])
            mask = torch.ones_like(tokens[rows], dtype=torch.bool)
            if options.updates == 1:
                prev = on_policy(logprobs)
            elif correction == "interpolated":
                prev = interpolated_logprobs(
                    logprobs,
                    sampled[rows],
                    torch.full_like(tokens[rows], max(0, step - staleness) * options.updates),
                    version=step * options.updates,
                    progress=float(update),
                )
            else:
                prev = before[rows]
            keywords, weights = CORRECTIONS.get(correction, {}), None
            if keywords is not None:
                weights, _ = importance_weights(
                    prev, sampled[rows], mask, None, advantages[rows], **keywords
                )
            loss = clipped(logprobs, prev, advantages[rows], token_mean_weights(mask), weights).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        older.append(_copied(policy))
        if step >= options.steps - 10:
            tokens, _ = policy.sample(prompts.repeat(4), generator)
            rewards.append(float((tokens == right[prompts.repeat(4)]).float().mean()))
    return statistics.mean(rewards)


def _copied(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.state_dict().items()}


def main(options: Options) -> None:
    torch.set_num_threads(1)
    names = [*CORRECTIONS, *["interpolated"] * (options.updates > 1)]
    print(
        f"reward after {options.steps} steps: median of {options.seeds} seeds (lowest); Adam"
        f" {options.learning_rate:g}, {options.updates} update(s) a batch, sampler's temperature"
        f" {options.temperature:g}"
    )
    print("".join(f"{name:>15}" for name in ("steps stale", *names)))
    for staleness in options.staleness:
        cells = []
        for name in names:
            found = [
                trained(options, staleness=staleness, correction=name, seed=seed)
                for seed in range(options.seeds)
            ]
            cells.append(f"{statistics.median(found):.2f} ({min(found):.2f})")
        print(f"{staleness:15d}" + "".join(f"{cell:>15}" for cell in cells), flush=True)


if __name__ == "__main__":
    command(main, Options, steps=3, seeds=1, staleness=(0, 2))
