"""The backends and the generator of a run, as the last checkpoint left them."""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from rich.console import Console
from torch import nn

from nemorl.checks import require, warn
from nemorl.data.statistics import Lengths, length_statistics
from nemorl.models.capabilities import Proofs, known
from nemorl.models.hub import check_supported, check_vocabulary, model_folder
from nemorl.models.source import ModelSource
from nemorl.parallel.backend import TrainingBackend
from nemorl.parallel.backends import check_training, limits_of
from nemorl.parallel.config import BackendConfig, OptimizerConfig
from nemorl.parallel.measure import profile_folder
from nemorl.parallel.planner.sharing import Sharing
from nemorl.parallel.proving import proved_now
from nemorl.parallel.world import DTYPES
from nemorl.rollout.calls import blocking
from nemorl.rollout.config import TRAITS, GenerationConfig
from nemorl.rollout.generation import GenerationBackend, GenerationTraits, HasEngines
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.tree import dump_yaml
from nemorl.runtime.engines.weights import TrainerWeights, check_agreement
from nemorl.runtime.ranks.trainer import make_trainer
from nemorl.runtime.run import registry
from nemorl.runtime.run.devices import Devices, Fit, fitted, keeps_reference, sharing_of
from nemorl.runtime.run.launch import Launch, changes, generation_config, kept, model_config_of
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.files import writing
from nemorl.runtime.store.state import POLICY, LoopState
from nemorl.runtime.watch.display import print_lengths
from nemorl.runtime.watch.log import event, waiting, waiting_for_engines, waiting_for_ranks

if TYPE_CHECKING:  # a small backend lacks methods, and raises AttributeError for them
    from nemorl.parallel.backend import FullTrainingBackend


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is live from the first use of the trainer on."""

    trainer: TrainingBackend
    generator: GenerationBackend | None
    state: LoopState
    """Of the loop, at the last checkpoint."""
    resumed_from: Path | None
    """That checkpoint, if any."""
    shares_weights: bool
    """Whether the generator computes with the trainer's own weights."""


