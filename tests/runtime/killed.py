"""Runs that are killed and go on, for all rooms. As a script: a JSON of settings (`main`)."""

import asyncio
import json
import os
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import nemorl
from nemorl.rollout.environments.classes import ClassEnvironment
from nemorl.runtime.config.tree import from_dict
from nemorl.runtime.run.loop import Step
from nemorl.runtime.watch.callbacks import Callback
from tests.runtime.runs import (
    addition_rows,
    ahead,
    digits,
    distill_config,
    dpo_config,
    grpo_config,
    hinted_rows,
    learn,
    lines,
    numbers,
    opened,
    ppo_config,
    preference_rows,
    rm_config,
    saved_critic,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

STEPS = 6


def in_a_process(python: Path | str, *, killed: bool = False, **settings: Any) -> None:
    """A run, or a part of one, in a process of its own."""
    done = process(python, **settings)
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr


def process(python: Path | str, **settings: Any) -> subprocess.CompletedProcess[str]:
    root = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [python, "-m", "tests.runtime.killed", json.dumps({"steps": STEPS, **settings})]
    return subprocess.run(
        command, env=os.environ | root, capture_output=True, text=True, check=False
    )


def kill_and_resume(
    python: Path | str,
    folder: Path,
    kills: Sequence[tuple[str, int]],
    *,
    last: Path | str | None = None,
    **settings: Any,
) -> Path:
    """Compare folder/straight with folder/killed, which goes on after each kill (how, in which
    step), and return the latter. last: the Python of the last process.
    """
    straight, broken = folder / "straight", folder / "killed"
    in_a_process(python, **settings, folder=str(straight))
    settings |= {"folder": str(broken), "resume": "auto"}
    for how, at in kills:
        in_a_process(python, killed=True, **settings, kill=how, at=at)
    in_a_process(last or python, **settings)
    assert_equal_outcomes(straight, broken)
    return broken


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[str]]:
    """Metrics but for times, the last checkpoint's tensors, and its samples and state."""
    last = max(folder.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))
    tensors = {
        f"{file.parent.name}/{file.name}/{name}": value
        for file in last.glob("*/*.safetensors")
        for name, value in load_file(file).items()
    }
    texts = [last / "state.json", *sorted(folder.glob("samples/*.jsonl"))]
    metrics = list(map(numbers, lines(folder, "metrics.jsonl")))
    return metrics, tensors, [path.read_text() for path in texts]


def assert_equal_outcomes(a: Path, b: Path) -> None:
    """Bit for bit."""
    (metrics, tensors, texts), (others, other_tensors, other_texts) = outcome(a), outcome(b)
    assert (metrics, texts, tensors.keys()) == (others, other_texts, other_tensors.keys())
    for name in tensors:
        assert torch.equal(tensors[name], other_tensors[name]), name


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


class Kill(Callback):
    """In or after a step.

    between: after it, before its checkpoint. amid: where its loop logs. checkpoint: while its
    checkpoint is written, after the model and before the optimizer.
    """

    def __init__(self, how: str, step: int) -> None:
        self.how, self.step = how, step

    def on_step_begin(self, trainer: nemorl.RunView, step: int) -> None:
        if step == self.step and self.how == "amid":
            Step.log = lambda *args, **options: die()  # type: ignore[method-assign]
        elif step == self.step and self.how == "checkpoint":
            from nemorl.parallel import checkpoint

            write = checkpoint.write_tensors

            def killing(path: Path, *args: Any) -> Any:
                return die() if path.name.startswith("optimizer") else write(path, *args)

            checkpoint.write_tensors = killing  # type: ignore[assignment]

    def on_step_end(self, trainer: nemorl.RunView, step: int, metrics: dict[str, float]) -> None:
        if step == self.step and self.how == "between":
            die()


class Talk:
    """Turns that take times of their own, of which one ends the process, if asked for."""

    max_turns = 3
    times = random.Random(3)
    left: int | None = None
    number: int = signal.SIGKILL

    async def step(self, response: str) -> nemorl.TurnResult:
        await asyncio.sleep(Talk.times.random() / 50)
        if Talk.left is not None:
            Talk.left -= 1
            if Talk.left < 0:
                die(Talk.number)
        done = response[:1] in "0123"
        return nemorl.TurnResult(observation="go on", reward=digits("", response), done=done)


