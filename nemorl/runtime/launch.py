"""From a configuration to a finished run: everything is checked and loaded in order of cost, put together, and handed to the algorithm's loop."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.checks import require
from nemorl.data.templates import with_chat_template
from nemorl.parallel.config import BackendConfig
from nemorl.rollout.environment import EnvironmentInterface
from nemorl.rollout.environments import make_environment
from nemorl.runtime import checkpoint
from nemorl.runtime.callbacks import Callback, closing
from nemorl.runtime.checkpoint import CheckpointError
from nemorl.runtime.config import BaseConfig
from nemorl.runtime.config_io import dump_yaml, load_config, to_dict
from nemorl.runtime.display import make_display
from nemorl.runtime.engine_start import told
from nemorl.runtime.generation_config import GenerationConfig
from nemorl.runtime.inspect import show_lengths
from nemorl.runtime.job import Inputs, Job, Rows, read_data
from nemorl.runtime.locking import locked, signals_in_order
from nemorl.runtime.loggers.base import LoggedRun, LoggerFactory, Recorder, chosen_loggers, flat
from nemorl.runtime.metric_rules import require_validation
from nemorl.runtime.observers import GapWatch, PlotCallback, SignalWatch
from nemorl.runtime.policy_config import GapConfig
from nemorl.runtime.pretrained import ExportCallback, check_vocabulary, load_tokenizer, model_folder
from nemorl.runtime.registry import algorithm_of, get_algorithm, get_generation_backend, get_training_backend, load
from nemorl.runtime.run_directory import RunDirectory, free_directory
from nemorl.runtime.saving import CheckpointCallback, EarlyStop
from nemorl.runtime.state import LoopState, Run
from nemorl.runtime.structured_log import RunLog, recorded
from nemorl.runtime.weight_sync import TrainerWeights, check_agreement

Reward = str | Callable[..., Any] | EnvironmentInterface | Sequence[Any] | Mapping[str, Any]
"""A reward by name, a function, an environment, or several of them (a list, or a mapping from names)."""


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves behind in memory; the rest is in its directory."""

    metrics: dict[str, float]
    """Of the last step, and of the last validation as val_…"""
    history: list[dict[str, Any]] = field(repr=False)
    """The lines of metrics.jsonl: a dict per step and per validation, told apart by `phase`."""
    paths: RunDirectory
    """Where everything is: paths.path, paths.hf, paths.metrics, paths.plots, paths.checkpoints, …"""
    model: nn.Module = field(repr=False)
    """The trained model, live, with its own attention and mode."""
    tokenizer: Any = field(repr=False)


