"""The program of a torchrun job in tests: torchrun -m tests.runtime.ranks.job WHAT MODEL."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from nemorl.losses.types import finalize
from nemorl.runtime.ranks import is_follower
from nemorl.runtime.ranks.rank import follow
from tests.parallel.batches import random_batch
from tests.runtime.ranks import backends

BATCH = random_batch([3])


def say(line: str) -> None:
    """Write a line at once: two ranks write to one stream, and print() writes its parts."""
    os.write(1, f"{line}\n".encode())


def everything(trainer, folder: str) -> None:
    """What the tests of ranks in actors do one by one."""
    assert finalize(trainer.train_step(BATCH, lambda rank, batch: rank + 1))["loss"] == 3
    assert trainer.step == 1
    batch = backends.routed(random_batch([4, 4]))
    found = finalize(trainer.train_step(batch, backends.sum_of_experts))["loss"]
    assert found == int(batch.routed_experts.sum())
    assert next(trainer.weights())[0] == "large.0"
    found = dict(trainer.weights(dtype=torch.bfloat16))
    assert [float(found[f"large.{i}"].mean()) for i in range(8)] == list(range(0, 16, 2))
    assert trainer.send_weights(lambda weights: len(list(weights))) == 9
    saved = Path(folder) / "saved"
    trainer.save_checkpoint(saved)
    trainer.save_checkpoint(saved, background=True)
    trainer.save_checkpoint(saved)
    trainer.load_checkpoint(saved)
    trainer.wait_for_checkpoint()
    say("did everything")


def dying(number: int) -> Callable[[int, object], float]:
    """A loss that kills a rank with the process that torchrun started for it: else torchrun could
    see the other rank's lost connection first.
    """

    def loss(rank: int, batch: object) -> float:
        if rank == number:
            os.kill(int(os.environ["FORKED_FOR"]), signal.SIGKILL)
            signal.pause()
        return 0

    return loss


LOSSES = {"killed": dying(1), "leader_killed": dying(0)}


def main(what: str, folder: str) -> None:
    say(f"process {os.getpid()}")
    config = backends.config(timeout_s=3, start_timeout_s=3 if what == "asleep" else 60)
    for run in range(2):  # a script may have several runs
        if is_follower():
            say(f"result {follow(backends.Summing, config)}")
            continue
        trainer = backends.trainer(config, Path("unused"))
        try:
            trainer.setup(backends.settings(folder))
            if what == "everything":
                everything(trainer, folder)
            elif what == "between_calls":
                raise ArithmeticError("of the loop")
            else:
                trainer.train_step(BATCH, LOSSES.get(what) or getattr(backends, what))
            trainer.result = f"of run {run}"
        finally:
            trainer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
