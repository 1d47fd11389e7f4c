"""A run's rows, as token ids within the longest sequence and in the order of training."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

from nemorl.checks import refuse_unused, require, warn
from nemorl.data.datasets import load_rows, stream_rows, to_prompts
from nemorl.data.lengths import limit_length, num_tokens
from nemorl.data.rows import Places, Row, StreamedRows, first_of, for_rows, split_rows
from nemorl.data.sources import DataModule, has_splits, known_set, sources_of
from nemorl.data.statistics import Lengths
from nemorl.rollout.config import RolloutConfig
from nemorl.rollout.conversation import Prompts
from nemorl.rollout.environment import EnvironmentInterface
from nemorl.rollout.episodes import ByRow, with_environment_tools
from nemorl.runtime.config.base import (
    BaseConfig,
    DataConfig,
    RewardConfig,
    require_files,
    require_rows,
)

Rows = Any
"""A path, a hub name, a list of dicts, a datasets.Dataset, a DataModule, or several of them."""
Reward = str | Callable[..., Any] | EnvironmentInterface | Sequence[Any] | Mapping[str, Any]
"""A name, a function, an environment, a list of them that are added up, or a mapping by row."""
SETS = {"train": "environments", "validation": "validation_environments"}
"""The setting with the environments of each set."""


def read_data(
    data: DataConfig, *, train: Rows = None, validation: Rows = None, seed: int = 0
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return the rows to train and to validate on: those given, or of `data`. A `DataModule` brings
    its own validation rows; `data.held_out` takes training rows.
    """
    count = len(sources_of(data.train if train is None else train))
    require(
        not data.weights or len(data.weights) == count,
        "data.weights",
        f"must be as many as there are training sets ({count})",
        data.weights,
        "give one weight for each set, or none",
    )
    given = validation is not None or data.validation is not None
    if not given and isinstance(train, DataModule) and len(train.validation_rows()):
        validation = train
    rows = read_rows(data, "train", train, seed=seed) or []
    held_out = read_rows(data, "validation", validation) or []
    if data.held_out and rows:
        require(
            not held_out,
            "data.held_out",
            "is for runs without rows to validate on",
            data.held_out,
            "omit it, or the validation rows",
        )
        rows, held_out = split_rows(rows, validation=data.held_out, seed=seed)
    require_rows(rows)
    return rows, held_out


def read_rows(
    data: DataConfig, which: str, given: Rows = None, *, seed: int = 0
) -> Sequence[Row] | None:
    """Return the rows of `given`, else of `data.train` or `data.validation`, else None."""
    source = given if given is not None else getattr(data, which)
    if source is None:
        return None
    require_files(f"data.{which}", source)
    parts = sources_of(source)
    names: Sequence[str] = getattr(data, SETS[which])
    must, remedy = f"must be as many as there are sets ({len(parts)})", "give one for each set"
    require(len(names) in (0, len(parts)), f"data.{SETS[which]}", must, names, remedy)
    rows: Sequence[Row]
    if which == "train" and data.streaming:
        reading = {"shuffle_buffer": 10_000 if data.shuffle else 0, **data.reading()}
        rows = stream_rows(source, split=data.split, seed=seed, **reading)
    else:
        splits = [data.split for _ in parts]
        if which == "validation":
            splits = [
                data.validation_split
                or (known.validation if known else "validation" if has_splits(part) else "train")
                for part, known in zip(parts, map(known_set, parts), strict=True)
            ]
        rows = load_rows(source, split=splits, **data.reading())
    return for_rows(rows, lambda row: row.but(environment=names[row.source])) if names else rows


def print_known(*sources: Rows) -> None:
    """Print what is known of the sources' data sets."""
    for name in dict.fromkeys(part for part in _parts(*sources) if known_set(part)):
        known = vars(known_set(name))
        shown = ", ".join(f"{key} {known[key]!r}" for key in known if known[key] and key != "build")
        print(f"{name} is known; where no setting says otherwise: {shown}", file=sys.stderr)


