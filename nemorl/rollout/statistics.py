"""Statistics of judged responses: pass@k, majority votes, confidence intervals, paired tests.

Responses to one prompt are not independent, prompts are: values are per prompt first.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nemorl.checks import at_least, require

EXACT = 16
"""Differences up to which a paired test counts all 2^16 assignments of signs."""
FLIPS = 10_000
"""Random ones that it draws for more."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its confidence interval, mean ± half_width."""

    mean: float
    half_width: float | None
    """None for a single prompt."""
    num_prompts: int


@dataclass(frozen=True)
class Paired:
    """How a second evaluation of the same prompts differs from the first."""

    difference: Interval
    p_value: float
    exact: bool
    """All assignments of signs were counted."""


def mean_by_prompt(values: Iterable[float], group_id: Iterable[int]) -> Values:
    """Return the mean of each prompt's values, [prompts], by first appearance.

    >>> mean_by_prompt([1, 0, 1, 1], [7, 7, 3, 3]).tolist()
    [0.5, 1.0]
    """
    flat = np.asarray(values, dtype=np.float64)
    return np.array([flat[rows].mean() for rows in _rows_of(group_id)])


def pass_at_k(correct: Iterable[float], group_id: Iterable[int], k: int) -> Values:
    """Return the probability that one of k responses is correct, [prompts], unbiased:
    1 − C(n−c, k) / C(n, k) for n responses, c of them correct.

    correct, group_id: [responses]. Raises: ValueError for a prompt with fewer than k responses.
    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.

    >>> pass_at_k([True, False, False, False], [0, 0, 0, 0], 2).tolist()
    [0.5]
    """
    right, found = np.asarray(correct, dtype=bool), list[float]()
    for rows in _rows_of(group_id, k):
        n, c = len(rows), int(right[rows].sum())
        found.append(1 - math.comb(n - c, k) / math.comb(n, k))
    return np.array(found)


def cons_at_k(
    correct: Iterable[float], answers: Sequence[str | None], group_id: Iterable[int], k: int
) -> Values:
    """Return how correct the most frequent of k responses' answers is, [prompts].

    The mean over blocks of k consecutive responses; a rest is left out. Equal texts are one answer,
    as correct as its responses are on average. Of answers with as many votes, the mean: the
    expected value of a random choice. None does not vote; without votes a block counts 0.
    Raises: as `pass_at_k`.

    >>> cons_at_k([1, 1, 0, 0], ["2", "2", "3", None], [0] * 4, 4).tolist()
    [1.0]
    >>> cons_at_k([1, 0], ["2", "3"], [0, 0], 2).tolist()
    [0.5]
    """
    right = np.asarray(correct, dtype=np.float64)

    def voted(block: Sequence[int]) -> float:
        votes: dict[str, list[float]] = {}
        for row in block:
            if (answer := answers[row]) is not None:
                votes.setdefault(answer, []).append(right[row])
        most = max(map(len, votes.values()), default=0)
        shares = [np.mean(found) for found in votes.values() if len(found) == most]
        return float(np.mean(shares)) if shares else 0.0

    return np.array(
        [
            np.mean([voted(rows[i : i + k]) for i in range(0, len(rows) - k + 1, k)])
            for rows in _rows_of(group_id, k)
        ]
    )


def interval(values: Iterable[float], *, confidence: float = 0.95) -> Interval:
    """Return the mean of one value per prompt, ± z · s / √prompts (the central limit theorem).

    The standard error is clustered by prompt; for few prompts it is too small. Source: Miller 2024
    (arXiv 2411.00640).

    >>> found = interval([1, 0, 1, 0])
    >>> found.mean, round(found.half_width, 3)
    (0.5, 0.566)
    """
    flat = np.asarray(values, dtype=np.float64)
    at_least(1, values=len(flat))
    require(0 < confidence < 1, "confidence", "must be between 0 and 1", confidence, "use 0.95")
    half = None
    if len(flat) > 1:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        half = float(z * flat.std(ddof=1) / math.sqrt(len(flat)))
    return Interval(float(flat.mean()), half, len(flat))


def paired(first: Iterable[float], second: Iterable[float], *, seed: int = 0) -> Paired:
    """Return second − first, values of the same prompts in the same order.

    The two-sided p-value is of a sign-flip test: the share of assignments of signs to the
    differences whose sum is as far from 0. Of random ones, (1 + as far) / (1 + FLIPS).

    >>> found = paired([0, 0, 0, 0, 1], [1, 1, 1, 1, 1])
    >>> found.difference.mean, found.p_value
    (0.8, 0.125)
    """
    a, b = (np.asarray(values, dtype=np.float64) for values in (first, second))
    require(a.shape == b.shape, "second", f"must have {len(a)} values", len(b), "pair the prompts")
    differences = b - a
    found = differences[differences != 0]
    limit = abs(found.sum()) - 1e-9 * np.abs(found).sum()  # sums differ by rounding
    if exact := len(found) <= EXACT:
        sums = np.zeros(1)
        for value in found:
            sums = np.concatenate([sums + value, sums - value])
        p_value = float(np.mean(np.abs(sums) >= limit))
    else:
        random, extreme, size = np.random.default_rng(seed), 0, max(1, 1_000_000 // len(found))
        for begin in range(0, FLIPS, size):
            shape = (min(size, FLIPS - begin), len(found))
            signs = 2 * random.integers(0, 2, shape, dtype=np.int8) - 1
            extreme += int((np.abs(signs @ found) >= limit).sum())
        p_value = (1 + extreme) / (1 + FLIPS)
    return Paired(interval(differences), p_value, exact)


def _rows_of(group_id: Iterable[int], k: int = 1) -> list[list[int]]:
    """Return the rows of each prompt."""
    at_least(1, k=k)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_id):
        members.setdefault(int(group), []).append(row)
    fewest = min(map(len, members.values()), default=k)
    require(k <= fewest, "k", f"must be at most the responses per prompt ({fewest})", k, "lower it")
    return list(members.values())
