"""Callbacks that look at a run as it goes and at its end."""

import math
import warnings

from nemorl.runtime.config.policy import GapConfig
from nemorl.runtime.run import checkpoint
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.state import Run


class SignalWatch(Callback):
    """A warning when nothing has been learned from for `patience` steps, because in no group did
    the rewards differ.
    """

    def __init__(self, patience: int = 10) -> None:
        self.patience, self.silent = patience, 0

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self.silent = self.silent + 1 if metrics.get("informative_groups") == 0 else 0
        if self.silent == self.patience:
            warnings.warn(
                f"step {step}: for {self.patience} steps all responses to each prompt had the same"
                " reward, so nothing is learned: look at samples/ and at the reward; easier"
                " prompts, more responses per prompt or some SFT first may help",
                stacklevel=2,
            )


CAUSES = (
    "Likely causes: weights that the engine did not take over (then it grows from step to step); an"
    " engine that computes in another way (quantised, another dtype or kernel) or reports logprobs"
    " of another distribution than it samples from; bfloat16 (1.01 to 1.03 is usual); dropout,"
    " which is on in training. Look at worst_tokens in {samples}, which nemorl report shows in"
    " colour."
)


class GapWatch(Callback):
    """Warns where sampler and trainer disagree, and ends the run with a FloatingPointError where
    they disagree too much: see `GapConfig`.

    Its place is after the checkpoints: when it ends the run, it tells the newest one that is left
    from before.
    """

    def __init__(self, config: GapConfig, directory: RunDirectory) -> None:
        self.config, self.directory = config, directory
        self.next_warning = config.warn
        self.error: FloatingPointError | None = None

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        if "token_mult_prob_error" not in metrics:
            return
        value, worst = metrics["token_mult_prob_error"], metrics["token_mult_prob_error_max"]
        found = (
            f"sampler and trainer disagree on the tokens' probabilities, by a factor of {value:.4g}"
            f" on average and {worst:.4g} in one response"
        )
        if metrics["generation_nonfinite_fraction"] == 1:
            value, found = (
                math.nan,
                (
                    "the sampler has no finite logprob for any of its tokens, so that it can't be"
                    " compared with the trainer"
                ),
            )
        found, causes = (
            f"step {step}: {found}",
            CAUSES.format(samples=self.directory.samples / f"step_{step}.jsonl"),
        )
        if self.config.stop is not None and not value <= self.config.stop:
            self.error = FloatingPointError(
                f"{found} (token_mult_prob_error; gap.stop is {self.config.stop:g}). {causes}"
            )
            raise self.error
        if self.next_warning is not None and not value <= self.next_warning:
            self.next_warning = 1 + 2 * (value - 1) if value < math.inf else None
            remedy = "off_policy.mode truncate corrects for what can't be helped."
            warnings.warn(
                f"{found} (token_mult_prob_error; gap.warn is {self.config.warn:g}). {causes}"
                f" {remedy}",
                stacklevel=2,
            )

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        if error is not self.error or self.config.stop is None:
            return
        measured = checkpoint.metrics_by_step(self.directory.path)
        good = [
            step
            for step, metrics in measured.items()
            if (metrics.get("token_mult_prob_error") or math.inf) <= self.config.stop
        ]
        if good:
            where = f"to go on from there, remove the later ones in {self.directory.checkpoints}"
            error.add_note(
                f"The newest checkpoint from before the gap is step_{max(good)}: {where}."
            )
        else:
            error.add_note(
                "No checkpoint from before the gap is left: run.save_period and"
                " run.keep_checkpoints say how many there are."
            )


class PlotCallback(Callback):
    """plots/*.png at the end of the run.

    A picture that can't be drawn is a warning: the training that it shows is safe.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        from nemorl.runtime.watch.plots import draw

        try:
            draw(self.directory)
        except Exception as error:
            warnings.warn(
                f"the plots of {self.directory.path} could not be drawn: {error!r}", stacklevel=2
            )
