"""A whole GRPO step end to end, here and in TRL: same model, prompts, group size, response lengths,
loss and optimizer.

    make bench-peers        (or in that environment, .venv-peers:
    python benchmarks/grpo_vs_trl.py [--lengths fixed|skewed])

fixed: every response has 64 tokens. skewed: each response has its own length, log-normal with mean
40, at most 256, the same on both sides. There nemorl's engine gets each sample as a request with a
limit of its own. A round is a few steps of one trainer and then of the other; each reports its
median time from step to step, with everything that a step is made of. TRL runs with all that its
documentation has for speed on the same work: no gradient checkpointing, no reference model, float32
as here, as many rows per forward pass as is fastest (measured first, for both), logging every ten
steps. It generates by transformers' generate: of its other ways vLLM needs a GPU, and transformers'
continuous batching took a hundred times as long on a CPU.
"""

import asyncio
import itertools
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

import nemorl
from nemorl.rollout.generation import Completion, SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend

PROMPT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is trained."""

    lengths: Literal["fixed", "skewed", "both"] = "both"
    """Of the responses."""
    num_prompts: int = 32
    """Prompts a step."""
    group_size: int = 8
    """Responses to each."""
    rounds: int = 5
    """Turns of each trainer; the median counts."""
    steps: int = 5
    """Steps of a turn, the first of which is not counted."""
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
    micro_batch: int | None = None
    """Rows (TRL) and as many times the longest sequence in tokens (nemorl) of a forward pass in
    training. None: for each the fastest of some.
    """
    peer: bool = True
    """Whether to run TRL, too."""


class Lengths:
    """Response lengths by step, the same for both trainers."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count
        self.longest = 64 if kind == "fixed" else 256
        self.known: dict[int, list[int]] = {}

    def of(self, step: int) -> list[int]:
        if step not in self.known:
            self.known[step] = (
                [64] * self.count
                if self.kind == "fixed"
                else skewed_lengths(self.count, longest=self.longest, seed=step)
            )
        return self.known[step]


def reward(prompts: Any = None, completions: Any = None, **_: Any) -> list[float]:
    """TRL's kind of reward: the share of even tokens."""
    return [share_of_even(text) for text in completions]


def share_of_even(text: str) -> float:
    tokens = text.split()
    return sum(token[-1] in "02468" for token in tokens) / max(1, len(tokens))


def nemorl_reward(prompt: str, response: str) -> float:
    return share_of_even(response)


class Ours:
    """Turns of nemorl; `median` of the seconds from step to step."""

    def __init__(
        self, folder: Path, rows: list[dict], lengths: Lengths, options: Options, micro_batch: int
    ) -> None:
        self.folder, self.rows, self.lengths = folder, rows, lengths
        if lengths.kind == "skewed":
            nemorl.register_generation_backend("skewed")(ending_at(lengths))
        self.config = nemorl.GRPOConfig(
            model=nemorl.ModelConfig(path=str(folder)),
            data=nemorl.DataConfig(max_total_sequence_length=PROMPT_TOKENS + lengths.longest),
            trainer=nemorl.TrainerConfig(
                sequence_packing=True,
                micro_batch_tokens=micro_batch * (PROMPT_TOKENS + lengths.longest),
                device=options.device,
            ),
            parallel=nemorl.ParallelPlan(param_dtype=options.precision),
            optimizer=nemorl.OptimizerConfig(lr=1e-5, beta2=0.999),
            generation=nemorl.GenerationConfig(
                backend="torch" if lengths.kind == "fixed" else "skewed",
                max_new_tokens=lengths.longest,
                ignore_eos=True,
                max_batch_size=256,
            ),
            num_prompts_per_step=options.num_prompts,
            num_generations_per_prompt=options.group_size,
            max_num_steps=options.steps,
        )

    def median(self) -> float:
        ends: list[float] = []
        lengths = self.lengths

        class Clock(nemorl.Callback):
            def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
                ends.append(time.perf_counter())
                assert round(metrics["response_length"] * lengths.count) == sum(
                    lengths.of(step - 1)
                )

        where = nemorl.RunConfig(
            dir=tempfile.mkdtemp(dir=self.folder),
            display="none",
            save_period=0,
            export=False,
            plots=False,
            samples_per_step=0,
        )
        nemorl.run(
            replace(self.config, run=where),
            tokenizer=load_tokenizer(self.folder),
            train=self.rows,
            reward=nemorl_reward,
            callbacks=[Clock()],
        )
        return statistics.median(np.diff(ends))


def ending_at(lengths: Lengths) -> type[TorchGenerationBackend]:
    """Return the embedded engine with responses of these lengths."""

    class Skewed(TorchGenerationBackend):
        step, ends = 0, iter(())

        async def sample(self, prompt: Any, params: SamplingParams) -> list[Completion]:
            found: list[Completion] = []
            parts = []
            for j in range(params.n):
                if (end := next(self.ends, None)) is None:  # a step begins
                    self.ends = iter(lengths.of(self.step))
                    self.step += 1
                    end = next(self.ends)
                own = replace(params, n=1, seed=params.seed + j, max_new_tokens=end)
                parts.append(super().sample(prompt, own))
            for part in await asyncio.gather(*parts):
                found += part
            return found

    return Skewed


