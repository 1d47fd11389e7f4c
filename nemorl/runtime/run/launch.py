"""A run before its model is loaded: its settings checked and its data read, by cost."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from nemorl.checks import require, warn
from nemorl.data.datasets import warn_of_strings
from nemorl.data.digest import Digest, difference, digests_of
from nemorl.data.rows import Row, first_of
from nemorl.data.sources import name_of, sources_of
from nemorl.data.templates import with_chat_template
from nemorl.models import hub
from nemorl.openmp import SPINS
from nemorl.parallel.determinism import deterministic_kernels
from nemorl.rollout.answers import GIVEN
from nemorl.rollout.config import GenerationConfig, RolloutConfig
from nemorl.rollout.environments import Environment, check_limits, make_environment
from nemorl.rollout.environments.classes import Workers
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.tree import defaults, dump_yaml, flat, merge, to_dict
from nemorl.runtime.config.yaml_io import read, without_secrets
from nemorl.runtime.ranks import is_follower
from nemorl.runtime.run.data import (
    Reward,
    Rows,
    check_names,
    first_of_each,
    print_known,
    read_data,
    reward_for,
)
from nemorl.runtime.run.devices import Devices
from nemorl.runtime.run.registry import (
    algorithm_of,
    chosen_loggers,
    get_generation_backend,
    training_backend_class,
)
from nemorl.runtime.serve.agents import Agent, led_by
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import RunDirectory, RunRecord, check_algorithm, locked
from nemorl.runtime.watch.callbacks import Callback, check_callbacks, closing, signals_raise
from nemorl.runtime.watch.log import RunLog, recorded
from nemorl.runtime.watch.loggers import LoggerFactory

Config = TypeVar("Config", bound=BaseConfig)


def _as_given(
    config: Config,
    *,
    train: Rows,
    validation: Rows,
    reward: Reward | None,
    environment: Any,
) -> Config:
    def named(value: Any) -> Any:
        if isinstance(value, list | tuple) and value:
            names = all(isinstance(each, str | Path) for each in value)
            return tuple(map(str, value)) if names else None
        if isinstance(value, Mapping) and value:
            found = {str(key): named(each) for key, each in value.items()}
            return found if all(found.values()) else None
        return str(value) if isinstance(value, str | Path) else None

    rows = {"train": train, "validation": validation}
    names = {key: name for key, value in rows.items() if (name := named(value))}
    changed: dict[str, Any] = {"data": replace(config.data, **names)}
    if environment is not None and hasattr(config, "rollout"):
        changed["rollout"] = replace(
            config.rollout, environment=named(environment) or _given(environment)
        )
    sources = [getattr(config.data, key) if value is None else value for key, value in rows.items()]
    if config.run.display != "none" and not is_follower():
        print_known(*sources)
    if reward is not None:
        changed["reward"] = named(reward) or _given(reward)
    elif hasattr(config, "reward"):
        if not config.generates(answers=False):
            sources = sources[:1] if config.data.held_out else sources[1:]
        changed["reward"] = reward_for(config.reward, *sources)
    return replace(config, **changed)


def _given(value: Any) -> str:
    names = [
        part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)
        for part in (value if isinstance(value, Mapping | list | tuple) else [value])
    ]
    return f"{GIVEN} ({', '.join(names)})"


def kept(config: Config) -> Config:
    """Return the config without what is for one start of the run."""
    return replace(config, run=replace(config.run, resume=False, accept_changed_data=False))


def model_config_of(model: nn.Module | str, *, trust_remote_code: bool = False) -> Any:
    """Return a model's Hugging Face configuration, None where it can't be read."""
    if not isinstance(model, str):
        return model.config
    try:
        return hub.read_config(
            (hub.base_of(Path(model)) or "") if (Path(model) / hub.CONFIG).is_file() else model,
            trust_remote_code=trust_remote_code,
        )
    except Exception:  # transformers raises what a wrong value leads to
        return None


def _warn_of_spinning() -> None:
    if SPINS and torch.get_num_threads() > 1:
        warn(
            "torch was imported before nemorl, so its threads spin while they wait, and a second"
            " run here can slow both 50 times: import nemorl first, or set GOMP_SPINCOUNT"
            " (KMP_BLOCKTIME on macOS) before Python starts"
        )


def _within_positions(config: Config, of_model: Any) -> Config:
    positions = None if of_model is None else hub.max_positions(of_model)
    wanted = config.data.max_total_sequence_length
    if positions is None or wanted <= positions:
        return config
    which = "that the model has"
    if positions < of_model.max_position_embeddings:
        which = "beyond which longrope changes the numbers of other sequences"
    warn(
        f"data.max_total_sequence_length is lowered from {wanted} to {positions}, the positions"
        f" {which}"
    )
    return replace(config, data=replace(config.data, max_total_sequence_length=positions))


def _with_response_length(config: Config) -> Config:
    if config.generation.max_new_tokens is not None or not hasattr(config, "reward"):
        return config
    fits = min(
        config.generation.longest_response, max(1, config.data.max_total_sequence_length // 2)
    )
    return replace(config, generation=replace(config.generation, max_new_tokens=fits))


def environment_of(
    config: BaseConfig, reward: Reward | None, environment: Any = None
) -> Environment | None:
    """Return the given or configured environment and reward; None without rewards."""
    rollout = getattr(config, "rollout", None)
    for name, value, used, why in (
        ("environment_factory", environment, rollout is not None, "samples no conversations"),
        ("reward", reward, hasattr(config, "reward"), "has none"),
    ):
        require(
            used or value is None,
            name,
            f"can't be given here, because {type(config).__name__} {why}",
            value,
            "remove it",
        )
    if rollout is not None:
        environment = led_by(environment, rollout)
    if not hasattr(config, "reward"):
        return None
    found = make_environment(
        config.reward if reward is None else reward,
        getattr(config, "reward_weights", ()),
        getattr(config, "reward_kwargs", {}),
        environment=environment,
        chosen=reward is not None or config.reward != defaults(type(config)).get("reward"),
        workers=workers_of(rollout) if rollout is not None else None,
    )
    if rollout is not None:
        by_turn = getattr(getattr(config, "advantage", None), "level", None) == "turn"
        check_limits(found, rollout, by_turn=by_turn)
    return found


def workers_of(rollout: RolloutConfig) -> Callable[[], Workers] | None:
    """Return what makes an environment's processes, if it has any."""
    if not rollout.workers:
        return None
    try:
        from nemorl.runtime.workers.environments import RayWorkers
    except ImportError as error:
        raise ImportError(
            f"rollout.workers needs Ray ({error}): pip install 'nemorl[ray]'"
        ) from error
    return partial(RayWorkers, rollout.workers, rollout.worker)


