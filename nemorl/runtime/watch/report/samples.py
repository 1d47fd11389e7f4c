"""The samples of a run as report.js takes them."""

import math
from collections.abc import Mapping
from typing import Any

from nemorl.checks import is_number
from nemorl.runtime.watch.metrics import number
from nemorl.runtime.watch.report.gather import SHOWN_TOKENS, Gathered

TEXTS = ("prompt", "response", "chosen", "rejected")
OWN = {*TEXTS, "reward", "rewards", "advantages", "logprobs", "trainer_logprobs", "worst_tokens"}
OWN |= {"token_ids", "pieces", "columns", "finish_reason", "group", "failure", "cut_by"}
OWN |= {"turns", "sampled", "trained"}
"""Columns that have their place; others are shown by their names."""


def sample_data(run: Gathered) -> dict[str, Any]:
    """Return samples by step, and the advantage of full color."""
    steps = {step: [compact(sample) for sample in lines] for step, lines in run.samples.items()}
    found = [sample.get("advantages", ()) for lines in steps.values() for sample in lines]
    sizes = sorted(abs(value) for values in found for value in values if value)
    most = sizes[math.ceil(0.98 * len(sizes)) - 1] if sizes else 0
    return {"name": run.name, "steps": steps, "most": most}


def modes(*runs: Gathered) -> dict[str, str]:
    """Return what tokens can be colored by."""
    names = {
        "advantages": "advantage",
        "logprobs": "surprise",
        "trainer_logprobs": "gap to the trainer",
    }
    lines = [line for run in runs for lines in run.samples.values() for line in lines]
    colored = [line for line in lines if line.get("pieces")]
    return {key: name for key, name in names.items() if any(line.get(key) for line in colored)}


def compact(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as the page takes it."""
    found: dict[str, Any] = {
        name: text(sample[name]) for name in TEXTS if sample.get(name) is not None
    }
    chips: dict[str, Any] = {}
    ids = sample.get("token_ids") or ()
    sampled = sample.get("sampled") or [True] * len(ids)
    if "pieces" in sample:
        found["tokens"] = sample["pieces"]
    if len(ids) > SHOWN_TOKENS:
        found["cut"] = len(ids) - SHOWN_TOKENS
    for name, values in {**sample, "gaps": gaps(sample)}.items():
        if name in ("logprobs", "gaps", "advantages") and values:
            found[name] = [
                float(f"{value:.4g}") if own and is_number(value) else None
                for value, own in zip(values[:SHOWN_TOKENS], sampled, strict=False)
            ]
    found |= {name: sample[name] for name in ("reward", "group") if is_number(sample.get(name))}
    found |= {name: sample[name] for name in ("turns", "trained", "failure") if name in sample}
    chips |= sample.get("rewards", {})
    advantages = zip(found.get("advantages", ()), sampled, strict=False)
    same = {value for value, own in advantages if own}
    if len(same) == 1:
        chips["advantage"] = same.pop()
    columns = sample.get("columns", {})
    chips |= {name: columns[name] for name in columns if name not in (*TEXTS, "messages")}
    chips |= {name: value for name, value in sample.items() if name not in OWN}
    chips |= {"widest gap": widest_gap(sample), "tokens": sum(sampled) or None}
    if "cut_by" in sample:
        chips["end"] = f"cut by {sample['cut_by']}"
    elif "failure" not in sample and sample.get("finish_reason") not in (None, "stop"):
        cut = sample["finish_reason"] == "length"
        chips["end"] = "cut at the limit" if cut else sample["finish_reason"]
    found["chips"] = {
        str(name): f"{value:.4g}" if isinstance(value, float) else text(value)[:500]
        for name, value in chips.items()
        if value not in (None, "")
    }
    return found


def gaps(sample: Mapping[str, Any]) -> list[float | None]:
    """Return trainer's minus sampler's logprobs."""
    pairs = zip(sample.get("trainer_logprobs", ()), sample.get("logprobs", ()), strict=False)
    return [pair[0] - pair[1] if all(map(is_number, pair)) else None for pair in pairs]


def widest_gap(sample: Mapping[str, Any]) -> str:
    """Describe the token on which sampler and trainer differ most; "" within a percent.

    >>> token = {"position": 4, "token": "ab", "logprob": -1.0, "trainer_logprob": -2.0}
    >>> widest_gap({"worst_tokens": [token]})
    "×2.72 in 'ab' (token 5)"
    """
    for worst in sample.get("worst_tokens", ())[:1]:
        values = worst["logprob"], worst["trainer_logprob"]
        if all(map(is_number, values)) and abs(gap := values[0] - values[1]) >= 0.01:
            factor = number(math.exp(min(abs(gap), 700)))
            return f"×{factor} in {worst['token']!r} (token {worst['position'] + 1})"
    return ""


def text(value: Any) -> str:
    """Return a prompt or response as text; a conversation turn by turn.

    >>> text([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}])
    'user: 1+1=\\nassistant: 2'
    """
    turns = value if isinstance(value, list) else []
    if turns and all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in turns)
    return "" if value is None else str(value)