class Backends:
    """The backends of a run by name, on the same devices; `stack` shuts them down."""

    def __init__(self, launch: Launch, stack: ExitStack, *, generates: bool) -> None:
        self.launch, self.stack, self.generates = launch, stack, generates
        self.trained: "dict[str, FullTrainingBackend]" = {}
        """Besides the policy."""
        self.frozen: "dict[str, FullTrainingBackend]" = {}
        self.schedule = launch.config.optimizer.schedule
        """The policy's schedule of the learning rate; if it is constant, another model's."""
        self._own: dict[str, ExitStack] = {}

    @cached_property
    def engines(self) -> GenerationConfig | None:
        """The engine's settings, but for its share of the GPUs."""
        launch = self.launch
        if not self.generates:
            return None
        return generation_config(launch.config, launch.directory, launch.devices)

    @property
    def share_gpus(self) -> bool:
        """Whether engines are on GPUs on which the model trains."""
        return self.engines is not None and self.launch.devices.shares_gpus(self.engines)

    @property
    def in_turns(self) -> bool:
        """Whether trainer and engines leave the devices to each other."""
        return self.share_gpus or bool(self.launch.config.trainer.offload_during_generation)

    @cached_property
    def fit(self) -> Fit | None:
        """What was chosen for the memory of the GPUs, if that is known."""
        launch = self.launch
        if not launch.devices.accelerated:
            return None
        engines, card = self.engines if self.share_gpus else None, smallest_gpu(launch)
        return fitted(launch.config, launch.devices, engines, launch.of_model, card=card)

    @cached_property
    def sharing(self) -> Sharing | None:
        """How trainer and engines share GPUs, if known."""
        if self.engines is None or not self.share_gpus:
            return None
        config = self.launch.config
        return sharing_of(
            self.fit,
            self.engines,
            self.launch.of_model,
            can_offload=registry.has_method(config, "offload"),
            can_empty=registry.has_method(config, "empty_cache"),
        )

    @cached_property
    def ranks(self) -> Any:
        """The policy's backend on ranks, which start with it or one beside it."""
        ranks = ranks_of(self.launch)
        if ranks is not None:  # they last until the run ends, whichever backend starts them
            self.stack.callback(ranks.shutdown)
        return ranks

    @cached_property
    def saved_policy(self) -> Path | None:
        """The policy's folder in the checkpoint to go on from."""
        if not self.launch.config.run.resume:
            return None
        found = checkpoint.latest(self.launch.directory.path, quiet=True)
        return found and found / POLICY

    def policy(self, num_updates: int | None) -> TrainingBackend:
        launch, config = self.launch, self.launch.config
        keep, profile = keeps_reference(config), config.profile
        if profile.span is not None:
            require(
                num_updates is None or profile.span[0] <= num_updates,
                "profile.steps",
                f"must begin within the {num_updates} optimizer steps of the run",
                profile.steps,
                "name earlier steps",
            )
            profile = replace(profile, dir=profile.dir or str(launch.directory.path / "profile"))
            profile_folder(profile)
        setup = replace(
            base_setup(self, num_updates),
            head=config.head,
            lora=config.lora,
            profile=profile,
            keep_reference=keep,
            same_initial_model_as=self.saved_policy if keep else None,
        )
        trainer = self.ranks or registry.get_training_backend(config.trainer.backend, launch.model)
        require_methods(config, setup)
        setup = proved(launch, setup, launch.model)
        self.stack.enter_context(set_up(trainer, setup, _waiting_for_trainer(launch)))
        model = getattr(trainer, "model", None)
        require(
            model is not None or not self.generates,
            "trainer.backend",
            "must have the attribute model, which the generator is made from, once it is set up",
            config.trainer.backend,
            "add it",
        )
        checkpoint.seed_generators(config.run.seed)
        if model is not None:
            check_vocabulary(model, launch.tokenizer)
        return trainer

    def add(
        self,
        name: str,
        config: BackendConfig,
        given: nn.Module | None,
        *,
        own_ranks: bool,
        live: Parts | None,
    ) -> "FullTrainingBackend":
        """Set up another backend as the last checkpoint left it; no random number is drawn."""
        own = self._own[name] = self.stack.enter_context(ExitStack())
        if own_ranks:
            backend = ranks_of(self.launch, name)
        elif self.ranks is not None:
            backend = self.ranks.beside(name)
        else:
            backend = registry.get_training_backend(config.trainer.backend, given)
        generators = checkpoint.RandomState.now()
        config = proved(self.launch, config, given)
        loading = waiting(f"loading {name}", quiet=self.launch.quiet)
        own.enter_context(set_up(backend, config, loading))
        if config.trains and live is not None and live.resumed_from is not None:
            checkpoint.load_backend(live.resumed_from, name, backend)
        generators.restore()
        if self.schedule == "constant":
            self.schedule = config.optimizer.schedule
        (self.trained if config.trains else self.frozen)[name] = backend
        return backend

    def release(self, name: str) -> None:
        require(
            name in self.frozen,
            "name",
            f"must name a backend that does not train ({', '.join(self.frozen) or 'none'})",
            name,
            "give the name it was made with",
        )
        self.drop(name)

    def drop(self, name: str) -> None:
        """Shut down a backend that `add` returned."""
        (self.frozen if name in self.frozen else self.trained).pop(name, None)
        self._own.pop(name).close()

    def make_room(self, backends: Iterable[Any], *, keep_weights: bool = False) -> None:
        """Free memory of the backends' devices for engines.

        keep_weights: the generator computes with the backends' own.
        """
        asked = self.launch.config.trainer.offload_during_generation
        offloads = asked if self.sharing is None else self.sharing.offloads
        for backend in backends:
            if offloads:
                backend.offload(keep_weights=keep_weights)
            elif self.share_gpus and registry.has_method(self.launch.config, "empty_cache"):
                backend.empty_cache()

    def require_all_of(self, found: Path | None) -> None:
        """Refuse a checkpoint of a backend that the run has not asked for."""
        here = sorted([POLICY, *self.trained])
        names = checkpoint.backends_of(found) if found else []
        calls = [
            f'{"omit trains=False of" if name in self.frozen else "call"} run.backend("{name}")'
            for name in names
            if name not in here
        ]
        require(
            not calls,
            "run.backend",
            f"must be called for each backend that {found} holds, to train it on",
            here,
            ", ".join(calls),
        )


