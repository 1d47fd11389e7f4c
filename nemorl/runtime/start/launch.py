"""From a configuration to a finished run: everything is checked and loaded in order of cost, put
together, and handed to the algorithm's loop.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.checks import require
from nemorl.data.templates import with_chat_template
from nemorl.models.pretrained import load_tokenizer, model_folder
from nemorl.runtime.cli.inspect import show_lengths
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.metric_rules import require_validation
from nemorl.runtime.config.tree import dump_yaml
from nemorl.runtime.ranks.following import follow, follows
from nemorl.runtime.run import checkpoint
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.directory import RunDirectory, free_directory
from nemorl.runtime.run.job import Inputs, Job, Reward, Rows, read_data
from nemorl.runtime.run.lock import locked
from nemorl.runtime.run.result import TrainResult
from nemorl.runtime.run.signals import signals_raise
from nemorl.runtime.start.attempt import Prepared, with_restarts
from nemorl.runtime.start.devices import Devices
from nemorl.runtime.start.registry import (
    algorithm_of,
    chosen_loggers,
    get_algorithm,
    get_generation_backend,
    get_training_backend,
    load,
)
from nemorl.runtime.start.run_settings import (
    as_given,
    environment_of,
    model_config_of,
    with_response_length,
    within_positions,
)
from nemorl.runtime.watch.log import RunLog, recorded


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
    name in the configuration. With `config.run.resume` the run in the folder goes on from its last
    checkpoint, and ends with the numbers that it would have had without the interruption.

    The loop, the callbacks and the reward are in this process, whatever `config.parallel` says:
    others only have their parts of the model. Under torchrun that is the one of rank 0; in the
    others this serves it until the run is over, and returns the same but for the model.

    Raises ValueError that names the field where something in the configuration or the data can't
    work, where possible before the model is loaded.
    """
    name = algorithm_of(config)
    remedy = (
        "build the model with random weights yourself, or name its folder (--model.path) instead of"
        " passing it"
    )
    require(
        model is None or not config.model.from_scratch,
        "model.from_scratch",
        "can't be given together with a loaded model",
        True,
        remedy,
    )
    (
        get_training_backend(config.trainer.backend),
        get_generation_backend(config.generation.backend),
    )  # or an error that lists those that there are
    devices = Devices.of(config)
    devices.check_given(model)
    if follows():
        return follow(config)
    config = as_given(config, train=train, validation=validation, reward=reward)
    config = replace(config, run=replace(config.run, resume=config.run.resume or devices.restarted))
    environment, loggers = environment_of(config, reward), chosen_loggers(config.run.loggers)
    train_rows, held_out = read_data(
        config.data, train=train, validation=validation, seed=config.run.seed
    )
    if not train_rows:
        raise ValueError(
            "data.train must name rows to train on, but it is empty: give --data.train FILE, or"
            " run(config, train=rows)"
        )
    held_out = held_out[: config.run.max_val_samples]
    require_validation(config.run.metrics_of_rules(), validates=bool(held_out))
    config = replace(config, run=replace(config.run, dir=config.run.dir or free_directory(name)))
    directory = RunDirectory(Path(str(config.run.dir)))
    with locked(directory.path), signals_raise(), started(config, algorithm=name) as log:
        checkpoint.sweep(directory.path)
        folder = model_folder(config.model.path)
        of_model = model_config_of(folder if model is None else model)
        devices.check_model(of_model)
        devices.check_weights(folder, from_scratch=config.model.from_scratch)
        config, shortened = with_response_length(within_positions(config, of_model))
        tokenizer = tokenizer or load_tokenizer(config.model.tokenizer or folder)
        tokenizer = with_chat_template(
            tokenizer, config.model.chat_template, config.model.chat_template_kwargs
        )
        inputs = Inputs(
            train=train_rows, validation=held_out, tokenizer=tokenizer, environment=environment
        )
        job: Job = load(get_algorithm(name).prepare)(config, inputs)
        if job.generates and shortened:
            warnings.warn(shortened, stacklevel=2)
        lengths = show_lengths(job.lengths, config)
        prepared = Prepared(config=config, devices=devices, directory=directory, job=job, folder=folder, model=model, tokenizer=tokenizer,
                            lengths=lengths, log=log, loggers=loggers, callbacks=callbacks)  # fmt: skip
        return with_restarts(prepared)


def started(config: BaseConfig, *, algorithm: str) -> AbstractContextManager[RunLog]:
    """The run's directory as it is at the start, with a log of what goes on as long as the block
    lasts.
    """
    return recorded(
        RunDirectory.create(str(config.run.dir), dump_yaml(config), resume=config.run.resume),
        algorithm=algorithm,
    )
