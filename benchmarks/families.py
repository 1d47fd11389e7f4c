"""Families of models: a training step on packed rows, padded rows and sequences one by one; experts
computed grouped against one after the other; and what it takes to prove what a model can do.

    python benchmarks/families.py

Padded rows are what a run falls back to where packing is not proved of a model, and sequences one
by one where padding is not proved, either. The experts' baseline is transformers' plain loop over
them ("eager"). A proof's is a later start, which has the answer kept.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import command, interleaved, median_ratio, model_config, quiet, skewed_lengths
from train_step import batch_of, our_step
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from nemorl.models import capabilities
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.proving import proved_now


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is computed, and how often."""

    num_sequences: int = 32
    """Of a step."""
    length: int = 128
    """Of a sequence on average; the longest is four times as long."""
    row_tokens: int = 1024
    """Of a packed row."""
    micro_batch_tokens: int = 4096
    """Of a forward pass, with packed or padded rows."""
    rounds: int = 5
    """Turns of each; the median of their ratios counts."""
    hidden: int = 256
    """Width of the models."""
    types: int = 5
    """How many types of TYPES are proved."""
    cpu_time: bool = False
    """Count the processor's time of a step instead of the clock's: for a busy machine, and one
    thread (OMP_NUM_THREADS=1).
    """

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.cpu_time else time.perf_counter


TYPES = ("olmo", "gemma", "arcee", "ernie4_5", "olmoe")
"""Model types that the tested table does not have, so that a run proves them at its start."""


def config_of(kind: str, hidden: int, **options: Any) -> Any:
    """The configuration of a model of four layers, of a type with windows, experts, or both experts
    and multi-head latent attention.
    """
    sizes = {"hidden_size": hidden, "head_dim": hidden // 4, "max_position_embeddings": 2048}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    own: dict[str, dict[str, Any]] = {
        "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention"] * 4},
        "qwen3_moe": {**experts, "num_experts": 8},
        "deepseek_v3": {
            **{**experts, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
            **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": hidden // 2},
            **{"kv_lora_rank": hidden // 4, "qk_nope_head_dim": hidden // 8},
            **{"qk_rope_head_dim": hidden // 8, "head_dim": hidden // 8},
            **{"v_head_dim": hidden // 4},
        },
    }
    own["gemma3_text"]["layer_types"][-1] = "full_attention"
    return model_config(kind, **{**sizes, **own[kind], **options})


def model_of(kind: str, hidden: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind, hidden, **options))


def rows(options: Options) -> None:
    """Print tokens per second of packed rows, padded ones and sequences one by one."""
    longest = 4 * options.length
    lengths = skewed_lengths(options.num_sequences, mean=options.length, longest=longest)
    batch = batch_of(lengths)
    padded = TrainerConfig(micro_batch_tokens=options.micro_batch_tokens)
    packed = replace(padded, sequence_packing=True, packed_row_tokens=options.row_tokens)
    alone = TrainerConfig(train_micro_batch_size=1)
    print(f"{len(lengths)} sequences, {sum(lengths)} tokens, the longest of {max(lengths)}:")
    for kind in ("gemma3_text", "qwen3_moe", "deepseek_v3"):
        model = model_of(kind, options.hidden)
        size = sum(parameter.numel() for parameter in model.parameters())
        steps = [
            our_step(model_of(kind, options.hidden), batch, trainer)
            for trainer in (packed, padded, alone)
        ]
        times = interleaved(steps, options.rounds, clock=options.clock)
        speeds = ", ".join(
            f"{name} {sum(lengths) / statistics.median(each):,.0f}"
            for name, each in zip(("packed", "padded", "one by one"), times, strict=True)
        )
        print(
            f"  {kind}, {size / 1e6:.1f} M parameters: tokens/s {speeds}; packed rows are"
            f" {median_ratio(times[0], times[2]):.2f} times as fast as one by one,"
            f" {median_ratio(times[0], times[1]):.2f} times as fast as padded"
        )


def experts(options: Options) -> None:
    """Print the time of a step with experts computed grouped and in a loop, few and many."""
    longest = 4 * options.length
    batch = batch_of(skewed_lengths(options.num_sequences, mean=options.length, longest=longest))
    trainer = TrainerConfig(
        sequence_packing=True,
        packed_row_tokens=options.row_tokens,
        micro_batch_tokens=options.micro_batch_tokens,
    )
    for count, taken, inner in ((8, 2, options.hidden), (64, 8, options.hidden // 4)):
        sizes = {"num_experts": count, "num_experts_per_tok": taken, "moe_intermediate_size": inner}
        used, loop = (model_of("qwen3_moe", options.hidden, **sizes) for _ in range(2))
        loop.set_experts_implementation("eager")
        steps = [our_step(model, batch, trainer) for model in (used, loop)]
        ours, plain = interleaved(steps, options.rounds, clock=options.clock)
        print(
            f"qwen3_moe, {taken} of {count} experts of {inner}:"
            f" {used.config._experts_implementation}, as nemorl has it,"
            f" {statistics.median(ours):.3f} s a step, in a loop {statistics.median(plain):.3f} s;"
            f" {median_ratio(ours, plain):.2f} times as fast"
        )


def proofs(options: Options) -> None:
    """Print the time of proving types, and of a start that has the answers kept."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for kind in TYPES[: options.types]:
            config = CONFIG_MAPPING[kind]()
            assert capabilities.known(config) is None
            begin = time.perf_counter()
            found = proved_now(config)
            seconds = time.perf_counter() - begin
            capabilities._tested.cache_clear()  # as a process that starts
            begin = time.perf_counter()
            assert capabilities.known(config) == found
            kept = time.perf_counter() - begin
            holds = sum(proof.holds for proof in found.values())
            print(
                f"{kind}: proved in {seconds:.1f} s ({holds} of {len(found)} hold), kept"
                f" {1000 * kept:.1f} ms, {seconds / kept:,.0f} times as fast"
            )
    del os.environ["XDG_CACHE_HOME"]


def main(options: Options) -> None:
    quiet()
    print(f"{torch.get_num_threads()} threads")
    rows(options)
    experts(options)
    proofs(options)


if __name__ == "__main__":
    small = {"num_sequences": 4, "length": 16, "row_tokens": 64, "micro_batch_tokens": 64}
    command(main, Options, **small, rounds=1, hidden=64, types=1)
