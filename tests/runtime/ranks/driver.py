"""The program of a driver that tests kill: python -m tests.runtime.ranks.driver MODEL LOGS."""

import sys
import time
from pathlib import Path

import psutil

from nemorl.losses.types import finalize
from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config.base import BaseConfig, RuntimeConfig
from nemorl.runtime.ranks.trainer import make_trainer
from tests.parallel.batches import random_batch
from tests.runtime.ranks import backends


def main(folder: str, logs: str) -> None:
    plan, device, batch = ParallelPlan(dp_shard=2), TrainerConfig(device="cpu"), random_batch([3])
    config = BaseConfig(trainer=device, runtime=RuntimeConfig(timeout_s=60))
    trainer = make_trainer(config, backends.Summing, plan, Path(logs))
    trainer.setup(BackendConfig(model=ModelConfig(path=folder), trainer=device, parallel=plan))
    child = trainer._call("spawn")
    print(*[one.pid for one in psutil.Process().children(recursive=True)], child, flush=True)
    try:
        trainer.train_step(batch, lambda rank, batch: time.sleep(3) or 0)
        time.sleep(600)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print("loss", finalize(trainer.train_step(batch, backends.rank_number))["loss"], flush=True)
    trainer.train_step(batch, lambda rank, batch: time.sleep(60) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
