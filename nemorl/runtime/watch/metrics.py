"""How a run's metrics are called and written, and their courses."""

import math
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nemorl.checks import is_number

Series = tuple[list[int], list[float]]
"""Steps and values."""
Course = tuple[Series, Series]
"""A metric in the training and in the validations of a run."""


class Metric(NamedTuple):
    """How a metric is shown."""

    title: str
    meaning: str = ""
    """What it is measured in."""
    label: str = ""
    """Its name in the live table; such metrics have a picture in plots/, too."""
    usual: float | None = None
    """A value that is shown and drawn only beside others."""


SECTIONS = {
    "Learning": {
        "reward": Metric("Reward", "mean reward of the responses", "reward"),
        "shaped_reward": Metric("Shaped reward", "mean after shaping by length"),
        "accuracy": Metric(
            "Accuracy", "share with reward ≥ 1 (pairs: chosen above rejected)", "accuracy"
        ),
        "loss": Metric("Loss", "the loss that is minimized", "loss"),
        "margin": Metric("Margin", "reward of chosen minus rejected", "margin"),
        "chosen_reward": Metric("Reward of chosen", "of a policy the implicit one"),
        "rejected_reward": Metric("Reward of rejected", "of a policy the implicit one"),
        "calibration_error": Metric(
            "Calibration error", "distance of predicted from right share of pairs"
        ),
        "nll": Metric("Negative log-likelihood", "nats per token"),
        "token_probability": Metric("Token probability", "mean of the demonstrations' tokens"),
        "reward/": Metric("", "one part of the reward"),
    },
    "Policy": {
        "kl": Metric("KL to the reference", "nats per token", "KL"),
        "entropy": Metric("Entropy", "nats per token", "entropy"),
        "response_length": Metric("Response length", "tokens", "length"),
        "truncated_fraction": Metric("Truncated", "share cut by a limit on tokens or turns"),
        "informative_groups": Metric(
            "Informative groups", "share whose responses differ in reward"
        ),
        "reward_std": Metric("Spread of rewards", "standard deviation in a step"),
        "groups_trained": Metric("Groups trained on", "prompts in a step"),
        "groups_kept": Metric("Groups kept", "share of sampled prompts that are trained on"),
    },
    "Teacher": {
        "divergence": Metric("Divergence from the teacher", "nats per token", "div"),
        "student_mass": Metric("Student's mass", "at the teacher's likeliest tokens"),
        "teacher_mass": Metric("Teacher's mass", "at its likeliest tokens"),
        "topk_top1_agreement": Metric("Same likeliest token", "share of tokens"),
    },
    "Conversations": {
        "turns": Metric("Turns", "of the model in a conversation", "turns", usual=1),
        "truncated_turns": Metric(
            "Truncated responses", "share of all turns cut by a limit on tokens"
        ),
        "failed_fraction": Metric("Failed", "share left out after an error", "failed", 0),
        "failed/": Metric("", "conversations with this error"),
        "reward/turn_": Metric("", "mean reward of conversations that had this turn"),
        "environment/": Metric("", "measured by the environment"),
    },
    "Sampler": {
        "token_mult_prob_error": Metric(
            "Sampler against trainer",
            "mean factor between their token probabilities; 1 is agreement",
            "gap",
        ),
        "token_mult_prob_error_max": Metric(
            "Sampler against trainer, worst response", "the same, where it is largest"
        ),
        "gen_kl_error": Metric("Sampler's KL error", "nats per token"),
        "gen_kl_error_max": Metric("Sampler's KL error, worst response", "nats per token"),
        "generation_nonfinite_fraction": Metric("Tokens without a sampler's logprob", "share"),
        "staleness/mean": Metric(
            "Age of the sampled tokens", "steps by which their weights are older", usual=0
        ),
        "staleness/max": Metric(
            "Age of the oldest token", "steps by which its weights are older", "stale", usual=0
        ),
        "staleness/limit": Metric(
            "Age allowed", "steps by which a token's weights may be older", usual=0
        ),
        "staleness/": Metric("", "share of tokens of this age, in steps"),
        "receipts/tokens": Metric("Tokens proved", "trained on as they were sampled"),
        "receipts/tokens_unproved": Metric("Tokens not proved", "trained on otherwise", usual=0),
        "receipts/support_ratio": Metric(
            "Support", "mean of π_trainer/π_sampler; 1: both keep the same tokens"
        ),
        "receipts/support_error": Metric("Support's standard error", "of the mean", usual=0),
        "receipts/kl_from_": Metric("", "sampler's KL error, from this token of the response on"),
        "receipts/": Metric(""),
    },
    "Updates": {
        "num_updates": Metric("Updates", "optimizer steps; 0: nothing to learn from"),
        "lr": Metric("Learning rate", "of the optimizer step", "lr"),
        "grad_norm": Metric("Gradient norm", "before clipping"),
        "approx_kl_k1": Metric("KL of the update, k1", "policy before against after, nats"),
        "approx_kl_k3": Metric("KL of the update, k3", "policy before against after, nats"),
        "clip_fraction_low": Metric("Clipped below", "share of tokens"),
        "clip_fraction_high": Metric("Clipped above", "share of tokens"),
        "ratio_": Metric(""),
        "importance_": Metric(""),
        "num_tokens": Metric("Tokens", "in a step"),
    },
    "Critic": {
        "critic/explained_variance": Metric(
            "Explained variance", "share of the returns' variance; 1 is perfect", "explained"
        ),
        "critic/loss": Metric("Loss of the critic"),
        "critic/value_mean": Metric("Values", "mean of the critic's", "value"),
        "critic/return_mean": Metric("Returns", "mean of what values are trained on"),
        "critic/": Metric(""),
    },
    "Engines": {
        "generation/weights/updates": Metric("Weights sent", "updates in a step"),
        "generation/": Metric(""),
    },
    "Speed and resources": {
        "tokens_per_second": Metric("Throughput", "tokens per second", "tok/s"),
        "trainer/mfu": Metric(
            "Model FLOPs utilization", "share of a device's peak in bfloat16", "MFU"
        ),
        "trainer/memory_gb": Metric(
            "Memory of the trainer",
            "GB, the greatest peak of a device; on CPUs since the process began",
            "mem GB",
        ),
        "seconds": Metric("Step time", "seconds"),
        "seconds_generate": Metric("Time to generate", "seconds a step"),
        "seconds_train": Metric("Time to train", "seconds a step"),
        "seconds_sync": Metric("Time to sync weights", "seconds a step"),
        "seconds_": Metric("", "seconds a step"),
        "trainer/tflops_per_device": Metric(
            "Training speed", "10^12 model operations per second and device"
        ),
        "trainer/seconds": Metric("Time of an optimizer step", "seconds"),
        "trainer/shared_fraction": Metric("Tokens not computed again", "share of all tokens"),
        "trainer/": Metric(""),
        "cpu_percent": Metric("CPU", "percent; 100 is one core"),
        "memory_gb": Metric("Memory", "GB, resident"),
        "gpu_memory_gb": Metric("GPU memory", "GB, the step's peak"),
    },
}
"""The metrics in the order shown; a name that ends in / or _ is a prefix."""
METRICS = {name: metric for section in SECTIONS.values() for name, metric in section.items()}
LABELS = {name: metric.label for name, metric in METRICS.items() if metric.label}


