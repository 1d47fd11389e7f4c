"""GRPO as a script: the whole algorithm in the order of time. Change any line of it.

    python examples/grpo_loop.py                                  a small demonstration
    python examples/grpo_loop.py --model.path … --data.train … --reward math --run.dir runs/mine
    python examples/grpo_loop.py --run.dir runs/mine --run.resume    after a kill: the same numbers

`--help` lists all settings, of one device or many, with either engine.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import nemorl as nr
from nemorl.losses import advantages, masks, policy
from nemorl.rollout.collect import to_token_batch


def main(config: nr.GRPOConfig) -> nr.TrainResult:
    loss_fn = nr.policy_loss(policy.clipped, clip_low=0.2, clip_high=0.28)
    size, count = config.num_generations_per_prompt, config.num_prompts_per_step
    with nr.open_run(config) as run:
        prompts = run.prompts()
        for step in run.steps(config.max_num_steps):
            groups = step.sample(prompts.next(count), n=size)
            batch = to_token_batch(groups)
            better = advantages.advantages(groups.rewards, groups.group_id)
            batch = replace(
                batch,
                advantages=advantages.to_tokens(better, batch.loss_mask),
                loss_weights=masks.token_mean_weights(batch.loss_mask),
            )
            step.log(run.trainer.train_step(batch, loss_fn), samples=groups)
    return run.result


def demonstration(folder: Path, *flags: str) -> list[str]:
    """Return the flags with which a model that knows nothing learns to add 1."""
    from quickstart import save_model, save_tokenizer

    save_model(folder / "model", save_tokenizer(folder / "model"), seed=0)
    sums = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(9)]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums))
    return [
        f"--model.path={folder / 'model'}", f"--data.train={data}", f"--data.validation={data}",
        f"--run.dir={folder / 'run'}", "--optimizer.lr=3e-3", "--generation.max-new-tokens=1",
        "--num-prompts-per-step=9", "--num-generations-per-prompt=16", "--max-num-steps=30",
        "--run.val-at-start=true", "--run.display=plain", *flags,
    ]  # fmt: skip


if __name__ == "__main__":
    flags = sys.argv[1:] or demonstration(Path("runs/grpo_loop"))
    main(nr.cli(nr.GRPOConfig, flags))
