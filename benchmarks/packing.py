"""Packing 100,000 log-normal lengths: rows against the lower bound, and time against a plain
first-fit loop over sorted lengths (on 5,000 of them).

python benchmarks/packing.py
"""

import time

import numpy as np

from nemorl.data.packing import pack_plan

CAPACITY = 4096


def first_fit(lengths: list[int], capacity: int) -> list[int]:
    """The textbook loop, quadratic in the number of rows."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        for row, space in enumerate(free):
            if space >= length:
                free[row] -= length
                break
        else:
            free.append(capacity - length)
    return free


def seconds(function, *args, **options) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function(*args, **options)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    lengths = np.clip(
        np.random.default_rng(0).lognormal(6, 0.8, 100_000).astype(int), 1, CAPACITY
    ).tolist()
    bound = -(-sum(lengths) // CAPACITY)
    few = lengths[:5_000]
    plain = seconds(first_fit, few, CAPACITY)
    print(
        f"{'algorithm':<24}{'rows / bound':>14}{'seconds':>10}{'speed-up over the plain loop (5,000)':>40}"
    )
    for algorithm in (
        "best_fit_decreasing",
        "first_fit_decreasing",
        "modified_first_fit_decreasing",
        "concatenative",
    ):
        rows = len(pack_plan(lengths, CAPACITY, algorithm=algorithm))
        whole = seconds(pack_plan, lengths, CAPACITY, algorithm=algorithm)
        ratio = plain / seconds(pack_plan, few, CAPACITY, algorithm=algorithm)
        print(f"{algorithm:<30}{rows / bound:>8.4f}{whole:>10.3f}{ratio:>39.1f}x")


if __name__ == "__main__":
    main()
