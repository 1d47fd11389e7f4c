"""What receipts cost: a whole GRPO step with them, as a multiple of the same step without.

    python benchmarks/receipts.py

The functions that hash what was sampled, and what the loss was computed from, are timed in a run of
GRPO, with the gap by depth and the check at the end of the step. A step without them is the step
less their time: their share is smaller than what two runs on a shared machine differ by.
"""

import statistics
import tempfile
import time
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
    steps: int = 4
    """Steps; the first is not counted."""
    hidden: int = 64
    """Width of the model; 64 makes 0.3 M parameters."""


def main(options: Options) -> None:
    quiet()
    import nemorl
    from nemorl.rollout import collect
    from nemorl.runtime.run import receipts

    watch = Stopwatch()
    for name in ("token_receipt", "gap_by_depth", "support_ratio"):  # in the loss
        setattr(receipts, name, watch.wrap(getattr(receipts, name)))
    for name in ("expect", "add", "check"):
        setattr(receipts.TokenReceipt, name, watch.wrap(getattr(receipts.TokenReceipt, name)))
    collect.sampled_hashes = watch.wrap(collect.sampled_hashes)
    tokens = list[float]()
    begin, costs, steps = 0.0, list[float](), list[float]()

    class Clock(nemorl.Callback):
        def on_step_begin(self, trainer: Any, step: int) -> None:
            nonlocal begin
            watch.take()
            begin = time.perf_counter()

        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            steps.append(time.perf_counter() - begin)
            costs.append(watch.take())
            tokens.append(metrics.get("receipts/tokens", 0.0))

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
                generation=nemorl.GenerationConfig(max_new_tokens=options.new_tokens, top_p=0.95),
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
    ratios = [step / (step - cost) for step, cost in zip(steps, costs, strict=True)]
    print(
        f"  a step with receipts of {statistics.median(tokens[1:]):,.0f} tokens takes"
        f" {statistics.median(steps[1:]):.2f} s, {1e3 * statistics.median(costs[1:]):.1f} ms of it"
        f" for them: {statistics.median(ratios[1:]):.4f} times a step without"
    )


if __name__ == "__main__":
    command(main, Options, num_prompts=2, group_size=2, new_tokens=8, steps=3)
