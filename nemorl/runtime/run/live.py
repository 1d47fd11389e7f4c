"""A run whose parts are live: trainer and generator as the last checkpoint left them."""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nemorl.checks import own_methods, require, warn
from nemorl.data.statistics import Lengths, LengthStatistics, length_statistics
from nemorl.models.capabilities import Proofs, known
from nemorl.models.hub import check_supported, check_vocabulary, model_folder
from nemorl.models.source import ModelSource
from nemorl.parallel.backend import FullTrainingBackend
from nemorl.parallel.backends import check_training, limits_of
from nemorl.parallel.config import BackendConfig, OptimizerConfig, ProfileConfig
from nemorl.parallel.measure import profile_folder
from nemorl.parallel.planner.sharing import Sharing
from nemorl.parallel.proving import proved_now
from nemorl.parallel.world import DTYPES
from nemorl.rollout.config import TRAITS, GenerationConfig
from nemorl.rollout.generation import GenerationBackend, GenerationTraits
from nemorl.rollout.rounds import blocking
from nemorl.runtime.config.grpo import GapConfig
from nemorl.runtime.config.tree import dump_yaml, to_dict
from nemorl.runtime.config.yaml_io import without_secrets
from nemorl.runtime.engines.weight_sync import TrainerWeights, check_agreement
from nemorl.runtime.ranks.trainer import make_trainer
from nemorl.runtime.run.devices import Devices, Fit, fitted, keeps_reference, sharing_of
from nemorl.runtime.run.launch import Launch, changes, generation_config, kept, model_config_of
from nemorl.runtime.run.loop import Parts, Run
from nemorl.runtime.run.models import BackendOrder
from nemorl.runtime.run.registry import (
    get_generation_backend,
    get_training_backend,
    training_backend_class,
)
from nemorl.runtime.run.saving import CheckpointCallback, EarlyStop, ExportCallback
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.checkpoint import CheckpointError, RandomState, seed_generators
from nemorl.runtime.store.files import writing
from nemorl.runtime.store.state import POLICY, LoopState
from nemorl.runtime.watch.alerts import GapWatch, SignalWatch
from nemorl.runtime.watch.callbacks import Callback, closing
from nemorl.runtime.watch.display import make_display
from nemorl.runtime.watch.log import event, waiting, waiting_for_engines, waiting_for_ranks
from nemorl.runtime.watch.loggers import LoggedRun, Recorder
from nemorl.runtime.watch.resources import ResourceMeter

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Backends:
    """The backends of a run, the policy's and others: on its ranks, or on ranks of their own."""

    launch: Launch
    run: Run
    found: Path | None
    """The checkpoint to go on from."""
    ranks: Any
    """The policy's backend on ranks, not set up yet; None in one process."""
    fit: Fit | None = None
    """What was chosen for the memory of the GPUs, if it is known."""

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """Set up the policy's backend for the block."""
        launch, run, config = self.launch, self.run, self.launch.config
        trainer = self.ranks or get_training_backend(config.trainer.backend, launch.model)
        setup = self._policy_config()
        self._require_methods(trainer, self._needs_of_policy(setup))
        setup = self._proved(setup, launch.model)
        with self._set_up(trainer, setup, waiting_for_trainer(launch)):
            model = getattr(trainer, "model", None)
            require(
                model is not None or not run.generates,
                "trainer.backend",
                "must have the attribute model, which the generator is made from, once it is set"
                " up",
                config.trainer.backend,
                "add it",
            )
            seed_generators(config.run.seed)
            if model is not None:
                check_vocabulary(model, launch.tokenizer)
            yield trainer

    def prepared(self, order: BackendOrder) -> BackendOrder:
        """Check an order, and return it with a copy of the policy's model if it begins with it."""
        if isinstance(order.model, nn.Module):
            self.launch.devices.check_given(order.model)
        if order.own_ranks:
            self.launch.devices.check_more_ranks()
        config, settings = self._other_config(order), self.launch.config
        order = replace(order, initial=self._copy_for(order))
        given: Any = order.initial if order.model is None else order.model
        path = None if isinstance(given, nn.Module) else config.model.path
        trust = {"trust_remote_code": config.model.trust_remote_code}
        limits = limits_of(settings.trainer.backend)
        for model in (None, model_config_of(path or given, **trust)):
            check_training(config, model, config.parallel, limits)
        offloads = bool(settings.trainer.offload_during_generation)
        saves = order.trains and settings.run.async_save
        needs = {
            "compute": ("a scalar head, whose values it returns", order.head == "scalar"),
            "offload": ("trainer.offload_during_generation", offloads),
            "wait_for_checkpoint": ("run.async_save", saves),
        }
        self._require_methods(None, needs)
        return order

    @contextmanager
    def other(self, order: BackendOrder) -> Iterator[Any]:
        """Set up another backend for the block, without drawing a random number."""
        given = order.model if isinstance(order.model, nn.Module) else order.initial
        if order.own_ranks:
            backend = ranks_of(self.launch, order.name)
        elif self.ranks is not None:
            backend = self.ranks.beside(order.name)
        else:
            backend = get_training_backend(self.launch.config.trainer.backend, given)
        generators = RandomState.now()
        config = self._proved(self._other_config(order), given)
        with self._set_up(backend, config, nullcontext()):
            generators.restore()
            yield backend

    def _proved(self, config: BackendConfig, given: nn.Module | None) -> BackendConfig:
        launch, trust = self.launch, {"trust_remote_code": config.model.trust_remote_code}
        of_model = model_config_of(given or config.model.path, **trust)
        if of_model is None or not limits_of(config.trainer.backend).traits.proves:
            return config
        proofs = known(of_model) if launch.devices.torchrun else proofs_of(of_model, launch.quiet)
        return replace(config, proofs=proofs)

    @contextmanager
    def _set_up(
        self, backend: Any, config: BackendConfig, waiting: AbstractContextManager[None]
    ) -> Iterator[None]:
        try:
            with waiting:
                backend.setup(config)
            yield
        except BaseException:
            with suppress(Exception):  # the first error is the one to show
                backend.shutdown()
            raise
        backend.shutdown()

    def _policy_config(self) -> BackendConfig:
        launch, run, config = self.launch, self.run, self.launch.config
        keep_reference = keeps_reference(config)
        return replace(
            self._config(),
            lora=config.lora,
            profile=profile_config(launch, num_updates=run.num_updates),
            keep_reference=keep_reference,
            same_initial_model_as=self.found / POLICY if self.found and keep_reference else None,
        )

    def _other_config(self, order: BackendOrder) -> BackendConfig:
        config, given = self._config(), self.launch.config
        if order.model is not None:
            named = isinstance(order.model, str | Path)
            path = model_folder(str(order.model)) if named else ""
            config = replace(config, model=replace(config.model, path=path, from_scratch=False))
        options: Any = {"router_aux_loss_coef": 0.0, "router_bias_update_rate": 0.0}
        trainer = replace(config.trainer, router_replay=False, **options)
        policys = order.model is None and not order.trains and order.head == "lm"
        same = self.found / POLICY if self.found and policys else None
        return replace(
            config,
            trainer=trainer,
            head=order.head,
            trains=order.trains,
            optimizer=(order.optimizer or given.optimizer) if order.trains else OptimizerConfig(),
            lora=given.lora if order.trains and order.head == "lm" else config.lora,
            same_initial_model_as=same,
        )

    def _config(self) -> BackendConfig:
        launch, config = self.launch, self.launch.config
        trainer, plan = config.trainer, launch.devices.plan
        if self.fit is not None:
            plan, chunk = self.fit.step.plan, self.fit.step.work.trainer.logprob_chunk
            tokens = self.fit.micro_batch_tokens
            trainer = replace(trainer, micro_batch_tokens=tokens, logprob_chunk=chunk)
        return BackendConfig(
            model=replace(config.model, path=launch.folder),
            trainer=trainer,
            optimizer=config.optimizer,
            seed=config.run.seed,
            parallel=plan,
            total_steps=self.run.num_updates or 1,  # unknown to a schedule that needs none
            # The timeouts of the runtime come first: their errors name the rank.
            collective_timeout_s=max(config.runtime.timeout_s, config.runtime.start_timeout_s) + 60,
        )

    def _copy_for(self, order: BackendOrder) -> nn.Module | None:
        if order.model is not None or self.launch.model is None:
            return None
        require(
            order.head == "lm",
            "model",
            "must be given for a scalar head where the policy's was, which has another head",
            None,
            "name its folder, or give a loaded AutoModelForTokenClassification with num_labels=1",
        )
        require(
            self.run.live is None,
            "model",
            "must be given where the policy's was, which trains in place by now",
            None,
            "call run.backend before run.trainer is used, or give a copy of the model",
        )
        return copy.deepcopy(self.launch.model)

    def _needs_of_policy(self, setup: BackendConfig) -> dict[str, tuple[str, bool]]:
        config = self.launch.config
        return {
            "offload": (
                "trainer.offload_during_generation",
                bool(config.trainer.offload_during_generation),
            ),
            "get_reference_logprobs": ("the reference model", setup.keep_reference),
            "weights": ("generation", self.run.generates),
            "wait_for_checkpoint": ("run.async_save", config.run.async_save),
        }

    def _require_methods(self, trainer: Any, needs: Mapping[str, tuple[str, bool]]) -> None:
        config = self.launch.config
        for method, (what, needed) in needs.items():
            if needed and not has_method(self.launch, trainer, method):
                raise ValueError(
                    f"trainer.backend must have the method {method} for {what}, but"
                    f" {config.trainer.backend!r} has none: add it, or omit what needs it"
                    f"{' (--reference precomputed)' * hasattr(config, 'reference')}"
                )


