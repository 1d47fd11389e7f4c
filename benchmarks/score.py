"""Seconds of `score` against a plain forward pass of the same sequences, in turn.

    python benchmarks/score.py [--engine torch|vllm] [--small]

The pass computes the logits of all tokens at once, and no probabilities of them.
"""

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from common import command, interleaved, load_tokenizer, median_ratio, model_config, saved_model
from transformers import Qwen2ForCausalLM

from nemorl import GenerationConfig, get_generation_backend
from nemorl.rollout.calls import blocking


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is scored."""

    engine: Literal["torch", "vllm"] = "torch"
    num_sequences: int = 16
    length: int = 256
    """Tokens of each."""
    hidden: int = 512
    """Width of the model, which has four layers: with this vocabulary the head is a quarter."""
    vocabulary: int = 8_000
    top_k: int = 64
    """Of the second measurement."""
    rounds: int = 7


def main(options: Options) -> None:
    torch.manual_seed(0)
    config = model_config(hidden_size=options.hidden, vocab_size=options.vocabulary)
    model = Qwen2ForCausalLM(config).eval()
    shape = options.num_sequences, options.length
    ids = torch.randint(2, options.vocabulary, shape)
    settings: dict[str, Any] = {"backend": options.engine}
    if options.engine == "vllm":
        settings["engine"] = {"kv_cache_memory_bytes": 1 << 30, "max_logprobs": options.top_k}
    with saved_model() as (folder, _):
        make: Any = get_generation_backend(options.engine)
        engine = make(model=model, tokenizer=load_tokenizer(folder / "model"))
        engine.setup(GenerationConfig(**settings))

        def scored(top_k: int) -> None:
            found = blocking(engine.score(ids.tolist(), top_k=top_k))
            assert len(found.token_logprobs) == options.num_sequences

        def forward() -> None:
            with torch.no_grad():
                model(ids, use_cache=False)

        ways = [forward, partial(scored, 0), partial(scored, options.top_k)]
        clock = time.process_time if options.engine == "torch" else time.perf_counter
        plain, *ours = interleaved(ways, options.rounds, clock=clock)
        engine.shutdown()
    print(f"{options.engine}, {shape[0]} x {shape[1]} tokens, vocabulary {options.vocabulary}")
    print(f"forward pass: {median(plain):.3f} s")
    for top_k, seconds in zip((0, options.top_k), ours, strict=True):
        ratio = median_ratio(plain, seconds)
        print(f"score, top_k {top_k:2}: {median(seconds):.3f} s   ratio {ratio:.2f}")


if __name__ == "__main__":
    command(
        main, Options, num_sequences=2, length=16, hidden=128, vocabulary=512, top_k=4, rounds=1
    )
