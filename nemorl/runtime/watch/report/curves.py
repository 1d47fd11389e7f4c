"""The curves of a report, as SVG that needs no script; the page's script adds the cursor, the
values under it and the degree of smoothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.runtime.watch.display import number
from nemorl.runtime.watch.report.elements import Html, element, join
from nemorl.runtime.watch.series import Series, is_number, series_of, smooth, thin

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 200, 46, 12, 10, 24
MOST_POINTS = 1000

TITLES = {
    "reward": ("Reward", "mean reward of the responses"),
    "accuracy": (
        "Accuracy",
        (
            "share of responses with a reward (of several: the first) of at least 1; of pairs:"
            " chosen above rejected"
        ),
    ),
    "loss": ("Loss", "the loss that is minimised"),
    "margin": ("Margin", "by how much chosen responses are preferred"),
    "chosen_reward": ("Reward of chosen", "implicit reward of the chosen responses"),
    "rejected_reward": ("Reward of rejected", "implicit reward of the rejected responses"),
    "nll": ("Negative log-likelihood", "nats per token of the demonstrations"),
    "token_probability": ("Token probability", "mean of the demonstrations' tokens"),
    "reward_std": ("Spread of rewards", "standard deviation of the rewards in a step"),
    "kl": ("KL to the reference", "nats per token"),
    "entropy": ("Entropy", "nats per token"),
    "response_length": ("Response length", "tokens"),
    "truncated_fraction": ("Truncated", "share of responses that hit the token limit"),
    "informative_groups": (
        "Informative groups",
        "share of prompts whose responses differ in reward",
    ),
    "groups_kept": ("Groups kept", "share of sampled prompts that are trained on"),
    "approx_kl_k1": ("KL of the update, k1", "policy before against after, nats per token"),
    "approx_kl_k3": ("KL of the update, k3", "policy before against after, nats per token"),
    "clip_fraction_low": ("Clipped below", "share of tokens"),
    "clip_fraction_high": ("Clipped above", "share of tokens"),
    "token_mult_prob_error": (
        "Sampler against trainer",
        "mean factor between their token probabilities; 1 is agreement",
    ),
    "token_mult_prob_error_max": (
        "Sampler against trainer, worst response",
        "the same in the response where it is largest",
    ),
    "gen_kl_error": ("Sampler's KL error", "nats per token"),
    "gen_kl_error_max": ("Sampler's KL error, worst response", "nats per token"),
    "generation_nonfinite_fraction": ("Tokens without a sampler's logprob", "share of the tokens"),
    "lr": ("Learning rate", "of the optimizer step"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "num_tokens": ("Tokens", "in a step"),
    "tokens_per_second": ("Throughput", "tokens per second"),
    "seconds": ("Step time", "seconds"),
    "seconds_generate": ("Time to generate", "seconds a step"),
    "seconds_train": ("Time to train", "seconds a step"),
    "seconds_sync": ("Time to sync weights", "seconds a step"),
    "cpu_percent": ("CPU", "percent; 100 is one core"),
    "memory_gb": ("Memory", "GB, resident"),
    "gpu_memory_gb": ("GPU memory", "GB, the step's peak"),
    "gpu_percent": ("GPU", "percent"),
    "trainer/mfu": (
        "Model FLOPs utilisation",
        "share of the peak that a device has in bfloat16, in an optimizer step",
    ),
    "trainer/tflops_per_device": ("Training speed", "10^12 model operations per second and device"),
    "trainer/seconds": ("Time of an optimizer step", "seconds"),
    "trainer/memory_gb": (
        "Memory of the trainer",
        "GB, the peak of the device that has most; on CPUs since the process began",
    ),
}
"""Metric → title, and what it is measured in."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Learning": (
        "reward",
        "accuracy",
        "loss",
        "margin",
        "chosen_reward",
        "rejected_reward",
        "nll",
        "token_probability",
        "reward/",
    ),
    "Policy": (
        "kl",
        "entropy",
        "response_length",
        "truncated_fraction",
        "informative_groups",
        "reward_std",
        "groups_kept",
    ),
    "Updates": (
        "lr",
        "grad_norm",
        "approx_kl_k1",
        "approx_kl_k3",
        "clip_fraction_",
        "ratio_",
        "importance",
        "num_tokens",
    ),
    "Sampler": (
        "token_mult_prob_error",
        "token_mult_prob_error_max",
        "gen_kl_error",
        "gen_kl_error_max",
        "generation_nonfinite_fraction",
    ),
    "Engines": ("generation/",),
    "Speed and resources": (
        "tokens_per_second",
        "trainer/mfu",
        "seconds",
        "trainer/",
        "cpu_percent",
        "memory_gb",
        "gpu_memory_gb",
        "gpu_percent",
    ),
}
"""The sections of the curves, and what belongs there in this order; a name that ends in / or _ is a
beginning.
"""
OPEN = ("Learning", "Policy")


