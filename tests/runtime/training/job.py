"""The program of a torchrun job in tests: torchrun -m tests.runtime.training.job WHAT MODEL."""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch

from nemorl.losses.types import finalize
from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config import BaseConfig
from nemorl.runtime.runtime_config import RuntimeConfig
from nemorl.runtime.training import group, torchrun
from nemorl.runtime.training.make import is_follower, make_trainer, serve_as_follower
from tests.parallel.batches import random_batch
from tests.runtime.training import backends

BATCH = random_batch([3])
TIMEOUT_S = 3.0


def made(folder: str):
    plan, device = ParallelPlan(dp_shard=2), TrainerConfig(device="cpu")
    trainer = make_trainer(BaseConfig(trainer=device), "summing", plan, RuntimeConfig(timeout_s=TIMEOUT_S), Path("unused"))
    trainer.setup(BackendConfig(model=ModelConfig(path=folder), trainer=device, parallel=plan))
    return trainer


def everything(trainer, folder: str) -> None:
    """What the other launchers' tests do one by one."""
    assert finalize(trainer.train_step(BATCH, lambda rank, batch: rank + 1))["loss"] == 3 and trainer.step == 1
    for _ in range(20):
        with contextlib.suppress(FloatingPointError):
            trainer.train_step(BATCH, backends.raising)
    assert trainer.step == 1
    assert next(trainer.export_weights())[0] == "large.0"
    found = dict(trainer.export_weights(dtype=torch.bfloat16))
    assert [float(found[f"large.{i}"].mean()) for i in range(8)] == list(range(0, 16, 2)) and found["large.0"].dtype == torch.bfloat16
    saved = Path(folder) / "saved"
    trainer.save_checkpoint(saved)
    trainer.save_checkpoint(saved, background=True)
    trainer.load_checkpoint(saved)
    trainer.wait_for_checkpoint()
    time.sleep(TIMEOUT_S + 2)  # the driver may take its time
    print("did everything", flush=True)


def main(what: str, folder: str, again: int = 2) -> None:
    if os.environ["RANK"] == "1":
        print("follower", os.getpid(), flush=True)
    group.ALONE_S = torchrun.ALONE_S = 1.0
    for run in range(again):  # a script may have several runs
        if is_follower():
            print("farewell", serve_as_follower("summing", TIMEOUT_S, "cpu"), flush=True)
            continue
        trainer = made(folder)
        try:
            if what == "everything":
                everything(trainer, folder)
            else:
                trainer.train_step(BATCH, getattr(backends, what))
            trainer.farewell = f"of run {run}"
        finally:
            trainer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