class KillInTurn(Callback):
    """In a turn that a seed chooses, once there is a checkpoint to go on from."""

    TURNS = 24
    SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_begin(self, trainer: nemorl.RunView) -> None:
        if trainer.state.step:
            Talk.left, Talk.number = random.Random(self.seed).randrange(self.TURNS), self.signal

    def on_checkpoint(self, trainer: nemorl.RunView, step: int, path: Path) -> None:
        if step == 1:
            self.on_train_begin(trainer)

    @property
    def signal(self) -> int:
        return self.SIGNALS[self.seed % len(self.SIGNALS)]


def own_loop(run: Any, steps: Any) -> None:
    """Of two streams of prompts, one of which is not trained on."""
    prompts, mixed = run.prompts(), run.prompts(run.rows[:9], name="mixed")
    for step in steps:
        responses = step.sample(prompts, count=3, n=4)
        step.log({"other": float(step.sample(mixed, count=2).rewards.mean())})
        learn(step, responses)


def talk(folder: Path, *, steps: int, seed: int | None) -> None:
    """Go on with a run that samples ahead, or begin it."""
    config = ahead(
        folder,
        2,
        steps=steps,
        num_prompts_per_step=3,
        generation=nemorl.GenerationConfig(max_new_tokens=6, max_batch_size=8),
        data=nemorl.DataConfig(max_total_sequence_length=60),
        run={"resume": "auto", "save_period": 1, "samples_per_step": 1000},
    )
    nemorl.run(
        config,
        model=tiny_model(scale=2.0),
        tokenizer=tiny_tokenizer(),
        train=addition_rows(),
        environment=ClassEnvironment(Talk, Talk),
        callbacks=[] if seed is None else [KillInTurn(seed)],
    )


def main(settings: dict[str, Any]) -> None:
    if settings.pop("emulated", False):
        from tests.emulated_gpu import NAME, emulated

        with emulated():
            main({**settings, "device": NAME})
        return
    folder, steps, algorithm = Path(settings["folder"]), settings["steps"], settings["algorithm"]
    options = settings.get("options", {})
    if algorithm == "talk":
        talk(folder, steps=steps, seed=settings.get("seed"))
        return
    makes = {
        "grpo": grpo_config,
        "sft": sft_config,
        "dpo": dpo_config,
        "distill": distill_config,
        "ppo": ppo_config,
        "rm": rm_config,
    }
    make = makes[algorithm]
    if algorithm == "ppo":
        critic = saved_critic(folder.parent / "critic")
        options["critic"] = nemorl.CriticConfig(model=critic, lr=1e-2, warmup_steps=1)
    for name, section in (("kl", nemorl.KLConfig), ("lora", nemorl.LoRAConfig)):
        if name in options:
            options[name] = section(**options[name])
    if "data" in options:
        options["data"] = nemorl.DataConfig(max_total_sequence_length=32, **options["data"])
    validation = addition_rows(8)
    if algorithm in ("dpo", "rm"):
        validation = preference_rows(8, seed=1)
    if algorithm == "dpo":
        options["loss"] = from_dict(nemorl.DPOConfig, {"loss": options.get("loss", "dpo")}).loss
    options["trainer"] = nemorl.TrainerConfig(device=settings.get("device", "cpu"))
    run = {"save_period": 2, "resume": settings.get("resume", False), "val_period": 3}
    config = make(folder, steps=steps, run=run, **options)
    callbacks = [Kill(settings["kill"], settings["at"])] if settings.get("kill") else []
    if settings.get("own"):
        with opened(config, callbacks=callbacks) as run:
            own_loop(run, run.steps(steps))
    else:
        rows = hinted_rows() if algorithm == "distill" else None
        start(config, rows=rows, validation=validation, callbacks=callbacks)


if __name__ == "__main__":
    import sys

    main(json.loads(sys.argv[1]))
