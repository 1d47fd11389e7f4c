"""The Protocol that every training backend keeps, and what it hands to a loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import LossOutput, Metrics


@dataclass(frozen=True)
class ForwardOutput:
    """What the current policy says about a (micro)batch, in the batch's own layout and of its
    `logprob_kind`.
    """

    token_logprobs: Float[Tensor, "batch seq"]
    entropy: Float[Tensor, "batch seq"]


LossFn = Callable[[ForwardOutput, TokenBatch], LossOutput]
"""A loss as a trainer sees it: pick the arrays that a pure loss function wants and call it.

Called once per microbatch; the outputs add (docs/numerics.md, Weighted sums).
"""


@runtime_checkable
class TrainingBackend(Protocol):
    """One model in training. tests/parallel/test_training_conformance.py is the contract that each
    one passes.

    From `setup` until `shutdown` its `model` is the live model, which an embedded generator shares.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """With a loaded model to train, or without one: then `setup` loads the one that the
        configuration names.
        """

    step: int
    """Optimizer steps begun so far: while it stands still the weights are as they were.

    Part of a checkpoint.
    """

    def setup(self, config: Any) -> None:
        """Load the model and make the optimizer. Called once, first."""

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """One optimizer step on a batch whose `loss_weights` were built for the whole of it.

        Returns the loss's metrics, and of its own loss, grad_norm (before clipping), lr and
        num_tokens (those that are not padding).
        """

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        """The current policy's token logprobs, without gradient, in the batch's layout and of its
        kind.
        """

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        """The same of the frozen reference model; an error where none was asked for."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name, one at a time; tied ones once."""

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """Write model, optimizer and schedule into the directory `path`.

        With `background` return as soon as training may go on.
        """

    def wait_for_checkpoint(self) -> None:
        """Return when what `save_checkpoint` was given last is on the disk.

        Raises what went wrong. Called from another thread than the rest.
        """

    def load_checkpoint(self, path: Path) -> None:
        """Take over what `save_checkpoint` wrote; the next step equals the one that would have
        followed.
        """

    def shutdown(self) -> None:
        """Free everything. The last call, made after a setup that failed, too."""
