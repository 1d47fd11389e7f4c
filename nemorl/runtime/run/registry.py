"""Algorithms, backends and loggers by name. Yours join by a decorator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import getattr_static, signature
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.checks import checked_by, closest, has_own, require
from nemorl.models.hub import model_folder
from nemorl.parallel.backends import LIMITS, OwnLimits
from nemorl.parallel.plan import TrainingTraits
from nemorl.rollout.answers import ENVIRONMENTS, GIVEN, REWARDS, require_known
from nemorl.rollout.config import TRAITS, GenerationConfig
from nemorl.rollout.generation import GenerationTraits, Machine
from nemorl.rollout.reward_model import PREFIX
from nemorl.rollout.user_code import check_function
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.distill import DistillConfig
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.config.offline import DPOConfig, RMConfig, SFTConfig
from nemorl.runtime.config.ppo import PPOConfig
from nemorl.runtime.config.tree import add_own, texts_in
from nemorl.runtime.engines import spec as engines

if TYPE_CHECKING:
    from nemorl.parallel.backend import FullTrainingBackend, TrainingBackend
    from nemorl.rollout.generation import GenerationBackend
    from nemorl.runtime.watch.loggers import LoggerFactory


Registered = TypeVar("Registered")
Loop = Callable[[Any], None]
"""loop(run), of a `nemorl.Run`."""


@dataclass(frozen=True)
class Algorithm:
    config: type[BaseConfig]
    """Its settings; the docstring is shown by --help."""
    loop: str | Loop
    """loop(run), or its place: "module:function"."""


ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm(SFTConfig, "nemorl.runtime.algorithms.sft:sft"),
    "grpo": Algorithm(GRPOConfig, "nemorl.runtime.algorithms.grpo:grpo"),
    "dpo": Algorithm(DPOConfig, "nemorl.runtime.algorithms.dpo:dpo"),
    "ppo": Algorithm(PPOConfig, "nemorl.runtime.algorithms.ppo:ppo"),
    "distill": Algorithm(DistillConfig, "nemorl.runtime.algorithms.distill:distill"),
    "rm": Algorithm(RMConfig, "nemorl.runtime.algorithms.rm:rm"),
}
TRAINING_BACKENDS: dict[str, str | type] = {
    "dtensor": "nemorl.parallel.dtensor.backend:DTensorBackend",
    "megatron": "nemorl.parallel.megatron.backend:MegatronBackend",
}
GENERATION_BACKENDS: dict[str, str | type] = {
    "torch": "nemorl.rollout.torch_backend:TorchGenerationBackend",
    "megatron": "nemorl.runtime.ranks.generator:RankedGenerator",
    "vllm": "nemorl.runtime.engines.backend:VLLMGenerationBackend",
}
GenerationCheck = Callable[[GenerationConfig, Any, Machine], None]
GENERATION_CHECKS: dict[str, GenerationCheck] = {"vllm": engines.check_machine}
"""check(config, model, machine); model: a configuration, None before it is known."""
LOGGERS: dict[str, Any] = {
    "tensorboard": "nemorl.runtime.watch.loggers:TensorBoardLogger",
    "wandb": "nemorl.runtime.watch.loggers:WandbLogger",
    "mlflow": "nemorl.runtime.watch.loggers:MlflowLogger",
}


def register_algorithm(name: str, *, config: type[BaseConfig]) -> Callable[[Loop], Loop]:
    """Register a training loop, loop(run) as in the block of `open_run`, for
    `nemorl.train(algorithm=name)`, `nemorl.run(its config)` and the command `nemorl NAME`.
    """
    require(
        isinstance(config, type)
        and issubclass(config, BaseConfig)
        and "__dataclass_params__" in vars(config),
        "config",
        "must be a dataclass derived from nemorl.BaseConfig",
        config,
        "decorate it with @dataclass(frozen=True)",
    )
    for other, algorithm in ALGORITHMS.items():
        if algorithm.config is config and other != name:
            raise ValueError(
                f"config must belong to one algorithm, but {config.__name__} belongs to {other!r}:"
                " derive one of its own"
            )

    def decorate(loop: Loop) -> Loop:
        ALGORITHMS[name] = Algorithm(config, loop)
        return loop

    return decorate


def register_loss(name: str) -> Callable[[Registered], Registered]:
    """Register a policy loss as a name of GRPO's `loss`; its keyword parameters are settings.

    The decorated function is fn(token_logprobs, prev_logprobs, advantages, loss_weights, *,
    your_setting=0.1), with tensors [batch, seq]. It returns Σ loss_weights · its terms over all
    tokens, a scalar or a `LossOutput`, and is called for parts of a batch, whose losses are added
    up. Parameters called importance_weights and segment_ids are given (see `nemorl.losses.policy`).
    """
    return partial(_add_own, "loss", name)


def register_advantage(name: str) -> Callable[[Registered], Registered]:
    """Register a function as a name of GRPO's `advantage`; its keyword parameters are settings.

    The decorated function is fn(rewards, group_id, *, your_setting=0.1), with tensors [batch], and
    returns advantages [batch] or [batch, seq]. Parameters called lengths and loss_mask are given.
    """
    return partial(_add_own, "advantage", name)


def register_reward(name: str) -> Callable[[Registered], Registered]:
    """Register a reward function, or an environment, as a name of `reward`."""
    return _register(name, REWARDS)


def register_training_backend(name: str) -> Callable[[type[Registered]], type[Registered]]:
    """Register a class with the methods of `TrainingBackend` that its docstring names as
    `trainer.backend=name`.

    It may say what it can do by the class attribute `traits`, a `TrainingTraits`, and refuse by the
    static method `check(config, model, plan)` (see `TrainingLimits`).
    """
    from nemorl.parallel.backend import check_training_backend

    def check(cls: Any) -> None:
        _require_description(cls, TrainingTraits)
        check_training_backend(cls)
        LIMITS[name] = OwnLimits(cls)

    return _register(name, TRAINING_BACKENDS, check)


def register_generation_backend(name: str) -> Callable[[type[Registered]], type[Registered]]:
    """Register a class with the methods of `GenerationBackend` that its docstring names as
    `generation.backend=name`.

    It may say what it can do by the class attribute `traits`, a `GenerationTraits`, and refuse by
    the static method `check(config, model, machine)`.
    """
    from nemorl.rollout.wrapped import as_generation_backend

    def check(cls: Any) -> None:
        _require_description(cls, GenerationTraits)
        as_generation_backend(cls)
        TRAITS[name] = getattr(cls, "traits", GenerationTraits())
        GENERATION_CHECKS.pop(name, None)
        if getattr(cls, "check", None) is not None:
            GENERATION_CHECKS[name] = cls.check

    return _register(name, GENERATION_BACKENDS, check)


def register_logger(name: str) -> Callable[[Registered], Registered]:
    """Register a class with the methods of `MetricLogger`, made with a `LoggedRun`, as a name of
    `run.loggers`.
    """
    return _register(name, LOGGERS)


def get_algorithm(name: str) -> Algorithm:
    """Return an algorithm."""
    return _get(name, ALGORITHMS, "algorithm")


def algorithm_of(config: object) -> str:
    """Return the name of a config's algorithm; if it is not registered, its class's.

    >>> algorithm_of(SFTConfig())
    'sft'
    """
    cls = config if isinstance(config, type) else type(config)
    require(
        issubclass(cls, BaseConfig),
        "config",
        "must be an instance of a class derived from nemorl.BaseConfig",
        config,
        "such as nemorl.GRPOConfig()",
    )
    names = (name for name, algorithm in ALGORITHMS.items() if algorithm.config is cls)
    return next(names, cls.__name__)


def loop_of(config: object) -> Loop:
    """Return the training loop of a config."""
    name = algorithm_of(config)
    require(
        name in ALGORITHMS,
        "config",
        f"must be of a registered algorithm ({', '.join(ALGORITHMS)})",
        name,
        "register its loop with @register_algorithm, or write the loop over open_run(config)",
    )
    return load(ALGORITHMS[name].loop)


def get_training_backend(name: str, model: Any = None) -> "FullTrainingBackend":
    """Return a new training backend, of a loaded model or of what `setup(BackendConfig(…))` names.
    Missing methods raise AttributeError.

    >>> backend = get_training_backend("dtensor")
    >>> backend.step
    0
    """
    from nemorl.parallel.backend import as_training_backend

    make: Any = training_backend_class(name)
    try:
        return as_training_backend(make() if model is None else make(model))
    except TypeError as error:
        if model is None or signature(make).parameters:
            raise
        raise ValueError(
            f"trainer.backend {name!r} can't be made with a loaded model: name the model's folder"
            " (--model.path), or give __init__ a parameter model=None"
        ) from error


def training_backend_class(name: str) -> "type[TrainingBackend]":
    """Return the registered class."""
    return load(_get(name, TRAINING_BACKENDS, "training backend"))


def has_method(config: BaseConfig, name: str) -> bool:
    """Return whether a run's training backends have a method of `FullTrainingBackend`."""
    from nemorl.parallel.backend import FullTrainingBackend

    backend = training_backend_class(config.trainer.backend)
    return has_own(backend, name, FullTrainingBackend) or hasattr(backend, "__getattr__")


