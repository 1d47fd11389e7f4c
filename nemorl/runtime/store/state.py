"""What callbacks may read of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nemorl.rollout.admission import LoopState
from nemorl.runtime.config.base import BaseConfig

if TYPE_CHECKING:  # it imports torch, which help and reports do without
    from nemorl.parallel.backend import FullTrainingBackend

POLICY = "policy"
"""The name of the backend that is `run.trainer`."""


@runtime_checkable
class RunView(Protocol):
    """What a callback may read of a run."""

    @property
    def config(self) -> BaseConfig: ...

    @property
    def trainer(self) -> "FullTrainingBackend":
        """The policy. A backend with few methods raises AttributeError for the others."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def state(self) -> LoopState: ...

    @property
    def directory(self) -> Path: ...

    @property
    def backends(self) -> Mapping[str, "FullTrainingBackend"]:
        """All backends that train, by name, the policy first: the ones in a checkpoint."""

    @property
    def updates(self) -> int:
        """Optimizer steps of all of them."""
