"""The receipts that a run's steps recorded, and groups that were lost or doubled."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nemorl.checks import is_number
from nemorl.runtime.store.directory import STEP, RunDirectory, RunRecord, by_step, read_lines

RECORDED: dict[str, tuple[str, Any, str, str | None]] = {
    "weights": ("generation/weights/proved", min, "{:,.0f} tensors or more in each update", ""),
    "tokens": ("receipts/tokens", sum, "{:,.0f} tokens", "receipts/tokens_unproved"),
    "support": ("receipts/support_ratio", min, "π_trainer/π_sampler of {:.4f} or more", None),
    "mismatch": ("token_mult_prob_error", max, "factor of {:.6g} or less", None),
    "staleness": ("staleness/max", max, "up to {:g} steps", ""),
}
"""A receipt's metric, the value shown, how, and a metric that must be 0 (None: a measurement)."""


@dataclass(frozen=True)
class Receipt:
    """What a run recorded of a receipt."""

    name: str
    holds: bool | None
    """None: nothing recorded, or a measurement."""
    found: str
    """Numbers, or the reason."""


def verify_run(path: Path | str) -> list[Receipt]:
    """Return the receipts of a run. Raises: ValueError where there is none."""
    directory = RunDirectory.open(path)
    record = RunRecord.read(directory)
    lines = [line for line in directory.read_metrics() if line["phase"] == "train"]
    log = directory.read_log(record)
    warned = [str(line.get("message")) for line in log if line.get("event") == "warning"]
    said = [(record.error if record else None) or "", *warned]
    steps = {line["step"]: line for line in lines}
    ends = [line.get("step", 0) for line in log if line.get("event") == "train_end"]
    finished = record is not None and record.status == "finished"
    last = max([*by_step(directory.checkpoints), *steps, *ends[-1:] * finished], default=0)
    found = [_recorded(name, lines, said, last) for name in RECORDED]
    return [*found, Receipt("prompts", *_prompts(directory, steps, last))]


def _recorded(
    name: str, lines: Sequence[Mapping[str, Any]], said: Sequence[str], last: int
) -> Receipt:
    metric, choose, text, unproved = RECORDED[name]
    values = [line[metric] for line in lines if is_number(line.get(metric))]
    failures = [each for each in said if f"receipt {name} does not hold" in each]
    if unproved:
        failures += [f"not in step {line['step']}" for line in lines if line.get(unproved)]
    if failures:
        return Receipt(name, False, failures[0])
    if not values:
        return Receipt(name, None, "not recorded")
    lacking = {*range(1, last + 1)}
    for line in lines:
        older = name in ("support", "mismatch") and line.get("staleness/max", 0) > 0
        if metric in line or older or line.get("num_updates", 0) <= 0:
            lacking.discard(line["step"])
    if lacking:
        return Receipt(name, False, f"not recorded in step {min(lacking)}, but in others")
    found = f"{text.format(choose(values))}, in {len(values)} steps"
    return Receipt(name, unproved is not None or None, found)


def _prompts(
    directory: RunDirectory, steps: Mapping[int, Mapping[str, Any]], last: int
) -> tuple[bool | None, str]:
    lines = [line for line in read_lines(directory.groups, STEP) if line["step"] <= last]
    if not lines:
        return None, "not recorded"
    ends, ended, highest = Counter({"trained on": 0}), Counter[int](), -1
    for line in lines:
        closed = [*line["trained"], *chain.from_iterable(line["dropped"].values())]
        ended.update(closed)
        highest = max([highest, *closed, *line["open"]])
        doubled = [each for each in closed if ended[each] > 1]
        doubled += [each for each in line["open"] if each in ended]
        whole = len(ended) + len(line["open"]) == highest + 1
        lost = () if whole else {*range(highest + 1)} - {*ended, *line["open"]}
        for groups, what in ((doubled, "doubled"), (lost, "lost")):
            if groups:
                where = f"in step {line['step']} ({len(groups)} in all)"
                return False, f"group {min(groups)} is {what} {where}"
        dropped = {f"dropped as {reason}": each for reason, each in line["dropped"].items()}
        for end, groups in {"trained on": line["trained"], **dropped}.items():
            ends[end] += len(groups)
        count = steps.get(line["step"], {}).get("groups_trained")
        if is_number(count) and count != len(line["trained"]):
            what = f"{len(line['trained'])} groups, and metrics.jsonl {count:g}"
            return False, f"groups.jsonl has step {line['step']} train on {what}"
    if lines[-1]["step"] < last and steps.get(last, {}).get("groups_trained"):
        return False, f"groups.jsonl ends with step {lines[-1]['step']} of {last}"
    counts = ", ".join(f"{number:,} {end}" for end, number in ends.items())
    return True, f"{highest + 1:,} taken: {counts}, {len(lines[-1]['open']):,} open"