def proofs_of(of_model: Any, quiet: bool) -> Proofs:
    """Return what is proved of models with a configuration, checking them now if need be."""
    check_supported(of_model)
    if (proofs := known(of_model)) is not None:
        return proofs
    what = f"checking what {of_model.model_type} can do here, for this and later runs"
    with waiting(what, quiet=quiet):
        return proved_now(of_model)


def waiting_for_trainer(launch: Launch) -> AbstractContextManager[None]:
    """Return `waiting` for the set-up of the policy's backend."""
    devices = launch.devices
    if devices.ranked:
        who = "processes of torchrun" if devices.torchrun else "Ray actors"
        return waiting_for_ranks(devices.plan, who, quiet=launch.quiet)
    if devices.accelerated:
        return waiting(f"training on a GPU ({devices.plan.precision})", quiet=launch.quiet)
    return nullcontext()


def ranks_of(launch: Launch, name: str = "") -> Any:
    """Return a backend on ranks, none started yet; None in one process. name: not the policy's."""
    if not launch.devices.ranked:
        return None
    make = training_backend_class(launch.config.trainer.backend)
    logs = launch.directory.path / "logs" / name
    engines = None if name else launch.config.generation
    return make_trainer(launch.config, make, launch.devices.plan, logs, engines)


def has_method(launch: Launch, trainer: Any, name: str) -> bool:
    """Return whether a training backend has a method; on ranks or unmade, its class."""
    if trainer is not None and not launch.devices.ranked:
        return hasattr(trainer, name)
    backend = training_backend_class(launch.config.trainer.backend)
    return name in own_methods(backend, FullTrainingBackend) or hasattr(backend, "__getattr__")


