"""Tokens per second of the embedded engine against `transformers` generate, on the same model and
prompts, in turn.

    python benchmarks/generation.py [--lengths fixed|skewed]

fixed: every response has 64 tokens. skewed: log-normal lengths (mean 40, at most 256); `generate`
has to go on until the longest of a batch is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from common import VOCABULARY, command, interleaved, model_config, skewed_lengths
from transformers import Qwen2ForCausalLM

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
    return skewed_lengths(options.num_prompts)


def turns(
    model: Any,
    baseline: Any,
    prompts: torch.Tensor,
    params: Sequence[SamplingParams],
    *,
    rounds: int,
    precision: str = "float32",
    **options: Any,
) -> tuple[list[float], list[float]]:
    """Seconds of the engine and of `generate`, of one round each in turn.

    baseline: the model of `generate`, which also gets `options`.
    """
    engine = TorchGenerationBackend(model=model, precision=precision)
    engine.setup(GenerationConfig(max_batch_size=max(256, len(prompts) * params[0].n)))
    inputs = prompts.to(baseline.device)

    def ours() -> None:
        completions = engine.generate(prompts.tolist(), params)
        assert sum(len(c.token_ids) for c in completions) == sum(
            p.n * p.max_new_tokens for p in params
        )

    def theirs() -> None:
        baseline.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(p.max_new_tokens for p in params),
            num_return_sequences=params[0].n,
            **options,
        )

    first, second = interleaved([ours, theirs], rounds)
    return first, second


def main(options: Options) -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(model_config(eos_token_id=None)).eval()
    prompts = torch.randint(2, VOCABULARY, (options.num_prompts, 16))
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters,"
        f" {options.num_prompts} prompts x {options.group_size}"
    )
    for kind in ("fixed", "skewed") if options.lengths == "both" else (options.lengths,):
        lengths = response_lengths(options, kind)
        params = [
            SamplingParams(n=options.group_size, max_new_tokens=length, seed=i)
            for i, length in enumerate(lengths)
        ]
        tokens = sum(lengths) * options.group_size
        times = turns(model, model, prompts, params, rounds=options.rounds)
        a, b = (tokens / median(one) for one in times)
        print(
            f"{kind:>7}: nemorl {a:8.0f} tokens/s   transformers {b:8.0f} tokens/s   ratio"
            f" {a / b:.2f}"
        )


if __name__ == "__main__":
    command(main, Options, num_prompts=2, group_size=2, rounds=1)
