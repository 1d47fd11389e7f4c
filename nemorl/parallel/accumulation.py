"""What the built-in backends have in common: outputs of a model, and optimizer steps along
gradients that are added up over batches.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from nemorl.accelerator import is_accelerator, module_of
from nemorl.checks import require
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import Metrics, Needs, in_main_memory, merge, needs_of
from nemorl.models.causal_lm import is_scalar
from nemorl.parallel.backend import ForwardOutput, LossFn, require_loss_weights
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.layout import Cutting
from nemorl.parallel.measure import StepMeter, of_step, profiled
from nemorl.parallel.optimizer import Offloaded, learning_rate, require_finite
from nemorl.parallel.world import RanksLost, World


class Accumulating(ABC):
    """`train_step` and its two halves, `compute` and its cases, of a rank or a single process."""

    world: World
    meter: StepMeter

    def __init__(self) -> None:
        self.config = BackendConfig()
        self._settings = ExitStack()
        """Settings of the process, restored by `shutdown`, or where nobody has the backend."""
        weakref.finalize(self, self._settings.close)
        self.optimizer: Any = None
        self._is_whole = False
        """Whether the batch whose gradient is added is all of a step."""
        self._batches: list[TokenBatch] = []
        self._loss = torch.zeros(())
        """Loss whose gradient no step was taken along yet."""
        self._copied = 0
        """Tokens that these microbatches did not compute again."""
        self._away = Offloaded()
        self.step = 0

    @property
    @abstractmethod
    def model(self) -> Any:
        """The model that trains. Raises RuntimeError before `setup` and after `shutdown`."""

    @property
    @abstractmethod
    def cutting(self) -> Cutting:
        """How batches are cut."""

    @property
    def place(self) -> tuple[int, int]:
        """Return the number of this rank's rows, and its place in the pipeline."""
        return self.world.data_rank, self.world.pp_rank

    @abstractmethod
    def _compute(
        self, batch: TokenBatch, needs: Needs, *, reference: bool = False
    ) -> ForwardOutput:
        """Return what `compute` does; with `reference` of the initial model, which is kept."""

    @abstractmethod
    def _gradients(
        self, batch: TokenBatch, loss_fn: LossFn, needs: Needs
    ) -> tuple[Metrics, Tensor]:
        """Add the gradient; return the metrics of this rank's rows and the whole loss."""

    @abstractmethod
    def _held(self, *, keep_weights: bool) -> Iterable[Tensor]:
        """Yield what is kept from call to call, with or without the parameters."""

    @property
    def _reducing(self) -> bool:
        """Whether ranks have begun to sum gradients in a backward pass, and have not waited yet."""
        return False

    @abstractmethod
    def _grad_norm(self) -> Tensor:
        """Return the whole gradient's norm, once it is summed over ranks, before clipping."""

    @abstractmethod
    def _update(self, grad_norm: Tensor, lr: float) -> None:
        """Change the weights."""

    def compute(self, batch: TokenBatch, needs: Needs) -> ForwardOutput:
        self._away.restore()
        self._require_head(needs)
        return self._compute(batch, needs)

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return Logprobs(self.compute(batch, Needs()).token_logprobs, batch.logprob_kind)

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        if not self.config.keep_reference:
            raise RuntimeError(
                "no reference model is kept: set up the backend with keep_reference=True"
            )
        self._away.restore()
        output = self._compute(batch, Needs(), reference=True)
        return Logprobs(output.token_logprobs, batch.logprob_kind)

    def _require_training(self) -> None:
        requirement = "must be True for steps and checkpoints of a model"
        remedy = "omit trains=False where the backend is made"
        require(self.config.trains, "trains", requirement, False, remedy)

    def _require_head(self, needs: Needs) -> None:
        wanted, head = ("scalar", "lm") if needs.values else ("lm", "scalar")
        remedy = "load the backend with that head"
        if not needs.values:
            remedy += ", or declare @nemorl.needs(values=True)"
        requirement = f"must be {wanted} for {' and '.join(needs.outputs)}"
        fits = needs.values == is_scalar(self.model)
        require(fits, "the model's head", requirement, head, remedy)

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Take an optimizer step on a batch alone."""
        self._away.restore()
        self._restart()
        self._is_whole = True
        try:
            metrics = self.forward_backward(batch, loss_fn)
        finally:
            self._is_whole = False
        return {**metrics, **self.optim_step()}

    def forward_backward(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Add the gradient of a batch's loss; an error drops what was added since the last step.

        Raises: RanksLost for an error while ranks sum gradients: each may have begun another number
        of sums.
        """
        self._require_training()
        self._away.restore()
        require_loss_weights(batch)
        needs = needs_of(loss_fn)
        self._require_head(needs)
        if not self._batches:
            self.meter.begin()
            self._zero_grad()
        step, rank = self.step + 1, self.world.rank
        try:
            with profiled(self.config.profile, step=step, rank=rank, last=False):
                metrics, loss = self._gradients(batch, loss_fn, needs)
            merged = self._merged(metrics, {})
        except BaseException as error:
            if self._reducing:
                raise RanksLost(
                    "the step failed while gradients were summed over ranks"
                    f" (parallel.overlap_grad_reduce), which ends the ranks: {error!r}"
                ) from error
            self._forget()
            raise
        self._batches, self._loss = [*self._batches, batch], self._loss + loss
        return merged

    def optim_step(self) -> Metrics:
        """Take an optimizer step along the gradients added since the last one.

        Raises: FloatingPointError, with the weights unchanged, if loss or gradient is not finite.
        """
        self._require_training()
        if not self._batches:
            raise RuntimeError("optim_step needs a gradient: call forward_backward() first")
        self._away.restore()
        config, batches, loss, copied = self.config, self._batches, self._loss, self._copied
        self._restart()
        with profiled(config.profile, step=self.step + 1, rank=self.world.rank):
            grad_norm = self._grad_norm()
            require_finite(loss, grad_norm, step=self.step + 1)
            lr = learning_rate(self.step, config.optimizer, total_steps=config.total_steps)
            # Counted before the weights change: after an error in the update the step has begun.
            self.step += 1
            self._update(grad_norm, lr)
            measured = self.meter.end(batches, copied=copied / self.world.plan.model_ranks)
        return {**self._merged({}, measured), **of_step(batches, loss, grad_norm, lr)}

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move parameters, gradients, optimizer state and the reference model to main memory, until
        any method but `weights` uses them.
        """
        self._drop_gradients()
        held, kind = self._held(keep_weights=keep_weights), self.world.device.type
        self._away.take(tensor for tensor in held if tensor.device.type == kind)

    def empty_cache(self) -> None:
        """Free gradients along which a step was taken, and what PyTorch caches of the GPU."""
        self._drop_gradients()
        if is_accelerator(self.world.device):
            module_of(self.world.device).empty_cache()

    def _drop_gradients(self) -> None:
        if not self._batches:
            self._zero_grad()

    def _zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _forget(self) -> None:
        self._restart()
        self._zero_grad()

    def _restart(self) -> None:
        self._batches, self._loss, self._copied = [], torch.zeros((), device=self.world.device), 0

    def _merged(self, metrics: Metrics, measured: Metrics) -> Metrics:
        first = self.world.is_last_stage and self.world.cp_rank == self.world.tp_rank == 0
        own = {**metrics, **measured} if first else measured
        return own if self.world.size == 1 else self.world.merge_objects(in_main_memory(own), merge)
