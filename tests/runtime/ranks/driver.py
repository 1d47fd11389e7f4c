"""The program of a driver that tests kill: python -m tests.runtime.ranks.driver MODEL LOGS."""

import sys
import time
from pathlib import Path

import psutil

from nemorl.losses.types import finalize
from tests.parallel.batches import random_batch
from tests.runtime.ranks import backends


def main(folder: str, logs: str) -> None:
    trainer, batch = backends.trainer(backends.config(timeout_s=60), Path(logs)), random_batch([3])
    trainer.setup(backends.settings(folder))
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
