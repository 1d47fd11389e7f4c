"""The tables of an evaluation, and of two compared, from records of answers.

A record has `data` (the set's name), `group` (the prompt's number in it), `prompt`, `reward`,
and maybe `correct`, `extracted_answer`, `category` and `cut_by` (the limit that cut the response).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemorl.rollout.statistics import (
    cons_at_k,
    interval,
    mean_by_prompt,
    paired,
    pass_at_k,
    share_interval,
)

Records = Sequence[Mapping[str, Any]]


def summaries(records: Records) -> list[dict[str, Any]]:
    """Return the statistics of all answers, each data set and each category (None: all).

    Accuracy and reward have NAME_ci beside them: (low, high). pass@k, and cons@k where answers
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
    """Return how accuracy, and reward where it is another, of two evaluations of the same prompts
    differ in each slice of `summaries`: second − first, and a p-value (`paired`).

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
            " evaluate both on the same rows, with the same prompts and categories; a prompt whose"
            " conversations all failed is missing, too"
        )
    rows = []
    in_pairs = ([r for key in ours for r in found[key]] for found in (ours, theirs))
    for (place, a), (_, b) in zip(*map(_slices, in_pairs), strict=True):
        plain = all(record["reward"] == record.get("correct") for record in (*a, *b))
        judged = all("correct" in record for record in (*a, *b))
        for name in ["accuracy"] * judged + ["reward"] * (not plain):
            key = "correct" if name == "accuracy" else name
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
    """Return the records of each prompt: by its data set, category and text, and the number of
    equal ones before it.
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
    for name, key in ("accuracy", "correct"), ("reward", "reward"):
        values = [record[key] for record in records if key in record]
        if len(values) < len(records):
            continue
        means = mean_by_prompt(values, groups)
        found[name] = float(means.mean())
        found[f"{name}_ci"] = share_interval(means) if {*values} <= {0, 1} else interval(means).ends
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
    """Return a number for each record's prompt; files that are joined may count from 0 each."""
    numbers: dict[tuple[Any, ...], int] = {}
    keys = [(record["data"], record["group"], record.get("prompt")) for record in records]
    return [numbers.setdefault(key, len(numbers)) for key in keys]
