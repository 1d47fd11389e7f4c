"""An optimizer step on packed rows against the plainest PyTorch loop on the same tokens, packed
rows against padded ones on skewed lengths, and prompts and turns that rows share, computed once,
against each row on its own.

    python benchmarks/train_step.py

The plain loop is what one writes without a library: the model's logits, cross entropy, backward,
clipping, AdamW. It gets sequences of one length, which need no padding, in the number of rows per
forward pass that suits it best. nemorl packs them several to a row, keeps them apart, and computes
logprobs from hidden states and their entropy besides.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from common import (
    VOCABULARY,
    command,
    interleaved,
    median_ratio,
    model_config,
    quiet,
    skewed_lengths,
)
from torch.nn import functional
from transformers import AutoModelForCausalLM

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.losses.masks import token_mean_weights
from nemorl.parallel.config import BackendConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.algorithms.sft import loss_fn


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a step is made of."""

    num_sequences: int = 128
    """Of a step."""
    length: int = 128
    """Of each sequence, in the comparison with the plain loop."""
    row_tokens: int = 1024
    """Of a packed row."""
    micro_batch_tokens: int = 4096
    """Of a forward pass, with packed rows."""
    rounds: int = 9
    """Turns of each; the median of their ratios counts."""
    hidden: int = 64
    """Width of the model; 64 makes 0.3 M parameters."""
    layers: int = 4
    """Of the model."""


def batch_of(lengths: list[int]) -> TokenBatch:
    rng = np.random.default_rng(0)
    examples = [
        Example(
            input_ids=rng.integers(2, VOCABULARY, length).tolist(),
            loss_mask=(mask := [False] + [True] * (length - 1)),
            response_mask=mask,
        )
        for length in lengths
    ]
    batch = collate(examples)
    return replace(batch, loss_weights=token_mean_weights(batch.loss_mask))


def groups_of(count: int, *, response: int = 14, turns: int = 1) -> TokenBatch:
    """Groups of 8. Each turn but the first is a row that keeps 10 tokens of every earlier response
    and 8 of what came after, as where a template removes thoughts.
    """
    rng, examples = np.random.default_rng(0), []

    def tokens(length: int) -> list[int]:
        return rng.integers(2, VOCABULARY, length).tolist()

    for prompt in [tokens(45) for _ in range(count)]:
        for given in [prompt] * 8:
            for _ in range(turns):
                mask = [False] * len(given) + [True] * response
                ids = [*given, *tokens(response)]
                examples.append(Example(input_ids=ids, loss_mask=mask, response_mask=mask))
                given = [*given, *tokens(18)]
    batch = collate(examples)
    return replace(batch, loss_weights=token_mean_weights(batch.loss_mask))


def our_step(model: Any, batch: TokenBatch, trainer: TrainerConfig) -> Callable[[], Any]:
    backend = DTensorBackend(model)
    backend.setup(BackendConfig(trainer=trainer, optimizer=OptimizerConfig(lr=1e-5)))
    return lambda: backend.train_step(batch, loss_fn)


def plain_step(
    model: Any, ids: torch.Tensor, rows: int, *, optimizer: Any = None, bfloat16: bool = False
) -> Callable[[], Any]:
    """The model may be one that a backend trains, too, with its optimizer."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def forward(part: torch.Tensor) -> torch.Tensor:
        logits = model(part, use_cache=False).logits
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        )

    def step() -> None:
        attention = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        model.train()
        try:
            optimizer.zero_grad()
            for part in ids.split(rows):
                with torch.autocast(ids.device.type, torch.bfloat16, enabled=bfloat16):
                    loss = forward(part)
                (loss / ids[:, 1:].numel()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:
            model.set_attn_implementation(attention)

    return step


def main(options: Options) -> None:
    quiet()
    torch.manual_seed(0)
    config = model_config(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        max_position_embeddings=options.row_tokens,
    )

    def model() -> Any:
        return AutoModelForCausalLM.from_config(config)

    size = sum(p.numel() for p in model().parameters())
    print(f"{size / 1e6:.1f} M parameters, {torch.get_num_threads()} threads")
    packed = TrainerConfig(
        sequence_packing=True,
        packed_row_tokens=options.row_tokens,
        micro_batch_tokens=options.micro_batch_tokens,
    )

    batch = batch_of([options.length] * options.num_sequences)
    sizes = [n for n in (16, 32, 64) if n <= options.num_sequences]
    ours, *plain = interleaved(
        [
            our_step(model(), batch, packed),
            *(plain_step(model(), batch.input_ids, rows) for rows in sizes),
        ],
        options.rounds,
    )
    print(
        f"{options.num_sequences} sequences of {options.length} tokens: nemorl, packed"
        f" {statistics.median(ours):.3f} s a step"
    )
    ratios = [median_ratio(theirs, ours) for theirs in plain]
    for rows, theirs, ratio in zip(sizes, plain, ratios, strict=True):
        print(
            f"  plain loop, {rows} rows a pass {statistics.median(theirs):.3f} s, time of"
            f" nemorl / plain loop {ratio:.2f}"
        )
    print(f"  time against the fastest plain loop: {max(ratios):.2f}")

    lengths = skewed_lengths(options.num_sequences, mean=options.length, longest=4 * options.length)
    batch = batch_of(lengths)
    rows = max(1, options.micro_batch_tokens // max(lengths))
    padded = TrainerConfig(train_micro_batch_size=rows)
    ours, padded_times = interleaved(
        [our_step(model(), batch, packed), our_step(model(), batch, padded)], options.rounds
    )
    print(
        f"log-normal lengths, mean {np.mean(lengths):.0f}, longest {max(lengths)}: packed"
        f" {statistics.median(ours):.3f} s, ",
        end="",
    )
    print(
        f"padded {statistics.median(padded_times):.3f} s, packed is"
        f" {median_ratio(ours, padded_times):.2f} times as fast"
    )

    cases = {
        "prompts of 45 tokens, responses of 14": groups_of(options.num_sequences // 8),
        "conversations of 5 turns, a row each, responses of 40": groups_of(
            max(1, options.num_sequences // 32), response=40, turns=5
        ),
    }
    for name, batch in cases.items():
        sharing = [replace(packed, share_prompts=share) for share in (True, False)]
        shared, alone = interleaved(
            [our_step(model(), batch, trainer) for trainer in sharing], options.rounds
        )
        print(
            f"groups of 8, {name}: beginnings computed once {statistics.median(shared):.3f} s, each"
            f" row on its own {statistics.median(alone):.3f} s, {median_ratio(shared, alone):.2f}"
            " times as fast"
        )


if __name__ == "__main__":
    command(
        main, Options, num_sequences=16, length=32, row_tokens=256, micro_batch_tokens=256, rounds=1
    )