def get_generation_backend(name: str) -> "type[GenerationBackend]":
    """Return the class of a generation backend, made with model=, tokenizer= and precision=."""
    from nemorl.rollout.wrapped import as_generation_backend

    return as_generation_backend(load(_get(name, GENERATION_BACKENDS, "generation backend")))


def require_score(config: GenerationConfig) -> None:
    """Refuse a generation backend that gives no log-probabilities of tokens."""
    from nemorl.rollout.generation import GenerationBackend

    cls = load(_get(config.backend, GENERATION_BACKENDS, "generation backend"))
    score, sample = (has_own(cls, name, GenerationBackend) for name in ("score", "sample"))
    fits = score or (not sample and config.traits.shares_model)  # the model scores beside it
    must, remedy = "must have the method score for choices", "add it, or omit --choices"
    require(fits, "generation.backend", must, config.backend, remedy)


def check_generation(config: GenerationConfig, model: Any, machine: Machine) -> None:
    """Refuse settings or a model (None: unknown) that a generation backend can't use."""
    if check := GENERATION_CHECKS.get(config.backend):
        with checked_by(f"generation backend {config.backend}"):
            check(config, model, machine)


def require_names(config: object) -> None:
    """Refuse a function, backend or logger that does not exist, without running code."""
    for reward in texts_in(getattr(config, "reward", ())):
        if not reward.startswith(GIVEN):
            require_known(reward, REWARDS, "reward", "reward")
            if reward.startswith(PREFIX):
                model_folder(reward.removeprefix(PREFIX))
            elif reward not in REWARDS:
                check_function(reward, "reward")
    for environment in texts_in(getattr(getattr(config, "rollout", None), "environment", None)):
        if not environment.startswith(GIVEN):
            require_known(environment, ENVIRONMENTS, "rollout.environment", "environment_factory")
            if environment not in ENVIRONMENTS:
                check_function(environment, "rollout.environment")
    if trainer := getattr(config, "trainer", None):
        _get(trainer.backend, TRAINING_BACKENDS, "training backend")
    if generation := getattr(config, "generation", None):
        _get(generation.backend, GENERATION_BACKENDS, "generation backend")
    for logger in (config.run.loggers or ()) if isinstance(config, BaseConfig) else ():
        _get(logger, LOGGERS, "logger")


