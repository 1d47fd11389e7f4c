"""A pretrained chat model learns to add by reinforcement learning, on a laptop CPU.

1. SmolLM2-135M-Instruct answers sums of reasoning-gym, "Calculate 36 + 47.", in its chat template.
2. GRPO trains LoRA adapters on other sums; the reward is 1 if the last number is the right one.
3. The trained model answers the first sums again.

`make demo` installs what this needs, converts the model and runs it.
"""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemorl
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train SmolLM2-135M-Instruct on sums, and compare its answers before and after."""

    dir: Path = Path("runs/demo")
    """Where the data and the run are kept; a demo that was interrupted goes on, one that has ended
    is replaced.
    """
    model: Path = Path("runs/smollm2")
    """The model: a folder that tools/smollm2.py wrote."""
    seed: int = 0
    """Of the sums, their order, the adapters and the sampling."""
    steps: int = 60
    """Steps of reinforcement learning."""
    prompts: int = 8
    """Sums in each step; each is answered eight times."""
    num_held_out: int = 300
    """Sums that are never trained on; accuracy is measured on them."""


def sums(count: int, seed: int) -> dict[str, str]:
    """Questions of reasoning-gym, each once, with their answers: two terms, one or two digits."""
    import reasoning_gym

    rows = reasoning_gym.create_dataset(
        "basic_arithmetic",
        seed=seed,
        size=count,
        operators=["+"],
        max_terms=2,
        max_digits=2,
        allow_parentheses=False,
    )
    return {row["question"]: row["answer"] for row in rows}


def save_rows(folder: Path, settings: Demo) -> None:
    """Rows held out, and rows to train on, which have none of their questions."""
    first = 1_000_000 * settings.seed  # reasoning-gym's row i has the seed first + i
    held_out = dict(list(sums(4 * settings.num_held_out, first).items())[: settings.num_held_out])
    train = sums(4000, first + 500_000)
    train = {question: answer for question, answer in train.items() if question not in held_out}
    for name, rows in (("held_out", held_out), ("train", train)):
        lines = (json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in rows.items())
        (folder / f"{name}.jsonl").write_text("".join(lines))


def answers(model: Path, settings: Demo) -> dict[str, Any]:
    """The model's likeliest answers to the sums that were held out, and how many are right."""
    return nemorl.evaluate(
        model,
        settings.dir / "held_out.jsonl",
        reward="last_number",
        data={"chat": True},
        # A sum, in many words; some at a time, so that the progress is seen.
        generation={"temperature": 0.0, "max_new_tokens": 64, "max_batch_size": 32},
    )


def show_both(before: dict[str, Any], after: dict[str, Any], count: int = 8) -> None:
    """A table of the first sums that were held out, with both answers."""
    table = Table("question", "before", "after", title="The same model on sums it never saw")
    for pair in list(zip(before["answers"], after["answers"], strict=True))[:count]:
        colored = [
            Text(" ".join(one["response"].split()), "green" if one["reward"] == 1 else "red")
            for one in pair
        ]
        table.add_row(pair[0]["prompt"], *colored)
    console.print(table)


def main(settings: Demo) -> None:
    run, first = settings.dir / "grpo", settings.dir / "before.json"
    if (run / "hf").exists():
        shutil.rmtree(run)
        first.unlink(missing_ok=True)
    settings.dir.mkdir(parents=True, exist_ok=True)
    save_rows(settings.dir, settings)
    console.print(f"[bold]Before[/]: {settings.model} answers {settings.num_held_out} sums")
    before = json.loads(first.read_text()) if first.exists() else answers(settings.model, settings)
    first.write_text(json.dumps(before))
    console.print(f"{before['accuracy']:.0%} are right\n")

    start = time.perf_counter()
    console.print("[bold]Reinforcement learning[/] (GRPO, LoRA), reward 1 for the right number")
    nemorl.run(
        nemorl.GRPOConfig(
            model=nemorl.ModelConfig(path=str(settings.model)),
            data=nemorl.DataConfig(train=str(settings.dir / "train.jsonl"), chat=True),
            lora=nemorl.LoRAConfig(rank=16),
            optimizer=nemorl.OptimizerConfig(lr=3e-4, schedule="linear", min_lr_ratio=0.1),
            generation=nemorl.GenerationConfig(max_new_tokens=20, temperature=0.8),
            run=nemorl.RunConfig(
                dir=str(run), seed=settings.seed, resume="auto", save_period=10, keep_checkpoints=9
            ),
            reward="last_number",
            num_prompts_per_step=settings.prompts,
            num_generations_per_prompt=8,
            max_num_steps=settings.steps,
            entropy_coef=None,
        )
    )
    seconds = time.perf_counter() - start

    console.print(f"\n[bold]After[/]: the trained model answers the same {settings.num_held_out}")
    after = answers(run, settings)
    show_both(before, after)
    console.print(f"report: [bold]{nemorl.write_report(run)}[/], plots: [bold]{run / 'plots'}[/]")
    console.print(
        f"held-out greedy accuracy: {before['accuracy']:.2f} -> {after['accuracy']:.2f}"
        f" (seed {settings.seed}, {seconds:.0f} s of training)"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Demo))
    except KeyboardInterrupt:
        raise SystemExit("interrupted; make demo goes on") from None
