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

from nemorl.parallel.config import BackendConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.processes import LocalRankGroup
from nemorl.runtime.ranks.rank import TrainingRank
from nemorl.runtime.ranks.trainer import RankedTrainer
from nemorl.runtime.start.registry import TRAINING_BACKENDS, register_training_backend

SIZE = 2


class Several:
    """A rank within a rank for each trainer: the backend of this name does not keep the Protocol's
    ways, but has its methods.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.hosts: dict[int, TrainingRank] = {}
        self.step = 0

    def on(self, number: int, method: str, args: tuple, kwargs: dict) -> Any:
        if number not in self.hosts:
            self.hosts[number] = TrainingRank(
                DTensorBackend, int(os.environ["RANK"]), transport="shared_memory"
            )
            self.hosts[number]._in_driver = True  # it gives exceptions as they are
        answer = self.hosts[number].perform(method, args, kwargs)
        if method == "shutdown":
            del self.hosts[number]
        self.step = answer.step
        if answer.error is not None:
            raise answer.error
        return answer.value

    def setup(self, config: Any) -> None:
        pass

    train_step = get_logprobs = get_reference_logprobs = export_weights = save_checkpoint = (
        wait_for_checkpoint
    ) = load_checkpoint = shutdown = setup


class View:
    """The group as it looks to one of the trainers."""

    numbers = itertools.count()

    def __init__(self, group: LocalRankGroup) -> None:
        self.group, self.size, self.number = group, group.size, next(self.numbers)
        self.place, self.statuses, self.note = group.place, group.statuses, group.note

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.group.start("on", self.number, method, args, kwargs)

    def shutdown(self, timeout_s: float, farewell: Any = None) -> None:
        call = self.start("shutdown")
        while len(call.poll(1)) < self.size:
            pass


@functools.cache
def group() -> LocalRankGroup:
    """The ranks of this test process; they end with it."""
    register_training_backend("several")(Several)
    try:
        made = LocalRankGroup(
            "several",
            SIZE,
            log_dir=Path(tempfile.mkdtemp(prefix="nemorl-ranks-")),
            runtime=RuntimeConfig(),
        )
    finally:
        del TRAINING_BACKENDS["several"]  # other tests list what there is
    call = made.start("setup", BackendConfig())
    while len(call.poll(1)) < SIZE:
        pass
    return made


def ranked(model: nn.Module, config: BackendConfig) -> RankedTrainer:
    """The model, by way of a folder, on two ranks."""
    trainer = RankedTrainer(lambda: View(group()), timeout_s=60, start_timeout_s=60)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        trainer.setup(
            replace(
                config, model=replace(config.model, path=folder), parallel=config.parallel.on(SIZE)
            )
        )
    return trainer
