"""Rows that are generated: tasks of reasoning-gym."""

from typing import Any
from urllib.parse import parse_qsl

import yaml

from nemorl.checks import closest, require

PREFIX = "reasoning_gym:"
APART = 10**9
"""Row i is made of the seed + i; the rows of "validation" of seeds that are so much larger."""


def task_of(name: str, **settings: Any) -> Any:
    """Return a task of reasoning-gym: `name`, or `name?setting=value&…`.

    >>> task_of("basic_arithmetic?max_terms=2", size=3).config.max_terms
    2
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        needs = f"{PREFIX}{name} needs reasoning-gym ({error})"
        raise ImportError(f"{needs}: pip install reasoning-gym") from error
    task, _, given = name.partition("?")
    remedy = f"see reasoning_gym.factory.DATASETS{closest(task, DATASETS)}"
    require(task in DATASETS, "task", "must be one of reasoning-gym's", task, remedy)
    try:
        return create_dataset(task, **{"size": 1000, "seed": 0} | _settings(given) | settings)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{PREFIX}{name}: {error}: change the setting") from error


def is_generated(source: Any) -> bool:
    """Return whether `generated` makes the rows of a source.

    >>> is_generated("reasoning_gym:leg_counting"), is_generated("sums.jsonl")
    (True, False)
    """
    return isinstance(source, str) and source.startswith(PREFIX)


def generated(source: str, split: str) -> list[dict[str, Any]]:
    """Return the rows of a task, of "validation" with other seeds; `task` judges them.

    >>> len(generated("reasoning_gym:leg_counting?size=3", "train"))
    3
    """
    known, remedy = split in ("train", "validation"), "there is no other"
    require(known, "the split of a task", 'must be "train" or "validation"', split, remedy)
    task = task_of(name := source.removeprefix(PREFIX))
    if split == "validation":
        task = task_of(name, seed=task.seed + APART)
    rows = (task[number] for number in range(len(task)))
    return [{"prompt": row.pop("question"), "task": name, **row} for row in rows]


def _settings(given: str) -> dict[str, Any]:
    return {key: yaml.safe_load(text) for key, text in parse_qsl(given, keep_blank_values=True)}
