"""The backends by name. Each is imported when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nemorl.runtime.config_io import closest

if TYPE_CHECKING:
    from nemorl.parallel.backend import TrainingBackend
    from nemorl.rollout.generation import GenerationBackend

TRAINING_BACKENDS = {"dtensor": "nemorl.parallel.dtensor.backend:DTensorBackend"}
GENERATION_BACKENDS = {"torch": "nemorl.rollout.torch_backend:TorchGenerationBackend"}


def get_training_backend(name: str) -> "type[TrainingBackend]":
    """The class of a training backend.

    >>> get_training_backend("dtenosr")
    Traceback (most recent call last):
    ValueError: unknown training backend 'dtenosr'; did you mean dtensor? Valid names: dtensor
    """
    return _load(name, TRAINING_BACKENDS, "training")


def get_generation_backend(name: str) -> "type[GenerationBackend]":
    """The class of a generation backend; an unknown name is a ValueError with the valid ones."""
    return _load(name, GENERATION_BACKENDS, "generation")


def _load(name: str, backends: dict[str, str], kind: str) -> Any:
    if name not in backends:
        raise ValueError(f"unknown {kind} backend {name!r}{closest(name, backends) or '.'} Valid names: {', '.join(backends)}")
    module, _, attribute = backends[name].partition(":")
    return getattr(import_module(module), attribute)
