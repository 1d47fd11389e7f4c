"""The Protocol of training backends, and what they give to a loss."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from nemorl.checks import has_own
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import LossOutput, Metrics, Needs, PerToken
from nemorl.parallel.config import OptimSettings
from nemorl.parallel.plan import TrainingTraits

REMEDIES = {
    "token_logprobs": "remove values=True from its needs, or read output.values",
    "entropy": "declare it with @nemorl.needs(entropy=True)",
    "values": "declare them with @nemorl.needs(values=True)",
    **dict.fromkeys(Needs(top_k=1).outputs[1:], "declare it with @nemorl.needs(top_k=…)"),
    **dict.fromkeys(Needs(targets=True).outputs[1:], "declare it with @nemorl.needs(targets=True)"),
}
"""How a loss gets each output of a model."""


class ForwardOutput:
    """A model's outputs for a batch, each of shape (batch, seq) or (batch, seq, k): what a loss
    reads.

    Index t belongs to token t of `input_ids`; 0 where nothing was computed. Reading an output that
    the loss's `Needs` does not name raises AttributeError, which says how to declare it.

    >>> import torch
    >>> ForwardOutput(torch.zeros(1, 2)).token_logprobs.tolist()
    [[0.0, 0.0]]
    """

    token_logprobs: PerToken
    """log p(x_t | x_<t) under the batch's `logprob_kind`; of a batch with targets, theirs."""
    entropy: PerToken
    """Entropy of the distribution that token t is drawn from, in nats."""
    values: PerToken
    """Value of the text before token t, x_<t, by a scalar head."""
    top_ids: Int[Tensor, "batch seq k"]
    """The k likeliest tokens in the place of token t, likeliest first."""
    top_logprobs: Float[Tensor, "batch seq k"]
    """Their log-probabilities; `compute` gives -inf where nothing was computed."""
    top_rest_logprobs: PerToken
    """Log of the probability of all other tokens; -inf, with gradient 0, where there are none."""
    target_logprobs: Float[Tensor, "batch seq k"]
    """Log-probabilities of the batch's `target_ids`; -inf, with gradient 0, outside a filter's
    support.
    """
    target_rest_logprobs: PerToken
    """Log of the probability of all tokens but the `target_ids`, as `top_rest_logprobs`."""

    def __init__(
        self,
        token_logprobs: PerToken | None = None,
        entropy: PerToken | None = None,
        **others: Tensor | None,
    ) -> None:
        found = {"token_logprobs": token_logprobs, "entropy": entropy, **others}
        if unknown := found.keys() - REMEDIES.keys():
            raise TypeError(f"ForwardOutput has no outputs {sorted(unknown)}: use {list(REMEDIES)}")
        vars(self).update({name: each for name, each in found.items() if each is not None})

    def __getattr__(self, name: str) -> Any:
        if name in REMEDIES:
            raise AttributeError(
                f"the loss did not say that it needs {name}: {REMEDIES[name]}. If it did, its"
                f" training backend has to make ForwardOutput({name}=…)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass(frozen=True)
class Output:
    """What `forward_backward` returns."""

    metrics: Metrics
    token_logprobs: PerToken | None = None
    """Of the pass that made the gradient, on request; 0 off the loss mask."""


LossFn = Callable[[ForwardOutput, TokenBatch], LossOutput]
"""A loss as a trainer calls it: once per microbatch; the outputs add (docs/numerics.md). What it
reads besides log-probabilities it declares with `nemorl.needs`.
"""


@runtime_checkable
class TrainingBackend(Protocol):
    """One model in training; tests/parallel/test_training_conformance.py is the contract.

    A class with these methods is accepted; a run that needs one of `FullTrainingBackend` says so.
    From `setup` until `shutdown` its `model` is the live one.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """Take a loaded model to train; without one `setup` loads what the configuration names."""

    step: int
    """Optimizer steps begun, part of a checkpoint; the weights change with it alone. A backend
    without it is wrapped (`SmallBackend`).
    """

    def setup(self, config: Any) -> None:
        """Load the model and make the optimizer. The first call."""

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Take one optimizer step on a batch whose `loss_weights` are built for the whole of it.

        Returns: the loss's metrics, and loss, grad_norm (before clipping), lr and num_tokens
        (without padding).
        """

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        """Return the log-probability of each token in `response_mask` under the current model,
        without gradient, in the batch's layout; 0 elsewhere.
        """

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """Write model, optimizer and schedule into the directory `path`.

        background: return as soon as training may go on; with `wait_for_checkpoint` only.
        """

    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote; the next step equals the uninterrupted one."""

    def shutdown(self) -> None:
        """Free everything. The last call, made after a setup that failed, too."""


@runtime_checkable
class FullTrainingBackend(TrainingBackend, Protocol):
    """A training backend with every method that some run needs."""

    def forward_backward(
        self, batch: TokenBatch, loss_fn: LossFn, *, token_logprobs: bool = False
    ) -> Output:
        """Add the gradient of a batch's loss to the gradient of the next `optim_step`. The batch's
        `loss_weights` are built for the whole step.

        token_logprobs: return the ones that the loss got, without a second pass.
        """

    def optim_step(self, settings: OptimSettings | None = None) -> Metrics:
        """Take an optimizer step along the gradients added since the last one. Returns loss,
        grad_norm, lr and num_tokens.

        settings: of this step alone. Raises: ValueError for one that the optimizer does not have.
        """

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        """Return each token's log-probability, of shape (batch, seq), under the initial model.

        Raises: RuntimeError unless the backend was set up with `keep_reference`.
        """

    def compute(self, batch: TokenBatch, needs: Needs) -> ForwardOutput:
        """Return the outputs that `needs` names for each token in `response_mask`, without
        gradient. `get_logprobs` is the case `Needs()`.

        Raises: ValueError for log-probabilities of a scalar head, values of a language model, top_k
        above the vocabulary, and targets of a batch without k `target_ids` at each place.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter under its Hugging Face name, tied ones once, adapters merged. With
        generation.adapter_rank it gets `adapters`, apart or alone, as in `merged_tensors`.
        """

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move what training keeps on the device to main memory, until the next use of `model` or
        of any method but `weights`.

        keep_weights: the generator computes with the live model.
        """

    def empty_cache(self) -> None:
        """Free unused memory of the device for another process."""

    def wait_for_checkpoint(self) -> None:
        """Return when the last `save_checkpoint` is on the disk; called from another thread.
        Raises what went wrong.
        """


def require_loss_weights(batch: TokenBatch) -> None:
    """Raise ValueError for a batch that can't be trained on."""
    if batch.loss_weights is None:
        raise ValueError(
            "batch.loss_weights must be given to train, but they are None: build them for the"
            " whole step, as with token_mean_weights(batch.loss_mask)"
        )


WAITING = {name for name in dir(FullTrainingBackend) if name[0] != "_"} - {
    "setup",
    "shutdown",
    "wait_for_checkpoint",
    "weights",
}
"""Methods of a training backend that wait while another thread reads its weights."""


class InTurns:
    """A training backend whose weights another thread may read: `WAITING` methods of subclasses
    hold `turn`, and so does the reader.
    """

    turn: threading.RLock

    def __new__(cls, *args: Any, **options: Any) -> Any:
        made = super().__new__(cls)
        made.turn = threading.RLock()
        return made

    def __init_subclass__(cls) -> None:
        for name in WAITING & vars(cls).keys():
            setattr(cls, name, _in_turn(vars(cls)[name]))


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: InTurns, *args: Any, **options: Any) -> Any:
        with self.turn:
            return method(self, *args, **options)

    return call


