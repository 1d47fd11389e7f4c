"""Advantages and loss as a share of a whole GRPO step: what the algorithm itself costs beside the
model and the sampling.

    python benchmarks/overhead.py

A run of GRPO in which the functions that compute advantages, loss weights and the loss are timed;
the backward of the loss, from its value to the logprobs, is measured apart, on the same batch. The
baseline is the step itself.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Stopwatch, command, load_tokenizer, quiet, save_model, share_of_even, words


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is trained."""

    num_prompts: int = 32
    """Prompts a step."""
    group_size: int = 8
    """Responses to each."""
    new_tokens: int = 64
    """Of a response, at most."""
    steps: int = 8
    """Steps; the first is not counted."""
    hidden: int = 64
    """Width of the model; 64 makes 0.3 M parameters."""


def backward_seconds(output: Any, batch: Any, loss_fn: Callable[..., Any]) -> float:
    """Of the loss alone, from its value to the logprobs and entropies that it got."""
    leaf = type(output)(
        output.token_logprobs.detach().requires_grad_(), output.entropy.detach().requires_grad_()
    )
    loss = loss_fn(leaf, batch).loss
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def main(options: Options) -> None:
    quiet()
    import nemorl
    from nemorl.runtime.algorithms import grpo

    watch, backward = Stopwatch(), 0.0
    make_loss = grpo.make_loss

    def timed_loss(config: Any) -> Callable[..., Any]:
        loss_fn = make_loss(config)
        timed = watch.wrap(loss_fn)

        def whole(output: Any, batch: Any) -> Any:
            nonlocal backward, begin
            before = time.perf_counter()
            backward += backward_seconds(output, batch, loss_fn)
            begin += time.perf_counter() - before  # this is no part of a step
            return timed(output, batch)

        return nemorl.needs(entropy=True)(whole)

    grpo.make_loss = timed_loss
    for name in ("make_advantages", "make_loss_weights"):
        make = getattr(grpo, name)
        setattr(grpo, name, lambda config, make=make: watch.wrap(make(config)))
    begin, shares, steps = 0.0, [], []

    class Clock(nemorl.Callback):
        def on_step_begin(self, trainer: Any, step: int) -> None:
            nonlocal begin, backward
            watch.take()
            begin, backward = time.perf_counter(), 0.0

        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            steps.append(time.perf_counter() - begin)
            shares.append((watch.take() + backward) / steps[-1])

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = save_model(folder, hidden=options.hidden)
        print(
            f"{size / 1e6:.1f} M parameters, {options.num_prompts} prompts x {options.group_size},"
            f" {torch.get_num_threads()} threads"
        )
        nemorl.run(
            nemorl.GRPOConfig(
                model=nemorl.ModelConfig(path=str(folder)),
                data=nemorl.DataConfig(max_total_sequence_length=16 + options.new_tokens),
                trainer=nemorl.TrainerConfig(sequence_packing=True, micro_batch_tokens=4096),
                generation=nemorl.GenerationConfig(max_new_tokens=options.new_tokens),
                run=nemorl.RunConfig(
                    dir=str(folder / "run"),
                    display="none",
                    save_period=0,
                    export=False,
                    plots=False,
                ),
                num_prompts_per_step=options.num_prompts,
                num_generations_per_prompt=options.group_size,
                max_num_steps=options.steps,
            ),
            tokenizer=load_tokenizer(folder),
            train=[{"prompt": words(16, rng)} for _ in range(128)],
            reward=share_of_even,
            callbacks=[Clock()],
        )
    print(
        f"  a step {statistics.median(steps[1:]):.2f} s; advantages, loss weights and loss are"
        f" {100 * statistics.median(shares[1:]):.2f} % of it"
    )


if __name__ == "__main__":
    command(main, Options, num_prompts=2, group_size=2, new_tokens=8, steps=3)
