"""What the law tests draw: a few ragged sequences and every per-token array that a loss may read.

Hypothesis draws the structure, which shrinks; a torch generator makes the numbers, cheaply.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

VOCAB = 5
TOP_K = 3
HIDDEN = 3

MASKS = ("response", "holes", "all", "none")
NOISES = (0.3, 0.02, 2.0, 0.0)
"""How far the policies are apart: inside the trust region, hardly, far outside, not at all."""
ADVANTAGES = ("sequence", "token", "equal")
REWARDS = ("binary", "equal", "real")


@dataclass(frozen=True)
class Problem:
    """Sequences without any layout: token arrays are `[tokens, ...]`, sequence arrays
    `[sequences, ...]`, in float64.
    """

    lengths: tuple[int, ...]
    seed: int
    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    shared: dict[str, Tensor]
    """What belongs to no token, such as the LM head."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def starts(self) -> list[int]:
        """Where each sequence begins among the tokens."""
        return [sum(self.lengths[:i]) for i in range(self.num_sequences)]

    def generator(self, salt: int = 1) -> torch.Generator:
        """Numbers that depend on the example alone."""
        return torch.Generator().manual_seed(self.seed * 1009 + salt)

    def but(self, **arrays: Tensor) -> "Problem":
        """The same sequences with other values in some arrays."""
        pick = lambda old: {name: arrays.get(name, value) for name, value in old.items()}  # noqa: E731
        return replace(
            self, tokens=pick(self.tokens), sequences=pick(self.sequences), shared=pick(self.shared)
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        flags = "".join("x" if trained else "." for trained in self.tokens["mask"])
        ends = zip(self.starts, self.lengths, strict=True)
        rows = " ".join(flags[start : start + length] for start, length in ends)
        return (
            f"Problem(seed={self.seed}, mask={rows!r},"
            f" group_id={self.sequences['group_id'].tolist()},"
            f" rewards={self.sequences['rewards'].tolist()})"
        )


def _trained(kind: str, lengths: tuple[int, ...], generator: torch.Generator) -> Tensor:
    rows = []
    for length in lengths:
        cut = int(torch.randint(1, max(length, 2), (), generator=generator))
        row = torch.arange(length) >= (cut if kind in ("response", "holes") else 1)
        if kind == "holes":  # tool output between two answers
            row &= torch.rand(length, generator=generator) < 0.7
        rows.append(row & (kind != "none"))
    mask = torch.cat(rows)
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    if kind != "none" and not mask.any() and lengths[longest] > 1:
        mask[sum(lengths[:longest]) + 1] = True
    return mask


def _token_arrays(
    mask: Tensor,
    lengths: tuple[int, ...],
    noise: float,
    advantages: str,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    count, double = len(mask), torch.float64
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=double)  # noqa: E731
    logprobs = -normal(count).abs() - 0.1
    per_sequence = torch.repeat_interleave(normal(len(lengths)), torch.tensor(lengths))
    teacher = normal(count, VOCAB)
    top_logprobs, top_ids = torch.log_softmax(teacher, -1).topk(TOP_K, -1)
    values, logits = normal(count), normal(count, VOCAB)
    student = torch.log_softmax(logits, -1)
    inside = torch.zeros_like(student).scatter(-1, top_ids, 1.0) > 0
    return {
        "token_logprobs": logprobs,
        "prev_logprobs": logprobs + noise * normal(count),
        "generation_logprobs": logprobs + noise * normal(count),
        "reference_logprobs": logprobs + noise * normal(count),
        "teacher_logprobs": logprobs + noise * normal(count),
        "importance_weights": torch.rand(count, generator=generator, dtype=double) + 0.5,
        "advantages": {
            "sequence": per_sequence,
            "token": normal(count),
            "equal": torch.ones(count, dtype=double),
        }[advantages],
        "loss_weights": torch.where(
            mask, torch.rand(count, generator=generator, dtype=double) + 0.1, 0.0
        ),
        "policy_versions": torch.randint(-1, 6, (count,), generator=generator),
        "mask": mask,
        "entropy": normal(count).abs(),
        "values": values,
        "old_values": values + noise * normal(count),
        "returns": values + normal(count),
        "token_rewards": torch.where(mask, normal(count), 0.0),
        "kl": normal(count).abs(),
        "logits": logits,
        "top_logprobs": top_logprobs,
        "some_top_logprobs": torch.where(top_ids == 0, float("-inf"), top_logprobs),
        "top_ids": top_ids,
        "target_logprobs": student.gather(-1, top_ids),
        "target_rest_logprobs": torch.where(inside, float("-inf"), student).logsumexp(-1),
        "hidden": normal(count, HIDDEN),
        "input_ids": torch.randint(0, VOCAB, (count,), generator=generator),
        "cotangent": normal(count),
    }


def _sequence_arrays(
    lengths: tuple[int, ...],
    group_id: Tensor,
    rewards: str,
    noise: float,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    count, double = len(lengths), torch.float64
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=double)  # noqa: E731
    chosen, rejected = -4 * normal(count).abs() - 1, -4 * normal(count).abs() - 1
    binary = (torch.rand(count, generator=generator) < 0.5).to(double)
    real = torch.round(normal(count), decimals=1)  # ties now and then
    return {
        "policy_chosen": chosen,
        "policy_rejected": rejected,
        "reference_chosen": chosen + noise * normal(count),
        "reference_rejected": rejected + noise * normal(count),
        "desirable": torch.rand(count, generator=generator) < 0.5,
        "pair_weights": torch.where(
            torch.rand(count, generator=generator) < 0.8,
            torch.rand(count, generator=generator, dtype=double) + 0.1,
            0.0,
        ),
        "chosen_scores": normal(count),
        "rejected_scores": normal(count),
        "margin": normal(count).abs(),
        "rewards": {
            "binary": binary,
            "equal": torch.full((count,), 0.1, dtype=double),
            "real": real,
        }[rewards],
        "greedy_rewards": normal(count),
        "reward_components": torch.round(normal(count, 2), decimals=1),
        "group_id": group_id,
        "lengths": torch.tensor(lengths),
        "truncated": torch.rand(count, generator=generator) < 0.4,
        "sequence_cotangent": normal(count),
    }


# Built once: making a strategy costs more than drawing from it.
_COUNT = st.sampled_from((3, 2, 4, 5, 1))
_LENGTHS = {
    count: st.tuples(*[st.sampled_from((3, 5, 2, 7, 1, 4))] * count) for count in range(1, 6)
}
_GROUPS = {count: st.tuples(*[st.sampled_from((7, 3, 12))] * count) for count in range(1, 6)}
_KINDS = st.sampled_from(list(itertools.product(MASKS, NOISES, ADVANTAGES, REWARDS)))
_SEED = st.integers(0, 2**20)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """One to five ragged sequences, of one to seven tokens, in up to three groups."""
    count = draw(_COUNT)
    lengths, groups = draw(_LENGTHS[count]), draw(_GROUPS[count])
    mask, noise, advantages, rewards = draw(_KINDS)
    return problem(
        draw(_SEED),
        lengths,
        groups=groups,
        mask=mask,
        noise=noise,
        advantages=advantages,
        rewards=rewards,
    )


def problem(
    seed: int,
    lengths: tuple[int, ...] = (3, 5, 1, 4),
    *,
    groups: tuple[int, ...] = (7, 3, 7, 7, 3),
    mask: str = "holes",
    noise: float = 0.3,
    advantages: str = "sequence",
    rewards: str = "real",
) -> Problem:
    """One fixed example, where no search is wanted (compilation, negative controls)."""
    group_id = torch.tensor(groups[: len(lengths)])
    generator = torch.Generator().manual_seed(seed)
    trained = _trained(mask, lengths, generator)
    tokens = _token_arrays(trained, lengths, noise, advantages, generator)
    sequences = _sequence_arrays(lengths, group_id, rewards, noise, generator)
    tokens["sequence"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens["token_group_id"] = group_id[tokens["sequence"]]
    shared = {
        "head": torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64),
        "kl_baseline": torch.tensor(0.3, dtype=torch.float64),
    }
    return Problem(lengths, seed, tokens, sequences, shared)
