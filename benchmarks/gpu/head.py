"""Logprobs from hidden states in chunks, with entropy, against the naive way and other kernels."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from common import median_ratio
from logprobs_memory import Options, peak_of, seconds_of

from benchmarks.gpu.part import Measurements, Row, Skip, require_package, row


def measurements(small: bool) -> Measurements:
    options = Options(tokens=32_768, hidden=1536, chunk=1024, rounds=5, entropy=True)
    if small:
        options = replace(options, tokens=2048, vocabulary=4096, hidden=64, chunk=64, device="cpu")
    else:
        options = replace(options, device="cuda", dtype="bfloat16")
    yield "chunks", partial(ours, options)
    for name in ("Liger", "PyTorch"):
        yield name, partial(peer, name, replace(options, entropy=False))


def ours(options: Options) -> Iterator[Row]:
    """With half as many tokens where the naive way runs out of memory."""
    while True:
        try:
            peak = peak_of("chunked", options) / peak_of("naive", options)
            naive, chunked = seconds_of(options, "naive", "chunked")
            break
        except torch.OutOfMemoryError:
            if options.tokens < 2048:
                raise
            options = replace(options, tokens=options.tokens // 2)
    note = f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}"
    yield row("peak memory, × naive", peak, at_most=1 / 8, note=note)
    yield row("time, × naive", median_ratio(chunked, naive), at_most=1.3, note=note)


def peer(name: str, options: Options) -> Iterator[Row]:
    if name == "Liger" and options.device == "cpu":
        raise Skip("Liger's kernels need a GPU")
    if name == "Liger":
        require_package("liger_kernel")
    if name == "PyTorch" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        raise Skip("PyTorch has linear_cross_entropy from 2.12 on")
    theirs, chunked = seconds_of(options, name, "chunked")
    note = "no entropy on either side"
    if options.device == "cuda":
        peak = peak_of("chunked", options) / peak_of(name, options)
        note = f"peak memory {peak:.2f} × theirs; {note}"
    yield row(f"time, × {name}'s fused cross entropy", median_ratio(chunked, theirs), note=note)
