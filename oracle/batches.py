"""The batches that are compared: random ones, and degenerate ones made of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROWS, TOKENS, VOCABULARY = 6, 7, 8
INF = float("inf")


@dataclass(frozen=True)
class Sequences:
    """Six answers of at most seven tokens, [6, 7] each; `rewards` and `group` are [6]."""

    logprobs: Tensor
    prev: Tensor
    generation: Tensor
    reference: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    mask: Tensor
    rewards: Tensor
    group: Tensor

    @property
    def size(self) -> int:
        return ROWS // len(self.group.unique())


@dataclass(frozen=True)
class Pairs:
    """Four pairs: `scores` and `reference` are [2, 4], chosen and rejected."""

    scores: Tensor
    reference: Tensor
    margin: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Two distributions over eight tokens at [2, 4] places; `ids` are the tokens there."""

    logits: Tensor
    teacher: Tensor
    ids: Tensor
    mask: Tensor


def sequences() -> Iterator[tuple[str, Sequences]]:
    """Yield the name and batch of each kind."""
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int, draw: torch.Generator = draw) -> Tensor:
            return torch.randn(shape or (ROWS, TOKENS), generator=draw, dtype=torch.float64)

        lengths = torch.randint(3, TOKENS + 1, (ROWS, 1), generator=draw)
        logprobs = -normal().abs()
        prev = -(logprobs + 0.3 * normal()).abs()
        reference, generation = (-(prev + size * normal()).abs() for size in (0.5, 0.4))
        others = [normal() for _ in range(4)]
        mask = torch.arange(TOKENS) < lengths
        group = torch.arange(ROWS) // 3
        batch = Sequences(logprobs, prev, generation, reference, *others, mask, normal(ROWS), group)
        yield "random", batch
    yield "equal rewards", replace(batch, rewards=torch.full((ROWS,), 0.9))
    yield "groups of one", replace(batch, group=torch.arange(ROWS))
    yield "empty mask", replace(batch, mask=torch.zeros_like(mask))
    row = torch.arange(ROWS)[:, None]
    yield "one answer masked", replace(batch, mask=mask & (row != 1))
    yield "tool tokens", replace(batch, mask=mask & (torch.arange(TOKENS) != 1))
    yield "single tokens", replace(batch, mask=mask & (torch.arange(TOKENS) == 0))
    yield "no end token", replace(batch, mask=torch.ones_like(mask))
    odd = (row % 2).double()
    for by, name in ((3, "ratio far from 1"), (60, "log ratio 60")):
        shifts = {"logprobs": odd, "prev": 1 - odd, "generation": odd}
        moved = {of: getattr(batch, of) - by * shift for of, shift in shifts.items()}
        yield name, replace(batch, **moved)
    cut = generation.clone()
    cut[0, 0] = -INF
    yield "sampler at -inf", replace(batch, generation=cut)
    holes = {
        name: torch.where(mask, getattr(batch, name), torch.nan)
        for name in ("logprobs", "prev", "generation", "reference", "values", "old_values")
    }
    yield "NaN under the mask", replace(batch, **holes)


def pairs() -> Iterator[tuple[str, Pairs]]:
    """Yield the name and batch of each kind."""
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        scores, reference = (
            -torch.rand(2, 4, generator=draw, dtype=torch.float64) * 5 for _ in range(2)
        )
        margin = torch.rand(4, generator=draw, dtype=torch.float64)
        yield "random", Pairs(scores, reference, margin)
    yield "policy = reference", Pairs(scores, scores, margin)
    yield "chosen = rejected", Pairs(scores[:1].expand(2, 4), reference, margin)
    yield "one pair", Pairs(scores[:, :1], reference[:, :1], margin[:1])
    huge = 400 * torch.tensor([[1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, 1.0, -1.0]]).double()
    yield "scores ±400", Pairs(huge + scores - 401, reference, margin)


def vocabularies() -> Iterator[tuple[str, Vocabulary]]:
    """Yield the name and batch of each kind."""
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        logits, teacher = (
            2 * torch.randn(2, 4, VOCABULARY, generator=draw, dtype=torch.float64) for _ in range(2)
        )
        ids = torch.randint(VOCABULARY, (2, 4), generator=draw)
        mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
        batch = Vocabulary(logits, teacher, ids, mask)
        yield "random", batch
    yield "student = teacher", replace(batch, teacher=logits)
    yield "sure student", replace(batch, logits=logits + 30 * teacher)
    yield "sure teacher", replace(batch, teacher=teacher * 30)
    excluded = teacher.clone()
    excluded[..., 0] = -INF
    yield "teacher excludes a token", replace(batch, teacher=excluded)
    excluded = logits.clone()
    excluded[..., 1] = teacher[..., 1] = -INF
    yield "both exclude a token", replace(batch, logits=excluded, teacher=teacher)
    yield "empty mask", replace(batch, mask=torch.zeros_like(mask))
