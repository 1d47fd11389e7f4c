"""One go at a run: trainer and generator are set up, take over the last checkpoint where there is
one to go on from, and the algorithm's loop runs.

Where ranks die or hang, there is another go (`with_restarts`).
"""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemorl.checks import require
from nemorl.models.pretrained import check_vocabulary
from nemorl.parallel.backend import TrainingBackend
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.determinism import deterministic_kernels
from nemorl.rollout.generation import GenerationBackend
from nemorl.runtime.config.policy import GapConfig
from nemorl.runtime.config.tree import dump_yaml, to_dict
from nemorl.runtime.ranks.make import make_trainer
from nemorl.runtime.run import checkpoint
from nemorl.runtime.run.callbacks import Callback, closing
from nemorl.runtime.run.checkpoint import CheckpointError
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout
from nemorl.runtime.run.export import ExportCallback
from nemorl.runtime.run.job import Job
from nemorl.runtime.run.result import TrainResult
from nemorl.runtime.run.rng import random_state, restore_generators
from nemorl.runtime.run.saving import CheckpointCallback, EarlyStop
from nemorl.runtime.run.state import LoopState, Run
from nemorl.runtime.run.weight_sync import TrainerWeights, check_agreement
from nemorl.runtime.start.devices import Devices
from nemorl.runtime.start.registry import get_generation_backend, get_training_backend
from nemorl.runtime.start.replica import replica_of, shares_model
from nemorl.runtime.start.run_settings import (
    backend_config,
    changes,
    data_changes,
    generation_config,
    probe,
)
from nemorl.runtime.watch.alerts import GapWatch, SignalWatch
from nemorl.runtime.watch.display import make_display
from nemorl.runtime.watch.log import RunLog, event
from nemorl.runtime.watch.loggers.base import LoggedRun, LoggerFactory, Recorder
from nemorl.runtime.watch.waiting import waiting_for_engines, waiting_for_ranks


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run before its model is loaded: everything that is read and checked once, however often it
    is begun.
    """

    config: Any
    devices: Devices
    directory: RunDirectory
    job: Job
    folder: str
    """The model's, or its name on the hub."""
    model: nn.Module | None
    """One that was handed over."""
    tokenizer: Any
    lengths: Mapping[str, Any]
    """What data.json says."""
    log: RunLog
    loggers: Mapping[str, LoggerFactory]
    callbacks: Sequence[Callback]
    """The caller's own."""


def with_restarts(prepared: Prepared) -> TrainResult:
    """`attempt`, and again from the last checkpoint with new ranks where some have died or hung, up
    to runtime.max_restarts times.

    The numbers are those of a run without the failure. Each time is a warning that says what went
    wrong. The caller's callbacks see all attempts, and are closed when the last one is over.

    trainer.deterministic holds for this process, too, where others train: an engine may compute
    here.
    """
    apart = prepared.devices.ranked and prepared.config.trainer.deterministic
    with closing(prepared.callbacks), deterministic_kernels() if apart else nullcontext():
        return _with_restarts(prepared)


def _with_restarts(prepared: Prepared) -> TrainResult:
    config, generators = prepared.config, random_state()
    for restart in itertools.count(1):
        try:
            return attempt(prepared)
        except Exception as error:
            failure = failed_ranks(error)
            if failure is None or restart > config.runtime.max_restarts:
                raise
            reason = str(failure)
        point = checkpoint.latest(prepared.directory.path)
        where = (
            "begins anew, as there is no checkpoint yet,"
            if point is None
            else f"goes on from {point}"
        )
        event("restart", f"restart {restart} of {config.runtime.max_restarts}", restart=restart)
        warnings.warn(
            f"the run {where} with new ranks (restart {restart} of {config.runtime.max_restarts}):"
            f" {reason}",
            stacklevel=4,
        )
        restore_generators(*generators)  # a run that begins anew draws the same numbers
        prepared = replace(
            prepared,
            config=replace(
                config, run=replace(config.run, resume=point is not None or config.run.resume)
            ),
        )
    raise AssertionError