def run(
    config: BaseConfig,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    train: Rows = None,
    validation: Rows = None,
    reward: Reward | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Run the algorithm that `config` is of, in the folder `config.run.dir`.

    A loaded `model` and `tokenizer`, rows and a reward function may be given here instead of by name in the configuration. With `config.run.resume`
    the run in the folder goes on from its last checkpoint, and ends with the numbers that it would have had without the interruption.

    Raises ValueError that names the field where something in the configuration or the data can't work, where possible before the model is loaded.
    """
    name = algorithm_of(config)
    remedy = "build the model with random weights yourself, or name its folder (--model.path) instead of passing it"
    require(model is None or not config.model.from_scratch, "model.from_scratch", "can't be given together with a loaded model", True, remedy)
    trainer_class, generator_class = get_training_backend(config.trainer.backend), get_generation_backend(config.generation.backend)
    config = as_given(config, train=train, validation=validation, reward=reward)
    environment, loggers = environment_of(config, reward), chosen_loggers(config.run.loggers)
    train_rows, held_out = read_data(config.data, train=train, validation=validation, seed=config.run.seed)
    if not train_rows:
        raise ValueError("data.train must name rows to train on, but it is empty: give --data.train FILE, or run(config, train=rows)")
    held_out = held_out[: config.run.max_val_samples]
    require_validation(config.run.metrics_of_rules(), validates=bool(held_out))
    config = replace(config, run=replace(config.run, dir=config.run.dir or free_directory(name)))
    directory = RunDirectory(Path(str(config.run.dir)))
    with locked(directory.path), signals_in_order(), started(config, algorithm=name) as log:
        checkpoint.sweep(directory.path)
        folder = model_folder(config.model.path)
        config = within_positions(config, folder if model is None else model)
        tokenizer = tokenizer or load_tokenizer(config.model.tokenizer or folder)
        tokenizer = with_chat_template(tokenizer, config.model.chat_template, config.model.chat_template_kwargs)
        inputs = Inputs(train=train_rows, validation=held_out, tokenizer=tokenizer, environment=environment)
        job: Job = load(get_algorithm(name).prepare)(config, inputs)
        lengths = show_lengths(job.lengths, config)
        engines = generation_config(config, directory) if job.generates else None

        trainer = trainer_class() if model is None else trainer_class(model)
        found = checkpoint.latest(directory.path) if config.run.resume else None
        set_up(trainer, backend_config(config, job, folder, found))
        live_model, generator = trainer.model, None  # type: ignore[attr-defined]
        try:
            check_vocabulary(live_model, tokenizer)
            if engines is not None:
                generator = generator_class(model=live_model, tokenizer=tokenizer, precision=config.trainer.precision)
                with told(engines, quiet=config.run.display == "none"):
                    generator.setup(engines)
            current = Run(config, trainer, generator, tokenizer, LoopState(config.run.seed), directory.path)
            if job.with_initial_model is not None:
                job = job.with_initial_model(current)
            current = resumed(current, directory, found, last_step=job.num_steps, lengths=lengths)
            tokenizer.save_pretrained(directory.path / "tokenizer")
            directory.write_data(lengths)
            if generator is not None:
                generator.update_weights(TrainerWeights(trainer), version=current.state.policy_version)
                check_agreement(trainer, generator, probe(config, live_model), precision=config.trainer.precision)
                generator.sleep()  # until it is needed
            log.total_steps = job.num_steps
            everyone = all_callbacks(config, directory, live_model, callbacks, log=log, loggers=loggers)
            with closing(everyone):
                job.run(current, callbacks=everyone)
        finally:
            try:
                if generator is not None:
                    generator.shutdown()
            finally:
                trainer.shutdown()
    history = directory.read_metrics()
    return TrainResult(final_metrics(history), history, directory, live_model, tokenizer)


def started(config: BaseConfig, *, algorithm: str) -> AbstractContextManager[RunLog]:
    """The run's directory as it is at the start, with a log of what goes on as long as the block lasts."""
    return recorded(RunDirectory.create(str(config.run.dir), dump_yaml(config), resume=config.run.resume), algorithm=algorithm)


def as_given(config: Any, *, train: Rows, validation: Rows, reward: Reward | None) -> Any:
    """The config with the names of what was given beside it, so that config.yaml tells them and a resume from a shell finds them.

    A reward that has no name is noted as given in Python: a resume without it is an error, rather than another reward.
    """

    def named(value: Any) -> Any:
        several = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
        parts = list(value) if several else [value]
        if not all(isinstance(part, str | Path) for part in parts):
            return None
        return tuple(map(str, parts)) if several else str(value)

    data = {name: named(rows) for name, rows in (("train", train), ("validation", validation)) if named(rows) is not None}
    config = replace(config, data=replace(config.data, **data)) if data else config
    if reward is not None and hasattr(config, "reward"):
        parts = list(reward) if isinstance(reward, Mapping | list | tuple) else [getattr(reward, "__name__", type(reward).__name__)]
        config = replace(config, reward=named(reward) or f"given in Python ({', '.join(getattr(p, '__name__', None) or str(p) for p in parts)})")
    return config


def within_positions(config: Any, model: nn.Module | str) -> Any:
    """The config with data.max_total_sequence_length lowered, with a warning, to the positions that the model has."""
    from transformers import AutoConfig

    try:
        of_model = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
    except (OSError, ValueError):
        return config  # loading it will say what is wrong
    positions, wanted = getattr(of_model, "max_position_embeddings", None), config.data.max_total_sequence_length
    if positions is None or wanted <= positions:
        return config
    warnings.warn(f"data.max_total_sequence_length is lowered from {wanted} to {positions}, the positions that the model has", stacklevel=3)
    return replace(config, data=replace(config.data, max_total_sequence_length=positions))


def environment_of(config: BaseConfig, reward: Reward | None) -> EnvironmentInterface | None:
    """The reward given, or that which the config names; None for an algorithm that has no reward."""
    if not hasattr(config, "reward"):
        if reward is not None:
            raise ValueError(f"reward can't be given here, because {type(config).__name__} has none: leave it out")
        return None
    return make_environment(config.reward if reward is None else reward, getattr(config, "reward_weights", ()))


def backend_config(config: BaseConfig, job: Job, folder: str, found: Path | None) -> BackendConfig:
    """What the training backend is set up with, where the run goes on from the checkpoint `found`."""
    needs_initial_model = job.keep_reference or job.with_initial_model is not None
    return BackendConfig(
        model=replace(config.model, path=folder),
        trainer=config.trainer,
        optimizer=config.optimizer,
        seed=config.run.seed,
        lora=config.lora,
        total_steps=job.num_updates or job.num_steps,
        keep_reference=job.keep_reference,
        same_initial_model_as=found / "trainer" if found is not None and needs_initial_model else None,
    )


def generation_config(config: BaseConfig, directory: RunDirectory) -> GenerationConfig:
    """What an engine is set up with: the replicas' place for logs and the longest sequence are the run's, unless they were given.

    Raises ValueError where the engine's longest sequence is shorter than the run's.
    """
    given = config.generation
    if given.backend == "torch":
        return given
    longest = config.data.max_total_sequence_length
    fits = given.max_model_len is None or given.max_model_len >= longest
    require(fits, "generation.max_model_len", f"must be at least data.max_total_sequence_length ({longest})", given.max_model_len,
            "lower that one, or leave this one out")  # fmt: skip
    logs = (given.log_dir or str(directory.path / "logs")) if given.num_replicas else None
    return replace(given, log_dir=logs, max_model_len=given.max_model_len or longest)


def probe(config: BaseConfig, model: Any) -> list[int]:
    """A prompt for `check_agreement`: any tokens do, as long as they leave room for an answer."""
    return [token % model.config.vocab_size for token in range(max(1, min(8, config.data.max_total_sequence_length // 2)))]


def set_up(trainer: Any, config: BackendConfig) -> None:
    """Set up a training backend; one that fails gives back the model that it was made with.

    Raises ValueError if one of your own has no `model` or `step` afterwards.
    """
    try:
        trainer.setup(config)
        missing = [name for name in ("model", "step") if not hasattr(trainer, name)]
        require(not missing, "trainer.backend", "must be one with the attributes model and step once it is set up", config.trainer.backend,
                f"{type(trainer).__name__} has no {' and no '.join(missing)}; nemorl.TrainingBackend says what they are")  # fmt: skip
    except BaseException:
        with suppress(Exception):  # what is wrong is that which comes out of setup
            trainer.shutdown()
        raise


def resumed(run: Run, directory: RunDirectory, found: Path | None, *, last_step: int, lengths: Mapping[str, Any]) -> Run:
    """The run where its last checkpoint, `found`, left it, if it is to be resumed; with a directory that shows this state and these settings.

    Settings and data (`lengths`: see `show_lengths`) that are not those of before are a warning.
    """
    config = run.config
    if found is not None:
        run = replace(run, state=checkpoint.load(found, run))
        for change in changes(directory.config, config):
            warnings.warn(f"the run goes on with other settings than before: {change}", stacklevel=3)
        for change in data_changes(directory.read_data(), lengths):
            warnings.warn(f"the run goes on with other data than before: {change}", stacklevel=3)
        if run.state.step >= last_step:
            done = f"the run has {run.state.step} steps already, so there is nothing to do up to step {last_step}"
            warnings.warn(f"{done}: raise max_num_steps", stacklevel=3)
    elif config.run.resume and checkpoint.present(directory.path):
        raise CheckpointError(
            f"run.resume needs a whole checkpoint, but none in {directory.checkpoints} is: put one back, or begin anew in another folder (--run.dir)"
        )
    elif config.run.resume:
        warnings.warn(f"there is no checkpoint in {directory.path} to resume from, so the run starts anew", stacklevel=3)
    directory.write_config(dump_yaml(replace(config, run=replace(config.run, resume=False))))
    directory.truncate(run.state.step if found is not None else -1)
    return run


def all_callbacks(
    config: BaseConfig,
    directory: RunDirectory,
    model: nn.Module,
    given: Sequence[Callback],
    *,
    log: RunLog,
    loggers: Mapping[str, LoggerFactory],
) -> list[Callback]:
    """Those that show and record, then the caller's, then those that save: a checkpoint vouches for what was written before it."""
    logged = LoggedRun(
        directory=directory, run_id=log.run_id, config=to_dict(config), project=config.run.project, samples_per_step=config.run.samples_per_step
    )
    observers = [
        log,
        make_display(config.run.display, total_steps=log.total_steps),
        Recorder(loggers, logged),
        SignalWatch(),
        *given,
    ]
    every, keep, condition = config.run.save_period, config.run.keep_checkpoints, config.run.stop_condition()
    savers: list[Callback] = [EarlyStop(condition, directory, quiet=config.run.display == "none")] if condition else []
    savers += [CheckpointCallback(directory, period=every, keep=keep, ranking=config.run.ranking(), observers=tuple(observers))]
    gap = getattr(config, "gap", None)
    savers += [GapWatch(gap, directory)] if isinstance(gap, GapConfig) else []
    savers += [ExportCallback(directory, model, adapter=config.lora.export == "adapter")] if config.run.export else []
    savers += [PlotCallback(directory)] if config.run.plots else []
    return [*observers, *savers]


def changes(path: str | Path, config: Any) -> list[str]:
    """In which settings a config differs from the one in a file, but for `run` and how long it goes on. A file that can't be read is a warning."""
    try:
        before, now = flat(to_dict(load_config(type(config), path))), flat(to_dict(config))
    except ValueError as error:
        warnings.warn(f"the settings that the run had so far can't be compared with the present ones: {error}", stacklevel=4)
        return []
    keys = [key for key in now | before if not key.startswith("run.") and key not in ("max_num_steps", "num_epochs")]
    return [f"{key} is {now.get(key)!r}, was {before.get(key)!r}" for key in keys if now.get(key) != before.get(key)]


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which data sets differ between two contents of data.json; nothing where the earlier one is missing.

    >>> data_changes({"train": {"count": 40, "total_tokens": 200, "hash": "a"}}, {"train": {"count": 77, "total_tokens": 385, "hash": "b"}})
    ['train is 77 sequences of 385 tokens in all (hash b), was 40 sequences of 200 tokens in all (hash a)']
    """

    def told(found: Mapping[str, Any] | None) -> str:
        return "none" if found is None else f"{found.get('count')} sequences of {found.get('total_tokens')} tokens in all (hash {found.get('hash')})"

    names = [name for name in dict.fromkeys([*now, *before]) if before]
    return [f"{name} is {told(now.get(name))}, was {told(before.get(name))}" for name in names if told(now.get(name)) != told(before.get(name))]


def final_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last step's metrics, and the last validation's with `val_` before their names.

    >>> final_metrics([{"step": 1, "phase": "train", "loss": 2.0}, {"step": 1, "phase": "validation", "accuracy": 0.5}])
    {'loss': 2.0, 'val_accuracy': 0.5}
    """
    last = {line["phase"]: line for line in history}
    return {
        prefix + name: value
        for phase, prefix in (("train", ""), ("validation", "val_"))
        for name, value in last.get(phase, {}).items()
        if name not in ("step", "time", "phase")
    }
