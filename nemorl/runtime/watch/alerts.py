"""Callbacks that measure a run and warn if it learns nothing or sampler and trainer disagree."""

import math

import psutil
import torch

from nemorl.checks import warn
from nemorl.parallel.measure import GIGABYTE, gpu_peaks
from nemorl.runtime.config.grpo import GapConfig
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.state import RunView
from nemorl.runtime.watch.callbacks import Callback

REJECTED_STEPS = 16
"""Steps in a row of which dynamic sampling may reject all groups."""


class SignalWatch(Callback):
    """Warn of the first, second, fourth, … step without a signal: all responses to each prompt had
    the same reward, or nothing was updated. Raise RuntimeError once dynamic sampling has rejected
    all of `REJECTED_STEPS`.
    """

    silent = rejected = 0

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self._warn(step, metrics)
        self.rejected = self.rejected + 1 if metrics.get("groups_kept") == 0 else 0
        if self.rejected == REJECTED_STEPS:
            raise RuntimeError(
                f"dynamic_sampling rejected all groups of the last {self.rejected} steps: all"
                " responses to each prompt had the same reward. Look at samples/ and at the reward:"
                " it must tell good responses from bad ones. Where prompts that are neither too"
                " easy nor too hard are rare, raise max_sampling_rounds"
            )

    def _warn(self, step: int, metrics: dict[str, float]) -> None:
        reward, rounding = metrics.get("reward", math.nan), 1e-6
        unchanged = metrics.get("num_updates") == 0
        differ = metrics.get("informative_groups", 0) > 0  # of equal rewards, in those of turns
        if not differ and metrics.get("reward_std", math.inf) <= rounding * abs(reward):
            found = f"all responses had the reward {reward:g}"
        elif metrics.get("informative_groups") == 0:
            found = "all responses to each prompt had the same reward"
        elif unchanged:
            found = "no token has an advantage (responses cut off and filtered, or empty)"
        else:
            return
        self.silent += 1
        if self.silent.bit_count() > 1:
            return
        warn(
            f"step {step}: {found}, so there was little or nothing to learn from the rewards"
            f"{'; weights and optimizer stay (num_updates 0)' * unchanged}; {self.silent} such"
            " steps so far. Look at samples/ and at the reward: does it find the answers in the"
            " responses, and tell good ones from bad ones? Easier or harder prompts, more responses"
            " per prompt or some SFT first may help"
        )


class GapWatch(Callback):
    """Warn where sampler and trainer disagree, unless on tokens of older weights; raise
    FloatingPointError where too much.
    """

    def __init__(self, config: GapConfig, directory: RunDirectory) -> None:
        self.config, self.directory = config, directory
        self.next_warning = config.warn

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        if "token_mult_prob_error" not in metrics:
            return
        value, worst = metrics["token_mult_prob_error"], metrics["token_mult_prob_error_max"]
        found = (
            f"sampler and trainer disagree on the tokens' probabilities, by a factor of {value:.4g}"
            f" on average and {worst:.4g} in one response"
        )
        if metrics["generation_nonfinite_fraction"] == 1:
            value, found = math.nan, "the sampler has no finite logprob for any token"
        found = f"step {step}: {found} (token_mult_prob_error;"
        causes = (
            "Usual causes: weights that an engine did not take (then the gap grows), or older ones"
            " (async.max_staleness); an engine that computes differently (quantized, other kernels;"
            " bfloat16 gives 1.01 to 1.03); dropout. Look at worst_tokens in"
            f" {self.directory.samples_file(step)} or in nemorl report."
        )
        if self.config.stop is not None and not value <= self.config.stop:
            raise FloatingPointError(f"{found} gap.stop is {self.config.stop:g}). {causes}")
        if metrics.get("staleness/max") and value < math.inf:
            return  # older weights are another distribution
        if self.next_warning is not None and not value <= self.next_warning:
            self.next_warning = 1 + 2 * (value - 1) if value < math.inf else None
            remedy = "off_policy.mode truncate corrects for it."
            warn(f"{found} gap.warn is {self.config.warn:g}). {causes} {remedy}")


class ResourceMeter(Callback):
    """Add to the metrics of every step:

    cpu_percent: of this process; 100 is one core · memory_gb: resident, in 10^9 bytes ·
    gpu_memory_gb: the most that PyTorch's tensors took.
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.process.cpu_percent()
        self.gpu = torch.cuda.is_available()

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        metrics.update(self.read())

    def read(self) -> dict[str, float]:
        found = {
            "cpu_percent": self.process.cpu_percent(),
            "memory_gb": self.process.memory_info().rss / GIGABYTE,
        }
        if self.gpu:
            found["gpu_memory_gb"] = gpu_peaks.take() / GIGABYTE
        return found