def reward_for(reward: Any, *sources: Rows) -> Any:
    """Return `reward` or, for the default, that of known data sets. Raises: ValueError where they
    differ.
    """
    rewards = {known and known.reward for known in map(known_set, _parts(*sources))}
    named = sorted(name for name in rewards if name)
    if reward != RewardConfig.reward or not named:
        return reward
    require(
        len(rewards) == 1,
        "reward",
        "must be given for data sets that differ in it",
        ", ".join(named),
        "add --reward",
    )
    return named[0]


def check_names(data: DataConfig, environment: Any, rows: Sequence[Row] = ()) -> None:
    """Refuse names of environments that nothing uses."""
    if isinstance(environment, ByRow):
        if rows and not data.streaming:
            environment.require_used(rows)
        return
    must = "needs a mapping as reward or rollout.environment"
    refuse_unused("data", data, must, "remove it", names=[*SETS.values()])


def first_of_each(rows: Sequence[Row], count: int) -> list[Row]:
    """Return the first `count` rows of each set."""
    sets = groupby(rows, key=lambda row: row.source)
    return [row for _, part in sets for row in islice(part, count)]


def _parts(*sources: Rows) -> list[Any]:
    return [part for source in sources if source is not None for part in sources_of(source)]


def tokenised_prompts(
    config: BaseConfig, rows: Sequence[Any], tokenizer: Any, environment: Any = None
) -> tuple[Prompts, Lengths]:
    """Return prompts, with an environment's tools, that leave room for an answer; their lengths."""
    longest, answer = config.data.max_total_sequence_length, config.generation.longest_response
    require(
        not rows or answer < longest,
        "generation.max_new_tokens",
        f"must be below data.max_total_sequence_length ({longest})",
        answer,
        "leave room for the prompt; SFT that validates on questions samples answers, too",
    )
    prompts = to_prompts(with_environment_tools(environment, rows, tokenizer), tokenizer)
    tokens, kept, lengths = within_limit("prompts", config, rows, prompts, room=answer)
    limits = getattr(config, "rollout", RolloutConfig()).limits(longest)
    return Prompts(kept, tokens, tokenizer=tokenizer, limits=limits, shows_tools=True), lengths


def within_limit(
    what: str, config: BaseConfig, rows: Sequence[Any], items: Any, *, room: int = 0
) -> tuple[Sequence[Any], Sequence[Any], Lengths]:
    """Return the items that leave `room` tokens of the longest sequence, their rows and lengths."""
    limit = max(1, config.data.max_total_sequence_length - room)
    if isinstance(rows, StreamedRows):
        first, policy = (first_of(rows), first_of(items)), config.data.too_long

        def fitting(row: Any) -> list[Any]:
            item = [items.build(row)]
            return limit_length(item, max_length=limit, policy=policy, rows=[rows.build(row)])[0]

        *_, lengths = within_limit(f"first {what}", config, *first, room=room)
        keep = None if policy == "error" else fitting
        kept = replace(rows, places=Places(rows.places.read, keep))
        return replace(kept, build=lambda row: fitting(row)[0]), kept, lengths
    found, report = limit_length(items, max_length=limit, policy=config.data.too_long, rows=rows)
    if report.num_dropped and not report.kept:
        raise ValueError(
            f"data.max_total_sequence_length must leave a row to use, but all {report.num_dropped}"
            f" {what} are longer (up to {report.longest} tokens): raise it, or set data.too_long"
            " truncate"
        )
    if report.num_truncated or report.num_dropped:
        warn(f"{what}: {report}")
    lengths = Lengths(
        tokens=[num_tokens(item) for item in found],
        limit=limit,
        num_truncated=report.num_truncated,
        num_dropped=report.num_dropped,
    )
    return found, [rows[i] for i in report.kept], lengths
