"""Token logprobs from hidden states in chunks against the naive way through all logits: peak memory
and time, forward and backward.

    python benchmarks/logprobs_memory.py

Naive: `log_softmax` of `hidden @ weight.T` for all tokens at once, and `gather`. Peak memory is
what is allocated at the most beyond the arguments (on a GPU as its allocator counts it, on a CPU as
the process grows), each in a process of its own.
"""

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from common import command

from nemorl.losses.logprobs import linear_token_logprobs


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
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    """Where it is computed."""


def arguments(options: Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(
        1, options.tokens + 1, options.hidden, device=options.device, requires_grad=True
    )
    weight = (
        0.05 * torch.randn(options.vocabulary, options.hidden, device=options.device)
    ).requires_grad_()
    return (
        hidden,
        weight,
        torch.randint(0, options.vocabulary, (1, options.tokens + 1), device=options.device),
    )


def naive(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logprobs = (hidden[:, :-1] @ weight.T).log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None])[..., 0]


def chunked(options: Options) -> Callable[..., torch.Tensor]:
    return lambda *args: linear_token_logprobs(*args, chunk=options.chunk)[0]


def forward_and_backward(
    function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]
) -> float:
    """Seconds."""
    for arg in args[:2]:
        arg.grad = None
    start = time.perf_counter()
    function(*args).sum().backward()
    if args[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(which: str, options: Options, answer: Any) -> None:
    """Bytes allocated at the most beyond the arguments, in a fresh process."""
    args = arguments(options)
    function = naive if which == "naive" else chunked(options)
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        forward_and_backward(function, args)
        answer.put(torch.cuda.max_memory_allocated() - before)
        return
    few = (
        args[0][:, :2].detach().requires_grad_(),
        args[1][:8].detach().requires_grad_(),
        args[2][:, :2] % 8,
    )
    forward_and_backward(naive, few)  # what torch itself loads at its first use is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward_and_backward(function, args)
    answer.put(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def main(options: Options) -> None:
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for which in ("naive", "chunked"):
        answer = context.Queue()
        process = context.Process(target=peak, args=(which, options, answer))
        process.start()
        peaks[which] = answer.get()
        process.join()
    gradients = (
        4 * options.hidden * (options.tokens + options.vocabulary)
    )  # they are results, which both have
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden},"
        f" {options.device}"
    )
    print(
        f"  peak memory: naive {peaks['naive'] / 2**20:.0f} MiB, chunked"
        f" {peaks['chunked'] / 2**20:.0f} MiB",
        end="",
    )
    print(
        f" (of these {gradients / 2**20:.0f} MiB are the gradients), chunked / naive"
        f" {peaks['chunked'] / peaks['naive']:.3f}"
    )

    args, function = arguments(options), chunked(options)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(options.rounds + 1):
        for one, candidate in zip(times, (naive, function), strict=True):
            seconds = forward_and_backward(candidate, args)
            if number:
                one.append(seconds)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    print(
        f"  time: naive {statistics.median(times[0]):.2f} s, chunked"
        f" {statistics.median(times[1]):.2f} s, chunked / naive {ratio:.2f}"
    )


if __name__ == "__main__":
    command(main, Options, tokens=256, vocabulary=4096, hidden=64, chunk=64, rounds=1)
