"""An algorithm of your own in one file: RAFT, which samples answers, keeps the best one to each
prompt, and learns it by heart (Dong et al. 2023).

    python examples/custom_algorithm.py                                     a small demonstration
    python examples/custom_algorithm.py raft --model.path … --data.train …  a command like `nemorl
                                                grpo`, with all of its settings and --help

It needs two things: a dataclass with its settings, and the loop. What every run has (data and
their order, validation, checkpoints that resume bit for bit, logs, early stop, export) is there.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import nemorl
from nemorl.checks import at_least
from nemorl.losses import LossOutput, nll, token_mean_weights
from nemorl.parallel.backend import ForwardOutput
from nemorl.rollout.collect import Rollouts, select


@dataclass(frozen=True, kw_only=True)
class RAFTConfig(nemorl.BaseConfig):
    """RAFT: imitate the best of several sampled answers to each prompt."""

    reward: str | tuple[str, ...] = "exact_match"
    """What makes an answer good: rewards by name or as module:function."""
    reward_weights: tuple[float, ...] = ()
    """One for each of several rewards; all 1 unless given."""
    num_prompts_per_step: int = 32
    """Prompts per step."""
    num_generations_per_prompt: int = 8
    """Answers to each prompt, of which one is kept."""
    min_reward: float = 0.5
    """Where even the best answer's reward is less, none is kept."""
    max_num_steps: int = 100
    """How often answers are sampled and learned from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts_per_step", "num_generations_per_prompt", "max_num_steps"):
            at_least(1, **{name: getattr(self, name)})  # refused before anything is loaded


@nemorl.register_algorithm("raft", config=RAFTConfig)
def raft(run: nemorl.Run) -> None:
    """Sample, choose, imitate."""
    config, prompts = run.config, run.prompts()
    for step in run.steps(config.max_num_steps):
        count, size = config.num_prompts_per_step, config.num_generations_per_prompt
        rollouts = step.sample(prompts, count=count, n=size)
        best = best_of_each(rollouts)
        kept = [i for i in best if rollouts.rewards[i] >= config.min_reward]
        step.log({"kept": len(kept) / len(best)})
        if kept:
            batch = select(rollouts, kept).to_batch(weights=token_mean_weights)
            step.train(batch, imitate)


def best_of_each(rollouts: Rollouts) -> list[int]:
    """The place of the best response to each prompt; of equals the first."""
    best: dict[int, int] = {}
    for i, group in enumerate(rollouts.group_id.tolist()):
        if group not in best or rollouts.rewards[i] > rollouts.rewards[best[group]]:
            best[group] = i
    return list(best.values())


def imitate(output: ForwardOutput, batch: nemorl.TokenBatch) -> LossOutput:
    """Called for each part of the batch with what the model says of it; the losses of the parts are
    added up.
    """
    return nll(output.token_logprobs, batch.loss_weights)


def demonstrate(folder: Path, steps: int = 30) -> None:
    """A model that knows nothing learns to add 1."""
    from quickstart import save_model, save_tokenizer

    save_model(folder / "model", save_tokenizer(folder / "model"), seed=0)
    sums = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(9)]
    result = nemorl.train(
        algorithm="raft",
        model=folder / "model",
        dataset=sums,
        validation=sums,
        dir=str(folder / "run"),
        lr=1e-3,
        max_new_tokens=1,
        num_prompts_per_step=9,
        num_generations_per_prompt=16,
        max_num_steps=steps,
        val_at_start=True,
        display="plain",
    )
    before, after = (line["accuracy"] for line in result.history if line["phase"] == "validation")
    print(f"greedy accuracy: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["raft"]:
        sys.exit(nemorl.main(sys.argv[1:]))
    demonstrate(Path("runs/custom_algorithm"), *map(int, sys.argv[1:2]))
