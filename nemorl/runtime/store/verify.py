"""Which receipts of a run hold, by its files alone: no model is loaded, and nothing is written."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nemorl.checks import is_number
from nemorl.runtime.store.directory import RunDirectory, read_lines, step_of
from nemorl.runtime.store.reading import RunFiles, read_run
from nemorl.runtime.store.shapes import is_count, is_mapping, list_of

GROUPS = "groups.jsonl"
"""In a run's directory: for each finished step the numbers of the groups that it closed."""
LINE = {
    "step": is_count,
    "trained": list_of(is_count),
    "dropped": lambda value: is_mapping(value) and all(map(list_of(is_count), value.values())),
    "open": list_of(is_count),
}
"""Shapes of the values in groups.jsonl."""
DEPTH = "receipts/kl_from_"
"""Begins the names of the metrics of the gap at some depth."""
ENGINE = re.compile("generation/.+/restarts")
"""A metric of an engine's processes, which are sent the weights."""
STALE = "staleness/max"
"""The metric of the oldest weights that sampled a token of a step."""
STALEST = "staleness/limit"
"""The metric of what async.max_staleness was in a step; older runs have none."""
UPDATES = "generation/weights/updates"
"""The metric of how often engines were given new weights in a step; older runs have none."""
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Receipt:
    """What a run's files say of one receipt."""

    name: str
    holds: bool | None
    """None: it was not recorded, or there is nothing to prove."""
    found: str
    """Numbers, or the reason."""

    @property
    def verdict(self) -> str:
        return "" if self.holds is None else "holds" if self.holds else "does not hold"


def verify_run(path: Path | str) -> list[Receipt]:
    """Return all receipts of a run, finished or not; each file of its checkpoints is read.

    Raises: ValueError where there is no run.
    """
    directory = RunDirectory.open(path)
    return [*receipts_of(directory, read_run(directory)), _checkpoints(directory)]


def receipts_of(directory: RunDirectory, files: RunFiles) -> list[Receipt]:
    """Return a run's receipts but for its checkpoints'."""
    lines = [line for line in files.metrics if line["phase"] == "train"]
    saved = map(step_of, directory.checkpoints.glob("step_*"))
    last = max([*saved, *(line["step"] for line in lines)], default=0)
    found = {
        "weights": _weights(lines, files),
        "tokens": _tokens(lines, last),
        "support": _support(lines, files.config),
        "mismatch": _mismatch(lines, files.config),
        "prompts": _prompts(directory, lines, last),
        "staleness": _staleness(lines, files.config),
    }
    failed = _failed(files)
    return [
        replaced if (replaced := failed.get(name)) is not None else Receipt(name, *found[name])
        for name in found
    ]


Found = tuple[bool | None, str]
"""Whether a receipt holds, and what was found."""


def _failed(files: RunFiles) -> dict[str, Receipt]:
    """Return the receipts of which the run itself has said that they don't hold when it stopped."""
    error = (files.record.error if files.record else None) or ""
    _, mark, rest = error.partition("the receipt ")
    name, _, found = rest.partition(" does not hold: ")
    return {name: Receipt(name, False, f"it stopped the run: {error}")} if mark and found else {}


def _weights(lines: Lines, files: RunFiles) -> Found:
    """Each update of the engines' weights is proved, if a step counts it."""
    name = "generation/weights/proved"
    sampled = [line for line in lines if any(map(ENGINE.fullmatch, line))]
    proved = [line for line in sampled if is_number(line.get(name))]
    if not sampled:
        return None, "nothing to prove: no engine reports weights of its own"
    begins = files.record.sessions if files.record else ()
    validated = {line["step"] for line in files.metrics if line["phase"] == "validation"}
    counts = [line for line in sampled if is_number(line.get(UPDATES))]
    lacking = [line["step"] for line in counts if line[UPDATES] > 0 and not _number(line, name)]
    for last, line in pairwise(sampled):
        if is_number(line.get(UPDATES)):
            continue
        # A process begins, and a validation, with an update that no step counts.
        begun = any(last["time"] < begin <= line["time"] for begin in begins)
        counted = not begun and last["step"] not in validated and last.get("num_updates") != 0
        if counted and not _number(line, name):
            lacking.append(line["step"])
    if lacking:
        first = min(lacking)
        return False, f"step {first} sampled after an update without a receipt{_more(lacking)}"
    if not proved:
        return None, "not recorded: no update is counted"
    fewest = min(int(line[name]) for line in proved)
    unread = max(int(_number(line, "generation/weights/unproved")) for line in proved)
    rest = f"; up to {unread} that engines store in another form can't be read" if unread else ""
    return True, f"{len(proved)} updates, {fewest:,} tensors or more in each{rest}"