def generation_config(
    config: BaseConfig, directory: RunDirectory, devices: Devices
) -> GenerationConfig:
    """Return the engine's settings, with the run's lengths, logs and GPUs unless given."""
    given, longest = config.generation, config.data.max_total_sequence_length
    if given.traits.embedded:
        return given
    require(
        given.max_model_len is None or given.max_model_len >= longest,
        "generation.max_model_len",
        f"must be at least data.max_total_sequence_length ({longest})",
        given.max_model_len,
        "lower that one, or remove this one",
    )
    return replace(
        given,
        max_model_len=given.max_model_len or longest,
        log_dir=given.log_dir or str(directory.path / "logs"),
        trainer_gpus=devices.local_gpus if given.trainer_gpus is None else given.trainer_gpus,
    )


def changes(path: str | Path, config: BaseConfig) -> list[str]:
    """Return which settings that change numbers differ from those in a file."""
    before, now = (
        flat(without_secrets(json.loads(json.dumps(each, default=str))))
        for each in (merge(defaults(type(config)), read(path)[0]), to_dict(config))
    )
    free = (
        *("run.", "runtime.", "profile.", "environment.", "max_num_steps", "num_epochs"),
        "trainer.offload_during_generation",
    )
    return [
        f"{key} is {now.get(key)!r}, was {before.get(key)!r}"
        for key in now | before
        if (key == "run.seed" or not key.startswith(free)) and now.get(key) != before.get(key)
    ]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is read and checked once, however often a run begins again with new ranks."""

    config: BaseConfig
    devices: Devices
    directory: RunDirectory
    folder: str
    """Folder or hub name of the model."""
    model: nn.Module | None
    of_model: Any
    """The model's Hugging Face configuration, if it can be read."""
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
    """Check and read all but the model, and lock the run's directory for the block."""
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
    config = _as_given(devices.config, **rows_given, reward=reward, environment=environment)
    environment = environment_of(config, reward, environment)
    loggers = chosen_loggers(config.run.loggers)
    rows, held_out = read_data(config.data, **rows_given, seed=config.run.seed)
    known = first_of(rows)
    check_names(config.data, environment, [*known, *held_out])
    data = digests_of(known, held_out)
    if not held_out:
        config.run.require_training_metrics()
    folder = config.run.dir or str(RunDirectory.create_free(name).path)
    config = replace(config, run=replace(config.run, dir=folder))
    with locked(Path(folder)), signals_raise():
        directory = open_directory(config, algorithm, restarted=devices.restarted)
        config = replace(config, run=replace(config.run, resume=directory.has_checkpoint()))
        _require_same_rows(config, directory, train, data, known, held_out)
        with recorded(directory, algorithm=algorithm) as log:
            _warn_of_spinning()
            checkpoint.sweep(directory.path)
            path = hub.model_folder(config.model.path)
            trust = {"trust_remote_code": config.model.trust_remote_code}
            of_model = model_config_of(path if model is None else model, **trust)
            devices.check_model(of_model)
            config = _with_response_length(_within_positions(config, of_model))
            tokenizer = with_chat_template(
                tokenizer or hub.load_tokenizer(config.model.tokenizer or path, **trust),
                config.model.chat_template,
                config.model.chat_template_kwargs,
            )
            asked = () if isinstance(environment, Agent) else (*known, *held_out)
            warn_of_strings(asked, tokenizer)
            fixed = devices.ranked and config.trainer.deterministic  # an engine may compute here
            with closing(callbacks), deterministic_kernels if fixed else nullcontext():
                yield Launch(
                    config=config,
                    devices=devices,
                    directory=directory,
                    folder=path,
                    model=model,
                    of_model=of_model,
                    tokenizer=tokenizer,
                    environment=environment,
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
    data: Sequence[Digest],
    *rows: Sequence[Row],
) -> None:
    saved = checkpoint.data_of(directory.path) if config.run.resume else []
    if not saved or saved == data:
        return
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
    """Make the folder of a run, or find it to resume. Raises ValueError for another run's."""
    run, found = config.run, RunDirectory(Path(str(config.run.dir)))
    unsaved = found.holds_results() and not found.has_checkpoint()
    if run.resume == "auto" and unsaved and not restarted:
        record, metrics = RunRecord.read(found), found.read_metrics()
        last = metrics[-1]["step"] if metrics else 0
        if record is not None and record.status != "finished" and last <= run.save_period:
            warn(
                f"the run in {found.path} ended before its first checkpoint: it begins again, anew"
            )
            restarted = True
    directory = RunDirectory.create(
        found.path, dump_yaml(kept(config)), resume=run.resume, restarted=restarted
    )
    if directory.holds_results():
        check_algorithm(directory, algorithm)
    return directory
