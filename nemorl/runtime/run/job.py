"""An algorithm's data and its plan of a run, before a model is loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemorl.checks import require
from nemorl.data.datasets import load_rows
from nemorl.data.order import split_rows
from nemorl.data.rows import COLUMNS, Row
from nemorl.data.sources import DataModule, has_splits, sources_of
from nemorl.data.statistics import Lengths
from nemorl.rollout.environment import EnvironmentInterface
from nemorl.runtime.config.data import DataConfig
from nemorl.runtime.run.state import Run

Rows = Any
"""A path, a hub name, a list of dicts, a datasets.Dataset, a DataModule, or several of them."""
Reward = str | Callable[..., Any] | EnvironmentInterface | Sequence[Any] | Mapping[str, Any]
"""A name, a function, an environment, or a list of them, or a mapping from names."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data of a run."""

    train: Sequence[Any]
    """At least one row."""
    validation: Sequence[Any] = ()
    """At most run.max_val_samples rows."""
    tokenizer: Any
    environment: EnvironmentInterface | None = None
    """Of a config with a `reward`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """An algorithm with its data: everything about a run but the model."""

    run: Callable[..., Run]
    """The loop, called as run(run, callbacks=…) where training starts or resumes; returns the run's
    end.
    """
    num_steps: int
    """Steps of the whole run."""
    num_updates: int | None = None
    """Optimizer steps of the whole run; None: one per step."""
    keep_reference: bool = False
    """Whether the trainer keeps a copy of the initial model."""
    generates: bool = False
    """Whether a generator is needed."""
    with_initial_model: "Callable[[Run], Job] | None" = None
    """Called with the initial model, before a resume; returns the job to go on with."""
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    """By data set, for data.json."""


def read_data(
    data: DataConfig, *, train: Rows = None, validation: Rows = None, seed: int = 0
) -> tuple[list[Row], list[Row]]:
    """Return the rows to train and to validate on, of `data` or of `train` and `validation`.

    A `DataModule` brings its own validation rows; `data.held_out` takes training rows for it.
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
    rows = read_rows(data, "train", train) or []
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
    return rows, held_out


def read_rows(data: DataConfig, which: str, given: Rows = None) -> list[Row] | None:
    """Return the rows of `given`, else those of `data.train` or `data.validation`, else None."""
    source = given if given is not None else getattr(data, which)
    if source is None:
        return None
    splits = [data.split for _ in sources_of(source)]
    if which == "validation":
        splits = [
            data.validation_split or ("validation" if has_splits(part) else "train")
            for part in sources_of(source)
        ]
    columns = {f"{name}_column": getattr(data, f"{name}_column") for name in COLUMNS}
    return load_rows(source, split=splits, **columns)
