"""Rewards of your own, alone and together.

    python examples/custom_reward.py                             a small demonstration
    nemorl grpo … --reward examples/custom_reward.py:right examples/custom_reward.py:brief
                  --reward-weights 1 0.3                         the same on the command line

A reward is a function. Its parameters say what it is given: `prompt` and `response` (texts), and
columns of the data by their names, here `answer`. With `responses` in the plural it is called once
for a whole batch and gets and returns lists: for a reward model, a judge behind an API, a
comparison of answers with each other. Arrays and tensors may be returned as well. Several rewards
are added up by weight; each is logged as reward/<its name>.
"""

import sys
from dataclasses import replace
from pathlib import Path

import nemorl
from nemorl.rollout.environment import EnvironmentReturn, FunctionalRewardWrapper


def right(prompt: str, response: str, answer: str) -> float:
    """The share of the answer's digits that stand at their place."""
    return sum(given == wanted for given, wanted in zip(response, answer, strict=False)) / len(
        answer
    )


def brief(responses: list[str], answer: list[str]) -> list[float]:
    """A whole batch at a time: 1 for a response as long as the answer, less for each character too
    many or too few.
    """
    return [
        1 / (1 + abs(len(given) - len(wanted)))
        for given, wanted in zip(responses, answer, strict=True)
    ]


class FirstTry(FunctionalRewardWrapper):
    """An environment, for what a function can't do: it shows what it took for the answer in the
    samples, and sees the rewards of a whole batch.
    """

    def __init__(self) -> None:
        super().__init__(
            lambda response, answer: float(response[: len(answer)] == answer), name="first_try"
        )

    def step(self, message_log_batch, metadata) -> EnvironmentReturn:
        result = super().step(message_log_batch, metadata)
        taken = [
            log[-1]["content"][: len(row["answer"])]
            for log, row in zip(message_log_batch, metadata, strict=True)
        ]
        return replace(result, answers=taken)

    def global_post_process_and_metrics(self, batch):
        return batch, {
            "solved": float(sum(batch["rewards"]))
        }  # it might change the rewards here, too


def demonstrate(folder: Path, steps: int = 30) -> None:
    """A model that knows nothing learns to repeat a number."""
    from quickstart import save_model, save_tokenizer

    save_model(folder / "model", save_tokenizer(folder / "model"), seed=0)
    rows = [{"prompt": f"{number}=", "answer": str(number)} for number in range(10, 20)]
    result = nemorl.train(
        model=folder / "model",
        dataset=rows,
        validation=rows,
        reward_fn=[right, brief, FirstTry()],
        reward_weights=(1.0, 0.3, 0.0),  # a reward of weight 0 is only logged
        dir=str(folder / "run"),
        num_prompts_per_step=10,
        num_generations_per_prompt=8,
        max_num_steps=steps,
        lr=1e-3,
        max_new_tokens=3,
        val_at_start=True,
        display="plain",
    )
    first, last = (
        next(line for line in lines if line["phase"] == "validation")
        for lines in (result.history, result.history[::-1])
    )
    for name in ("reward", "reward/right", "reward/brief", "first_try/solved"):
        print(f"{name}: {first[name]:.2f} -> {last[name]:.2f}")


if __name__ == "__main__":
    demonstrate(Path("runs/custom_reward"), *map(int, sys.argv[1:2]))