def other_setup(
    backends: Backends,
    model: str | Path | nn.Module | None,
    num_updates: int | None,
    *,
    head: Literal["lm", "scalar"],
    trains: bool,
    optimizer: OptimizerConfig | None,
    own_ranks: bool,
    live: Parts | None,
) -> tuple[BackendConfig, nn.Module | None]:
    """Return the setup of another backend, and its model if in memory, a copy of the policy's."""
    launch, settings = backends.launch, backends.launch.config
    if isinstance(model, nn.Module):
        launch.devices.check_given(model)
    require(
        launch.devices.placed or not own_ranks,
        "own_ranks",
        "needs ranks that Ray places",
        True,
        "remove it: the model then shares the policy's devices",
    )
    base = base_setup(backends, num_updates)
    if model is not None:
        path = "" if isinstance(model, nn.Module) else model_folder(str(model))
        base = replace(base, model=replace(base.model, path=path, from_scratch=False))
    as_policy = model is None and not trains and head == "lm"
    config = replace(
        base,
        trainer=replace(
            base.trainer,
            router_replay=False,
            router_aux_loss_coef=0.0,
            router_bias_update_rate=0.0,
        ),
        head=head,
        trains=trains,
        optimizer=(optimizer or settings.optimizer) if trains else OptimizerConfig(),
        lora=settings.lora if trains and head == "lm" else base.lora,
        same_initial_model_as=backends.saved_policy if as_policy else None,
    )
    if model is None and launch.model is not None:
        require(
            head == "lm",
            "model",
            "must be given for a scalar head where the policy's was, which has another head",
            None,
            "name its folder, or give a loaded AutoModelForSequenceClassification of one label",
        )
        require(
            live is None,
            "model",
            "must be given where the policy's was, which trains in place by now",
            None,
            "call run.backend before run.trainer is used, or give a copy of the model",
        )
        model = copy.deepcopy(launch.model)
    given = model if isinstance(model, nn.Module) else None
    for of_model in (None, hf_config(config, given)):
        check_training(config, of_model, config.parallel, limits_of(settings.trainer.backend))
    require_methods(settings, config)
    return config, given


def base_setup(backends: Backends, num_updates: int | None) -> BackendConfig:
    """Return what the setups of all backends have in common."""
    launch, config, fit = backends.launch, backends.launch.config, backends.fit
    trainer, plan = config.trainer, launch.devices.plan
    if fit is not None:
        plan, chunk = fit.step.plan, fit.step.work.trainer.logprob_chunk
        trainer = replace(trainer, micro_batch_tokens=fit.micro_batch_tokens, logprob_chunk=chunk)
    return BackendConfig(
        model=replace(config.model, path=launch.folder),
        trainer=trainer,
        optimizer=config.optimizer,
        seed=config.run.seed,
        parallel=plan,
        total_steps=num_updates or 1,  # unknown to a schedule that needs none
        # The timeouts of the runtime come first: their errors name the rank.
        collective_timeout_s=max(config.runtime.timeout_s, config.runtime.start_timeout_s) + 60,
    )


def hf_config(config: BackendConfig, given: nn.Module | None) -> Any:
    """Return the Hugging Face configuration of a backend's model, if it can be read."""
    return model_config_of(
        given or config.model.path, trust_remote_code=config.model.trust_remote_code
    )


def proved(launch: Launch, config: BackendConfig, given: nn.Module | None) -> BackendConfig:
    """Return a setup with what is proved of its model."""
    of_model = hf_config(config, given)
    if of_model is None or not limits_of(config.trainer.backend).traits.proves:
        return config
    return replace(
        config,
        proofs=known(of_model) if launch.devices.torchrun else proofs_of(of_model, launch.quiet),
    )


