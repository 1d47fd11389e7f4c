"""The responses of a run, for a viewer that goes from step to step and colours each token by what
was measured of it.
"""

import math
from collections.abc import Mapping
from typing import Any

from nemorl.runtime.watch.display import number
from nemorl.runtime.watch.report.elements import Html, element, join
from nemorl.runtime.watch.report.gather import SHOWN_TOKENS, Gathered
from nemorl.runtime.watch.series import is_number

OWN = (
    *(
        "prompt",
        "response",
        "chosen",
        "rejected",
        "reward",
        "rewards",
        "advantages",
        "logprobs",
        "trainer_logprobs",
        "worst_tokens",
    ),
    *("token_ids", "pieces", "columns", "finish_reason"),
)
"""What the viewer has a place for; other values of a sample are shown by their names."""
REPEATED = ("prompt", "response", "messages", "chosen", "rejected")
"""Columns of the data that a sample shows anyway, or that are too long to."""


def sample_data(run: Gathered) -> dict[str, Any]:
    """The samples as the script takes them, and the largest advantage: what full colour stands for."""
    steps = {step: [compact(sample) for sample in lines] for step, lines in run.samples.items()}
    advantages = sorted(
        abs(value)
        for lines in steps.values()
        for sample in lines
        for value in as_list(sample.get("a"))
        if is_number(value) and value != 0
    )
    return {
        "steps": steps,
        "most": advantages[math.ceil(0.98 * len(advantages)) - 1] if advantages else 0,
    }


def compact(sample: Mapping[str, Any]) -> dict[str, Any]:
    """One sample under short names: p(rompt), r(esponse), t(exts of tokens), l(ogprobs), g(aps of
    the trainer's to these), a(dvantages, one number if all are the same), w (reward), ws (its
    parts), c(hosen), j (rejected), f(inish reason), n (number of tokens), o(ther values), cut
    (tokens that are not shown).
    """
    found: dict[str, Any] = {"p": text(sample.get("prompt")), "r": text(sample.get("response"))}
    for name, key in (("c", "chosen"), ("j", "rejected")):
        if sample.get(key) is not None:
            found[name] = text(sample[key])
    ids = sample.get("token_ids")
    if isinstance(ids, list):
        found["n"] = len(ids)
        if len(ids) > SHOWN_TOKENS:
            found["cut"] = len(ids) - SHOWN_TOKENS
    if isinstance(sample.get("pieces"), list):
        found["t"] = sample["pieces"]
    for name, values in (
        ("l", sample.get("logprobs")),
        ("g", gaps(sample)),
        ("a", sample.get("advantages")),
    ):
        if isinstance(values, list) and values:
            rounded = [
                float(f"{value:.4g}") if is_number(value) else None
                for value in values[:SHOWN_TOKENS]
            ]
            found[name] = (
                rounded[0]
                if name == "a" and len(set(rounded)) == 1 and rounded[0] is not None
                else rounded
            )
    if is_number(sample.get("reward")):
        found["w"] = sample["reward"]
    if isinstance(sample.get("rewards"), Mapping):
        found["ws"] = {
            str(name): value for name, value in sample["rewards"].items() if is_number(value)
        }
    if sample.get("finish_reason"):
        found["f"] = str(sample["finish_reason"])
    columns = sample.get("columns")
    shown = (
        {str(name): text(value) for name, value in columns.items() if name not in REPEATED}
        if isinstance(columns, Mapping)
        else {}
    )
    other = {
        name: f"{value:.4g}" if isinstance(value, float) else text(value)
        for name, value in sample.items()
        if name not in OWN
    }
    found["o"] = {
        name: value[:500]
        for name, value in {**shown, **other, "widest gap": widest_gap(sample)}.items()
        if value
    }
    return found


