"""Two ranks for many trainers, one after another or at once: starting some for each would take
seconds every time.
"""

import functools
import itertools
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.rank import Rank
from nemorl.runtime.ranks.trainer import RankedTrainer
from nemorl.runtime.ranks.wire import dumps, loads
from tests.ray_session import ray_cpus

SIZE = 2
CONFIG = BaseConfig(
    trainer=TrainerConfig(device="cpu"), runtime=RuntimeConfig(timeout_s=60, start_timeout_s=60)
)


class Several:
    """A rank within a rank for each trainer."""

    def __init__(self) -> None:
        self.hosts: dict[int, Rank] = {}
        self.step = 0

    def on(self, number: int, method: str, payload: list[Any]) -> Any:
        host = self.hosts.setdefault(number, Rank(DTensorBackend, int(os.environ["RANK"])))
        args, kwargs = loads(payload)
        try:
            return host.do(method, args, kwargs)
        finally:
            self.step = host.step
            if method == "shutdown":
                del self.hosts[number]

    def setup(self, config: Any) -> None:
        pass


class View:
    """The ranks as they look to one of the trainers."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)

    def call(self, method: str, payload: list[Any], phase: str) -> Any:
        return group().call("on", dumps(((self.number, method, payload), {})), phase)

    def shutdown(self, timeout_s: float, result: Any = None) -> None:
        self.call("shutdown", dumps(((), {})), "shutdown")


@functools.cache
def group() -> Any:
    """The ranks of this test process; they end with it."""
    from nemorl.runtime.ranks.actors import RayRanks

    ray_cpus()
    made = RayRanks(Several, SIZE, CONFIG, Path(tempfile.mkdtemp(prefix="nemorl-ranks-")))
    made.call("setup", dumps(((BackendConfig(),), {})), "setup")
    return made


def ranked(model: nn.Module, config: BackendConfig) -> RankedTrainer:
    """The model, by way of a folder, on two ranks."""
    trainer = RankedTrainer(View)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        trainer.setup(
            replace(
                config, model=replace(config.model, path=folder), parallel=config.parallel.on(SIZE)
            )
        )
    return trainer
