"""A run whose parts are live: trainer and generator as the last checkpoint left them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemorl.checks import own_methods, require
from nemorl.models.causal_lm import usable_device
from nemorl.models.hub import EXPERTS, check_supported, has_own_code
from nemorl.models.pretrained import check_vocabulary, model_folder
from nemorl.parallel.backend import FullTrainingBackend
from nemorl.parallel.config import BackendConfig
from nemorl.rollout.generation import GenerationBackend
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.config.grpo import GapConfig
from nemorl.runtime.config.tree import dump_yaml, to_dict
from nemorl.runtime.config.trust import seal_of
from nemorl.runtime.ranks.trainer import make_trainer
from nemorl.runtime.run import checkpoint
from nemorl.runtime.run.callbacks import Callback, closing
from nemorl.runtime.run.checkpoint import CheckpointError
from nemorl.runtime.run.export import ExportCallback
from nemorl.runtime.run.files import writing
from nemorl.runtime.run.loop import OpenRun, Parts
from nemorl.runtime.run.rng import random_state, restore_generators, seed_generators
from nemorl.runtime.run.saving import CheckpointCallback, EarlyStop
from nemorl.runtime.run.state import LoopState, Run
from nemorl.runtime.run.weight_sync import TrainerWeights, check_agreement
from nemorl.runtime.start.launch import Launch
from nemorl.runtime.start.lengths import show_lengths
from nemorl.runtime.start.registry import (
    get_generation_backend,
    get_training_backend,
    training_backend_class,
)
from nemorl.runtime.start.settings import (
    backend_config,
    changes,
    generation_config,
    kept,
    model_config_of,
)
from nemorl.runtime.watch.alerts import GapWatch, SignalWatch
from nemorl.runtime.watch.display import make_display
from nemorl.runtime.watch.loggers.base import LoggedRun, Recorder
from nemorl.runtime.watch.resources import ResourceMeter
from nemorl.runtime.watch.waiting import waiting_for_engines, waiting_for_ranks
from nemorl.warn import warn


def start(launch: Launch, run: OpenRun, stack: ExitStack) -> Parts:
    """Load the model, start the engine, and take over the last checkpoint. `stack` ends them."""
    config, directory = launch.config, launch.directory
    offloads = config.trainer.offload_during_generation
    requirement = "is for runs that generate"
    field = "trainer.offload_during_generation"
    require(run.generates or not offloads, field, requirement, offloads, "remove it")
    require(
        not (config.trainer.router_replay and run.generates)
        or config.generation.backend == "megatron",
        "generation.backend",
        "must be megatron, which records the experts, with trainer.router_replay",
        config.generation.backend,
        "add --generation.backend megatron, or remove it",
    )
    directory_lengths = show_lengths(run.lengths, quiet=launch.quiet)
    engines = generation_config(config, directory, launch.devices) if run.generates else None
    if engines is not None:
        launch.devices.check_cluster(config, engines)
        trust = {"trust_remote_code": config.model.trust_remote_code}
        given = launch.folder if launch.model is None else launch.model
        if engines.backend == "torch" and (of_model := model_config_of(given, **trust)):
            # Before ranks are started for a model that it can't sample.
            kind = of_model.model_type
            remedy = "add --generation.backend megatron, with trainer.backend megatron, or vllm"
            requirement = f"must be megatron or vllm to sample from {kind}, a mixture of experts"
            require(kind not in EXPERTS, "generation.backend", requirement, "torch", remedy)
            check_supported(of_model)
    found = checkpoint.latest(directory.path, quiet=True) if config.run.resume else None
    trainer = stack.enter_context(live_trainer(launch, run, found))
    shared = engines is not None and shares_weights(launch, engines)
    model: Any = getattr(trainer, "model", None)
    if offloads:
        trainer.offload(keep_weights=shared)  # engines take what they find
    generator = stack.enter_context(live_generator(launch, engines, trainer))
    if generator is not None and offloads:
        generator.sleep()  # what is loaded now needs the memory
    if run.initial is not None:
        run.initial(trainer)
    state = resumed(launch, run, trainer)
    with writing("the tokenizer", directory.path / "tokenizer"):
        launch.tokenizer.save_pretrained(directory.path / "tokenizer")
    directory.write_data(directory_lengths)
    if generator is not None:
        if offloads:
            trainer.offload(keep_weights=shared)
            generator.wake()
        generator.update_weights(TrainerWeights(trainer), version=trainer.step)
        length = min(8, config.data.max_total_sequence_length // 2)
        prompt = [token % model.config.vocab_size for token in range(length)]
        precision = config.parallel.param_dtype
        check_agreement(trainer, generator, prompt, precision=precision, num_tokens=length)
    launch.log.total_steps = run.num_steps
    exports = has_method(launch, trainer, "weights")
    before, after = own_callbacks(launch, model if exports else None)
    stack.enter_context(closing([*before, *after]))
    callbacks = [launch.log, *launch.callbacks, *before, *after]
    return Parts(
        trainer=trainer,
        generator=generator,
        state=state,
        callbacks=callbacks,
        shares_weights=shared,
    )


@contextmanager
def live_trainer(launch: Launch, run: OpenRun, found: Path | None) -> Iterator[Any]:
    """Set up the training backend, in this process or on ranks, and shut it down at the end."""
    config, devices, folder = launch.config, launch.devices, launch.directory.path
    name = config.trainer.backend
    waiting: AbstractContextManager[None] = nullcontext()
    if devices.ranked:
        trainer: Any = make_trainer(
            config, training_backend_class(name), devices.plan, folder / "logs"
        )
        who = "processes of torchrun" if devices.torchrun else "Ray actors"
        waiting = waiting_for_ranks(devices.plan, who, quiet=launch.quiet)
    else:
        trainer = get_training_backend(name, launch.model)
    setup = backend_config(
        config, run, launch.folder, found, devices=devices, directory=launch.directory
    )
    offloads = config.trainer.offload_during_generation
    needs = {
        "offload": ("trainer.offload_during_generation", offloads),
        "get_reference_logprobs": ("the reference model", setup.keep_reference),
        "weights": ("generation", run.generates),
        "wait_for_checkpoint": ("run.async_save", config.run.async_save),
    }
    for method, (what, needed) in needs.items():
        if needed and not has_method(launch, trainer, method):
            raise ValueError(
                f"trainer.backend must have the method {method} for {what}, but"
                f" {config.trainer.backend!r} has none: add it, or omit what needs it"
                f"{' (--reference precomputed)' * hasattr(config, 'reference')}"
            )
    try:
        with waiting:
            trainer.setup(setup)
        model = getattr(trainer, "model", None)
        require(
            model is not None or not run.generates,
            "trainer.backend",
            "must have the attribute model, which the generator is made from, once it is set up",
            config.trainer.backend,
            "add it",
        )
        seed_generators(config.run.seed)  # those that a reward or a loop may use
        if model is not None:
            check_vocabulary(model, launch.tokenizer)
        yield trainer
    except BaseException:
        with suppress(Exception):  # the first error is the one to show
            trainer.shutdown()
        raise
    trainer.shutdown()


def has_method(launch: Launch, trainer: Any, name: str) -> bool:
    """Return whether the training backend, of which ranks know the class alone, has a method."""
    if not launch.devices.ranked:
        return hasattr(trainer, name)
    backend = training_backend_class(launch.config.trainer.backend)
    return name in own_methods(backend, FullTrainingBackend)


@contextmanager
def frozen_model(launch: Launch, path: str) -> Iterator[Any]:
    """Set up a backend of another model, which is not trained, and shut it down at the end."""
    config, devices = launch.config, launch.devices
    require(
        not devices.torchrun,
        "frozen_model",
        "needs ranks of its own, which torchrun does not start",
        path,
        "start the script without torchrun",
    )
    backend: Any = get_training_backend(config.trainer.backend)
    if devices.ranked:
        make = training_backend_class(config.trainer.backend)
        folder = launch.directory.path / "logs" / "frozen"
        backend = make_trainer(config, make, devices.plan, folder)
    model = replace(config.model, path=model_folder(path), from_scratch=False)
    # Its experts are not the sampler's, if it has any.
    trainer = replace(config.trainer, router_replay=False, router_aux_loss_coef=0.0)
    generators = random_state()
    try:
        backend.setup(BackendConfig(model=model, trainer=trainer, parallel=devices.plan))
        restore_generators(*generators)  # whenever it is loaded, a run has the same numbers
        yield backend
    finally:
        backend.shutdown()


def shares_weights(launch: Launch, engines: GenerationConfig) -> bool:
    """Return whether the engine computes with the trainer's own weights."""
    backend: Any = get_generation_backend(engines.backend)
    if launch.devices.ranked:
        return getattr(backend, "on_trainer", False)
    return getattr(backend, "shares_model", True)


