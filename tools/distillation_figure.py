"""Draw docs/distillation.png: the model of `make demo` is the teacher of a fresh one.

    python tools/distillation_figure.py runs/demo-0 runs/smollm2

Each checkpoint of both runs answers the sums that were held out. Time is that of the CPU cores in
the steps alone, so that other work on the machine does not count.
"""

import json
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import nemorl


def minutes(run: Path) -> list[float]:
    """The cores' time up to each step, from 0."""
    found = [0.0]
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if line["phase"] == "train":
            found.append(found[-1] + line["seconds"] * line["cpu_percent"] / 100 / 60)
    return found


def accuracy(model: str | Path, demo: Path) -> float:
    """The share of right answers to the sums that were held out."""
    return nemorl.evaluate(
        model,
        demo / "held_out.jsonl",
        reward="last_number",
        data={"chat": True},
        generation={"temperature": 0.0, "max_new_tokens": 64, "max_batch_size": 32},
    )["accuracy"]


def course(run: Path, demo: Path, before: float) -> tuple[list[float], list[float]]:
    """Minutes and accuracy before the run and at each of its checkpoints."""
    times, found = minutes(run), {0: before}
    steps = sorted(int(path.name[5:]) for path in run.glob("checkpoints/step_*"))
    for step in steps:
        with tempfile.TemporaryDirectory() as folder:
            nemorl.export(run, Path(folder) / "model", step=step)
            found[step] = accuracy(Path(folder) / "model", demo)
            print(f"{run}, step {step}: {found[step]:.3f} after {times[step]:.1f} minutes")
    return [times[step] for step in found], [*found.values()]


def main(demo: Path, model: Path) -> None:
    student = demo / "student"
    if not (student / "metrics.jsonl").exists():
        nemorl.train(
            str(model),
            str(demo / "train.jsonl"),
            algorithm="distill",
            teacher={"model": str(demo / "grpo")},
            distillation={"name": "top_k", "direction": "forward"},
            reward="last_number",
            chat=True,
            lora={"rank": 16},
            optimizer={"lr": 1e-3, "schedule": "linear", "min_lr_ratio": 0.1},
            generation={"max_new_tokens": 20, "temperature": 0.8},
            num_prompts_per_step=16,
            num_generations_per_prompt=4,
            max_num_steps=15,
            reduction="token_mean",
            entropy_coef=None,
            run={"dir": str(student), "save_period": 5, "keep_checkpoints": 9},
        )
    before = json.loads((demo / "before.json").read_text())["accuracy"]
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for run, label in ((demo / "grpo", "GRPO, the teacher"), (student, "distilled from it")):
        axes.plot(*course(run, demo, before), marker="o", label=label)
    axes.set(xlabel="minutes of the CPU cores", ylabel="held-out accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent.parent / "docs" / "distillation.png", dpi=130)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