def gaps(sample: Mapping[str, Any]) -> list[float | None]:
    """By how much the trainer's logprob of each token exceeds the sampler's; None where one is
    missing.
    """
    pairs = zip(
        as_list(sample.get("logprobs")), as_list(sample.get("trainer_logprobs")), strict=False
    )
    return [
        ours - theirs if is_number(theirs) and is_number(ours) else None for theirs, ours in pairs
    ]


def widest_gap(sample: Mapping[str, Any]) -> str:
    """The token on which sampler and trainer differ most, in words; nothing where they agree to a
    percent.

    >>> widest_gap({"worst_tokens": [{"position": 4, "token": "ab", "logprob": -1.0, "trainer_logprob": -2.0}]})
    "×2.72 in 'ab' (token 5)"
    """
    worst = next(
        (token for token in as_list(sample.get("worst_tokens")) if isinstance(token, Mapping)), {}
    )
    (gap,) = gaps(
        {name: [worst.get(name.removesuffix("s"))] for name in ("logprobs", "trainer_logprobs")}
    )
    if gap is None or abs(gap) < 0.01 or not isinstance(worst.get("position"), int):
        return ""
    return (
        f"×{number(math.exp(min(abs(gap), 700)))} in {worst.get('token')!r} (token"
        f" {worst['position'] + 1})"
    )


def text(value: Any) -> str:
    """A prompt or response as text; a conversation turn by turn.

    >>> text([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}])
    'user: 1+1=\\nassistant: 2'
    """
    if (
        isinstance(value, list)
        and value
        and all(isinstance(turn, Mapping) and "role" in turn for turn in value)
    ):
        return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in value)
    return "" if value is None else value if isinstance(value, str) else str(value)


def as_list(value: Any) -> list[Any]:
    """A column that may be missing, or a single value, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def sample_section(run: Gathered) -> Html | None:
    """The viewer's controls, which the script brings to life; without one there is a note and the
    path.
    """
    if not run.samples:
        return None
    steps = list(run.samples)
    which = (
        f"{len(steps)} steps"
        if len(steps) == run.sample_steps
        else f"{len(steps)} of {run.sample_steps} steps, evenly spaced"
    )
    some = [sample for lines in run.samples.values() for sample in lines]
    modes = (
        [("advantage", "advantage")]
        if any(sample.get("advantages") and sample.get("pieces") for sample in some)
        else []
    )
    modes += (
        [("logprob", "surprise")]
        if any(sample.get("logprobs") and sample.get("pieces") for sample in some)
        else []
    )
    modes += (
        [("gap", "gap to the trainer")]
        if any(sample.get("trainer_logprobs") and sample.get("pieces") for sample in some)
        else []
    )
    modes += [("none", "nothing")]
    buttons = [element("button", label, type="button", data_mode=mode) for mode, label in modes]
    controls = element(
        "div",
        element(
            "span",
            element(
                "button",
                "‹",
                type="button",
                id="earlier",
                title="earlier (←)",
                aria_label="earlier step",
            ),
            element("label", "Step ", element("output", str(steps[-1]), id="sample-step")),
            element(
                "button", "›", type="button", id="later", title="later (→)", aria_label="later step"
            ),
            class_="stepper",
        ),
        element(
            "input",
            type="range",
            id="sample-range",
            min=0,
            max=len(steps) - 1,
            value=len(steps) - 1,
            aria_label="step of the samples",
        ),
        element("span", "Colour ", *buttons, class_="modes") if len(modes) > 1 else None,
        element(
            "label", "Find ", element("input", type="search", id="find-sample", placeholder="text")
        ),
        class_="controls js",
    )
    hint = (
        " Point at a token to see what was measured of it."
        if any(sample.get("pieces") for sample in some)
        else ""
    )
    note = element("p", f"Samples of {which}.{hint}", class_="note js")
    without = element(
        "p",
        "The samples are shown by this page's script; they are in samples/ of the run's directory,"
        " too.",
        class_="nojs",
    )
    return join(
        controls,
        note,
        element("div", id="legend", class_="js"),
        element("div", id="sample-list"),
        without,
    )
