"""What the built-in backends have in common: outputs, and optimizer steps along gradients that are
added up over batches.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.accelerator import is_accelerator
from nemorl.checks import require
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import Metrics, Needs, in_main_memory, merge, needs_of
from nemorl.parallel.backend import ForwardOutput, InTurns, LossFn, require_loss_weights
from nemorl.parallel.checkpoint import CheckpointWriter
from nemorl.parallel.config import BackendConfig, OptimizerConfig
from nemorl.parallel.layout import Cutting
from nemorl.parallel.measure import StepMeter, of_step, profiled
from nemorl.parallel.world import RanksLost, World


def learning_rate(step: int, config: OptimizerConfig, *, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0: a linear warm-up, then constant, or
    linear or cosine decay.

    The rate falls to `min_lr_ratio · lr` one step after the last one, so that every step trains.
    After the warm-up this is transformers' `get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup`, whose own warm-up is one step behind.

    >>> config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    >>> [learning_rate(step, config, total_steps=6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    fall = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Make AdamW of parameters, with weight decay on those that are matrices.

    Parameters on different device meshes are in different groups: no operation takes both.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for of_mesh in by_mesh.values() or [[]]:
        matrices = [p for p in of_mesh if p.ndim >= 2]
        groups.append({"params": matrices, "weight_decay": config.weight_decay})
        groups.append({"params": [p for p in of_mesh if p.ndim < 2], "weight_decay": 0.0})
    fused = config.implementation == "fused"
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=not fused,
    )


State = dict[nn.Parameter, dict[str, Tensor]]


class Optimizers:
    """Several optimizers as one, each of parameters of its own."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> State:
        return {key: value for part in self.parts for key, value in part.state.items()}

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        for part in self.parts:
            part.step()


def require_finite(loss: Float[Tensor, ""], grad_norm: Float[Tensor, ""], *, step: int) -> None:
    """Raise FloatingPointError unless both are finite, before a weight changes.

    step: of the optimizer, from 1.
    """
    if bool(loss.isfinite() & grad_norm.isfinite()):
        return
    name, value = ("gradient's norm", grad_norm) if bool(loss.isfinite()) else ("loss", loss)
    raise FloatingPointError(
        f"the {name} of optimizer step {step} must be finite, but it is {float(value)}: the weights"
        " were left as they are; look for extreme advantages or logprobs, or lower optimizer.lr"
    )


class Offloaded:
    """Moves the memory of tensors to main memory, pinned for a GPU's, and back. Tensors and views
    stay the same objects, but nothing may compute with them until `restore`.
    """

    def __init__(self) -> None:
        self._away: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(len(copy) for _, copy in self._away.values())

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._away

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors, which may share memory or be away already."""
        taken = {}
        for storage in (local_part(tensor).untyped_storage() for tensor in tensors):
            if storage.nbytes() and storage._cdata not in taken:
                pinned = is_accelerator(storage.device)
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                taken[storage._cdata] = storage, copy.copy_(_bytes(storage), non_blocking=True)
        self._away |= taken
        devices = {storage.device for storage, _ in self._away.values()}
        modules = [torch.get_device_module(device) for device in devices if is_accelerator(device)]
        for module in modules:
            module.synchronize()
        for storage, _ in taken.values():
            storage.resize_(0)
        for module in modules:
            module.empty_cache()

    def restore(self) -> None:
        """Move everything back, bit for bit. May be repeated after an error for lack of memory."""
        for storage, copy in self._away.values():
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)
        self._away.clear()

    def present(self, tensor: Tensor) -> Tensor:
        """Return a new tensor on the device, equal to one that is away; any other as it is."""
        local = local_part(tensor)
        found = self._away.get(storage_of(local))
        if found is None:
            return tensor
        # The storage may be a buffer of many parameters: only this one's part is copied.
        whole = found[1].view(local.dtype)
        part = whole.as_strided(local.shape, local.stride(), local.storage_offset())
        part = part.to(local.device, copy=True)
        if not isinstance(tensor, DTensor):
            return part
        return DTensor.from_local(
            part,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage of what this rank holds of a tensor."""
    return local_part(tensor).untyped_storage()._cdata


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


NO_MODEL = "the training backend has no model: call setup() first, and nothing after shutdown()"


class Accumulating(InTurns, ABC):
    """`train_step` and its halves, and `compute` and its cases, of a rank or a process."""

    world: World
    meter: StepMeter

    def __init__(self) -> None:
        self.config = BackendConfig()
        self._settings = ExitStack()
        """Settings of the process, restored by `shutdown` or the end of the backend."""
        weakref.finalize(self, self._settings.close)
        self.optimizer: Any = None
        self._is_whole = False
        """Whether the batch whose gradient is added is all of a step."""
        self._batches: list[TokenBatch] = []
        self._loss = torch.zeros(())
        """Loss of these batches."""
        self._copied = 0
        """Tokens that they did not compute again."""
        self._away = Offloaded()
        self._writer: CheckpointWriter | None = None
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

    def wait_for_checkpoint(self) -> None:
        if self._writer is not None:
            self._writer.wait()

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
        fits = needs.values == (self.config.head == "scalar")
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

        Raises: RanksLost for an error while ranks sum gradients.
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
            measured = self.meter.end(batches, copied=copied)
        return {**self._merged({}, measured), **of_step(batches, loss, grad_norm, lr)}

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move parameters, gradients, optimizer state and the reference model to main memory until
        a method other than `weights`.
        """
        self._drop_gradients()
        held, kind = self._held(keep_weights=keep_weights), self.world.device.type
        self._away.take(tensor for tensor in held if tensor.device.type == kind)

    def empty_cache(self) -> None:
        """Free gradients along which a step was taken, and what PyTorch caches of the GPU."""
        self._drop_gradients()
        if is_accelerator(self.world.device):
            torch.get_device_module(self.world.device).empty_cache()

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
        if self.world.size == 1:
            return {**metrics, **measured}
        first = self.world.is_last_stage and self.world.cp_rank == self.world.tp_rank == 0
        own = {**metrics, **measured} if first else measured
        return self.world.merge_objects(in_main_memory(own), merge)