def placed(name: str) -> tuple[str, int, Metric]:
    """Return a metric's section, place in the table, and look.

    >>> placed("seconds_sync")[2].title, placed("reward/brief")[2].title, placed("my_own")[0]
    ('Time to sync weights', 'brief', 'Other')
    >>> placed("gsm8k/accuracy")[0], placed("gsm8k/accuracy")[2].title
    ('Learning', 'Accuracy, gsm8k')
    """
    prefixes = [key for key in METRICS if key[-1] in "/_" and name.startswith(key)]
    key = name if name in METRICS else max(prefixes, key=len, default="")
    part, _, rest = name.partition("/")
    if not key and rest.partition("/")[0] in ("reward", "accuracy"):  # of a data set
        section, place, metric = placed(rest)
        return section, place, metric._replace(title=f"{metric.title}, {part}")
    metric = METRICS.get(key, Metric(""))
    section = next((name for name, metrics in SECTIONS.items() if key in metrics), "Other")
    title = metric.title or name.removeprefix(key.rpartition("/")[0] + "/").replace("_", " ")
    return section, [*METRICS, key].index(key), metric._replace(title=title)


def is_usual(metric: str, values: Iterable[float | None]) -> bool:
    """Return whether a metric has no value but its usual one."""
    usual = METRICS.get(metric, Metric("")).usual
    return all(value in (None, usual) for value in values)


