"""A run in TensorBoard."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.runtime.store.directory import Phase
from nemorl.runtime.store.files import writing
from nemorl.runtime.watch.loggers.base import LoggedRun


class TensorBoardLogger:
    """Write scalars as train/… and validation/… that hide those before a resume."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.directory.tensorboard
        with writing("TensorBoard's events", self.folder):
            self.writer = SummaryWriter(str(self.folder), purge_step=run.first_step + 1)

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        with writing("TensorBoard's events", self.folder):
            for name, value in metrics.items():
                self.writer.add_scalar(f"{phase}/{name}", value, step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: `nemorl report` shows them."""

    def close(self, *, finished: bool) -> None:
        with writing("TensorBoard's events", self.folder):
            self.writer.close()
