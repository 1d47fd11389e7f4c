"""Small complete runs in this process; those that are killed are in killed.py."""

import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nemorl
from nemorl.losses import advantages, policy
from nemorl.losses.logprobs import LogprobKind
from nemorl.losses.masks import token_mean_weights
from nemorl.rollout.collect import Rollouts
from nemorl.rollout.conversation import Conversation, Outcome, Turn
from nemorl.rollout.generation import Completion
from nemorl.runtime.store.directory import RunDirectory
from tests.tiny_models import tiny_critic, tiny_model, tiny_tokenizer

TRAINER = nemorl.TrainerConfig(device="cpu")
TIMES = (
    "time",
    "seconds",
    "seconds_generate",
    "seconds_reference",
    "seconds_teacher",
    "seconds_train",
    "seconds_sync",
    "tokens_per_second",
    "cpu_percent",
    "memory_gb",
    "gpu_memory_gb",
    "trainer/seconds",
    "trainer/shared_fraction",  # of microbatches
    "trainer/memory_gb",
    "trainer/tflops_per_device",
    "trainer/mfu",
)
"""What two runs of the same numbers differ in."""


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same numbers have in common."""
    times = {f"{of}{name}" for of in ("", "critic/") for name in TIMES}
    return {name: value for name, value in metrics.items() if name not in times}


def of_phase(result: nemorl.TrainResult, phase: str) -> list[dict[str, Any]]:
    """The metrics of every step, or of every validation."""
    return [line for line in result.history if line["phase"] == phase]


def addition_rows(count: int = 40) -> list[dict[str, Any]]:
    sums = [(f"{i % 7}+{i % 5}=", str(i % 7 + i % 5)) for i in range(count)]
    return [{"prompt": prompt, "answer": answer, "response": answer} for prompt, answer in sums]


def hinted_rows() -> list[dict[str, Any]]:
    """`addition_rows` without answers, whose teacher sees them in its prompt."""
    return [
        {"prompt": prompt, "teacher_prompt": f"{prompt}{answer}, {prompt}"}
        for prompt, answer in ((row["prompt"], row["answer"]) for row in addition_rows())
    ]


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
ppo_config = partial(small_config, nemorl.PPOConfig, SAMPLED | {"num_prompts_per_step": 8})
sft_config = partial(small_config, nemorl.SFTConfig, SAMPLED | BATCH)
dpo_config = partial(small_config, nemorl.DPOConfig, BATCH)
distill_config = partial(small_config, nemorl.DistillConfig, SAMPLED | {"num_prompts_per_step": 12})
rm_config = partial(small_config, nemorl.RMConfig, BATCH)


LOSS = nemorl.policy_loss(policy.clipped, off_policy={})


def ahead(folder: Path, staleness: int, *, in_flight: str = "keep", **options: Any) -> Any:
    """A configuration that samples ahead."""
    section: Any = {"max_staleness": staleness, "in_flight": in_flight}
    return grpo_config(folder, async_=nemorl.AsyncConfig(**section), **options)


def saved_model(folder: Path, **options: Any) -> Path:
    """The folder of a tiny model and its tokenizer."""
    tiny_model(**{"scale": 2.0, **options}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def saved_critic(folder: Path, **options: Any) -> str:
    """The folder of a tiny critic."""
    tiny_critic(**{"scale": 2.0, **options}).save_pretrained(folder)
    return str(folder)


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines(folder: Path, name: str = "groups.jsonl") -> list[dict[str, Any]]:
    """The lines of a file of a run."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def prove(folder: Path, steps: int, count: int = 6) -> None:
    """Each group was taken once, in order, and each step has as many as it asked for."""
    found = lines(folder)
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    trained = [number for line in found for number in line["trained"]]
    dropped = [n for line in found for each in line["dropped"].values() for n in each]
    taken = Counter([*trained, *dropped, *found[-1]["open"]])
    assert taken == Counter(range(len(taken)))
    assert {len(line["trained"]) for line in found} == {count}


def learn(step: Any, found: Rollouts) -> Any:
    """A step of GRPO in a loop of a test's own."""
    batch = found.to_batch(advantages.grpo, token_mean_weights)
    step.log({}, samples=found)
    step.train(batch, LOSS)
    return batch


def resumed(config: Any, **changes: Any) -> Any:
    """The configuration that resumes a run, perhaps with changes."""
    return replace(config, run=replace(config.run, resume=True), **changes)


def chat_rows() -> list[dict[str, Any]]:
    """`addition_rows` whose prompts are messages."""
    return [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in addition_rows()
    ]


def samples_at(folder: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step."""
    return RunDirectory(folder).read_samples([step])[step]


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
    given: Any = None,
    **model: Any,
) -> nemorl.TrainResult:
    """A run of a tiny model (or a given one) on additions, or on preferences among digits."""
    scored = isinstance(config, nemorl.RMConfig)
    of_pairs = scored or isinstance(config, nemorl.DPOConfig)
    make = tiny_critic if scored else tiny_model
    return nemorl.run(
        config,
        model=given or make(**{"scale": 2.0, **model}),
        tokenizer=tiny_tokenizer(),
        train=rows or (preference_rows() if of_pairs else addition_rows()),
        validation=validation,
        reward=reward
        or (digits if isinstance(config, nemorl.GRPOConfig | nemorl.PPOConfig) else None),
        callbacks=callbacks,
    )


def rollouts(
    rewards: list[float],
    *,
    group: int = 2,
    lengths: list[int] | None = None,
    truncated: tuple[int, ...] = (),
) -> Rollouts:
    lengths = lengths or [3] * len(rewards)
    completions = [
        Completion(
            token_ids=(2,) * n,
            logprobs=(-0.5,) * n,
            finish_reason="length" if i in truncated else "stop",
            text="00"[:n],
        )
        for i, n in enumerate(lengths)
    ]
    return Rollouts(
        conversations=[
            Conversation(
                row={},
                group=i // group,
                member=i % group,
                turns=(Turn(prompt=[3, 4], completion=completion),),
                outcome=Outcome(reward=reward),
            )
            for i, (reward, completion) in enumerate(zip(rewards, completions, strict=True))
        ],
        rewards=torch.tensor(rewards),
        kind=LogprobKind(),
    )