def _tokens(lines: Lines, last: int) -> Found:
    proved = [line for line in lines if is_number(line.get("receipts/tokens"))]
    if not proved:
        return None, "not recorded"
    wrong = [line["step"] for line in proved if line.get("receipts/tokens_unproved") != 0]
    if wrong:
        return False, f"in step {wrong[0]} others were trained on than sampled{_more(wrong)}"
    steps = Counter[int](line["step"] for line in lines)
    if twice := sorted(step for step, count in steps.items() if count > 1):
        return False, f"metrics.jsonl has step {twice[0]} more than once{_more(twice)}"
    recorded = {line["step"] for line in proved}
    trained = {line["step"] for line in lines if line.get("num_updates")}
    with_limit = {line["step"] for line in lines if STALEST in line}
    # Others before the first receipt are of a version that recorded none.
    earlier = {step for step in trained - with_limit if step < min(recorded)}
    lacking = sorted(trained - recorded - earlier)
    if lacking:
        return False, f"step {lacking[0]} trained without a receipt{_more(lacking)}"
    if gone := sorted({*range(1, last + 1)} - {*steps}):
        return None, f"not recorded: metrics.jsonl lacks step {gone[0]}{_more(gone)}"
    count = sum(int(line["receipts/tokens"]) for line in proved)
    since = f", from step {min(recorded)} on" if earlier else ""
    return True, f"{count:,} tokens in {len(proved)} steps are the sampled ones{since}"


def _support(lines: Lines, config: Mapping[str, Any]) -> Found:
    measured = [line for line in lines if is_number(line.get("receipts/support_ratio"))]
    if not measured:
        if lines and all(_number(line, STALE) for line in lines):
            return None, "nothing to compare: all steps have tokens of older weights"
        sampled = any(is_number(line.get("receipts/tokens")) for line in lines)
        reason = "nothing to prove: top_p, top_k and min_p are off" if sampled else "not recorded"
        return None, reason
    limit = _setting(config, "receipts", "support", 0.02)
    worst = max(measured, key=lambda line: abs(line["receipts/support_ratio"] - 1))
    ratio = worst["receipts/support_ratio"]
    numbers = (
        f"mean of π_trainer/π_sampler {ratio:.4f} in step {worst['step']}, the farthest from 1"
    )
    if limit is None:
        return None, f"{numbers}; receipts.support sets no limit"
    wrong = [
        line["step"]
        for line in measured
        if abs(line["receipts/support_ratio"] - 1)
        > limit + 4 * _number(line, "receipts/support_error")
    ]
    more = f", over the limit in {len(wrong)} steps" if wrong else ""
    return not wrong, f"{numbers} (at most {limit:g} off{more})"


def _mismatch(lines: Lines, config: Mapping[str, Any]) -> Found:
    name, fraction = "token_mult_prob_error", "generation_nonfinite_fraction"
    found = [line for line in lines if is_number(line.get(name))]
    if unread := [line["step"] for line in found if _number(line, fraction) == 1]:
        return False, f"in step {unread[0]} no logprob of the sampler is finite{_more(unread)}"
    measured = [line for line in found if not _number(line, STALE)]
    if not measured:
        older = "nothing to compare: all steps have tokens of older weights"
        return None, older if found else "not recorded"
    worst = max(measured, key=lambda line: line[name])
    kl = max(_number(line, "gen_kl_error") for line in measured)
    numbers = f"factor {worst[name]:.6g} on average in step {worst['step']}, KL up to {kl:.2g}"
    if len(measured) < len(found):
        numbers += f" ({len(found) - len(measured)} steps with older tokens are not compared)"
    if deepest := _deepest(measured):
        numbers += f", {deepest[1]:.2g} from token {deepest[0]} on"
    limits = [_setting(config, "gap", limit, None) for limit in ("stop", "warn")]
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is None:
        return None, f"{numbers}; gap sets no limit"
    return worst[name] <= limit, f"{numbers} (factor at most {limit:g})"