OF_ENGINES = {
    "tokens": "generated in a step",
    "tokens_per_second": "while generating",
    "busy": "share of the time of generating in which it computed",
    "restarts": "in a step",
}
SPANS = {"token_mult_prob_error": (1.0, 1.01), "token_mult_prob_error_max": (1.0, 1.01)}
"""What the axis of a metric covers at least, so that rounding errors don't look like mountains."""


@dataclass(frozen=True)
class Curve:
    """A metric's course in training and validation."""

    metric: str
    train: Series
    validation: Series

    @property
    def title(self) -> str:
        known = TITLES.get(self.metric)
        if self.metric.startswith("generation/"):
            return self.metric.removeprefix("generation/")
        return (
            known[0]
            if known
            else (
                self.metric.removeprefix("reward/").replace("_", " ")
                if "/" in self.metric
                else self.metric.replace("_", " ")
            )
        )

    @property
    def meaning(self) -> str:
        if self.metric.startswith("generation/"):
            return OF_ENGINES.get(self.metric.rpartition("/")[2], "")
        return (
            TITLES[self.metric][1]
            if self.metric in TITLES
            else "one part of the reward"
            if self.metric.startswith("reward/")
            else ""
        )

    @property
    def box(self) -> "Box":
        """Its place on its picture."""
        return Box.around(
            thin(self.train, MOST_POINTS), self.validation, span=SPANS.get(self.metric, ())
        )

    @property
    def constant(self) -> bool:
        """Whether the metric never changed: that is told in words."""
        return not self.validation[0] and len(self.train[0]) > 2 and len(set(self.train[1])) == 1


def curves_of(metrics: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Every metric of a run that was ever a finite number, in the order in which they came."""
    numbers = (name for line in metrics for name, value in line.items() if is_number(value))
    names = [name for name in dict.fromkeys(numbers) if name not in ("step", "time", "phase")]
    return [
        Curve(name, series_of(metrics, name, "train"), series_of(metrics, name, "validation"))
        for name in names
    ]


def grouped(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """The curves by section, in the order of `GROUPS`; those that no section names come last, under
    Other.
    """
    left = {curve.metric: curve for curve in curves}
    groups: dict[str, list[Curve]] = {}
    for group, patterns in GROUPS.items():
        for pattern in patterns:
            names = [
                name
                for name in left
                if name == pattern
                or (pattern[-1] in "/_" and name.startswith(pattern))
                or belongs(name, pattern)
            ]
            groups.setdefault(group, []).extend(left.pop(name) for name in sorted(names))
    groups["Other"] = list(left.values())
    return {group: members for group, members in groups.items() if members}


def belongs(name: str, pattern: str) -> bool:
    """seconds_generate belongs to seconds, importance_mean to importance."""
    return pattern in ("seconds", "importance") and name.startswith(f"{pattern}_")


def chart(curve: Curve, place: int) -> Html:
    """A figure with the single steps (faint), their smoothed course, and the validations; `place`
    is the curve's among those of `curve_data`.
    """
    train, validation = thin(curve.train, MOST_POINTS), curve.validation
    last = (train[1] or validation[1])[-1]
    caption = element(
        "figcaption",
        element("span", element("b", curve.title), element("small", curve.meaning), class_="what"),
        element("output", number(last), class_="now"),
    )
    box = curve.box
    parts: list[Html] = [*box.grid(), *_course(box, train), *_validations(box, validation)]
    cursor = [
        element("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM),
        element("circle", class_="dot", r=3.5, cx=-9, cy=-9),
    ]
    described = (
        f"{curve.title} over {len(curve.train[0]) or len(validation[0])} steps, last {number(last)}"
    )
    picture = element(
        "svg", *parts, *cursor, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=described
    )
    return element(
        "figure", caption, picture, class_="chart", data_curve=place, data_metric=curve.metric
    )


def _course(box: "Box", series: Series) -> list[Html]:
    steps, values = series
    if not steps:
        return []
    if len(steps) < 3:
        return [
            element("circle", class_="mark", cx=f"{box.x(step):.1f}", cy=f"{box.y(value):.1f}", r=3)
            for step, value in zip(*series, strict=True)
        ]
    smoothed = smooth(values, width=default_width(len(steps)))
    return [
        element("path", class_="raw", d=box.path(steps, values)),
        element("path", class_="smooth", d=box.path(steps, smoothed)),
    ]


def _validations(box: "Box", series: Series) -> list[Html]:
    if not series[0]:
        return []
    marks = [
        element("circle", class_="val", cx=f"{box.x(step):.1f}", cy=f"{box.y(value):.1f}", r=3.5)
        for step, value in zip(*series, strict=True)
    ]
    return [element("path", class_="val", d=box.path(*series)), *marks]


def default_width(count: int) -> float:
    """Standard deviation of the smoothing, in points: none to speak of in a short run."""
    return max(0.4, count / 50)


@dataclass(frozen=True)
class Box:
    """The place of a curve's values on its picture."""

    low_step: float
    high_step: float
    low: float
    high: float

    @classmethod
    def around(cls, *series: Series, span: Sequence[float] = ()) -> "Box":
        steps = [step for part in series for step in part[0]]
        values = [*span, *(value for part in series for value in part[1])]
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        low, high = (
            low - room if low < 0 or low - room > 0 else min(low, 0.0) - 0.02 * (high - low),
            high + room,
        )
        return cls(min(steps), max(max(steps), min(steps) + 1), low, high)

    def x(self, step: float) -> float:
        return LEFT + (step - self.low_step) / (self.high_step - self.low_step) * (
            WIDTH - LEFT - RIGHT
        )

    def y(self, value: float) -> float:
        return (
            HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)
        )

    def path(self, steps: Sequence[float], values: Sequence[float]) -> str:
        return "M" + "L".join(
            f"{self.x(step):.1f} {self.y(value):.1f}"
            for step, value in zip(steps, values, strict=True)
        )

    def grid(self) -> list[Html]:
        found: list[Html] = []
        for tick, label in ticks(self.low, self.high, most=5):
            y = f"{self.y(tick):.1f}"
            found += [element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)]
            found += [element("text", label, x=LEFT - 6, y=y, class_="y")]
        for tick, label in ticks(self.low_step, self.high_step, most=6, whole=True):
            found += [element("text", label, x=f"{self.x(tick):.1f}", y=HEIGHT - 6, class_="x")]
        return found