def headline(*lines: Mapping[str, Any]) -> list[str]:
    """Return the metrics of some steps that the live table and the top of the report show; beside a
    reward the loss (GRPO's is about 0) is omitted.

    >>> headline({"lr": 0.1, "my_own": 2, "turns": 1.0}), headline({"loss": 0.0}, {"reward": 1.0})
    (['lr'], ['reward'])
    """
    shown = [name for name in LABELS if not is_usual(name, (line.get(name) for line in lines))]
    return [name for name in shown if name != "loss" or "reward" not in shown]


def number(value: float) -> str:
    """Write a number with three significant digits; zeros at the end only where it was rounded.

    >>> [number(x) for x in (0.5, 0.50001, 999.9, 12345, 1e6, -0.01234, 3e-5, 0, float("nan"))]
    ['0.5', '0.500', '1000', '12.3k', '1M', '-0.0123', '3e-5', '0', 'nan']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = float(f"{value:.3g}")
    if not 1e-3 <= abs(rounded) < 1e15:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if 1e3 <= abs(rounded) < 1e4:
        return f"{value:.0f}"
    power = max(0, math.floor(math.log10(abs(rounded)) / 3))
    text = f"{rounded / 1000**power:#.3g}".rstrip(".")
    if "." in text and math.isclose(rounded, value, rel_tol=1e-6):
        text = text.rstrip("0").rstrip(".")
    return text + ("", "k", "M", "G", "T")[power]


def duration(seconds: float) -> str:
    """Write a time as minutes and seconds, with hours and days if any.

    >>> [duration(x) for x in (5, 62, 3723, 180000)]
    ['0:05', '1:02', '1:02:03', '2d 2:00:00']
    """
    text = re.sub(" days?,", "d", str(timedelta(seconds=round(seconds))))
    return re.sub("^0:0?", "", text)


def course_of(records: Iterable[Mapping[str, Any]], metric: str) -> Course:
    """Return a metric's numbers in the lines of metrics.jsonl."""
    found: dict[str, Series] = {"train": ([], []), "validation": ([], [])}
    for line in records:
        if is_number(line.get(metric)):
            steps, values = found[line["phase"]]
            steps.append(line["step"])
            values.append(line[metric])
    return found["train"], found["validation"]


def smooth(values: list[float], *, width: float) -> list[float]:
    """Average neighbors with Gaussian weights of standard deviation `width`."""
    reach = math.ceil(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    sums, weights = np.convolve(values, kernel), np.convolve(np.ones(len(values)), kernel)
    return (sums / weights)[reach : reach + len(values)].tolist()


def thin(series: Series, most: int) -> Series:
    """Return at most `most` points, each the mean of neighbors."""
    steps, values = series
    count = min(most, len(steps))
    edges = [index * len(steps) // count for index in range(count)] + [len(steps)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    return [steps[start] for start in edges[:-1]], means
