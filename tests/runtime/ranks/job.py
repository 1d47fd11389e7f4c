"""The program of a torchrun job in tests: torchrun -m tests.runtime.ranks.job WHAT MODEL."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from nemorl.losses.types import finalize
from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks import group, torchrun
from nemorl.runtime.ranks.following import FollowedRunFailed
from nemorl.runtime.ranks.make import is_follower, make_trainer, serve_as_follower
from nemorl.runtime.run.signals import signals_raise
from tests.parallel.batches import random_batch
from tests.runtime.ranks import backends

BATCH = random_batch([3])
TIMEOUT_S = 3.0
PATIENT_S = 600.0
"""For ranks of which something else is expected before a call takes too long."""


def made(folder: str, timeout_s: float):
    plan, device = ParallelPlan(dp_shard=2), TrainerConfig(device="cpu")
    trainer = make_trainer(
        BaseConfig(trainer=device),
        "summing",
        plan,
        RuntimeConfig(timeout_s=timeout_s),
        Path("unused"),
    )
    trainer.setup(BackendConfig(model=ModelConfig(path=folder), trainer=device, parallel=plan))
    return trainer


def everything(trainer, folder: str) -> None:
    """What the other launchers' tests do one by one."""
    assert (
        finalize(trainer.train_step(BATCH, lambda rank, batch: rank + 1))["loss"] == 3
        and trainer.step == 1
    )
    for _ in range(20):
        with contextlib.suppress(FloatingPointError):
            trainer.train_step(BATCH, backends.raising)
    assert trainer.step == 1
    assert next(trainer.export_weights())[0] == "large.0"
    found = dict(trainer.export_weights(dtype=torch.bfloat16))
    assert [float(found[f"large.{i}"].mean()) for i in range(8)] == list(range(0, 16, 2)) and found[
        "large.0"
    ].dtype == torch.bfloat16
    saved = Path(folder) / "saved"
    trainer.save_checkpoint(saved)
    trainer.save_checkpoint(saved, background=True)
    trainer.load_checkpoint(saved)
    trainer.wait_for_checkpoint()
    time.sleep(TIMEOUT_S + 2)  # the driver may take its time
    print("did everything", flush=True)


def killed_in_a_pause(trainer, folder: str) -> None:
    """The other rank dies while this one has nothing to do with the ranks."""
    os.kill(trainer._group.place(1).pid, signal.SIGKILL)
    time.sleep(600)


def signalled_while_the_other_hangs(trainer, folder: str) -> None:
    """No handler in Python gets into the collective in which this rank waits."""
    trainer.train_step(os.getpid(), backends.asleep_and_signalled)


def told_to_end(trainer, folder: str) -> None:
    """As torchrun tells both where it has been told so, while no step is under way."""
    os.kill(trainer._group.place(1).pid, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def main(what: str, folder: str, again: int = 2) -> None:
    if os.environ["RANK"] == "1":
        print("follower", os.getpid(), flush=True)
    group.ALONE_S = torchrun.ALONE_S = group.SIGNAL_S = 1.0
    timeout_s = TIMEOUT_S if what in ("everything", "asleep", "stopped") else PATIENT_S
    for run in range(again):  # a script may have several runs
        if is_follower():
            try:
                print("farewell", serve_as_follower("summing", timeout_s, "cpu"), flush=True)
            except FollowedRunFailed:
                print("no farewell", flush=True)
                raise
        else:
            with signals_raise():
                lead(run, what, folder, timeout_s)
        print("groups", len(dist.distributed_c10d._world.pg_map), flush=True)


def lead(run: int, what: str, folder: str, timeout_s: float) -> None:
    trainer = made(folder, timeout_s)
    try:
        if (act := globals().get(what)) is not None:
            act(trainer, folder)
        else:
            trainer.train_step(BATCH, getattr(backends, what))
        trainer.farewell = f"of run {run}"
    finally:
        trainer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