def failed_ranks(error: BaseException | None) -> WorkerDied | WorkerTimeout | None:
    """What befell the ranks, where that is what an error comes from."""
    while error is not None and not isinstance(error, WorkerDied | WorkerTimeout):
        error = error.__cause__
    return error


def attempt(prepared: Prepared) -> TrainResult:
    """From the loaded model to the end of the run.

    Trainer, generator and nemorl's own callbacks are shut down in any case.
    """
    config, directory, job, devices = (
        prepared.config,
        prepared.directory,
        prepared.job,
        prepared.devices,
    )
    engines = generation_config(config, directory, devices) if job.generates else None
    trainer, generator = make_backend(prepared), None
    found = checkpoint.latest(directory.path) if config.run.resume else None
    setup = backend_config(
        config, job, prepared.folder, found, devices=devices, directory=directory
    )
    who = (
        "processes of torchrun"
        if devices.torchrun
        else "workers that Ray places"
        if devices.through_ray
        else "processes of this machine"
    )
    quiet = config.run.display == "none"
    with waiting_for_ranks(devices.plan, who, quiet=quiet) if devices.ranked else nullcontext():
        set_up(trainer, setup)
    if devices.ranked:
        torch.manual_seed(
            config.run.seed
        )  # as a backend in this process does: a reward that draws numbers draws the same ones
    try:
        model = trainer.model  # type: ignore[attr-defined]
        check_vocabulary(model, prepared.tokenizer)
        if engines is not None:
            generator = make_generator(prepared, model)
            with waiting_for_engines(engines, quiet=quiet):
                generator.setup(engines)
        current = Run(
            config,
            trainer,
            generator,
            prepared.tokenizer,
            LoopState(config.run.seed),
            directory.path,
        )
        if job.with_initial_model is not None:
            job = job.with_initial_model(current)
        current, found = resumed(
            current, directory, last_step=job.num_steps, lengths=prepared.lengths
        )
        if found is not None and (before := num_ranks(found)) not in (0, devices.plan.num_ranks):
            warnings.warn(
                "the run goes on with another number of devices than before:"
                f" {devices.plan.num_ranks}, was {before}",
                stacklevel=3,
            )
        prepared.tokenizer.save_pretrained(directory.path / "tokenizer")
        directory.write_data(prepared.lengths)
        if generator is not None:
            generator.update_weights(TrainerWeights(trainer), version=current.state.policy_version)
            check_agreement(
                trainer, generator, probe(config, model), precision=config.parallel.param_dtype
            )
            generator.sleep()  # until it is needed
        prepared.log.total_steps = job.num_steps
        everyone = all_callbacks(prepared, model)
        with closing(
            [one for one in everyone if not any(one is other for other in prepared.callbacks)]
        ):  # the caller's may be needed again
            job.run(current, callbacks=everyone)
        result = TrainResult.of(
            directory, model=None if devices.ranked else model, tokenizer=prepared.tokenizer
        )
        if devices.torchrun:
            trainer.farewell = result  # type: ignore[attr-defined]
        return result
    finally:
        try:
            if generator is not None:
                generator.shutdown()
        finally:
            trainer.shutdown()


def make_backend(prepared: Prepared) -> TrainingBackend:
    """The training backend: in this process, or one that stands for the ranks."""
    config, devices = prepared.config, prepared.devices
    if devices.ranked:
        return make_trainer(
            config,
            config.trainer.backend,
            devices.plan,
            config.runtime,
            prepared.directory.path / "logs",
        )
    backend = get_training_backend(config.trainer.backend)
    return backend() if prepared.model is None else backend(prepared.model)


