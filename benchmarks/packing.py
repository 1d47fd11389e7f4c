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


def seconds(function, *args) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    lengths = np.clip(
        np.random.default_rng(0).lognormal(6, 0.8, 100_000).astype(int), 1, CAPACITY
    ).tolist()
    bound = -(-sum(lengths) // CAPACITY)
    few = lengths[:5_000]
    plain = seconds(first_fit, few, CAPACITY)
    rows, whole = len(pack_plan(lengths, CAPACITY)), seconds(pack_plan, lengths, CAPACITY)
    speedup = plain / seconds(pack_plan, few, CAPACITY)
    print(
        f"rows / lower bound {rows / bound:.4f}; {whole:.3f} s; {speedup:.1f} times as fast as the"
        " plain loop on 5,000"
    )


if __name__ == "__main__":
    main()
