"""What tells most in half a minute: first SFT and GRPO runs by the public API, whose numbers are
the CPU's, and the speed and memory of a step.
"""

import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import interleaved, load_tokenizer, save_model, words
from train_step import batch_of

import nemorl
from benchmarks.gpu.models import config_of, random_model, trainer
from benchmarks.gpu.part import Measurements, Row, require_memory, row
from nemorl.losses.types import finalize
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import PlannedStep
from nemorl.parallel.planner.model_shape import model_shape
from nemorl.runtime.algorithms.sft import loss_fn

QUIET = {
    **{"run__display": "none", "run__save_period": 0, "run__export": False, "run__plots": False},
    "max_num_steps": 2,
}
GRPO: dict[str, Any] = {
    **{"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 16},
    "generation__ignore_eos": True,
}
RUNS: dict[str, dict[str, Any]] = {"SFT": {"train_global_batch_size": 4}, "GRPO": GRPO}
"""By algorithm, the settings."""


def measurements(small: bool) -> Measurements:
    for algorithm in RUNS:
        yield f"{algorithm} run", partial(runs, algorithm, "cpu" if small else "cuda")
    yield "a step", partial(step, small)


def even(prompt: str, response: str) -> float:
    """Reward tokens with even numbers."""
    tokens = response.split()
    return sum(token[-1] in "02468" for token in tokens) / max(1, len(tokens))


def runs(algorithm: str, device: str) -> Iterator[Row]:
    """Two steps of a small model, in float32 on both devices, and as the defaults have it."""
    settings: dict[str, Any] = {**QUIET, **RUNS[algorithm], "algorithm": algorithm.lower()}
    if algorithm == "GRPO":
        settings["reward_fn"] = even
    rng = np.random.default_rng(0)
    rows = [{"prompt": words(8, rng), "response": words(16, rng)} for _ in range(8)]
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        save_model(folder / "model")
        tokenizer = load_tokenizer(folder / "model")
        for place, precision in (("cpu", "float32"), (device, "float32"), (device, None)):
            done = nemorl.train(
                folder / "model",
                rows,
                tokenizer=tokenizer,
                trainer__device=place,
                parallel__param_dtype=precision,
                run__dir=str(folder / f"run{len(found)}"),
                **settings,
            )
            found.append([line for line in done.history if line["phase"] == "train"])
    cpu, exact, usual = found
    names = {"SFT": ("loss", "grad_norm"), "GRPO": ("reward", "grad_norm")}[algorithm]
    note = f"greatest difference of {' and '.join(names)} from the CPU's, in two steps"

    def worst(other: list[dict[str, Any]]) -> float:
        return max(abs(a[n] - b[n]) for a, b in zip(cpu, other, strict=True) for n in names)

    yield row(f"{algorithm} in float32", worst(exact), at_most=1e-4, note=note)
    what = f"{algorithm} in the default precision"
    if algorithm == "SFT":
        yield row(what, worst(usual), at_most=0.1, note=note)
    else:  # its samples are others where probabilities are rounded
        gap = max(line["token_mult_prob_error"] for line in usual)
        yield row(what, gap, at_most=1.05, note="sampler against trainer, token_mult_prob_error")


def step(small: bool) -> Iterator[Row]:
    """Optimizer steps of 0.5 B parameters with the default settings, on packed rows."""
    shape, width, device = ("small", 128, "cpu") if small else ("0.5B", 8192, "cuda")
    config, plan = config_of(shape), ParallelPlan().with_precision(accelerator=True).on(1)
    work = PlanConfig(gpus=1, seq_len=width)
    require_memory(PlannedStep(model_shape(config), plan, work).training_memory().total, small)
    made = trainer(random_model(config, device), width)
    data, measured = batch_of([width // 8] * 8 * 4), []
    interleaved(
        [lambda: measured.append(finalize(made.train_step(data, loss_fn)))], 1 + 2 * (not small)
    )
    seconds = statistics.median(each["trainer/seconds"] for each in measured[1:])
    yield row(f"{shape}: tokens/s", data.num_tokens / seconds, note=made.world.plan.precision)
    if "trainer/mfu" in measured[-1]:
        mfu = statistics.median(each["trainer/mfu"] for each in measured[1:])
        yield row(f"{shape}: MFU", mfu, note="model FLOPs utilization")
    yield row(f"{shape}: GB at the peak", measured[-1]["trainer/memory_gb"])
    made.shutdown()