@contextmanager
def live_generator(
    launch: Launch, engines: GenerationConfig | None, trainer: Any
) -> Iterator[GenerationBackend | None]:
    """Set up the engine that the run samples with, if any, and shut it down at the end."""
    if engines is None:
        yield None
        return
    config, model = launch.config, trainer.model
    backend: Any = get_generation_backend(engines.backend)
    given = {"model": model, "precision": config.parallel.param_dtype}
    if getattr(backend, "on_trainer", False):
        given = {"trainer": trainer}
    elif launch.devices.ranked and getattr(backend, "shares_model", True):
        # Where the ranks have GPUs, this machine may have none.
        given["model"] = whole_model(model, "cpu" if config.trainer.device == "cpu" else None)
    generator = backend(tokenizer=launch.tokenizer, **given)
    try:
        with waiting_for_engines(engines, quiet=launch.quiet):
            generator.setup(engines)
        yield generator
    finally:
        generator.shutdown()


def whole_model(model: Any, device: str | None) -> nn.Module:
    """Return a float32 model like `model`, whose weights are on ranks, without weights, on `device`
    (None: the best there is). No random number is drawn.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device(usable_device(device)):
        whole = AutoModelForCausalLM.from_config(
            model.config, dtype=torch.float32, trust_remote_code=has_own_code(model.config)
        )
    whole.tie_weights()  # not done where no weights are made
    if getattr(model, "generation_config", None) is not None:
        whole.generation_config = model.generation_config
    return whole.eval().requires_grad_(False)


def resumed(launch: Launch, run: OpenRun, trainer: Any) -> LoopState:
    """Return the state where the last whole checkpoint left the run, if it is to be resumed, load
    its weights, and make the directory show this state and these settings. Changed settings are a
    warning.
    """
    config, directory, state = launch.config, launch.directory, run.state
    found = None
    if config.run.resume:
        fresh = Run(config, trainer, None, run.tokenizer, state, directory.path)
        found = checkpoint.load_latest(directory.path, fresh)
    if found is not None:
        state = found[1]
        for change in changes(directory.config, config):
            warn(f"the run goes on with other settings than before: {change}")
        if run.num_steps is not None and state.step >= run.num_steps:
            warn(
                f"the run has {state.step} steps already, so there is nothing to do up to step"
                f" {run.num_steps}: raise max_num_steps"
            )
    elif config.run.resume:
        raise CheckpointError(
            f"run.resume needs a whole checkpoint, but none in {directory.checkpoints} is: put one"
            " back, or begin anew in another folder (--run.dir)"
        )
    directory.write_config(dump_yaml(kept(config)), seal_of(to_dict(config)))
    directory.truncate(state.step if found is not None else -1)
    return replace(state, data=launch.data)


def own_callbacks(launch: Launch, model: nn.Module | None) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks that show and record, and those that save, which come last: a checkpoint
    covers all that was recorded before it.
    """
    config, directory = launch.config, launch.directory
    logged = LoggedRun(
        directory=directory,
        run_id=launch.log.record.run_id,
        config=to_dict(config),
        project=config.run.project,
        samples_per_step=config.run.samples_per_step,
    )
    before: list[Callback] = [
        ResourceMeter(),
        make_display(config.run.display, total_steps=launch.log.total_steps),
        Recorder(launch.loggers, logged),
        SignalWatch(),
    ]
    after: list[Callback] = []
    if condition := config.run.stop_condition():
        after.append(EarlyStop(condition, directory, quiet=launch.quiet))
    after.append(
        CheckpointCallback(
            directory,
            period=config.run.save_period,
            keep=config.run.keep_checkpoints,
            ranking=config.run.ranking(),
            observers=(launch.log, *launch.callbacks, *before),
            background=config.run.async_save,
        )
    )
    if isinstance(gap := getattr(config, "gap", None), GapConfig):
        after.append(GapWatch(gap, directory))
    if config.run.export and model is None:
        warn(
            f"{directory.hf} will not be written, because the training backend"
            f" {config.trainer.backend!r} has no attribute model or no weights to export"
        )
    elif config.run.export:
        assert model is not None
        after.append(ExportCallback(directory, model, adapter=config.lora.export == "adapter"))
    if config.run.plots:
        from nemorl.runtime.watch.plots import PlotCallback  # slow to import

        after.append(PlotCallback(directory))
    return before, after
