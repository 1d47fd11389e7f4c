"""What an algorithm gets (`Inputs`) and what it makes of it (`Job`), before a model is loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemorl.data.datasets import load_rows
from nemorl.data.sources import READERS
from nemorl.rollout.environment import EnvironmentInterface
from nemorl.runtime.config import DataConfig
from nemorl.runtime.state import Run

Rows = Any
"""What `load_rows` takes: a path, a hub name, a list of dicts, a datasets.Dataset, a DataModule, or several of them."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The rows of a run as they were read, and what turns them into tokens and rewards."""

    train: Sequence[Any]
    """At least one row."""
    validation: Sequence[Any] = ()
    """At most run.max_val_samples rows."""
    tokenizer: Any
    environment: EnvironmentInterface | None = None
    """Judges responses: of the `reward` of a config that has one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """An algorithm together with its data: everything about a run but the model."""

    run: Callable[..., Run]
    """The loop, called as run(run, callbacks=…) with a `Run` that stands where training starts or goes on; returns the run at its end."""
    num_steps: int
    """Steps of the whole run."""
    num_updates: int | None = None
    """Optimizer steps of the whole run, over which the learning-rate schedule stretches; None: one per step."""
    keep_reference: bool = False
    """Whether the trainer keeps a frozen copy of the initial model."""
    generates: bool = False
    """Whether a generator is needed."""
    with_initial_model: "Callable[[Run], Job] | None" = None
    """Called once when the model is loaded, before a resume gives it other weights; returns the job to go on with."""
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tokens of every sequence, by data set ("train", "validation"), for the statistics that are shown before the run."""


def read_rows(data: DataConfig, which: str, given: Rows = None) -> list[Any] | None:
    """The rows of `data.train` or `data.validation`, or those of `given` in their place; None where there is neither."""
    source = given if given is not None else getattr(data, which)
    if source is None:
        return None
    split = data.split
    if which == "validation":
        in_hub = isinstance(source, str | Path) and Path(source).suffix not in READERS
        split = data.validation_split or ("validation" if in_hub else "train")
    columns = {name: getattr(data, name) for name in ("prompt_column", "response_column", "answer_column", "messages_column")}
    return load_rows(source, split=split, **columns)
