"""The Protocol of training backends, and what they give to a loss."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from nemorl.checks import own_methods
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import LossOutput, Metrics


@dataclass(frozen=True)
class ForwardOutput:
    """The current policy on a (micro)batch, in the batch's own layout and `logprob_kind`; of the
    tokens in `loss_mask`, 0 elsewhere.
    """

    token_logprobs: Float[Tensor, "batch seq"]
    entropy: Float[Tensor, "batch seq"]


LossFn = Callable[[ForwardOutput, TokenBatch], LossOutput]
"""A loss as a trainer calls it: once per microbatch; the outputs add (docs/numerics.md)."""


@runtime_checkable
class TrainingBackend(Protocol):
    """One model in training. tests/parallel/test_training_conformance.py is the contract.

    A class with these methods is accepted; a run that needs one of `FullTrainingBackend` says so.
    From `setup` until `shutdown` its `model` is the live one, which an embedded generator shares.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """Take a loaded model to train; without one `setup` loads what the configuration names."""

    step: int
    """Optimizer steps begun: while it stands still, so do the weights. Part of a checkpoint. It is
    counted where a backend has none.
    """

    def setup(self, config: Any) -> None:
        """Load the model and make the optimizer. The first call."""

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Take one optimizer step on a batch with `loss_weights` built for the whole of it:
        `forward_backward` and `optim_step` in a row.

        Returns: the loss's metrics, and loss, grad_norm (before clipping), lr and num_tokens
        (without padding).
        """

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        """Return the current policy's token logprobs, without gradient, in the batch's layout; of
        the tokens in `response_mask`.
        """

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """Write model, optimizer and schedule into the directory `path`.

        background: return as soon as training may go on; with `wait_for_checkpoint` only.
        """

    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote; the next step equals the one that would have
        followed.
        """

    def shutdown(self) -> None:
        """Free everything. The last call, made after a setup that failed, too."""


@runtime_checkable
class FullTrainingBackend(TrainingBackend, Protocol):
    """A training backend with every method that some run needs."""

    def forward_backward(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Add the gradient of a batch's loss to that of the next `optim_step`; its `loss_weights`
        are those of the whole step. Returns the loss's metrics.
        """

    def optim_step(self) -> Metrics:
        """Take an optimizer step along the gradients added since the last one. Returns loss,
        grad_norm, lr and num_tokens.
        """

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        """Return those of the frozen reference model; an error where none is kept."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter under its Hugging Face name, tied ones once."""

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move what training keeps on the device to main memory, for a generator to use the device.
        It is back with the next use of `model` and of all methods but `weights`.

        keep_weights: the generator computes with the live model.
        """

    def wait_for_checkpoint(self) -> None:
        """Return when the last `save_checkpoint` is on the disk. Raises what went wrong.

        Called from another thread than the other methods.
        """


def require_loss_weights(batch: TokenBatch) -> None:
    """Raise ValueError for a batch that can't be trained on."""
    if batch.loss_weights is None:
        raise ValueError(
            "batch.loss_weights must be given to train, but they are None: build them for the"
            " whole step, as with token_mean_weights(batch.loss_mask)"
        )


NEEDED = (
    "setup",
    "train_step",
    "get_logprobs",
    "save_checkpoint",
    "load_checkpoint",
    "shutdown",
)
"""The methods without which a class is no training backend."""


def check_training_backend(cls: type) -> None:
    """Raise ValueError for a class that lacks one of the `NEEDED` methods."""
    if missing := [name for name in NEEDED if name not in own_methods(cls, TrainingBackend)]:
        raise ValueError(
            f"a training backend must have the methods {', '.join(NEEDED)}, but {cls.__name__} has"
            f" no {', '.join(missing)}: add what is missing"
        )


def as_training_backend(backend: Any) -> Any:
    """Return a backend that may have only the `NEEDED` methods in the form that loops use: with
    `step`, `Logprobs`, and no method that would do nothing.
    """
    complete = own_methods(backend, FullTrainingBackend) >= own_methods(FullTrainingBackend, object)
    return backend if complete and hasattr(backend, "step") else SmallBackend(backend)


class SmallBackend:
    """A backend that has few methods. A `step` that it has not is counted, and is part of its
    checkpoints; a tensor from get_logprobs has the batch's `logprob_kind`. A method that it lacks
    is an AttributeError.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self._count = inner, 0
        self._has = own_methods(inner, FullTrainingBackend)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner")
        if name in vars(FullTrainingBackend) and name not in self._has:
            raise AttributeError(f"the training backend {type(inner).__name__} has no {name}()")
        if name == "get_reference_logprobs":
            return partial(self._logprobs, name)
        return getattr(inner, name)

    @property
    def step(self) -> int:
        return getattr(self.inner, "step", self._count)

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Any:
        metrics = self.inner.train_step(batch, loss_fn)
        self._count += 1
        return metrics

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._logprobs("get_logprobs", batch)

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        options = {"background": True} if background else {}
        self.inner.save_checkpoint(path, **options)
        if not hasattr(self.inner, "step"):
            (path / "step.json").write_text(json.dumps(self.step))

    def load_checkpoint(self, path: Path) -> None:
        self.inner.load_checkpoint(path)
        if not hasattr(self.inner, "step"):
            self._count = json.loads((path / "step.json").read_bytes())

    def _logprobs(self, method: str, batch: TokenBatch) -> Logprobs:
        found = getattr(self.inner, method)(batch)
        return found if isinstance(found, Logprobs) else Logprobs(found, batch.logprob_kind)
