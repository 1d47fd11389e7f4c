"""The models of a run: their training backends, in this process or on ranks."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.checks import own_methods, require
from nemorl.models.capabilities import Proofs, known
from nemorl.models.hub import check_supported
from nemorl.models.pretrained import check_vocabulary, model_folder
from nemorl.parallel.backend import FullTrainingBackend
from nemorl.parallel.backends import check_training, limits_of
from nemorl.parallel.config import BackendConfig, OptimizerConfig, ProfileConfig
from nemorl.parallel.profiling import profile_folder
from nemorl.parallel.proving import proved_now
from nemorl.runtime.ranks.trainer import make_trainer
from nemorl.runtime.run.loop import OpenRun
from nemorl.runtime.run.models import BackendOrder
from nemorl.runtime.start.launch import Launch
from nemorl.runtime.start.registry import get_training_backend, training_backend_class
from nemorl.runtime.start.settings import model_config_of
from nemorl.runtime.start.sharing import Fit, keeps_reference
from nemorl.runtime.store.checkpoint import RandomState, seed_generators
from nemorl.runtime.store.state import POLICY
from nemorl.runtime.watch.waiting import waiting, waiting_for_ranks


@dataclass(frozen=True)
class Backends:
    """The backends of a run, the policy's and others: on its ranks, or on ranks of their own."""

    launch: Launch
    run: OpenRun
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
