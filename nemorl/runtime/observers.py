"""Callbacks that look at a run as it goes and at its end."""

import warnings

from nemorl.runtime.callbacks import Callback
from nemorl.runtime.run_directory import RunDirectory
from nemorl.runtime.state import Run


class SignalWatch(Callback):
    """A warning when nothing has been learned from for `patience` steps, because in no group did the rewards differ."""

    def __init__(self, patience: int = 10) -> None:
        self.patience, self.silent = patience, 0

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self.silent = self.silent + 1 if metrics.get("informative_groups") == 0 else 0
        if self.silent == self.patience:
            warnings.warn(
                f"step {step}: for {self.patience} steps all responses to each prompt had the same reward, so nothing is learned: "
                "look at samples/ and at the reward; easier prompts, more responses per prompt or some SFT first may help",
                stacklevel=2,
            )


class PlotCallback(Callback):
    """plots/*.png at the end of the run. A picture that can't be drawn is a warning: the training that it shows is safe."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        from nemorl.runtime.plots import draw

        try:
            draw(self.directory)
        except Exception as error:
            warnings.warn(f"the plots of {self.directory.path} could not be drawn: {error!r}", stacklevel=2)
