"""A run on Weights & Biases: `wandb login`, or WANDB_MODE=offline and later `wandb sync`."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.runtime.store.directory import Phase
from nemorl.runtime.watch.loggers.base import LoggedRun

SECONDS_BETWEEN_TABLES = 60.0
"""Every table of samples is a file."""


class WandbLogger:
    """Write metrics as train/… and validation/…, samples as tables, the settings as config.

    The run's id is ours, so that a resumed run keeps its address. Our `step` is the axis, as W&B's
    own never decreases.
    """

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        directory = run.directory
        try:
            self.run = wandb.init(
                project=run.project or os.environ.get("WANDB_PROJECT") or "nemorl",
                name=directory.name,
                id=run.run_id,
                resume="allow",
                dir=directory.path,
                config=dict(run.config),
                settings=wandb.Settings(console="off", quiet=True),  # the display has the terminal
            )
        except wandb.Error as error:
            raise ValueError(
                f"run.loggers names wandb, but Weights & Biases can't start a run ({error}): log in"
                " with `wandb login`, set WANDB_MODE=offline, or remove wandb from run.loggers"
            ) from error
        for phase in ("train", "validation"):
            self.run.define_metric(f"{phase}/*", step_metric="step")
        self.last_table = -float("inf")

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(
            {"step": step, **{f"{phase}/{name}": value for name, value in metrics.items()}}
        )

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        now = time.monotonic()
        if now - self.last_table >= SECONDS_BETWEEN_TABLES:
            self.last_table = now
            values = [item for sample in samples for item in sample.items()]
            plain = {key: 0 for key, value in values if isinstance(value, str | int | float)}
            rows = [[sample.get(key) for key in plain] for sample in samples]
            self.run.log({"step": step, "samples": wandb.Table(columns=[*plain], data=rows)})

    def close(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)