def ticks(low: float, high: float, *, most: int, whole: bool = False) -> list[tuple[float, str]]:
    """Round numbers between two, at most `most` of them, and how they are written: all with as many
    digits as tell them apart.

    >>> ticks(0.02, 0.98, most=5)
    [(0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6'), (0.8, '0.8')]
    >>> [label for _, label in ticks(0, 24000, most=4)], [label for _, label in ticks(1, 3, most=6, whole=True)]
    (['0', '10k', '20k'], ['1', '2', '3'])
    """
    magnitude = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(
        size
        for factor in (1, 2, 2.5, 5, 10, 20)
        if (high - low) / (size := factor * magnitude) <= most - 1e-9 or factor == 20
    )
    step = max(1.0, math.ceil(step)) if whole else step
    values = [
        round(count * step, 12)
        for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
    greatest = max((abs(value) for value in values), default=0.0)
    unit, suffix = next(
        ((size, name) for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if greatest >= size),
        (1.0, ""),
    )
    unit = 1e3 if suffix == "k" else unit
    if 0 < greatest < 1e-3:
        return [(value, f"{value:.2g}".replace("e-0", "e-")) for value in values]
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9)) + (
        step / magnitude == 2.5 and not whole
    )
    return [(value, f"{value / unit:.{digits}f}{suffix}" if value else "0") for value in values]


def curve_sections(curves: Sequence[Curve]) -> Html:
    """All curves in their sections; those that never changed as one line of words."""
    sections = []
    places = {curve.metric: place for place, curve in enumerate(curves)}
    for group, members in grouped(curves).items():
        drawn = [chart(curve, places[curve.metric]) for curve in members if not curve.constant]
        constant = [
            f"{curve.title} {number(curve.train[1][0])}" for curve in members if curve.constant
        ]
        told = (
            element("p", element("b", "Constant: "), " · ".join(constant), class_="constant")
            if constant
            else None
        )
        time = time_shares(members)
        heading = element(
            "summary", element("h3", group), element("small", f"{len(drawn)}" if drawn else "")
        )
        grid = element("div", *drawn, class_="charts") if drawn else None
        sections.append(
            element(
                "details",
                heading,
                time,
                grid,
                told,
                class_="group",
                open=group in OPEN and bool(drawn),
            )
        )
    return join(*sections)


def time_shares(curves: Sequence[Curve]) -> Html | None:
    """Where the time of the steps went, as one bar: the phases that are timed (seconds_…) and the
    rest.
    """
    totals = {
        curve.metric: sum(curve.train[1]) for curve in curves if curve.metric.startswith("seconds")
    }
    whole = totals.pop("seconds", 0.0)
    if not totals or whole <= 0:
        return None
    shares = {
        name.removeprefix("seconds_").replace("_", " "): total / whole
        for name, total in totals.items()
    }
    if (rest := 1 - sum(shares.values())) > 0.005:
        shares["other"] = rest
    parts = [
        element(
            "span",
            element("b", f"{share:.0%}"),
            f" {name}",
            style=f"flex-grow:{max(0.001, share):.4f}",
            class_=f"share s{index % 5}",
        )
        for index, (name, share) in enumerate(shares.items())
    ]
    return element("div", *parts, class_="shares", title="where the time of the steps went")


def curve_data(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """What the page's script needs to read values off the curves and to smooth them anew."""
    data = []
    for curve in curves:
        train, box = thin(curve.train, MOST_POINTS), curve.box
        told = {
            "box": [box.low_step, box.high_step, box.low, box.high],
            "train": [train[0], [float(f"{value:.6g}") for value in train[1]]],
            "validation": [
                curve.validation[0],
                [float(f"{value:.6g}") for value in curve.validation[1]],
            ],
            "width": default_width(len(train[0])),
        }
        data.append({} if curve.constant else told)
    return data
