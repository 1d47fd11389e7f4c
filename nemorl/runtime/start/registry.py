"""What is chosen by name: algorithms, backends, loggers.

Each is imported when it is asked for; yours join by a decorator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.checks import closest, require
from nemorl.runtime.config.base import BaseConfig, GRPOConfig, SFTConfig
from nemorl.runtime.config.preference import DPOConfig

if TYPE_CHECKING:
    from nemorl.parallel.backend import TrainingBackend
    from nemorl.rollout.generation import GenerationBackend
    from nemorl.runtime.run.job import Inputs, Job
    from nemorl.runtime.watch.loggers.base import LoggerFactory

Registered = TypeVar("Registered")
Prepare = Callable[[Any, "Inputs"], "Job"]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as the launcher and the command line know it."""

    config: type[BaseConfig]
    """The dataclass of its settings; its docstring is what `nemorl NAME --help` begins with."""
    prepare: str | Prepare
    """prepare(config, inputs) -> Job, or where it is: "module:function"."""


ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm(SFTConfig, "nemorl.runtime.algorithms.sft:prepare"),
    "grpo": Algorithm(GRPOConfig, "nemorl.runtime.algorithms.grpo:prepare"),
    "dpo": Algorithm(DPOConfig, "nemorl.runtime.algorithms.dpo:prepare"),
}
TRAINING_BACKENDS: dict[str, str | type] = {
    "dtensor": "nemorl.parallel.dtensor.backend:DTensorBackend"
}
GENERATION_BACKENDS: dict[str, str | type] = {
    "torch": "nemorl.rollout.torch_backend:TorchGenerationBackend",
    "vllm": "nemorl.runtime.engines.backend:VLLMGenerationBackend",
}
LOGGERS: dict[str, Any] = {
    "tensorboard": "nemorl.runtime.watch.loggers.tensorboard:TensorBoardLogger",
    "wandb": "nemorl.runtime.watch.loggers.wandb:WandbLogger",
    "mlflow": "nemorl.runtime.watch.loggers.mlflow:MlflowLogger",
}


def register_algorithm(name: str, *, config: type[BaseConfig]) -> Callable[[Prepare], Prepare]:
    """Make an algorithm known: `nemorl.train(algorithm=name)`, `nemorl.run(its config)` and,
    through `nemorl.main`, the command `nemorl NAME`.

    The decorated function turns the config and the `Inputs` (rows, tokenizer, environment) into a
    `Job` before a model is loaded. Raises ValueError where another algorithm has the name, or
    `config` is no frozen dataclass derived from `BaseConfig`.
    """
    if not (
        isinstance(config, type)
        and issubclass(config, BaseConfig)
        and "__dataclass_params__" in vars(config)
    ):
        raise ValueError(
            f"config must be a dataclass derived from nemorl.BaseConfig, but it is {config!r}:"
            " decorate it with @dataclass(frozen=True)"
        )
    taken = [
        other
        for other, algorithm in ALGORITHMS.items()
        if algorithm.config is config and other != name
    ]
    if taken:
        raise ValueError(
            f"config must belong to one algorithm, but {config.__name__} is that of {taken[0]!r}"
            " already: derive one of its own"
        )
    register = _register(name, ALGORITHMS, "algorithm")

    def decorate(prepare: Prepare) -> Prepare:
        register(Algorithm(config, prepare))
        return prepare

    return decorate


def register_training_backend(name: str) -> Callable[[type[Registered]], type[Registered]]:
    """Make a class that keeps the `TrainingBackend` Protocol known as `trainer.backend=name`.

    Raises ValueError if another has the name, or the class lacks one of the Protocol's methods.
    """
    return _register(
        name,
        TRAINING_BACKENDS,
        "training backend",
        protocol="nemorl.parallel.backend:TrainingBackend",
    )


def register_generation_backend(name: str) -> Callable[[type[Registered]], type[Registered]]:
    """Make a class that keeps the `GenerationBackend` Protocol known as `generation.backend=name`.

    Raises ValueError if another has the name, or the class lacks one of the Protocol's methods.
    """
    return _register(
        name,
        GENERATION_BACKENDS,
        "generation backend",
        protocol="nemorl.rollout.generation:GenerationBackend",
    )


def register_logger(name: str) -> Callable[[Registered], Registered]:
    """Make a logger known as `run.loggers name`: what is made with a `LoggedRun` and keeps the
    `MetricLogger` Protocol.
    """
    return _register(name, LOGGERS, "logger")


