"""Tokens per second of the embedded engine against `transformers` generate, on the same model and
prompts, in turn.

    python benchmarks/generation.py [--lengths fixed|skewed]

fixed: every response has 64 tokens. skewed: log-normal lengths (mean 40, at most 256); `generate`
has to go on until the longest of a batch is done.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
import torch
from common import command
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemorl import GenerationConfig, SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is generated."""

    lengths: Literal["fixed", "skewed", "both"] = "both"
    """Of the responses."""
    num_prompts: int = 32
    """Prompts of 16 tokens."""
    group_size: int = 8
    """Responses to each."""
    rounds: int = 5
    """Each engine's turns; the median counts."""


def response_lengths(options: Options, kind: str) -> list[int]:
    if kind == "fixed":
        return [64] * options.num_prompts
    spread = 0.8
    lengths = np.random.default_rng(0).lognormal(
        np.log(40) - spread**2 / 2, spread, options.num_prompts
    )
    return np.clip(lengths.round().astype(int), 1, 256).tolist()


def main(options: Options) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    prompts = torch.randint(2, 512, (options.num_prompts, 16))
    engine = TorchGenerationBackend(model=model)
    engine.setup(GenerationConfig())
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters,"
        f" {options.num_prompts} prompts x {options.group_size}"
    )
    for kind in ("fixed", "skewed") if options.lengths == "both" else (options.lengths,):
        lengths = response_lengths(options, kind)
        tokens = sum(lengths) * options.group_size
        params = [
            SamplingParams(n=options.group_size, max_new_tokens=length, seed=i)
            for i, length in enumerate(lengths)
        ]
        ours, theirs = [], []
        for _ in range(options.rounds):
            start = time.perf_counter()
            completions = engine.generate(prompts.tolist(), params)
            ours.append(time.perf_counter() - start)
            assert sum(len(c.token_ids) for c in completions) == tokens
            start = time.perf_counter()
            longest = max(lengths)
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                num_return_sequences=options.group_size,
            )
            theirs.append(time.perf_counter() - start)
        a, b = tokens / median(ours), tokens / median(theirs)
        print(
            f"{kind:>7}: nemorl {a:8.0f} tokens/s   transformers {b:8.0f} tokens/s   ratio"
            f" {a / b:.2f}"
        )


if __name__ == "__main__":
    command(main, Options, num_prompts=2, group_size=2, rounds=1)
