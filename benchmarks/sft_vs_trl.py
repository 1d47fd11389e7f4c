"""Supervised fine-tuning with packing, here and in TRL: same model, examples, optimizer and
sequences per optimizer step.

    make bench-peers        (or in that environment, .venv-peers:
    python benchmarks/sft_vs_trl.py)

Sequences of log-normal length. A turn is one pass over the examples; its time is from the first
step's begin to the last one's end. TRL is measured with each setting that runs without
FlashAttention and does the same work (sequences whole, and none sees another): padded batches of
several sizes, padded batches of sequences of similar length, and packed rows ("bfd"), which
transformers keeps apart by a mask. The ratio is against the fastest.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common import (
    command,
    load_tokenizer,
    median_ratio,
    quiet,
    save_model,
    silence,
    skewed_lengths,
    words,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is trained."""

    num_examples: int = 256
    """Of a pass."""
    batch: int = 32
    """Sequences per optimizer step."""
    mean: int = 128
    """Mean length, in tokens."""
    longest: int = 512
    """Longest sequence, and length of TRL's packed rows."""
    rounds: int = 5
    """Turns of each; the median counts."""
    hidden: int = 64
    """Width of the model; 64 makes 0.3 M parameters."""
    layers: int = 4
    """Of the model."""
    heads: int = 4
    """Of the model, for queries."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it is computed."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in, on both sides."""
    peer: bool = True
    """Whether to run TRL, too."""


class Ours:
    """Turns of nemorl, in packed rows."""

    def __init__(self, folder: Path, rows: list[dict], options: Options) -> None:
        import nemorl

        self.folder, self.rows, self.turn = folder, rows, 0
        self.config = nemorl.SFTConfig(
            model=nemorl.ModelConfig(path=str(folder)),
            data=nemorl.DataConfig(max_total_sequence_length=options.longest),
            trainer=nemorl.TrainerConfig(
                sequence_packing=True,
                micro_batch_tokens=max(4096, options.longest),
                device=options.device,
            ),
            parallel=nemorl.ParallelPlan(param_dtype=options.precision),
            optimizer=nemorl.OptimizerConfig(lr=1e-5, beta2=0.999),
            train_global_batch_size=options.batch,
        )

    def seconds(self) -> float:
        import nemorl

        times: list[float] = []

        class Clock(nemorl.Callback):
            def on_step_begin(self, trainer: Any, step: int) -> None:
                times.append(time.perf_counter())

            def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
                times.append(time.perf_counter())

        self.turn += 1
        where = nemorl.RunConfig(
            dir=str(self.folder / f"run{self.turn}"),
            display="none",
            save_period=0,
            export=False,
            plots=False,
        )
        with silence():
            nemorl.run(
                replace(self.config, run=where),
                tokenizer=load_tokenizer(self.folder),
                train=self.rows,
                callbacks=[Clock()],
            )
        return times[-1] - times[0]


class Theirs:
    """Turns of TRL. `rows`: of a forward pass; with packing these are packed rows."""

    def __init__(
        self,
        folder: Path,
        examples: list[dict],
        options: Options,
        *,
        rows: int,
        packing: bool = False,
        by_length: bool = False,
    ) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, TrainerCallback
        from trl import SFTConfig, SFTTrainer

        times = self.times = []

        class Clock(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                times.append(time.perf_counter())

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                times.append(time.perf_counter())

        per_step = options.batch
        if packing:  # as many packed rows as hold a step's sequences
            tokens = sum(len(example["input_ids"]) for example in examples)
            per_step = max(1, round(tokens / options.longest * options.batch / len(examples)))
        self.trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            train_dataset=Dataset.from_list(examples),
            processing_class=load_tokenizer(folder),
            callbacks=[Clock()],
            args=SFTConfig(
                output_dir=str(folder / "trl"),
                per_device_train_batch_size=min(rows, per_step),
                gradient_accumulation_steps=max(1, per_step // rows),
                num_train_epochs=1,
                max_length=options.longest,
                packing=packing,
                train_sampling_strategy="group_by_length" if by_length else "random",
                learning_rate=1e-5,
                lr_scheduler_type="constant",
                adam_beta2=0.999,
                max_grad_norm=1.0,
                bf16=options.precision == "bfloat16",
                gradient_checkpointing=False,
                use_cpu=options.device == "cpu",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
        )

    def seconds(self) -> float:
        self.times.clear()
        with silence():
            self.trainer.train()
        return self.times[-1] - self.times[0]


def make_data(folder: Path, options: Options) -> tuple[list[dict], list[dict]]:
    """Rows for nemorl, and the same examples as token ids and labels for TRL."""
    from nemorl.data.datasets import to_examples

    rng = np.random.default_rng(0)
    lengths = skewed_lengths(options.num_examples, mean=options.mean, longest=options.longest - 1)
    rows = [
        {"prompt": words(8, rng), "response": " " + words(max(1, length - 8), rng)}
        for length in lengths
    ]
    examples = [
        {
            "input_ids": list(example.input_ids),
            "labels": [
                token if trained else -100
                for token, trained in zip(example.input_ids, example.loss_mask, strict=True)
            ],
        }
        for example in to_examples(rows, load_tokenizer(folder))
    ]
    return rows, examples


def peers(folder: Path, examples: list[dict], options: Options) -> dict[str, Theirs]:
    """TRL's settings."""
    kinds: dict[str, Any] = {
        "padded, {} rows": ((32, 8), {}),
        "by length, {} rows": ((32, 8), {"by_length": True}),
        "packed, {} rows": ((1, 4), {"packing": True}),
    }
    return {
        f"TRL, {name.format(n)}": Theirs(folder, examples, options, rows=n, **settings)
        for name, (sizes, settings) in kinds.items()
        for n in sizes
    }


def compare(options: Options) -> dict[str, tuple[float, float]]:
    """Tokens per second of nemorl and of TRL's settings, and how many times as fast nemorl is."""
    quiet()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = save_model(
            folder,
            hidden=options.hidden,
            layers=options.layers,
            heads=options.heads,
            positions=options.longest,
        )
        rows, examples = make_data(folder, options)
        tokens = sum(len(example["input_ids"]) for example in examples)
        print(
            f"{size / 1e6:.1f} M parameters, {len(rows)} sequences, {tokens} tokens,"
            f" {options.batch} sequences a step"
        )
        with silence():
            trainers: dict[str, Any] = {"nemorl, packed": Ours(folder, rows, options)}
            if options.peer:
                trainers |= peers(folder, examples, options)
        times: dict[str, list[float]] = {name: [] for name in trainers}
        for number in range(options.rounds + 1):
            for name, trainer in list(trainers.items()):
                try:
                    seconds = trainer.seconds()
                except torch.OutOfMemoryError:
                    del trainers[name], times[name]
                    continue
                if number:  # the first turn warms up
                    times[name].append(seconds)
    ours = times["nemorl, packed"]
    return {
        name: (tokens / statistics.median(taken), median_ratio(ours, taken))
        for name, taken in times.items()
    }


def main(options: Options) -> None:
    found = compare(options)
    for name, (speed, ratio) in found.items():
        print(f"  {name:<24}{speed:8.0f} tokens/s   nemorl is {ratio:.2f} times as fast")
    if options.peer:
        fastest = min(ratio for name, (_, ratio) in found.items() if name.startswith("TRL"))
        print(f"  ratio against TRL's fastest: {fastest:.2f}")


if __name__ == "__main__":
    command(main, Options, num_examples=8, batch=4, mean=16, longest=32, rounds=1, layers=2)
