"""Seconds of a step of distillation against one of GRPO on as many tokens, in turn.

    python benchmarks/distillation.py [--small]

The teacher is as large as the student; it is a training backend, or the embedded engine.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import (
    command,
    interleaved,
    load_tokenizer,
    median_ratio,
    quiet,
    save_model,
    share_of_even,
    silence,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is trained."""

    num_prompts: int = 16
    group_size: int = 4
    new_tokens: int = 64
    """Of each response."""
    hidden: int = 256
    """Width of the models, which have four layers."""
    top_k: int = 64
    steps: int = 4
    """Steps of a run; the first is not counted."""
    rounds: int = 3


def main(options: Options) -> None:
    quiet()
    import nemorl

    def seconds(folder: Path, algorithm: str, **own: Any) -> list[float]:
        shape = {
            "num_prompts_per_step": options.num_prompts,
            "num_generations_per_prompt": options.group_size,
        }
        with silence():
            result = nemorl.train(
                str(folder / "model"),
                [{"prompt": "<unknown>" * n} for n in range(1, 20)],
                share_of_even,
                algorithm=algorithm,
                max_num_steps=options.steps,
                max_new_tokens=options.new_tokens,
                ignore_eos=True,
                run={"dir": tempfile.mkdtemp(dir=folder), "display": "none", "export": False},
                **shape,
                **own,
            )
        return [line["seconds"] for line in result.history][1:]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", hidden=options.hidden)
        load_tokenizer(folder / "model").save_pretrained(folder / "model")
        teacher = {"model": str(folder / "model")}
        tokens = {"name": "top_k", "top_k": options.top_k}
        ways: dict[str, dict[str, Any]] = {
            "grpo": {"algorithm": "grpo"},
            "sampled token, backend": {"algorithm": "distill", "teacher": teacher},
            f"top {options.top_k}, backend": {"distillation": tokens, "teacher": teacher},
            f"top {options.top_k}, engine": {
                "distillation": tokens,
                "teacher": {**teacher, "engine": "torch"},
            },
        }
        found: dict[str, list[float]] = {way: [] for way in ways}

        def run(way: str) -> None:
            found[way] += seconds(folder, **{"algorithm": "distill", **ways[way]})

        interleaved([lambda way=way: run(way) for way in ways], options.rounds, clock=time.time)
    print(f"{options.num_prompts * options.group_size} responses of {options.new_tokens} tokens")
    for way, took in found.items():
        ratio = median_ratio(found["grpo"], took)
        print(f"{way:24} {median(took):.2f} s a step   ratio {ratio:.2f}")


if __name__ == "__main__":
    command(main, Options, num_prompts=2, group_size=2, new_tokens=4, hidden=64, steps=2, rounds=1)
