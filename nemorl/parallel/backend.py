"""The Protocol of training backends, and what they give to a loss."""

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
    """The current policy on a (micro)batch, in the batch's own layout and `logprob_kind`."""

    token_logprobs: Float[Tensor, "batch seq"]
    entropy: Float[Tensor, "batch seq"]


LossFn = Callable[[ForwardOutput, TokenBatch], LossOutput]
"""A loss as a trainer calls it: once per microbatch; the outputs add (docs/numerics.md)."""


@runtime_checkable
class TrainingBackend(Protocol):
    """One model in training. tests/parallel/test_training_conformance.py is the contract.

    From `setup` until `shutdown` its `model` is the live one, which an embedded generator shares.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """Take a loaded model to train; without one `setup` loads what the configuration names."""

    step: int
    """Optimizer steps begun: while it stands still, so do the weights. Part of a checkpoint."""

    def setup(self, config: Any) -> None:
        """Load the model and make the optimizer. The first call."""

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Take one optimizer step on a batch with `loss_weights` built for the whole of it:
        `forward_backward` and `optim_step` in a row.

        Returns: the loss's metrics, and loss, grad_norm (before clipping), lr and num_tokens
        (without padding).
        """

    def forward_backward(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Add the gradient of a batch's loss to that of the next `optim_step`; its `loss_weights`
        are those of the whole step. Returns the loss's metrics.
        """

    def optim_step(self) -> Metrics:
        """Take an optimizer step along the gradients added since the last one. Returns loss,
        grad_norm, lr and num_tokens.
        """

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        """Return the current policy's token logprobs, without gradient, in the batch's layout."""

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        """Return those of the frozen reference model; an error where none is kept."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter under its Hugging Face name, tied ones once."""

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """Write model, optimizer and schedule into the directory `path`.

        background: return as soon as training may go on.
        """

    def wait_for_checkpoint(self) -> None:
        """Return when the last `save_checkpoint` is on the disk. Raises what went wrong.

        Called from another thread than the other methods.
        """

    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote; the next step equals the one that would have
        followed.
        """

    def shutdown(self) -> None:
        """Free everything. The last call, made after a setup that failed, too."""