def profile_config(launch: Launch, *, num_updates: int | None) -> ProfileConfig:
    """Return what is profiled, in profile/ of the run by default."""
    profile: ProfileConfig = launch.config.profile
    span = profile.span()
    if span is None:
        return profile
    require(
        num_updates is None or span[0] <= num_updates,
        "profile.steps",
        f"must begin within the {num_updates} optimizer steps of the run",
        profile.steps,
        "name earlier steps",
    )
    profile = replace(profile, dir=profile.dir or str(launch.directory.path / "profile"))
    profile_folder(profile)
    return profile


def show_lengths(lengths: Mapping[str, Lengths], *, quiet: bool) -> dict[str, Any]:
    """Print the lengths of a run's data sets, and return the contents of data.json."""
    statistics = {name: length_statistics(given) for name, given in lengths.items()}
    statistics = {name: s for name, s in statistics.items() if s.count or s.num_dropped}
    if statistics and not quiet:
        from rich.console import Console

        print_lengths(Console(highlight=False), statistics)
    return {name: s.to_dict() for name, s in statistics.items()}


def print_lengths(console: "Console", statistics: Mapping[str, LengthStatistics]) -> None:
    """Print a line for each data set."""
    from rich.table import Table

    table = Table("data", title="lengths in tokens", title_justify="left")
    for name in ("sequences", "total", "mean", "median", "95 %", "max", "limit"):
        table.add_column(name, justify="right")
    for name, s in statistics.items():
        values = (s.count, s.total_tokens, f"{s.mean:.1f}", f"{s.median:g}", f"{s.p95:g}", s.max)
        table.add_row(name, *map(str, values), str(s.limit))
    console.print(table)
    for name, s in statistics.items():
        parts = {"cut to it": s.num_truncated, "left out": s.num_dropped}
        taken = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
        if s.num_over_limit:
            console.print(
                f"{name}: {s.num_over_limit} over the limit of {s.limit} tokens"
                + (f" ({taken})" if taken else ""),
                style="yellow",
            )


