"""One model on several devices, from a script of your own: `parallel` says how it is spread, and
nothing else changes.

    python examples/several_devices.py
    torchrun --nproc-per-node 2 examples/several_devices.py

In the first line the script starts two processes, each with half of the model; in the second
torchrun has started them.

The loop, the reward and the callbacks are in one process in both cases: this one, or torchrun's
rank 0. `nemorl.run` returns in all of them.
"""

import os
import shutil
import sys
from pathlib import Path

import nemorl


def even_digits(response: str) -> float:
    return sum(character in "02468" for character in response) / 4


class Progress(nemorl.Callback):
    """Told in one process alone, so that nothing is printed twice."""

    def on_step_end(self, trainer: nemorl.RunView, step: int, metrics: dict[str, float]) -> None:
        if step % 5 == 0 or step == 1:
            print(
                f"step {step:2}  reward {metrics['reward']:.2f}  {metrics['trainer/memory_gb']:.1f}"
                " GB on the fullest device",
                flush=True,
            )


def train(folder: Path, steps: int) -> nemorl.TrainResult:
    """A model that knows nothing learns to answer in even digits."""
    from quickstart import save_model, save_tokenizer

    rank, under_torchrun = int(os.environ.get("RANK", 0)), "RANK" in os.environ
    if rank == 0:  # the others wait in nemorl.train until it has been there
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier start
        save_model(folder / "model", save_tokenizer(folder / "model"), seed=0)
    return nemorl.train(
        model=folder / "model",
        dataset=[{"prompt": f"{number}="} for number in range(100)],
        reward_fn=even_digits,
        callbacks=[Progress()],
        parallel={} if under_torchrun else {"dp_shard": 2},
        trainer__device="cpu",
        dir=str(folder / "run"),
        lr=1e-3,
        max_new_tokens=4,
        num_prompts_per_step=8,
        num_generations_per_prompt=8,
        max_num_steps=steps,
        display="none",
    )


if __name__ == "__main__":
    result = train(Path("runs/several_devices"), int(sys.argv[1]) if sys.argv[1:] else 20)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"the trained model, whole again: {result.paths.hf}")