def chosen_loggers(names: Sequence[str] | None) -> "dict[str, LoggerFactory]":
    """Return the loggers that `run.loggers` names, after the one of the run's own files."""
    from nemorl.runtime.watch.loggers import JsonlLogger

    if names is None:
        names = ("tensorboard",) if installed("tensorboard") else ()
    for name in names:
        if name in ("tensorboard", "wandb", "mlflow") and not installed(name):
            raise ValueError(
                f"run.loggers can't name {name}, because it is not installed: pip install"
                " 'nemorl[loggers]', or omit it"
            )
    return {"jsonl": JsonlLogger} | {name: load(_get(name, LOGGERS, "logger")) for name in names}


def installed(package: str) -> bool:
    """Return whether a package can be imported; a run's folder `wandb/` is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def load(target: Any) -> Any:
    """Return the object at "module:name", or the target itself."""
    return resolve_name(target) if isinstance(target, str) else target


def _add_own(section: str, name: str, function: Any) -> Any:
    add_own(GRPOConfig, section, name, function)
    return function


def _require_description(cls: type, kind: type) -> None:
    traits, check = getattr(cls, "traits", kind()), getattr_static(cls, "check", None)
    require(
        isinstance(traits, kind),
        f"{cls.__name__}.traits",
        f"must be a {kind.__name__}",
        traits,
        f"write traits = {kind.__name__}(…) in the class",
    )
    require(
        check is None or isinstance(check, staticmethod | classmethod),
        f"{cls.__name__}.check",
        "must be a static method",
        check,
        "decorate it with @staticmethod",
    )


def _get(name: str, known: dict[str, Any], kind: str) -> Any:
    if name.startswith("http") and name not in known:  # of a run that is resumed at a service
        load("nemorl.runtime.run.connect:register")(name)
    if name not in known:
        raise ValueError(
            f"unknown {kind} {name!r}{closest(name, known) or '.'} Valid names: {', '.join(known)}"
        )
    return known[name]


def _register(
    name: str, known: dict[str, Any], check: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    def decorate(value: Any) -> Any:
        if check is not None:
            check(value)
        known[name] = value
        return value

    return decorate
