"""Token logprobs from hidden states in chunks against the naive way through all logits: peak memory
and time, forward and backward.

    python benchmarks/logprobs_memory.py

Also, what the likeliest tokens at each place (`Needs(top_k=…)`) cost besides, with a gradient
through them and without one.

Naive: `log_softmax` of `hidden @ weight.T` for all tokens at once, and `gather`. Peak memory is
what is allocated at the most beyond the arguments: on a GPU as its allocator counts it, on a CPU as
a process of its own grows.
"""

import multiprocessing
import resource
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from common import command, interleaved, median_ratio, synchronize
from torch.nn import functional

from nemorl.losses.logprobs import flat_linear_logprobs, linear_token_logprobs


@dataclass(frozen=True, kw_only=True)
class Options:
    """The size of the problem."""

    tokens: int = 4096
    """Of one row."""
    vocabulary: int = 151_936
    """That of Qwen2."""
    hidden: int = 256
    """Width of the model; the logits' own work grows with it, softmax does not."""
    chunk: int = 640
    """Tokens whose logits are held at a time."""
    rounds: int = 3
    """Turns of each; the median of their ratios counts."""
    entropy: bool = False
    """Entropy besides."""
    top_k: int = 64
    """Of the likeliest tokens."""
    backward: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of hidden states and weight."""
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    """Where it is computed."""


def arguments(options: Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    kind = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    hidden = torch.randn(1, options.tokens + 1, options.hidden, **kind, requires_grad=True)
    # In place: growth below an earlier peak of the process would not be seen.
    weight = torch.randn(options.vocabulary, options.hidden, **kind).mul_(0.05).requires_grad_()
    ids = torch.randint(0, options.vocabulary, (1, options.tokens + 1), device=options.device)
    return hidden, weight, ids


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, options: Options
) -> torch.Tensor:
    every = (hidden[:, :-1] @ weight.T).log_softmax(-1)
    logprobs = every.gather(-1, ids[:, 1:, None])[..., 0]
    return logprobs - (every.exp() * every).sum(-1) if options.entropy else logprobs


def chunked(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, options: Options
) -> torch.Tensor:
    logprobs, entropy = linear_token_logprobs(
        hidden, weight, ids, chunk=options.chunk, with_entropy=options.entropy
    )
    return logprobs if entropy is None else logprobs + entropy


def measured(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, options: Options
) -> torch.Tensor:
    """Logprobs of the loss; with the option entropy, its mean as a metric."""
    options_of_head = {"chunk": options.chunk, "with_entropy": options.entropy}
    logprobs, entropy = linear_token_logprobs(hidden, weight, ids, **options_of_head)
    assert entropy is None or entropy.detach().mean().isfinite()
    return logprobs


def likeliest(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, options: Options
) -> torch.Tensor:
    how: Any = {"chunk": options.chunk, "top_k": options.top_k}
    found = flat_linear_logprobs(hidden[0, :-1], weight, ids[0, 1:], **how)
    if found.top_logprobs is None:
        return found.token_logprobs
    return found.token_logprobs + found.top_logprobs.sum(-1) + found.top_rest_logprobs


def liger(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, options: Options
) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    states, targets = hidden[0, :-1], ids[0, 1:]
    return -liger_fused_linear_cross_entropy(states, weight, targets, reduction="sum")


def pytorch(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, options: Options
) -> torch.Tensor:
    return -functional.linear_cross_entropy(hidden[0, :-1], weight, ids[0, 1:], reduction="sum")


CANDIDATES = {
    "naive": naive,
    "chunked": chunked,
    "measured": measured,
    "likeliest": likeliest,
    "Liger": liger,
    "PyTorch": pytorch,
}
"""The last two without entropy."""


def forward_and_backward(which: str, args: tuple[torch.Tensor, ...], options: Options) -> float:
    """Seconds."""
    for arg in args[:2]:
        arg.grad = None
    start = time.perf_counter()
    with torch.set_grad_enabled(options.backward):
        total = CANDIDATES[which](*args, options).sum()
    if options.backward:
        total.backward()
    synchronize()
    return time.perf_counter() - start


def grown(which: str, options: Options, answer: Any) -> None:
    """Bytes by which this process, a fresh one, grows at the most."""
    args = arguments(options)
    few = (
        args[0][:, :2].detach().requires_grad_(),
        args[1][:8].detach().requires_grad_(),
        args[2][:, :2] % 8,
    )
    # What torch itself loads at its first use is not counted.
    forward_and_backward("naive", few, options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward_and_backward(which, args, options)
    answer.put(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def peak_of(which: str, options: Options) -> int:
    if options.device == "cuda":
        args = arguments(options)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward_and_backward(which, args, options)
        return torch.cuda.max_memory_allocated() - before
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=grown, args=(which, options, answer))
    process.start()
    process.join()
    return answer.get()


def seconds_of(options: Options, *candidates: str) -> list[list[float]]:
    args = arguments(options)
    return interleaved(
        [partial(forward_and_backward, which, args, options) for which in candidates],
        options.rounds,
    )


def main(options: Options) -> None:
    kinds = {name: replace(options, entropy=name == "with") for name in ("with", "without")}
    # All peaks before the times: a process counts its parent's peak as its own.
    peaks = {which: peak_of(which, options) for which in ("naive", "chunked")}
    peaks |= {name: peak_of("measured", kind) for name, kind in kinds.items()}
    sets = [
        replace(options, top_k=k, backward=backward)
        for backward in (True, False)
        for k in (0, options.top_k)
    ]
    of_sets = [peak_of("likeliest", kind) for kind in sets]

    # What a loss that does not need the entropy saves; no gradient goes through it.
    args = arguments(options)
    times = interleaved(
        [partial(forward_and_backward, "measured", args, kind) for kind in kinds.values()],
        options.rounds,
    )
    for i, passes in enumerate(("forward and backward", "forward alone")):
        both = sets[2 * i : 2 * i + 2]
        runs = [partial(forward_and_backward, "likeliest", args, kind) for kind in both]
        plain, more = interleaved(runs, options.rounds)
        memory = of_sets[2 * i + 1] / of_sets[2 * i]
        print(
            f"top_k={options.top_k} / without, {passes}: peak memory {memory:.3f}, time"
            f" {median_ratio(more, plain):.3f}"
        )
    memory, seconds = peaks["without"] / peaks["with"], median_ratio(times[1], times[0])
    print(f"without entropy / with it as a metric: peak memory {memory:.3f}, time {seconds:.3f}")

    gradients = (
        4 * options.hidden * (options.tokens + options.vocabulary)
    )  # they are results, which both have
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden},"
        f" {options.device}"
    )
    print(
        f"  peak memory: naive {peaks['naive'] / 2**20:.0f} MiB, chunked"
        f" {peaks['chunked'] / 2**20:.0f} MiB (of these {gradients / 2**20:.0f} MiB are the"
        f" gradients), chunked / naive {peaks['chunked'] / peaks['naive']:.3f}"
    )

    times = seconds_of(options, "naive", "chunked")
    ratio = median_ratio(times[1], times[0])
    print(
        f"  time: naive {statistics.median(times[0]):.2f} s, chunked"
        f" {statistics.median(times[1]):.2f} s, chunked / naive {ratio:.2f}"
    )


if __name__ == "__main__":
    command(main, Options, tokens=256, vocabulary=4096, hidden=64, chunk=64, rounds=1)