class Theirs:
    """Turns of TRL."""

    def __init__(
        self, folder: Path, rows: list[dict], lengths: Lengths, options: Options, micro_batch: int
    ) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        self.ends: list[float] = []
        ends = self.ends

        class Clock(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                ends.append(time.perf_counter())

        responses = options.num_prompts * options.group_size
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        force_lengths(model, lengths, options.steps)
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
            processing_class=load_tokenizer(folder),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=str(folder / "trl"),
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=responses // micro_batch,
                num_generations=options.group_size,
                max_completion_length=lengths.longest,
                max_steps=options.steps,
                learning_rate=1e-5,
                lr_scheduler_type="constant",
                adam_beta2=0.999,
                max_grad_norm=1.0,
                beta=0.0,
                loss_type="grpo",
                bf16=options.precision == "bfloat16",
                gradient_checkpointing=False,
                use_cpu=options.device == "cpu",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
        )

    def median(self) -> float:
        self.ends.clear()
        with silence():
            self.trainer.train()
        return statistics.median(np.diff(self.ends))


def force_lengths(model: Any, lengths: Lengths, steps: int) -> None:
    """Let the responses that `generate` makes end where they are to end: token 0, which ends a
    sequence, is their last one and no other.
    """
    from transformers import StoppingCriteria

    generate, calls = model.generate, itertools.cycle(range(steps))

    class AtLength(StoppingCriteria):
        eos_token_id = 0  # by this name generate knows that rows end one by one, and pads them

        def __init__(self, ends: torch.Tensor) -> None:
            self.ends = ends

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] >= self.ends

    def forced(
        input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any
    ) -> torch.Tensor:
        ends = torch.tensor(lengths.of(next(calls)), device=input_ids.device) + input_ids.shape[1]
        generation_config.eos_token_id = None
        tokens = generate(
            input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            stopping_criteria=[AtLength(ends)],
        )
        begin = input_ids.shape[1]
        response = tokens[:, begin:]
        response[response == 0] = 1
        tokens[:, begin:] = torch.where(
            torch.arange(begin, tokens.shape[1], device=ends.device) < ends[:, None] - 1,
            response,
            0,
        )
        return tokens

    model.generate = forced


def fastest(
    trainer: type[Ours] | type[Theirs],
    folder: Path,
    rows: list[dict],
    lengths: Lengths,
    options: Options,
    sizes: tuple[int, ...],
) -> Any:
    """The trainer with as much per forward pass as makes it fastest."""
    if options.micro_batch is not None:
        sizes = (options.micro_batch,)
    few = replace(options, steps=3)
    seconds = {
        size: trainer(folder, rows, lengths, few, size).median() for size in sizes if len(sizes) > 1
    }
    if seconds:
        print(
            f"  {trainer.__name__}, seconds a step by rows per forward pass:",
            ", ".join(f"{size}: {t:.2f}" for size, t in seconds.items()),
        )
    return trainer(
        folder,
        rows,
        lengths,
        options,
        min(seconds, key=lambda size: seconds[size]) if seconds else sizes[0],
    )


def compare(options: Options, kind: str) -> tuple[float, ...]:
    """Tokens per second of nemorl, and with a peer those of TRL, and their ratio."""
    quiet()
    rng = np.random.default_rng(0)
    rows = [{"prompt": words(PROMPT_TOKENS, rng)} for _ in range(4 * options.num_prompts)]
    responses = options.num_prompts * options.group_size
    with tempfile.TemporaryDirectory() as name:
        folder, lengths = Path(name), Lengths(kind, responses)
        size = save_model(folder, hidden=options.hidden, layers=options.layers, heads=options.heads)
        print(
            f"{kind}: {size / 1e6:.1f} M parameters, {options.num_prompts} prompts x"
            f" {options.group_size}, {torch.get_num_threads()} threads"
        )
        ours = fastest(Ours, folder, rows, lengths, options, (16, 32, 64))
        theirs = options.peer and fastest(
            Theirs, folder, rows, lengths, options, (32, 64, 128, 256)
        )
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds):
            times[0].append(ours.median())
            if theirs:
                times[1].append(theirs.median())
        tokens = statistics.mean(sum(lengths.of(step)) for step in range(options.steps))
    speeds = tuple(tokens / statistics.median(t) for t in times if t)
    return (*speeds, median_ratio(*times)) if theirs else speeds


def main(options: Options) -> None:
    for kind in ("fixed", "skewed") if options.lengths == "both" else (options.lengths,):
        ours, *theirs = compare(options, kind)
        found = "   TRL {:8.0f} tokens/s   ratio {:.2f}".format(*theirs) if theirs else ""
        print(f"  nemorl {ours:8.0f} tokens/s{found}")


if __name__ == "__main__":
    command(main, Options, num_prompts=2, group_size=2, rounds=1, steps=3, layers=2, micro_batch=4)
