"""Small complete runs, in this process or in one that is killed.

Run as a script it takes a JSON of settings: see `main`.
"""

import json
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import nemorl
from nemorl.runtime.config.tree import from_dict
from nemorl.runtime.run.callbacks import Callback
from tests.tiny_models import tiny_model, tiny_tokenizer

TRAINER = nemorl.TrainerConfig(device="cpu")
TIMES = (
    "time",
    "seconds",
    "seconds_generate",
    "seconds_reference",
    "seconds_train",
    "seconds_sync",
    "tokens_per_second",
    "cpu_percent",
    "memory_gb",
    "gpu_memory_gb",
    "gpu_percent",
    "trainer/seconds",
    "trainer/shared_fraction",  # of microbatches
    "trainer/memory_gb",
    "trainer/tflops_per_device",
    "trainer/mfu",
)
"""What two runs of the same numbers differ in."""


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same numbers have in common."""
    return {name: value for name, value in metrics.items() if name not in TIMES}


def of_phase(result: nemorl.TrainResult, phase: str) -> list[dict[str, Any]]:
    """The metrics of every step, or of every validation."""
    return [line for line in result.history if line["phase"] == phase]


def addition_rows(count: int = 40) -> list[dict[str, Any]]:
    sums = [(f"{i % 7}+{i % 5}=", str(i % 7 + i % 5)) for i in range(count)]
    return [{"prompt": prompt, "answer": answer, "response": answer} for prompt, answer in sums]


def preference_rows(count: int = 60, *, seed: int = 0, wrong: float = 0.0) -> list[dict[str, Any]]:
    """After a word that ends with a, even digits are preferred; with b, odd ones.

    A share `wrong` of the pairs says the opposite.
    """
    draw, rows = random.Random(seed), []

    def text(letters: str, shortest: int, longest: int) -> str:
        return "".join(draw.choice(letters) for _ in range(draw.randint(shortest, longest)))

    for _ in range(count):
        word = text("cdefghkl", 1, 4) + draw.choice("ab")
        answers = [text("02468", 2, 5), text("13579", 2, 5)]
        even = (word[-1] == "a") != (draw.random() < wrong)
        chosen, rejected = answers if even else answers[::-1]
        rows.append({"prompt": f"{word}=", "chosen": chosen, "rejected": rejected})
    return rows


def run_config(folder: Path, **options: Any) -> nemorl.RunConfig:
    quiet = {"display": "none", "plots": False, "loggers": (), "export": False}
    return nemorl.RunConfig(**{"dir": str(folder), **quiet, **options})


def small_config(
    algorithm: Any, own: dict[str, Any], folder: Path, *, steps: int = 4, run: Any = None, **options
) -> Any:
    sections = {
        "data": nemorl.DataConfig(max_total_sequence_length=32),
        "trainer": TRAINER,
        "optimizer": nemorl.OptimizerConfig(lr=1e-2),
        "run": run_config(folder, **(run or {})),
        "max_num_steps": steps,
    }
    return algorithm(**{**sections, **own, **options})


BATCH = {"train_global_batch_size": 16}
SAMPLED = {"generation": nemorl.GenerationConfig(max_new_tokens=4)}
GROUPS = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4}
grpo_config = partial(small_config, nemorl.GRPOConfig, SAMPLED | GROUPS)
sft_config = partial(small_config, nemorl.SFTConfig, SAMPLED | BATCH)
dpo_config = partial(small_config, nemorl.DPOConfig, BATCH)


def digits(prompt: str, response: str) -> float:
    """A reward that a random model earns now and then: the share of digits in the response."""
    return sum(c.isdigit() for c in response) / 4


def opened(config: Any, **given: Any) -> Any:
    """An open run of a tiny model on sums, for a loop of a test's own."""
    usual = {"train": addition_rows(), "reward": digits}
    return nemorl.open_run(
        config, model=tiny_model(scale=2.0), tokenizer=tiny_tokenizer(), **{**usual, **given}
    )


def start(
    config: Any,
    *,
    rows: Any = None,
    validation: Any = None,
    reward: Any = None,
    callbacks: Any = (),
    **model: Any,
) -> nemorl.TrainResult:
    """A run of a tiny model on additions, or on preferences among digits."""
    of_pairs = isinstance(config, nemorl.DPOConfig)
    return nemorl.run(
        config,
        model=tiny_model(**{"scale": 2.0, **model}),
        tokenizer=tiny_tokenizer(),
        train=rows or (preference_rows() if of_pairs else addition_rows()),
        validation=validation,
        reward=reward or (digits if isinstance(config, nemorl.GRPOConfig) else None),
        callbacks=callbacks,
    )


class Kill(Callback):
    """SIGKILL to this process after step `step`, before its checkpoint is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer, step, metrics) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class KillInCheckpoint(Callback):
    """SIGKILL in the middle of writing the checkpoint of step `step`: the model is there, the
    optimizer is not.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, trainer, step) -> None:
        if step == self.step:
            from nemorl.parallel import checkpoint

            write = checkpoint.write_tensors

            def killing(path: Path, *args: Any) -> Any:
                if path.name.startswith("optimizer"):
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(path, *args)

            checkpoint.write_tensors = killing  # type: ignore[assignment]


def main(settings: dict[str, Any]) -> None:
    if settings.pop("emulated", False):
        from tests.emulated_gpu import NAME, emulated

        with emulated():
            main({**settings, "device": NAME})
        return
    make = {"grpo": grpo_config, "sft": sft_config, "dpo": dpo_config}[settings["algorithm"]]
    options = settings.get("options", {})
    if "kl" in options:
        options["kl"] = nemorl.KLConfig(**options["kl"])
    if "data" in options:
        options["data"] = nemorl.DataConfig(max_total_sequence_length=32, **options["data"])
    if "lora" in options:
        options["lora"] = nemorl.LoRAConfig(**options["lora"])
    validation = addition_rows(8)
    if settings["algorithm"] == "dpo":
        validation = preference_rows(8, seed=1)
        options["loss"] = from_dict(nemorl.DPOConfig, {"loss": options.get("loss", "dpo")}).loss
    options["trainer"] = nemorl.TrainerConfig(device=settings.get("device", "cpu"))
    config = make(
        Path(settings["folder"]),
        steps=settings["steps"],
        run={"save_period": 2, "resume": settings["resume"], "val_period": 3},
        **options,
    )
    kills = {"between": Kill, "checkpoint": KillInCheckpoint}
    callbacks = [kills[settings["kill"]](settings["at"])] if settings.get("kill") else []
    start(config, validation=validation, callbacks=callbacks)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