def make_generator(prepared: Prepared, model: nn.Module) -> GenerationBackend:
    """The generation backend with the trainer's model; where that is spread over ranks, with one of
    its own if it computes in this process.
    """
    config = prepared.config
    backend = get_generation_backend(config.generation.backend)
    if prepared.devices.ranked and shares_model(backend):
        model = replica_of(
            model, "cpu" if config.trainer.device == "cpu" else None
        )  # where the ranks have GPUs, this machine may have none
    return backend(model=model, tokenizer=prepared.tokenizer, precision=config.parallel.param_dtype)


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


def resumed(
    run: Run,
    directory: RunDirectory,
    *,
    last_step: int,
    lengths: Mapping[str, Any],
) -> tuple[Run, Path | None]:
    """The run where its last whole checkpoint left it, if it is to be resumed, and that checkpoint;
    with a directory that shows this state and these settings.

    Settings and data (`lengths`: see `show_lengths`) that are not those of before are a warning.
    """
    config = run.config
    loaded = checkpoint.load_latest(directory.path, run) if config.run.resume else None
    if loaded is not None:
        run = replace(run, state=loaded[1])
        for change in changes(directory.config, config):
            warnings.warn(
                f"the run goes on with other settings than before: {change}", stacklevel=3
            )
        for change in data_changes(directory.read_data(), lengths):
            warnings.warn(f"the run goes on with other data than before: {change}", stacklevel=3)
        if run.state.step >= last_step:
            done = (
                f"the run has {run.state.step} steps already, so there is nothing to do up to step"
                f" {last_step}"
            )
            warnings.warn(f"{done}: raise max_num_steps", stacklevel=3)
    elif config.run.resume and checkpoint.present(directory.path):
        raise CheckpointError(
            f"run.resume needs a whole checkpoint, but none in {directory.checkpoints} is: put one"
            " back, or begin anew in another folder (--run.dir)"
        )
    elif config.run.resume:
        warnings.warn(
            f"there is no checkpoint in {directory.path} to resume from, so the run starts anew",
            stacklevel=3,
        )
    directory.write_config(dump_yaml(replace(config, run=replace(config.run, resume=False))))
    directory.truncate(run.state.step if loaded is not None else -1)
    return run, None if loaded is None else loaded[0]


def num_ranks(found: Path) -> int:
    """How many ranks have written a checkpoint; 0 where a training backend of somebody's own has,
    in its own way.
    """
    return len(list((found / "trainer").glob("optimizer*.safetensors")))


def all_callbacks(prepared: Prepared, model: nn.Module) -> list[Callback]:
    """Those that show and record, then the caller's, then those that save: a checkpoint vouches for
    what was written before it.
    """
    config, directory, log = prepared.config, prepared.directory, prepared.log
    logged = LoggedRun(
        directory=directory,
        run_id=log.run_id,
        config=to_dict(config),
        project=config.run.project,
        samples_per_step=config.run.samples_per_step,
    )
    observers = [
        log,
        make_display(config.run.display, total_steps=log.total_steps),
        Recorder(prepared.loggers, logged),
        SignalWatch(),
        *prepared.callbacks,
    ]
    every, keep, condition = (
        config.run.save_period,
        config.run.keep_checkpoints,
        config.run.stop_condition(),
    )
    savers: list[Callback] = (
        [EarlyStop(condition, directory, quiet=config.run.display == "none")] if condition else []
    )
    ranking, told_of_it, background = config.run.ranking(), tuple(observers), config.run.async_save
    savers += [
        CheckpointCallback(
            directory,
            period=every,
            keep=keep,
            ranking=ranking,
            observers=told_of_it,
            background=background,
        )
    ]
    gap = getattr(config, "gap", None)
    savers += [GapWatch(gap, directory)] if isinstance(gap, GapConfig) else []
    savers += (
        [ExportCallback(directory, model, adapter=config.lora.export == "adapter")]
        if config.run.export
        else []
    )
    if config.run.plots:
        from nemorl.runtime.watch.plots import PlotCallback  # slow to import

        savers.append(PlotCallback(directory))
    return [*observers, *savers]
