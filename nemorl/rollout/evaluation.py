"""The tables of an evaluation, and of two compared, from records of answers.

A record has `data` (the set's name), `group` (the prompt's number in it), `prompt`, `reward`,
and maybe `correct`, `correct_norm` (by likelihood per byte), `extracted_answer`, `category` and
`cut_by` (the limit that cut the response).
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemorl.checks import at_least, require

EXACT = 16
"""Differences up to which `paired` counts all assignments of signs."""
FLIPS = 10_000
"""Random ones that it draws for more."""
METRICS = {"accuracy": "correct", "accuracy_norm": "correct_norm", "reward": "reward"}
"""What is averaged, and its key in records."""

Values = NDArray[np.float64]


class Interval(NamedTuple):
    """mean ± half_width (None for a single prompt), with 95 % confidence."""

    mean: float
    half_width: float | None


def mean_by_prompt(values: Iterable[float], group_id: Iterable[int]) -> Values:
    """Return each prompt's mean, [prompts], by first appearance.

    >>> mean_by_prompt([1, 0, 1, 1], [7, 7, 3, 3]).tolist()
    [0.5, 1.0]
    """
    flat = np.asarray(values, dtype=np.float64)
    return np.array([flat[rows].mean() for rows in _rows_of(group_id)])


def pass_at_k(correct: Iterable[float], group_id: Iterable[int], k: int) -> Values:
    """Return the probability that one of k responses is correct, [prompts], unbiased:
    1 − C(n−c, k) / C(n, k) for n responses, c of them correct.

    correct, group_id: [responses]. Raises: ValueError for a prompt with fewer than k.
    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.

    >>> pass_at_k([True, False, False, False], [0, 0, 0, 0], 2).tolist()
    [0.5]
    """
    right = np.asarray(correct, dtype=bool)
    sizes = [(len(rows), int(right[rows].sum())) for rows in _rows_of(group_id, k)]
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in sizes])


def cons_at_k(
    correct: Iterable[float], answers: Sequence[str | None], group_id: Iterable[int], k: int
) -> Values:
    """Return how correct the most frequent of k responses' answers is, [prompts].

    The mean over blocks of k consecutive responses. Equal texts are one answer, as correct as its
    responses on average; tied answers count with their mean, as a random choice would; None has
    no vote; without votes 0. Raises: as `pass_at_k`.

    >>> cons_at_k([1, 1, 0, 0], ["2", "2", "3", None], [0] * 4, 4).tolist()
    [1.0]
    """
    right = np.asarray(correct, dtype=np.float64)

    def voted(block: Sequence[int]) -> float:
        votes: dict[str | None, list[float]] = {}
        for row in block:
            votes.setdefault(answers[row], []).append(right[row])
        votes.pop(None, None)
        most = max(map(len, votes.values()), default=0)
        return fmean([fmean(found) for found in votes.values() if len(found) == most] or [0.0])

    return np.array(
        [
            fmean(voted(rows[i : i + k]) for i in range(0, len(rows) - k + 1, k))
            for rows in _rows_of(group_id, k)
        ]
    )


def interval(values: Iterable[float]) -> Interval:
    """Return the mean of one value per prompt, ± 1.96 s / √prompts: clustered by prompt.

    Source: Miller 2024 (arXiv 2411.00640).

    >>> found = interval([1, 0, 1, 0])
    >>> found.mean, round(found.half_width, 3)
    (0.5, 0.566)
    """
    flat = np.asarray(values, dtype=np.float64)
    at_least(1, values=len(flat))
    half = 1.959964 * flat.std(ddof=1) / math.sqrt(len(flat)) if len(flat) > 1 else None
    return Interval(float(flat.mean()), half and float(half))


def share_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval of a share, of one value in 0 … 1 per prompt:
    (m + z²/2n ± z √(m (1 − m) / n + z²/4n²)) / (1 + z²/n), where m is the mean and z = 1.96.

    n is the number of independent responses with the same variance of the mean,
    m (1 − m) · prompts / s², but at least the number of prompts. Unlike `interval`, it stays in
    0 … 1, and has a width where m is 0 or 1.

    Source: Wilson 1927; Brown, Cai & DasGupta 2001; n: Korn & Graubard 1998.

    >>> [round(end, 3) for end in share_interval([1, 1, 1, 1])]
    [0.51, 1.0]
    """
    flat = np.asarray(values, dtype=np.float64)
    at_least(1, values=len(flat))
    mean, n, z = float(flat.mean()), float(len(flat)), 1.959964
    if flat.var():
        n = max(n, mean * (1 - mean) * n / float(flat.var(ddof=1)))
    middle, half = mean + z * z / (2 * n), z * math.sqrt(mean * (1 - mean) / n + (z / (2 * n)) ** 2)
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def paired(
    first: Iterable[float], second: Iterable[float], *, seed: int = 0
) -> tuple[Interval, float]:
    """Return second − first, values of the same prompts, and the two-sided p-value of a sign-flip
    test: the share of assignments of signs to the differences whose sum is as far from 0.

    Of more than EXACT differences the signs are random: (1 + number as far) / (1 + FLIPS).

    >>> paired([0, 0, 0, 0, 1], [1, 1, 1, 1, 1])[1]
    0.125
    """
    a, b = (np.asarray(values, dtype=np.float64) for values in (first, second))
    require(a.shape == b.shape, "second", f"must have {len(a)} values", len(b), "pair the prompts")
    found = (b - a)[a != b]
    limit = abs(found.sum()) - 1e-9 * np.abs(found).sum()  # sums differ by rounding
    if len(found) <= EXACT:
        sums = np.zeros(1)
        for value in found:
            sums = np.concatenate([sums + value, sums - value])
        return interval(b - a), float(np.mean(np.abs(sums) >= limit))
    random, far, size = np.random.default_rng(seed), 0, max(1, 1_000_000 // len(found))
    for begin in range(0, FLIPS, size):
        signs = 2 * random.integers(0, 2, (min(size, FLIPS - begin), len(found)), dtype=np.int8) - 1
        far += int((np.abs(signs @ found) >= limit).sum())
    return interval(b - a), (1 + far) / (1 + FLIPS)


def _rows_of(group_id: Iterable[int], k: int = 1) -> list[list[int]]:
    at_least(1, k=k)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_id):
        members.setdefault(int(group), []).append(row)
    fewest = min(map(len, members.values()), default=k)
    require(k <= fewest, "k", f"must be at most the responses per prompt ({fewest})", k, "lower it")
    return list(members.values())