def get_algorithm(name: str) -> Algorithm:
    """An algorithm by its name; an unknown one is a ValueError with the valid ones."""
    _require_known(name, ALGORITHMS, "algorithm")
    return ALGORITHMS[name]


def algorithm_of(config: Any) -> str:
    """The name of the algorithm that a config is of.

    >>> algorithm_of(SFTConfig())
    'sft'
    """
    found = [name for name, algorithm in ALGORITHMS.items() if algorithm.config is type(config)]
    if not found:
        known, what = (
            ", ".join(algorithm.config.__name__ for algorithm in ALGORITHMS.values()),
            type(config).__name__,
        )
        raise ValueError(
            f"config must be of a known algorithm ({known}), but it is a {what}: make yours known"
            " with @register_algorithm"
        )
    return found[0]


def get_training_backend(name: str) -> "type[TrainingBackend]":
    """The class of a training backend.

    >>> get_training_backend("dtenosr")
    Traceback (most recent call last):
    ValueError: unknown training backend 'dtenosr'; did you mean dtensor? Valid names: dtensor
    """
    _require_known(name, TRAINING_BACKENDS, "training backend")
    return load(TRAINING_BACKENDS[name])


def get_generation_backend(name: str) -> "type[GenerationBackend]":
    """The class of a generation backend; an unknown name is a ValueError with the valid ones."""
    _require_known(name, GENERATION_BACKENDS, "generation backend")
    return load(GENERATION_BACKENDS[name])


def get_logger(name: str) -> "LoggerFactory":
    """What makes a logger; an unknown name is a ValueError with the valid ones."""
    _require_known(name, LOGGERS, "logger")
    return load(LOGGERS[name])


def chosen_loggers(names: Sequence[str] | None) -> "dict[str, LoggerFactory]":
    """Return the loggers that `run.loggers` names, after the one of the run's own files.

    names: None means TensorBoard where it is installed.
    Raises: ValueError for a name that is unknown, doubled, or whose package is missing.
    """
    from nemorl.runtime.watch.loggers.jsonl import JsonlLogger

    if names is None:
        names = ("tensorboard",) if installed("tensorboard") else ()
    for name in names:
        require(
            list(names).count(name) == 1,
            "run.loggers",
            "must name each logger once",
            list(names),
            f"omit the second {name}",
        )
        if name in ("tensorboard", "wandb", "mlflow") and not installed(name):
            raise ValueError(
                f"run.loggers can't name {name}, because the package {name} is not installed:"
                " pip install 'nemorl[loggers]', or omit it"
            )
    return {"jsonl": JsonlLogger} | {name: get_logger(name) for name in names}


def installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of that name, such as W&B's own `wandb/`
    in the working directory, is none.
    """
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def load(target: Any) -> Any:
    """What "module:name" names; anything else is returned as it is."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _require_known(name: str, known: dict[str, Any], kind: str) -> None:
    if name not in known:
        raise ValueError(
            f"unknown {kind} {name!r}{closest(name, known) or '.'} Valid names: {', '.join(known)}"
        )


def _register(
    name: str, known: dict[str, Any], kind: str, *, protocol: str | None = None
) -> Callable[[Any], Any]:
    if not name or not all(part.isidentifier() for part in name.split("-")):
        raise ValueError(
            f"the name of a {kind} must be a word, but it is {name!r}: use letters, digits and _"
        )

    def decorate(value: Any) -> Any:
        present = known.get(name)
        if present is not None and _home(present) != _home(
            value
        ):  # a module that is loaded twice may register twice
            raise ValueError(f"the {kind} {name!r} is there already: choose another name")
        methods = (
            []
            if protocol is None
            else [
                key
                for key, of in vars(load(protocol)).items()
                if callable(of) and not key.startswith("_")
            ]
        )
        missing = [method for method in methods if not callable(getattr(value, method, None))]
        if missing:
            raise ValueError(
                f"a {kind} must have the methods {', '.join(methods)}, but {name!r} has no"
                f" {', '.join(missing)}: add them"
            )
        known[name] = value
        return value

    return decorate


def _home(value: Any) -> Any:
    value = value.prepare if isinstance(value, Algorithm) else value
    return (
        value
        if isinstance(value, str)
        else (getattr(value, "__module__", None), getattr(value, "__qualname__", None))
    )