def live_parts(
    backends: Backends, lengths: Mapping[str, Lengths], *, num_updates: int | None
) -> Parts:
    """Load the model, start the engine, and take over the last checkpoint."""
    launch, generates = backends.launch, backends.generates
    config, directory = launch.config, launch.directory
    _check_sampling(config, generates=generates)
    found = {name: length_statistics(given) for name, given in lengths.items()}
    statistics = {name: each for name, each in found.items() if each.count or each.num_dropped}
    if statistics and not launch.quiet:
        print_lengths(Console(highlight=False), statistics)
    engines, sharing = backends.engines, backends.sharing
    if engines is not None:
        launch.devices.check_cluster(engines)
    if backends.fit is not None:
        show(backends.fit, quiet=launch.quiet)
    if engines and sharing:
        show(sharing, quiet=launch.quiet)
    in_turns = backends.in_turns
    trainer = backends.policy(num_updates)
    shared = engines is not None and (
        engines.traits.on_trainer if launch.devices.ranked else engines.traits.shares_model
    )
    # To ask for the model ends `offload`: once, before.
    model: Any = getattr(trainer, "model", None) if generates else None
    vocab_size = model.config.vocab_size if generates else 0
    backends.make_room([trainer], keep_weights=shared)  # engines take what they find
    generator: GenerationBackend | None = None
    if engines is not None:
        options: dict[str, Any] = {"trainer": trainer}
        if not engines.traits.on_trainer:
            options = {"model": engine_source(launch.devices, engines.traits, model)}
            options |= {"records_experts": True} if config.trainer.router_replay else {}
        generator = backends.stack.enter_context(live_engine(backends, engines, **options))
        if in_turns:
            generator.sleep()
    state, resumed_from = resumed(launch, trainer)
    with writing("the tokenizer", directory.path / "tokenizer"):
        launch.tokenizer.save_pretrained(directory.path / "tokenizer")
    directory.write_data({name: asdict(each) for name, each in statistics.items()})
    if generator is not None:
        if in_turns:
            backends.make_room([trainer], keep_weights=shared)
            generator.wake()
        blocking(generator.update_weights(TrainerWeights(cast(Any, trainer))))
        if isinstance(generator, HasEngines) and generator.transport is not None:
            event("weight_transport", str(generator.transport))
            show(generator.transport, quiet=launch.quiet)
        length = min(8, config.data.max_total_sequence_length // 2)
        check_agreement(
            trainer,
            generator,
            [token % vocab_size for token in range(length)],
            precision=config.parallel.precision,
            num_tokens=length,
        )
    return Parts(
        trainer=trainer,
        generator=generator,
        state=state,
        resumed_from=resumed_from,
        shares_weights=shared,
    )


def require_length(schedule: str, num_updates: int | None) -> None:
    """Refuse a schedule over an unknown number of steps."""
    require(
        schedule == "constant" or num_updates is not None,
        "optimizer.schedule",
        "must be constant where no setting says how long the run is",
        schedule,
        "give nemorl.open_run num_updates=…, or the config a field max_num_steps",
    )


@contextmanager
def set_up(
    backend: Any, config: BackendConfig, waiting: AbstractContextManager[None]
) -> Iterator[None]:
    """Set up a backend for the block."""
    try:
        with waiting:
            backend.setup(config)
        yield
    except BaseException:
        with suppress(Exception):  # the first error is the one to show
            backend.shutdown()
        raise
    backend.shutdown()


def require_methods(config: BaseConfig, setup: BackendConfig) -> None:
    """Refuse a backend that lacks a needed method."""
    offloads = bool(config.trainer.offload_during_generation)
    needs = {
        "compute": ("a scalar head, whose values it returns", setup.head == "scalar"),
        "offload": ("trainer.offload_during_generation", offloads),
        "get_reference_logprobs": ("the reference model", setup.keep_reference),
        "wait_for_checkpoint": ("run.async_save", setup.trains and config.run.async_save),
    }
    for method, (what, needed) in needs.items():
        if needed and not registry.has_method(config, method):
            raise ValueError(
                f"trainer.backend must have the method {method} for {what}, but"
                f" {config.trainer.backend!r} has none: add it, or omit what needs it"
                f"{' (--reference precomputed)' * hasattr(config, 'reference')}"
            )


def proofs_of(of_model: Any, quiet: bool) -> Proofs:
    """Return what is proved of models with a configuration, now if need be."""
    check_supported(of_model)
    if (proofs := known(of_model)) is not None:
        return proofs
    what = f"checking what {of_model.model_type} can do here, for this and later runs"
    with waiting(what, quiet=quiet):
        return proved_now(of_model)


def _waiting_for_trainer(launch: Launch) -> AbstractContextManager[None]:
    devices = launch.devices
    if devices.ranked:
        return waiting_for_ranks(
            devices.plan,
            "processes of torchrun" if devices.torchrun else "Ray actors",
            quiet=launch.quiet,
        )
    if devices.accelerated:
        return waiting(f"training on a GPU ({devices.plan.precision})", quiet=launch.quiet)
    return nullcontext()


def ranks_of(launch: Launch, name: str = "") -> Any:
    """Return a backend on ranks, not started; None in one process. name: of another model."""
    if not launch.devices.ranked:
        return None
    return make_trainer(
        launch.config,
        registry.training_backend_class(launch.config.trainer.backend),
        launch.devices.plan,
        launch.directory.path / "logs" / name,
        None if name else launch.config.generation,
    )


def _check_sampling(config: BaseConfig, *, generates: bool) -> None:
    recording = [name for name, traits in TRAITS.items() if traits.records_experts]
    require(
        generates or not config.trainer.offload_during_generation,
        "trainer.offload_during_generation",
        "is for runs that generate",
        config.trainer.offload_during_generation,
        "remove it",
    )
    require(
        not (config.trainer.router_replay and generates)
        or config.generation.traits.records_experts,
        "generation.backend",
        f"must record the experts with trainer.router_replay, as {', '.join(recording)} do",
        config.generation.backend,
        f"add --generation.backend {' or '.join(recording)}, or remove it",
    )
    require(
        not config.trainer.router_replay or config.generation.pipeline_parallel_size == 1,
        "generation.pipeline_parallel_size",
        "must be 1 with trainer.router_replay: only the first part's experts would be recorded",
        config.generation.pipeline_parallel_size,
        "remove one of them",
    )


def smallest_gpu(launch: Launch) -> int | None:
    """Return the bytes of the smallest GPU of this process or of Ray's ranks, if known."""
    devices, config = launch.devices, launch.config
    if devices.placed and os.environ.get("RAY_ADDRESS"):
        from nemorl.runtime.ranks.actors import rank_bundles
        from nemorl.runtime.workers import cluster

        cluster.connect()
        try:
            return cluster.smallest_of_cluster(
                rank_bundles(config, devices.plan.num_ranks, config.generation)
            )
        finally:
            cluster.release()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return min((each.total_memory for each in found), default=None)


def show(found: object, *, quiet: bool) -> None:
    """Print what was chosen."""
    if not quiet:
        Console(highlight=False).print(str(found))


@contextmanager
def live_engine(
    backends: Backends, engines: GenerationConfig, **options: Any
) -> Iterator[GenerationBackend]:
    """Set up an engine for the block. options: what its backend is made with."""
    launch, devices = backends.launch, backends.launch.devices
    backend: Any = registry.get_generation_backend(engines.backend)
    if not engines.traits.on_trainer:
        options["precision"] = launch.config.parallel.precision
        if devices.placed and devices.shares_gpus(engines):
            options["beside"] = backends.ranks.places
    if sharing := backends.sharing:
        share = {"gpu_memory_utilization": sharing.share}
        engines = replace(engines, engine={**share, **engines.engine})
    generator = backend(tokenizer=launch.tokenizer, **options)
    try:
        with waiting_for_engines(engines, quiet=launch.quiet):
            generator.setup(engines)
        yield generator
    finally:
        generator.shutdown()


def engine_source(devices: Devices, engine: GenerationTraits, model: Any) -> ModelSource:
    """Return the model for engines: a copy of one on ranks, on a free GPU if there is one."""
    config, name = devices.config, devices.plan.precision
    # Where the ranks have GPUs, this machine may have none.
    dtype, device = DTYPES[name], "cpu" if config.trainer.device == "cpu" else None
    if devices.ranked and devices.on_gpus and engine.shares_model:
        if devices.free_gpu is not None:
            device = f"cuda:{devices.free_gpu}"
        else:
            size = sum(each.numel() for each in model.parameters()) * dtype.itemsize / 1e9
            warn(
                f"generation.backend {config.generation.backend} keeps a whole copy of the model,"
                f" {size:.3g} GB in {name}, on the first GPU beside a rank, because all GPUs train:"
                " add --generation.backend vllm, which can split it, or leave a GPU free"
            )
    return ModelSource(model, device=device, dtype=dtype)


def resumed(launch: Launch, trainer: TrainingBackend) -> tuple[LoopState, Path | None]:
    """Load the last whole checkpoint of a resumed run, and return its state and folder."""
    config, directory = launch.config, launch.directory
    state, path = LoopState(config.run.seed), None
    if config.run.resume:
        found = checkpoint.load_latest(directory.path, config, trainer)
        if found is None:
            raise checkpoint.CheckpointError(
                f"run.resume needs a whole checkpoint, but none in {directory.checkpoints} is: put"
                " one back, or start again in another folder (--run.dir)"
            )
        path, state = found
        for change in changes(directory.config, config):
            warn(f"the run continues with changed settings: {change}")
    directory.write_config(dump_yaml(kept(config)))
    directory.truncate(-1 if path is None else state.step)
    return replace(state, data=launch.data), path
