"""The embedded engine against `generate` and against what memory allows; GRPO against TRL's."""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import grpo_vs_trl
import torch
from common import interleaved, silence
from generation import turns

from benchmarks.gpu.models import PEERS, config_of, random_model
from benchmarks.gpu.part import Measurements, Row, require_package, row
from nemorl import SamplingParams

PROMPT = 16


def measurements(small: bool) -> Measurements:
    for rows in (4,) if small else (64, 512):
        yield f"{rows} rows", partial(engine, rows, small)
    yield "GRPO", partial(grpo, small)


def bandwidth(device: str, megabytes: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(megabytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(interleaved([lambda: target.copy_(source)], 5)[0])


def engine(rows: int, small: bool) -> Iterator[Row]:
    shape, device, new = ("small", "cpu", 4) if small else ("1.5B", "cuda", 128)
    config = config_of(shape)
    model = random_model(config, device)
    baseline = random_model(config, device, torch.bfloat16)
    prompts = torch.randint(2, config.vocab_size, (rows, PROMPT))
    params = [SamplingParams(max_new_tokens=new, seed=i) for i in range(rows)]
    # A static cache is compiled on GPUs, which the uncounted round pays for.
    static: Any = {} if small else {"cache_implementation": "static"}
    rounds = 1 if small else 3
    ours, theirs = turns(
        model, baseline, prompts, params, rounds=rounds, precision="bfloat16", **static
    )
    speed, peer = (rows * new / median(times) for times in (ours, theirs))
    note = f"{speed:,.0f} and {peer:,.0f} tokens/s, {new} new tokens"
    what = f"{rows} rows, × the speed of generate with a static cache"
    yield row(what, speed / peer, at_least=1, note=note)
    # Each step reads the weights, and keys and values of all tokens so far, in bfloat16.
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    cache = 4 * config.num_hidden_layers * heads * rows * (PROMPT + new / 2)
    weights = 2 * sum(p.numel() for p in baseline.parameters())
    fastest = rows * bandwidth(device, 16 if small else 2048) / (weights + cache)
    note = f"memory allows {fastest:,.0f} tokens/s"
    yield row(f"{rows} rows, share of the roofline", speed / fastest, note=note)


def grpo(small: bool) -> Iterator[Row]:
    """Both sample in plain PyTorch: the embedded engine, and transformers' generate."""
    require_package("trl")
    sizes = {**PEERS, "steps": 3, "micro_batch": 64}
    if small:
        sizes = {"num_prompts": 2, "group_size": 2, "rounds": 1, "steps": 3, "micro_batch": 4}
    options = grpo_vs_trl.Options(**sizes)
    for kind in ("fixed", "skewed"):
        with silence():
            ours, theirs, ratio = grpo_vs_trl.compare(options, kind)
        note = f"{ours:,.0f} and {theirs:,.0f} tokens/s"
        what = f"a GRPO step, {kind} lengths, × TRL's speed"
        yield row(what, ratio, at_least={"fixed": 1.5, "skewed": 3.0}[kind], note=note)