Records = Sequence[Mapping[str, Any]]


def summaries(records: Records) -> list[dict[str, Any]]:
    """Return the statistics of all answers, each data set and each category (None: all).

    METRICS have NAME_ci beside them: (low, high). pass@k, and cons@k where answers
    were read in each data set, are for k = 2, 4, … and n, the most answers that a prompt has. They
    are of the prompts that have k; left_out@k, where there are any, counts the others.

    >>> records = [{"data": "sums", "group": 0, "correct": n > 0, "reward": n} for n in (0, 1)]
    >>> summaries(records)[0]["accuracy"], summaries(records)[0]["pass@2"]
    (0.5, 1.0)
    """
    most = max(Counter(_groups(records)).values())
    sizes = sorted({2**i for i in range(1, most.bit_length())} | {most} - {1})
    return [{**place, **_summary(part, sizes)} for place, part in _slices(records)]


def comparison(first: Records, second: Records, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return how METRICS, of rewards one that is not accuracy, of two evaluations of the same
    prompts differ in each slice of `summaries`: second − first, and a p-value (`paired`).

    Prompts are paired as in `by_prompt`. Raises: ValueError for other prompts.

    >>> record = {"data": "sums", "group": 0, "prompt": "1+1=", "correct": False, "reward": 0.0}
    >>> comparison([record], [{**record, "correct": True, "reward": 1.0}])[0]["difference"]
    1.0
    """
    ours, theirs = by_prompt(first), by_prompt(second)
    if ours.keys() != theirs.keys():
        lacked = next((f" without {key[2]!r}" for key in ours if key not in theirs), "")
        raise ValueError(
            f"second must have the {len(ours)} prompts of first, but it has {len(theirs)}{lacked}:"
            " evaluate both on the same rows, prompts and categories; a prompt whose conversations"
            " all failed is missing, too"
        )
    rows = []
    in_pairs = ([r for key in ours for r in found[key]] for found in (ours, theirs))
    for (place, a), (_, b) in zip(*map(_slices, in_pairs), strict=True):
        plain = all(record["reward"] == record.get("correct") for record in (*a, *b))
        for name, key in METRICS.items():
            if (plain and name == "reward") or any(key not in record for record in (*a, *b)):
                continue
            means = [mean_by_prompt([r[key] for r in part], _groups(part)) for part in (a, b)]
            (difference, half), p_value = paired(*means, seed=seed)
            rows.append(
                {
                    **place,
                    "metric": name,
                    "num_prompts": len(means[0]),
                    "first": float(means[0].mean()),
                    "second": float(means[1].mean()),
                    "difference": difference,
                    "difference_ci": half,
                    "p_value": p_value,
                }
            )
    return rows


def by_prompt(records: Records) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Return the records of each prompt, by its data set, category and text, and the number of
    equal prompts before it.
    """
    found: dict[tuple[Any, ...], dict[Any, list[Mapping[str, Any]]]] = {}
    for record in records:
        equal = found.setdefault((record["data"], record.get("category"), record["prompt"]), {})
        equal.setdefault(record["group"], []).append(record)
    return {
        (*key, n): part for key, equal in found.items() for n, part in enumerate(equal.values())
    }


def _slices(records: Records) -> Iterator[tuple[dict[str, Any], Records]]:
    yield {"data": None, "category": None}, records
    names = dict.fromkeys(record["data"] for record in records)
    for name in names:
        part = [record for record in records if record["data"] == name]
        categories = {record["category"] for record in part if "category" in record}
        if len(names) > 1:
            yield {"data": name, "category": None}, part
        for category in sorted(categories):
            own = [record for record in part if record.get("category") == category]
            yield {"data": name, "category": category}, own


def _summary(records: Records, sizes: Sequence[int]) -> dict[str, Any]:
    groups = _groups(records)
    counts = Counter(groups)
    read = {record["data"] for record in records if record.get("extracted_answer") is not None}
    found: dict[str, Any] = {"num_prompts": len(counts)}
    for name, key in METRICS.items():
        values = [record[key] for record in records if key in record]
        if len(values) < len(records):
            continue
        means = mean_by_prompt(values, groups)
        mean, half = interval(means)
        ends = None if half is None else (mean - half, mean + half)
        found[name] = mean
        found[f"{name}_ci"] = share_interval(means) if {*values} <= {0, 1} else ends
    cut = ["cut_by" in record for record in records]
    found["truncated_fraction"] = float(mean_by_prompt(cut, groups).mean())
    for k in sizes:
        part = [r for r, group in zip(records, groups, strict=True) if counts[group] >= k]
        correct, of = [record["correct"] for record in part if "correct" in record], _groups(part)
        if part and len(correct) == len(part):
            found[f"pass@{k}"] = float(pass_at_k(correct, of, k).mean())
            if read == {record["data"] for record in records}:
                answers = [record.get("extracted_answer") for record in part]
                found[f"cons@{k}"] = float(cons_at_k(correct, answers, of, k).mean())
        if left_out := len(counts) - len({*of}):
            found[f"left_out@{k}"] = left_out
    return found


def _groups(records: Records) -> list[int]:
    """Return a number for each record's prompt; joined files may count from 0 each."""
    numbers: dict[tuple[Any, ...], int] = {}
    keys = [(record["data"], record["group"], record.get("prompt")) for record in records]
    return [numbers.setdefault(key, len(numbers)) for key in keys]