class Live:
    """The parts of a run, made when they are asked for; `stack` ends them."""

    def __init__(self, launch: Launch, stack: ExitStack) -> None:
        self.launch, self.stack = launch, stack
        self._released: dict[str, ExitStack] = {}
        self._backends: Backends | None = None
        self._fit: tuple[Fit | None] | None = None
        self._sharing: tuple[Sharing | None] | None = None

    def parts(self, run: Run) -> Parts:
        """Load the model, start the engine, and take over the last checkpoint."""
        launch, config, directory = self.launch, self.launch.config, self.launch.directory
        check_generation(launch, run)
        directory_lengths = show_lengths(run.lengths, quiet=launch.quiet)
        engines, sharing = self._engines(run), self.sharing(run)
        if engines is not None:
            launch.devices.check_cluster(config, engines)
        if (fit := self.fit(run)) is not None:
            show(fit, quiet=launch.quiet)
        if engines is not None and sharing is not None:
            show(sharing, quiet=launch.quiet)
            share = {"gpu_memory_utilization": sharing.share}
            engines = replace(engines, engine={**share, **engines.engine})
        in_turns = self._share(run) or bool(config.trainer.offload_during_generation)
        trainer = self.stack.enter_context(self._of(run).policy())
        shared = engines is not None and shares_weights(launch, engines.traits)
        # To ask for the model ends `offload`: once, before.
        model: Any = trainer.model if run.generates else None
        vocab_size = model.config.vocab_size if run.generates else 0
        self.make_room(run, [trainer], keep_weights=shared)  # engines take what they find
        generator = self.stack.enter_context(live_generator(launch, engines, trainer, model))
        if generator is not None and in_turns:
            generator.sleep()
        state, resumed_from = resumed(launch, run, trainer)
        with writing("the tokenizer", directory.path / "tokenizer"):
            launch.tokenizer.save_pretrained(directory.path / "tokenizer")
        directory.write_data(directory_lengths)
        if generator is not None:
            if in_turns:
                self.make_room(run, [trainer], keep_weights=shared)
                generator.wake()
            blocking(generator.update_weights(TrainerWeights(trainer)))
            if (transport := getattr(generator, "transport", None)) is not None:
                event("weight_transport", str(transport))
                show(transport, quiet=launch.quiet)
            length = min(8, config.data.max_total_sequence_length // 2)
            prompt = [token % vocab_size for token in range(length)]
            precision = config.parallel.precision
            check_agreement(trainer, generator, prompt, precision=precision, num_tokens=length)
        return Parts(
            trainer=trainer,
            generator=generator,
            state=state,
            resumed_from=resumed_from,
            shares_weights=shared,
        )

    def prepared(self, run: Run, order: BackendOrder) -> BackendOrder:
        return self._of(run).prepared(order)

    def backend(self, run: Run, order: BackendOrder) -> Any:
        """Load another backend, as the last checkpoint left it if it trains."""
        own = self._released[order.name] = self.stack.enter_context(ExitStack())
        backend = own.enter_context(self._of(run).other(order))
        if order.trains and run.live is not None and run.live.resumed_from is not None:
            checkpoint.load_backend(run.live.resumed_from, order.name, backend)
        return backend

    def release(self, name: str) -> None:
        """Shut a backend down."""
        self._released.pop(name).close()

    def make_room(self, run: Run, backends: Iterable[Any], *, keep_weights: bool = False) -> None:
        """Offload backends, or empty their caches where engines share their GPUs."""
        sharing = self.sharing(run)
        asked = self.launch.config.trainer.offload_during_generation
        offloads = asked if sharing is None else sharing.offloads
        for backend in backends:
            if offloads:
                backend.offload(keep_weights=keep_weights)
            elif self._share(run) and has_method(self.launch, backend, "empty_cache"):
                backend.empty_cache()

    def sharing(self, run: Run) -> Sharing | None:
        """Return how trainer and engines share GPUs, if known."""
        if self._sharing is None:
            launch, engines, found = self.launch, self._engines(run), None
            if engines is not None and self._share(run):
                found = sharing_of(
                    self.fit(run),
                    engines,
                    launch.of_model,
                    can_offload=has_method(launch, None, "offload"),
                    can_empty=has_method(launch, None, "empty_cache"),
                )
            self._sharing = (found,)
        return self._sharing[0]

    def fit(self, run: Run) -> Fit | None:
        """Return what was chosen for the memory of the GPUs, if it is known."""
        if self._fit is None:
            launch, found = self.launch, None
            if launch.devices.accelerated:
                engines = self._engines(run) if self._share(run) else None
                card = smallest_gpu(launch)
                found = fitted(launch.config, launch.devices, engines, launch.of_model, card=card)
            self._fit = (found,)
        return self._fit[0]

    def _share(self, run: Run) -> bool:
        engines = self._engines(run)
        return engines is not None and self.launch.devices.shares_gpus(engines)

    def _engines(self, run: Run) -> GenerationConfig | None:
        launch = self.launch
        if not run.generates:
            return None
        return generation_config(launch.config, launch.directory, launch.devices)

    def callbacks(self, run: Run) -> list[Callback]:
        launch = self.launch
        launch.log.total_steps = run.num_steps
        before, after = own_callbacks(launch, exported(launch, run.backends))
        self.stack.enter_context(closing([*before, *after]))
        return [launch.log, *launch.callbacks, *before, *after]

    def _of(self, run: Run) -> Backends:
        if self._backends is None:
            launch, ranks = self.launch, ranks_of(self.launch)
            if ranks is not None:  # they last until the run ends, whichever backend starts them
                self.stack.callback(ranks.shutdown)
            found = None
            if launch.config.run.resume:
                found = checkpoint.latest(launch.directory.path, quiet=True)
            self._backends = Backends(launch, run, found, ranks, self.fit(run))
        return self._backends


def exported(launch: Launch, backends: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the models that can export their weights, by name."""
    models = {name: getattr(each, "model", None) for name, each in backends.items()}
    return {
        name: model
        for name, model in models.items()
        if model is not None and has_method(launch, backends[name], "weights")
    }


def own_callbacks(
    launch: Launch, models: Mapping[str, nn.Module]
) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks that record, then those that save all that was recorded before."""
    config, directory = launch.config, launch.directory
    logged = LoggedRun(
        directory=directory,
        run_id=launch.log.record.run_id,
        config=without_secrets(to_dict(config)),
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
    if config.run.export and POLICY not in models:
        warn(
            f"{directory.hf} will not be written, because the training backend"
            f" {config.trainer.backend!r} has no attribute model or no weights to export"
        )
    elif config.run.export:
        after.append(ExportCallback(directory, models, adapter=config.lora.export == "adapter"))
    if config.run.plots:
        from nemorl.runtime.watch.curves import PlotCallback

        after.append(PlotCallback(directory))
    return before, after


def check_generation(launch: Launch, run: Run) -> None:
    """Refuse settings about generation that do not fit the run."""
    config = launch.config
    recording = [name for name, traits in TRAITS.items() if traits.records_experts]
    require(
        run.generates or not config.trainer.offload_during_generation,
        "trainer.offload_during_generation",
        "is for runs that generate",
        config.trainer.offload_during_generation,
        "remove it",
    )
    require(
        not (config.trainer.router_replay and run.generates)
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
    """Return the bytes of the smallest GPU of this process, or of Ray's ranks; None if unknown."""
    devices, config = launch.devices, launch.config
    if devices.placed and os.environ.get("RAY_ADDRESS"):
        from nemorl.runtime.ranks.actors import rank_bundles
        from nemorl.runtime.workers import cluster

        cluster.connect()
        try:
            bundles = rank_bundles(config, devices.plan.num_ranks, config.generation)
            return cluster.smallest_of_cluster(bundles)
        finally:
            cluster.release()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return min((each.total_memory for each in found), default=None)


def show(found: object, *, quiet: bool) -> None:
    """Print how training fits, how engines share GPUs, or how new weights get to them."""
    if not quiet:
        from rich.console import Console

        Console(highlight=False).print(str(found))


def shares_weights(launch: Launch, engine: GenerationTraits) -> bool:
    """Return whether the engine computes with the trainer's own weights."""
    return engine.on_trainer if launch.devices.ranked else engine.shares_model


@contextmanager
def live_generator(
    launch: Launch, engines: GenerationConfig | None, trainer: Any, model: Any
) -> Iterator[GenerationBackend | None]:
    """Set up the engine that the run samples with, if any, for the block."""
    if engines is None:
        yield None
        return
    config = launch.config
    backend: Any = get_generation_backend(engines.backend)
    if engines.traits.on_trainer:
        generator = backend(trainer=trainer, tokenizer=launch.tokenizer)
    else:
        replays = config.trainer.router_replay
        devices = launch.devices
        shares = devices.placed and devices.shares_gpus(engines)
        beside = {"beside": trainer.places} if shares else {}
        generator = backend(
            model=engine_source(launch.devices, engines.traits, model),
            tokenizer=launch.tokenizer,
            precision=config.parallel.precision,
            **({"records_experts": True} if replays else {}),
            **beside,
        )
    try:
        with waiting_for_engines(engines, quiet=launch.quiet):
            generator.setup(engines)
        yield generator
    finally:
        generator.shutdown()


def engine_source(devices: Devices, engine: GenerationTraits, model: Any) -> ModelSource:
    """Return the model as engines get it: a copy of one on ranks, on a free GPU if there is one."""
    config = devices.config
    name = devices.plan.precision
    dtype = DTYPES[name]
    # Where the ranks have GPUs, this machine may have none.
    device = "cpu" if config.trainer.device == "cpu" else None
    if devices.ranked and devices.on_gpus and engine.shares_model:
        if devices.free_gpu is not None:
            device = f"cuda:{devices.free_gpu}"
        else:
            size = sum(each.numel() for each in model.parameters()) * dtype.itemsize / 1e9
            warn(
                f"the engine of generation.backend {config.generation.backend} keeps a whole copy"
                f" of the model, {size:.3g} GB in {name}, on the first GPU beside a rank, because"
                " all GPUs train: add --generation.backend vllm, whose engines can split the"
                " model, or leave a GPU free"
            )
    return ModelSource(model, device=device, dtype=dtype)


def resumed(launch: Launch, run: Run, trainer: Any) -> tuple[LoopState, Path | None]:
    """Load the last whole checkpoint, if the run is resumed, and return its state and folder."""
    config, directory, state = launch.config, launch.directory, run.state
    found = None
    if config.run.resume:
        found = checkpoint.load_latest(directory.path, config, trainer)
    if found is not None:
        state = found[1]
        for change in changes(directory.config, config):
            warn(f"the run continues with changed settings: {change}")
    elif config.run.resume:
        raise CheckpointError(
            f"run.resume needs a whole checkpoint, but none in {directory.checkpoints} is: put one"
            " back, or start again in another folder (--run.dir)"
        )
    directory.write_config(dump_yaml(kept(config)))
    directory.truncate(state.step if found is not None else -1)
    return replace(state, data=launch.data), found and found[0]