NEEDED = ("setup", "train_step", "get_logprobs", "save_checkpoint", "load_checkpoint", "shutdown")
TO_GENERATE = ("open_engine", "decode", "take_weights")
"""The methods that ranks which sample have, too."""


def check_training_backend(cls: type) -> None:
    """Raise ValueError for a class that lacks one of the `NEEDED` methods, or of those that its
    traits promise.
    """
    generates = getattr(cls, "traits", TrainingTraits()).generates
    for names, kind in ((NEEDED, ""), (TO_GENERATE * generates, " whose traits say generates")):
        if missing := [name for name in names if not has_own(cls, name, TrainingBackend)]:
            raise ValueError(
                f"a training backend{kind} must have the methods {', '.join(names)}, but"
                f" {cls.__name__} has no {', '.join(missing)}: add what is missing"
            )


def as_training_backend(backend: Any) -> Any:
    """Return `backend` if it is `InTurns`, else a `SmallBackend` around it."""
    return backend if isinstance(backend, InTurns) else SmallBackend(backend)


class SmallBackend(InTurns):
    """Adapts a backend with the `NEEDED` methods, or more, to `FullTrainingBackend` and `InTurns`.

    Counts optimizer steps, also in checkpoints, if the backend has no `step`; wraps
    log-probabilities in `Logprobs` of the batch's `logprob_kind`, metrics of `forward_backward` in
    `Output`. Lacking `weights` are those of its `model`, if any; other methods AttributeErrors.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self._count = inner, 0

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner")
        lacks = name in vars(FullTrainingBackend) and not has_own(inner, name, FullTrainingBackend)
        if lacks and name == "weights" and hasattr(inner, "model"):
            return self._weights
        if lacks:
            raise AttributeError(f"the training backend {type(inner).__name__} has no {name}()")
        if name in ("get_logprobs", "get_reference_logprobs"):
            return partial(self._logprobs, name)
        found = getattr(inner, name)
        if name == "forward_backward":
            return partial(self._output, found)
        return partial(self._hold, found) if name in WAITING else found

    @property
    def step(self) -> int:
        return getattr(self.inner, "step", self._count)

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Any:
        metrics = self.inner.train_step(batch, loss_fn)
        self._count += 1
        return metrics

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
        found = self._hold(getattr(self.inner, method), batch)
        return found if isinstance(found, Logprobs) else Logprobs(found, batch.logprob_kind)

    def _output(self, method: Callable[..., Any], *args: Any, **options: Any) -> Output:
        found = self._hold(method, *args, **options)
        return found if isinstance(found, Output) else Output(found)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, each.detach()) for name, each in self.inner.model.named_parameters())

    def _hold(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self.turn:
            return method(*args, **options)
