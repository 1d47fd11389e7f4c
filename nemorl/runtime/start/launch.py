"""A run before its model is loaded: checked and read in order of cost."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.checks import require
from nemorl.data.digest import Digest, difference, digests_of
from nemorl.data.prompts import warn_of_strings
from nemorl.data.rows import Row
from nemorl.data.sources import name_of, sources_of
from nemorl.data.stream import first_of
from nemorl.data.templates import with_chat_template
from nemorl.models.pretrained import load_tokenizer, model_folder
from nemorl.rollout.environments import Environment
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.data import require_rows
from nemorl.runtime.config.run import RunConfig
from nemorl.runtime.config.tree import dump_yaml
from nemorl.runtime.run.callbacks import Callback, check_callbacks
from nemorl.runtime.run.data import Reward, Rows, first_of_each, read_data
from nemorl.runtime.run.signals import signals_raise
from nemorl.runtime.start.devices import Devices
from nemorl.runtime.start.registry import (
    algorithm_of,
    chosen_loggers,
    get_generation_backend,
    training_backend_class,
)
from nemorl.runtime.start.settings import (
    as_given,
    changes,
    environment_of,
    kept,
    model_config_of,
    warn_of_spinning,
    with_response_length,
    within_positions,
)
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import RunDirectory, locked
from nemorl.runtime.store.record import RunRecord, check_algorithm
from nemorl.runtime.watch.log import RunLog, recorded
from nemorl.runtime.watch.loggers.base import LoggerFactory
from nemorl.warn import warn


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is read and checked once, also where a run begins again with new ranks."""

    config: BaseConfig
    devices: Devices
    directory: RunDirectory
    folder: str
    """Folder or hub name of the model."""
    model: nn.Module | None
    of_model: Any
    """The model's Hugging Face configuration; None where it can't be read."""
    tokenizer: Any
    environment: Environment | None
    rows: Sequence[Row]
    data: Sequence[Digest]
    validation_rows: Sequence[Row]
    log: RunLog
    loggers: Mapping[str, LoggerFactory]
    callbacks: Sequence[Callback]

    @property
    def quiet(self) -> bool:
        return self.config.run.display == "none"


@contextmanager
def launched(
    config: BaseConfig,
    algorithm: str,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    train: Rows = None,
    validation: Rows = None,
    reward: Reward | None = None,
    environment: Any = None,
    callbacks: Sequence[Any] = (),
) -> Iterator[Launch]:
    """Check and read all but the model, and hold the run's directory in the block."""
    require(
        model is None or not config.model.from_scratch,
        "model.from_scratch",
        "can't be given together with a loaded model",
        True,
        "omit it, or name the model's folder (--model.path)",
    )
    check_callbacks(callbacks)
    training_backend_class(config.trainer.backend)  # or an error that lists the known names
    get_generation_backend(config.generation.backend)
    RunDirectory.check_missing(config.run)
    devices, name = Devices.of(config), algorithm_of(config)
    devices.check_given(model)
    rows_given: dict[str, Any] = {"train": train, "validation": validation}
    config = as_given(devices.config, **rows_given, reward=reward, environment=environment)
    led, loggers = environment_of(config, reward, environment), chosen_loggers(config.run.loggers)
    rows, held_out = read_data(config.data, **rows_given, seed=config.run.seed)
    require_rows(rows)
    known = first_of(rows)
    data = digests_of(known, held_out)
    if not held_out:
        config.run.require_training_metrics()
    folder = config.run.dir or str(RunDirectory.create_free(name).path)
    config = replace(config, run=replace(config.run, dir=folder))
    with locked(Path(folder)), signals_raise():
        directory = open_directory(config, algorithm, restarted=devices.restarted)
        config = replace(config, run=replace(config.run, resume=directory.has_checkpoint()))
        saved = checkpoint.data_of(folder) if config.run.resume else []
        if saved and saved != data:
            _require_same_rows(config, directory, train, saved, known, held_out)
        with recorded(directory, algorithm=algorithm) as log:
            warn_of_spinning()
            checkpoint.sweep(directory.path)
            path = model_folder(config.model.path)
            trust = {"trust_remote_code": config.model.trust_remote_code}
            of_model = model_config_of(path if model is None else model, **trust)
            devices.check_model(of_model)
            config = with_response_length(within_positions(config, of_model))
            tokenizer = with_chat_template(
                tokenizer or load_tokenizer(config.model.tokenizer or path, **trust),
                config.model.chat_template,
                config.model.chat_template_kwargs,
            )
            warn_of_strings(chain(known, held_out), tokenizer)
            yield Launch(
                config=config,
                devices=devices,
                directory=directory,
                folder=path,
                model=model,
                of_model=of_model,
                tokenizer=tokenizer,
                environment=led,
                rows=rows,
                data=data,
                validation_rows=first_of_each(held_out, config.run.max_val_samples),
                log=log,
                loggers=loggers,
                callbacks=callbacks,
            )


def _require_same_rows(
    config: BaseConfig,
    directory: RunDirectory,
    train: Rows,
    saved: list[Digest],
    *rows: Sequence[Row],
) -> None:
    sources = sources_of(config.data.train if train is None else train)
    found = difference(saved, *rows, names=[*map(name_of, sources), "the validation rows"])
    if not found:
        return
    of_rows = [
        each
        for each in changes(directory.config, config)
        if each.startswith(("data.", "run.seed")) and not each.startswith("data.max_")
    ]
    if of_rows:
        found += f" ({'; '.join(of_rows)})"
    if not config.run.accept_changed_data:
        raise ValueError(
            f"data.train and data.validation must be the rows that the run began with, but {found}:"
            " restore them, or add --run.accept-changed-data"
        )
    warn(f"the run continues with changed rows: {found}")


def open_directory(config: BaseConfig, algorithm: str, *, restarted: bool) -> RunDirectory:
    """Make or, to resume, find the folder of a run. Raises ValueError where it is of another."""
    restarted = restarted or _begins_anew(RunDirectory(Path(str(config.run.dir))), config.run)
    directory = RunDirectory.create(
        str(config.run.dir),
        dump_yaml(kept(config)),
        resume=config.run.resume,
        restarted=restarted,
    )
    if directory.holds_results():
        check_algorithm(directory, algorithm)
    return directory


def _begins_anew(directory: RunDirectory, run: RunConfig) -> bool:
    """Return whether to begin a run again that ended before its first checkpoint was due."""
    if run.resume != "auto" or directory.has_checkpoint() or not directory.holds_results():
        return False
    record, metrics = RunRecord.read(directory), directory.read_metrics()
    last = metrics[-1]["step"] if metrics else 0
    if record is None or record.status == "finished" or last > run.save_period:
        return False
    warn(f"the run in {directory.path} ended before its first checkpoint: it begins again, anew")
    return True
