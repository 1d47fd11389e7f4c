"""A reward model learns from pairs which numbers are preferred, and a policy learns from it.

python examples/reward_model.py                              a small demonstration

nemorl rm --model.path … --data.train pairs.jsonl --data.held-out 0.1 --run.dir runs/rm
nemorl grpo --model.path … --data.train … --reward rm:runs/rm       the same on the command line
"""

import random
import sys
from pathlib import Path

import nemorl


def pairs(count: int) -> list[dict[str, str]]:
    """Of two numbers of three digits, the one with more nines is preferred."""
    draw, found = random.Random(1), []
    while len(found) < count:
        one, other = sorted((f"{draw.randrange(1000):03}" for _ in range(2)), key=nines)
        if nines(one) < nines(other):
            prompt = f"{draw.randrange(10)}="
            found.append({"prompt": prompt, "chosen": other, "rejected": one})
    return found


def nines(number: str) -> int:
    return number.count("9")


def demonstrate(folder: Path, steps: int = 40) -> None:
    from quickstart import save_model, save_tokenizer

    save_model(folder / "model", save_tokenizer(folder / "model"), seed=0)
    usual = {"model": folder / "model", "max_num_steps": steps, "lr": 1e-3, "display": "plain"}
    scores = nemorl.train(
        algorithm="rm", dataset=pairs(500), validation=pairs(100), dir=str(folder / "rm"), **usual
    )
    questions = [{"prompt": f"{digit}="} for digit in range(10)]
    policy = nemorl.train(
        dataset=questions,
        reward=f"rm:{folder / 'rm'}",
        dir=str(folder / "policy"),
        num_prompts_per_step=10,
        num_generations_per_prompt=8,
        max_new_tokens=3,
        **usual,
    )
    rewards = [line["reward"] for line in policy.history]
    print(f"held-out pairs in the right order: {scores.metrics['val_accuracy']:.2f}")
    print(f"score of the policy's numbers: {rewards[0]:.2f} -> {rewards[-1]:.2f}")


if __name__ == "__main__":
    demonstrate(Path("runs/reward_model"), *map(int, sys.argv[1:2]))
