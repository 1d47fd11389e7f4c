"""Two ranks for many trainers, one after another or at once: starting some for each would take
seconds every time.
"""

import functools
import itertools
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.runtime.config.base import BaseConfig, RuntimeConfig
from nemorl.runtime.ranks.rank import Rank, dumps, loads
from nemorl.runtime.ranks.trainer import RankedTrainer
from nemorl.runtime.run.registry import training_backend_class
from tests.ray_session import ENDS, ray_cpus

SIZE = 2
CONFIG = BaseConfig(
    trainer=TrainerConfig(device="cpu"), runtime=RuntimeConfig(timeout_s=60, start_timeout_s=60)
)


class Several:
    """A rank within a rank for each trainer."""

    def __init__(self) -> None:
        self.hosts: dict[int, Rank] = {}
        self.step = 0

    def on(self, number: int, backend: str, method: str, payload: list[Any], parts: Any) -> Any:
        make = training_backend_class(backend)
        host = self.hosts.setdefault(number, Rank(make, int(os.environ["RANK"])))
        args, kwargs = loads(payload)
        try:
            return host.do(method, args, kwargs, (lambda at: loads(parts[at])) if parts else None)
        finally:
            self.step = host.step
            if method == "shutdown":
                del self.hosts[number]

    def setup(self, config: Any) -> None:
        pass


class View:
    """The ranks as they look to one of the trainers."""

    numbers = itertools.count()

    def __init__(self, backend: str) -> None:
        self.number, self.backend = next(self.numbers), backend

    def call(self, method: str, payload: list[Any], phase: str, parts: Any = ()) -> Any:
        arguments = self.number, self.backend, method, payload, parts
        return group().call("on", dumps((arguments, {})), phase)

    def shutdown(self, timeout_s: float, result: Any = None) -> None:
        self.call("shutdown", dumps(((), {})), "shutdown")


@functools.cache
def group() -> Any:
    """The ranks of this test process; they end with its cluster."""
    from nemorl.runtime.ranks.actors import RayRanks

    ray_cpus()
    ENDS.callback(group.cache_clear)
    made = RayRanks(Several, SIZE, CONFIG, Path(tempfile.mkdtemp(prefix="nemorl-ranks-")))
    made.call("setup", dumps(((BackendConfig(),), {})), "setup")
    return made


def ranked(
    model: nn.Module, config: BackendConfig, backend: str = "dtensor", **degrees: int
) -> RankedTrainer:
    """The model, by way of a folder, on two ranks."""
    trainer = RankedTrainer(partial(View, backend))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        plan = replace(config.parallel, **degrees).on(SIZE)
        trainer.setup(replace(config, model=replace(config.model, path=folder), parallel=plan))
    return trainer