def _deepest(lines: Lines) -> tuple[int, float] | None:
    """Return where the deepest part of responses begins that was measured, and its largest gap."""
    found: dict[int, float] = {}
    for line in lines:
        for name, value in line.items():
            first = name.removeprefix(DEPTH)
            if first != name and first.isdigit() and is_number(value):
                found[int(first)] = max(value, found.get(int(first), 0.0))
    return max(found.items(), default=None)


def _prompts(directory: RunDirectory, steps: Lines, last: int) -> Found:
    """Each prompt of the finished steps is trained on, dropped or open."""
    file = directory.path / GROUPS
    lines = read_lines(file, LINE) if file.exists() else []
    lines = [line for line in lines if line["step"] <= last]
    sampled = {line["step"] for line in steps if is_number(line.get(STALE))}
    if lacking := sorted(sampled - {line["step"] for line in lines}):
        return False, f"{GROUPS} lacks step {lacking[0]}{_more(lacking)}"
    if not lines:
        return None, "not recorded"
    closed = Counter[int]()
    reasons = Counter[str]()
    for line in lines:
        closed.update(line["trained"])
        reasons["trained on"] += len(line["trained"])
        for reason, groups in line["dropped"].items():
            closed.update(groups)
            reasons[f"dropped as {reason}"] += len(groups)
    opened = Counter(lines[-1]["open"])
    total = closed + opened
    if doubled := sorted(group for group, count in total.items() if count > 1):
        return False, f"group {doubled[0]} is in it {total[doubled[0]]} times{_more(doubled)}"
    # Steps before the file are of an older version, if their metrics have no staleness either.
    older = bool(sampled) and 1 in {line["step"] for line in steps} - sampled
    start = min(total, default=0) if older else 0
    if lost := sorted({*range(start, max(total, default=-1) + 1)} - {*total}):
        return False, f"group {lost[0]} is lost{_more(lost)}"
    counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    return True, f"{len(total):,} taken: {counts}, {len(opened):,} open"


def _staleness(lines: Lines, config: Mapping[str, Any]) -> Found:
    """No step has a token that is older than the step's own limit, which a resume may change."""
    measured = [line for line in lines if is_number(line.get(STALE))]
    if not measured:
        return None, "not recorded"
    usual = _setting(config, "async", "max_staleness", None)

    def limit_of(line: Mapping[str, Any]) -> float | None:
        return line[STALEST] if is_number(line.get(STALEST)) else usual

    def holds(line: Mapping[str, Any]) -> bool:
        limit = limit_of(line)
        return limit is None or line[STALE] <= limit

    worst = max(measured, key=lambda line: (not holds(line), line[STALE]))
    limit = limit_of(worst)
    if limit is None:
        return None, f"up to {worst[STALE]:g} steps; async.max_staleness sets no limit"
    found = f"up to {worst[STALE]:g} steps, in step {worst['step']} (at most {limit:g})"
    return holds(worst), found


def _checkpoints(directory: RunDirectory) -> Receipt:
    """Each checkpoint is whole: all files that its manifests name, with their sizes and CRC-32."""
    from nemorl.runtime.store import checkpoint  # which loads torch

    number, size = 0, 0
    for step, path in checkpoint.present(directory.path).items():
        try:
            files = checkpoint.verify(path)
        except checkpoint.CheckpointError as error:
            if path.exists():  # one of a run that goes on may be gone by now
                return Receipt("checkpoints", False, f"step {step}: {error}")
            continue
        number += 1
        size += sum(each.size for each in files.values())
    if not number:
        return Receipt("checkpoints", None, "there is none")
    whole = f"{number} whole, {size / 1e6:,.1f} MB read"
    return Receipt("checkpoints", True, whole)


def _setting(config: Mapping[str, Any], section: str, name: str, default: float | None) -> Any:
    """Return a number of config.yaml; the default where it is not there."""
    found = config.get(section)
    value = found.get(name, default) if isinstance(found, Mapping) else default
    return value if is_number(value) else None


def _number(line: Mapping[str, Any], name: str) -> float:
    """Return a metric of a step; 0 where there is none."""
    value: Any = line.get(name)
    return float(value) if is_number(value) else 0.0


def _more(found: Sequence[Any]) -> str:
    return f" ({len(found)} in all)" if len(found) > 1 else ""
