"""`run`: from a configuration to a finished run, checked and loaded in order of cost."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.checks import require
from nemorl.data.templates import with_chat_template
from nemorl.models.pretrained import load_tokenizer, model_folder
from nemorl.parallel.determinism import deterministic_kernels
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.tree import dump_yaml
from nemorl.runtime.ranks.environment import is_follower
from nemorl.runtime.run import checkpoint
from nemorl.runtime.run.callbacks import Callback, closing
from nemorl.runtime.run.directory import RunDirectory, free_directory
from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout
from nemorl.runtime.run.job import Inputs, Job, Reward, Row, Rows, read_data
from nemorl.runtime.run.lock import locked
from nemorl.runtime.run.result import TrainResult
from nemorl.runtime.run.rng import random_state, restore_generators
from nemorl.runtime.run.signals import signals_raise
from nemorl.runtime.start.devices import Devices
from nemorl.runtime.start.lengths import show_lengths
from nemorl.runtime.start.live import Launch
from nemorl.runtime.start.live import train as train_once
from nemorl.runtime.start.registry import (
    algorithm_of,
    chosen_loggers,
    get_algorithm,
    get_generation_backend,
    get_training_backend,
    load,
)
from nemorl.runtime.start.settings import (
    as_given,
    environment_of,
    generation_config,
    model_config_of,
    with_response_length,
    within_positions,
)
from nemorl.runtime.watch.log import event, recorded


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

    A loaded `model` and `tokenizer`, rows and a reward function may be given here instead of by
    name. With `config.run.resume` the run goes on from its last checkpoint, and ends with the
    numbers that it would have had without the interruption; a validation that failed is not made up
    for.

    The loop, the callbacks and the reward are in this process. Under torchrun it is that of rank 0;
    the others serve it until the run is over, and return the same result without the model.

    Raises ValueError that names the field, where possible before the model is loaded.
    """
    name = algorithm_of(config)
    require(
        model is None or not config.model.from_scratch,
        "model.from_scratch",
        "can't be given together with a loaded model",
        True,
        "omit it, or name the model's folder (--model.path)",
    )
    get_training_backend(config.trainer.backend)  # or an error that lists the known names
    get_generation_backend(config.generation.backend)
    devices = Devices.of(config)
    devices.check_given(model)
    if is_follower():
        from nemorl.runtime.ranks.torchrun import follow

        return follow(get_training_backend(config.trainer.backend), config)
    config = as_given(config, train=train, validation=validation, reward=reward)
    environment, loggers = environment_of(config, reward), chosen_loggers(config.run.loggers)
    rows, held_out = _rows(config, train, validation)
    resume, folder = config.run.resume or devices.restarted, config.run.dir or free_directory(name)
    config = replace(config, run=replace(config.run, resume=resume, dir=folder))
    with locked(Path(folder)), signals_raise():
        directory = RunDirectory.create(folder, dump_yaml(config), resume=resume)
        with recorded(directory, algorithm=name) as log:
            checkpoint.sweep(directory.path)
            path = model_folder(config.model.path)
            of_model = model_config_of(path if model is None else model)
            devices.check_model(of_model)
            config = with_response_length(within_positions(config, of_model))
            tokenizer = with_chat_template(
                tokenizer or load_tokenizer(config.model.tokenizer or path),
                config.model.chat_template,
                config.model.chat_template_kwargs,
            )
            inputs = Inputs(
                train=rows,
                validation=held_out[: config.run.max_val_samples],
                tokenizer=tokenizer,
                environment=environment,
            )
            job: Job = load(get_algorithm(name).prepare)(config, inputs)
            engines = generation_config(config, directory, devices) if job.generates else None
            launch = Launch(
                config=config,
                devices=devices,
                directory=directory,
                job=job,
                folder=path,
                model=model,
                engines=engines,
                tokenizer=tokenizer,
                lengths=show_lengths(job.lengths, quiet=config.run.display == "none"),
                log=log,
                loggers=loggers,
                callbacks=callbacks,
            )
            return with_restarts(launch)


def _rows(config: BaseConfig, train: Rows, validation: Rows) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on and those held out for validation."""
    data, seed = config.data, config.run.seed
    rows, held_out = read_data(data, train=train, validation=validation, seed=seed)
    if not rows:
        raise ValueError("data.train must name rows to train on: add --data.train FILE")
    if not held_out:
        config.run.require_training_metrics()
    return rows, held_out


def with_restarts(launch: Launch) -> TrainResult:
    """Train, and after ranks have died or hung, up to runtime.max_restarts times again, with new
    ranks and from the last checkpoint. The caller's callbacks see all attempts.
    """
    config, generators = launch.config, random_state()
    # An engine may compute in this process while others train.
    kernels = launch.devices.ranked and config.trainer.deterministic
    with closing(launch.callbacks), deterministic_kernels() if kernels else nullcontext():
        restart = 0
        while True:
            try:
                return train_once(launch)
            except Exception as error:
                failure, restart = failed_ranks(error), restart + 1
                if failure is None or restart > config.runtime.max_restarts:
                    raise
                reason = str(failure)
            point = checkpoint.latest(launch.directory.path)
            where = f"goes on from {point}" if point else "begins anew, without a checkpoint yet,"
            times = f"restart {restart} of {config.runtime.max_restarts}"
            event("restart", times, restart=restart)
            warnings.warn(f"the run {where} with new ranks ({times}): {reason}", stacklevel=3)
            restore_generators(*generators)  # a new beginning draws the same numbers
            resume = point is not None or config.run.resume
            launch = replace(launch, config=replace(config, run=replace(config.run, resume=resume)))


def failed_ranks(error: BaseException | None) -> WorkerDied | WorkerTimeout | None:
    """Return the failure of ranks that an error comes from, if any."""
    while error is not None and not isinstance(error, WorkerDied | WorkerTimeout):
        error = error.__cause__
    return error
