"""What the built-in backends have in common: setup, outputs, checkpoints, and optimizer steps along
gradients that are added up over batches.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.accelerator import is_accelerator
from nemorl.checks import require
from nemorl.data.batch import TokenBatch, check_targets
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import (
    LossOutput,
    Metrics,
    Needs,
    in_main_memory,
    merge,
    needs_of,
    same_segment,
)
from nemorl.models.attention import without_cudnn_attention
from nemorl.models.causal_lm import load_causal_lm, on_meta
from nemorl.models.hub import weights_folder
from nemorl.parallel.backend import ForwardOutput, InTurns, LossFn, Output, require_loss_weights
from nemorl.parallel.backends import check_training
from nemorl.parallel.checkpoint import KIND, CheckpointWriter, Contents, Saved
from nemorl.parallel.config import BackendConfig, OptimizerConfig, OptimSettings
from nemorl.parallel.determinism import deterministic_kernels
from nemorl.parallel.layout import Cutting, Layout
from nemorl.parallel.measure import StepMeter, close_profile, of_step, profile_folder, profiled
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
        vectors = [p for p in of_mesh if p.ndim < 2]
        groups.append({"params": vectors, "weight_decay": 0.0, "decays": False})
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

    reducing = False
    """Whether ranks have begun to sum gradients in a backward pass, and have not waited yet."""

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

    free_gradients = zero_grad

    def step(self) -> None:
        for part in self.parts:
            part.step()


def set_step(
    given: OptimSettings | None, config: BackendConfig, step: int, groups: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Give an optimizer's groups a step's settings, and return these with the limit of the norm."""
    own, is_adamw = config.optimizer, all("betas" in group for group in groups)
    found = {name: x for name, x in vars(given or OptimSettings()).items() if x is not None}
    for name in found.keys() & {"beta1", "beta2", "eps"}:
        require(
            is_adamw,
            f"settings.{name}",
            f"must be None with optimizer.name {own.name}",
            found[name],
            "it has no such setting",
        )
    usual = {name: getattr(own, name) for name in vars(OptimSettings())}
    usual["lr"] = learning_rate(step, own, total_steps=config.total_steps)
    taken = {**usual, "max_grad_norm": own.max_grad_norm or math.inf, **found}
    for group in groups:
        group["lr"] = taken["lr"]
        group["weight_decay"] = taken["weight_decay"] * group.get("decays", True)
        if "betas" in group:
            group |= {"betas": (taken["beta1"], taken["beta2"]), "eps": taken["eps"]}
    return taken


def recorded(loss_fn: LossFn, kept: list[ForwardOutput]) -> LossFn:
    """Return a loss that keeps its log-probabilities."""

    def recording(output: ForwardOutput, rows: TokenBatch) -> LossOutput:
        kept.append(ForwardOutput(output.token_logprobs.detach()))
        return loss_fn(output, rows)

    return recording


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
        if (found := self._away.get(storage_of(local))) is None:
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


def load_whole(config: BackendConfig) -> nn.Module:
    """Load the model that the configuration names, on the CPU."""
    return load_causal_lm(
        config.model.path,
        from_scratch=config.model.from_scratch,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        head=config.head,
    )


def outline_of(config: BackendConfig, given: Any) -> tuple[Any, Any, Path | None]:
    """Return the model on the meta device, and where its weights are: a whole model on the CPU that
    is `given`, has random weights, or is merged with adapters; or else a folder of safetensors.
    """
    trust: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    folder = None
    if given is None and not config.model.from_scratch:
        folder = weights_folder(config.model.path, **trust)
    if given is None and folder is None:
        given = load_whole(config)
    source = str(folder) if given is None else given.config
    return on_meta(source, head=config.head, **trust), given, folder


def require_needs(needs: Needs, batch: TokenBatch, *, head: str, vocab_size: int) -> None:
    """Raise ValueError unless a model with this head has the outputs that `needs` names for a
    batch, and its targets are right.
    """
    wanted = "scalar" if needs.values else "lm"
    require(
        head == wanted,
        "the model's head",
        f"must be {wanted} for {' and '.join(needs.outputs)}",
        head,
        "load the backend with that head"
        + ", or declare @nemorl.needs(values=True)" * (not needs.values),
    )
    require(
        needs.top_k <= vocab_size,
        "needs.top_k",
        f"must be at most the vocabulary's {vocab_size}",
        needs.top_k,
        "ask for fewer tokens",
    )
    shape = None if batch.target_ids is None else tuple(batch.target_ids.shape)
    require(
        not needs.targets or len(shape or ()) == 3,
        "batch.target_ids",
        "must be [batch, seq, k] for a loss that needs targets",
        shape,
        "give each token k ids, as a teacher's likeliest ones, or leave targets=True out",
    )
    check_targets(batch, vocab_size=vocab_size)


def require_training(config: BackendConfig) -> None:
    """Raise ValueError unless the backend trains its model."""
    require(
        config.trains,
        "trains",
        "must be True for steps and checkpoints of a model",
        False,
        "omit trains=False where the backend is made",
    )


def whole_outputs(
    found: Sequence[ForwardOutput], layout: Layout, needs: Needs, world: World
) -> ForwardOutput:
    """Return a batch's outputs from the microbatches' that ranks have; a collective call."""
    outputs, rows = {}, layout.rows
    k = {"top_ids": [needs.top_k], "top_logprobs": [needs.top_k]}
    if needs.targets and rows.target_ids is not None:
        k["target_logprobs"] = [rows.target_ids.shape[2]]
    for name in needs.outputs:
        dtype = torch.int64 if name == "top_ids" else torch.float32
        shape = (*rows.input_ids.shape, *k.get(name, ()))
        placed = torch.zeros(shape, dtype=dtype, device=world.device)
        if found:
            placed = layout.place([getattr(each, name) for each in found], world.data_rank)
        if world.size > 1:
            placed = world.total(placed)
        outputs[name] = layout.restore(placed.to(rows.input_ids.device))
    return ForwardOutput(**outputs)


def merged_metrics(metrics: Metrics, measured: Metrics, world: World) -> Metrics:
    """Return the metrics of all rows, and what each rank measured; a collective call."""
    if world.size == 1:
        return {**metrics, **measured}
    if world.is_last_stage and world.cp_rank == world.tp_rank == 0:
        measured = {**metrics, **measured}
    return world.merge_objects(in_main_memory(measured), merge)


class Accumulating(InTurns, ABC):
    """A training backend but for what depends on how its model is spread. All ranks make the same
    calls with the same whole batches, and each gets the whole result.
    """

    traits: Any
    check: Any
    world: World
    _base: str
    """Fingerprint of the weights that the run began with."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.config = BackendConfig()
        self._given = model
        self._model: Any = None
        self._settings = ExitStack()
        """Settings of the process, restored by `shutdown` or the end of the backend."""
        weakref.finalize(self, self._settings.close)
        self.optimizer: Any = None
        self._is_whole = False
        """Whether the batch whose gradient is added is all of a step."""
        self._batches: list[TokenBatch] = []
        self._loss = torch.zeros(())
        self._copied = 0
        """Tokens that they did not compute again."""
        self._away = Offloaded()
        self._writer: CheckpointWriter | None = None
        self.step = 0

    def setup(self, config: BackendConfig) -> None:
        check_training(config, None, config.parallel, self)
        self.config = config
        profile_folder(config.profile)
        if config.trainer.deterministic:
            self._settings.enter_context(deterministic_kernels)
        # cuDNN makes a plan for each new shape, in 55 ms to 1 s, and most microbatches have one.
        self._settings.enter_context(without_cudnn_attention)
        self._load()
        if (initial := config.same_initial_model_as) is not None:
            Saved(initial, self.world).require_base(self._base)
        self._writer = CheckpointWriter(self.world)
        sizes = self.model.config, self.world.device, self.world.plan
        self.meter = StepMeter(*sizes, frozen_weights=bool(config.lora.rank))
        self._forget()
        torch.manual_seed(config.seed)

    @abstractmethod
    def _load(self) -> None:
        """Join the ranks; load the model and the reference, and make the optimizer."""

    @property
    def model(self) -> Any:
        """The live model, which a generator may share; asking for it ends `offload`."""
        self._away.restore()
        return self._loaded()

    def _loaded(self) -> Any:
        if self._model is None:
            raise RuntimeError(
                "the training backend has no model: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._model

    @property
    @abstractmethod
    def cutting(self) -> Cutting:
        """How batches are cut."""

    @property
    def place(self) -> tuple[int, int]:
        """Return the number of this rank's rows, and its place in the pipeline."""
        return self.world.data_rank, self.world.pp_rank

    @abstractmethod
    def _outputs(self, layout: Layout, needs: Needs, *, reference: bool) -> list[ForwardOutput]:
        """Return what this rank has of its microbatches' outputs."""

    @abstractmethod
    def _gradients(self, layout: Layout, loss_fn: LossFn, needs: Needs) -> tuple[Metrics, Tensor]:
        """Add the gradient, of microbatches in order; return own metrics and the whole loss."""

    @abstractmethod
    def _held(self, *, keep_weights: bool) -> Iterable[Tensor]:
        """Yield what is kept from call to call, with or without the parameters."""

    @abstractmethod
    def _contents(self) -> Contents:
        """Return what this rank writes of a checkpoint; a collective call."""

    @abstractmethod
    def _restore(self, saved: Saved) -> None:
        """Copy this rank's part of a checkpoint into model and optimizer."""

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """Write this rank's pieces of weights (rank 0: adapters) and optimizer state.
        `transformers` (with LoRA: PEFT) loads what one process writes.
        """
        require_training(self.config)
        assert self._writer is not None
        state, name = {"step": self.step, "base": self._base}, self.config.optimizer.name
        state |= {} if name == "adamw" else {KIND: name}
        with self.world.share_errors():
            self._away.restore()
        self._writer.save(self._contents(), path, state=state, background=background)

    def load_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        """Restore what either backend's `save_checkpoint` wrote, or its weights alone."""
        require_training(self.config)
        saved = Saved(path, self.world, optimizer=optimizer)
        saved.require_same(self.config)
        if self.config.lora.rank or self.config.keep_reference:
            saved.require_base(self._base)
        with self.world.share_errors():
            self._away.restore()
            self._restore(saved)
        # The weights that the run began with, whatever this backend was set up with.
        self.step, self._base = saved.state["step"] * optimizer, saved.state["base"]

    def wait_for_checkpoint(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def shutdown(self) -> None:
        close_profile(self.config.profile)
        if self._writer is not None:
            self._writer.close()
        self._model = self._given = self.optimizer = None
        self._away = Offloaded()
        self._settings.close()

    @abstractmethod
    def _grad_norm(self) -> Tensor:
        """Return the whole gradient's norm, once it is summed over ranks, before clipping."""

    @abstractmethod
    def _update(self, grad_norm: Tensor, limit: float) -> None:
        """Clip the gradient of this norm and change the weights."""

    def compute(self, batch: TokenBatch, needs: Needs, *, reference: bool = False) -> ForwardOutput:
        vocab_size = self._loaded().config.vocab_size
        require_needs(needs, batch, head=self.config.head, vocab_size=vocab_size)
        self._away.restore()
        # The reference model's routers choose by themselves: the sampler's were others.
        layout = self.cutting.own_layout(batch, self.place, replay=not reference)
        found = self._outputs(layout, needs, reference=reference)
        whole = whole_outputs(found, layout, needs, self.world)
        if needs.top_k:  # empty places elsewhere
            computed = batch.response_mask & same_segment(batch.segment_ids)
            whole.top_logprobs = whole.top_logprobs.masked_fill(~computed[..., None], -math.inf)
        return whole

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return Logprobs(self.compute(batch, Needs()).token_logprobs, batch.logprob_kind)

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        if not self.config.keep_reference:
            raise RuntimeError("no reference is kept: set up the backend with keep_reference=True")
        found = self.compute(batch, Needs(), reference=True).token_logprobs
        return Logprobs(found, batch.logprob_kind)

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        self._away.restore()
        self._restart()
        self._is_whole = True
        try:
            metrics = self.forward_backward(batch, loss_fn).metrics
        finally:
            self._is_whole = False
        return {**metrics, **self.optim_step()}

    def forward_backward(
        self, batch: TokenBatch, loss_fn: LossFn, *, token_logprobs: bool = False
    ) -> Output:
        """Add the gradient. Raises: RanksLost for an error while ranks sum gradients; any other
        error drops what was added since the last step.
        """
        require_training(self.config)
        self._away.restore()
        require_loss_weights(batch)
        needs, kept = needs_of(loss_fn), list[ForwardOutput]()
        vocab_size = self._loaded().config.vocab_size
        for each in (needs, Needs())[: 1 + token_logprobs]:
            require_needs(each, batch, head=self.config.head, vocab_size=vocab_size)
        if token_logprobs:
            loss_fn = recorded(loss_fn, kept)
        if not self._batches:
            self.meter.begin()
            self.optimizer.zero_grad()
        step, rank = self.step + 1, self.world.rank
        try:
            with profiled(self.config.profile, step=step, rank=rank, last=False):
                layout = self.cutting.own_layout(batch, self.place, replay=True)
                metrics, loss = self._gradients(layout, loss_fn, needs)
            merged, found = merged_metrics(metrics, {}, self.world), None
            if token_logprobs:
                found = whole_outputs(kept, layout, Needs(), self.world).token_logprobs
        except BaseException as error:
            if self.optimizer.reducing:
                raise RanksLost(
                    "the step failed while gradients were summed over ranks"
                    f" (parallel.overlap_grad_reduce), which ends the ranks: {error!r}"
                ) from error
            self._forget()
            raise
        self._batches, self._loss = [*self._batches, batch], self._loss + loss
        return Output(merged, found)

    def optim_step(self, settings: OptimSettings | None = None) -> Metrics:
        """Take the step. Raises: FloatingPointError, with unchanged weights, if loss or gradient is
        not finite.
        """
        require_training(self.config)
        if not self._batches:
            raise RuntimeError("optim_step needs a gradient: call forward_backward() first")
        self._away.restore()
        config, batches, loss, copied = self.config, self._batches, self._loss, self._copied
        taken = set_step(settings, config, self.step, self.optimizer.param_groups)
        self._restart()
        with profiled(config.profile, step=self.step + 1, rank=self.world.rank):
            grad_norm = self._grad_norm()
            require_finite(loss, grad_norm, step=self.step + 1)
            # Counted before the weights change: after an error in the update the step has begun.
            self.step += 1
            self._update(grad_norm, taken["max_grad_norm"])
            metrics = merged_metrics({}, self.meter.end(batches, copied=copied), self.world)
        return {**metrics, **of_step(batches, loss, grad_norm, taken["lr"])}

    def offload(self, *, keep_weights: bool = False) -> None:
        self._drop_gradients()
        held, kind = self._held(keep_weights=keep_weights), self.world.device.type
        self._away.take(tensor for tensor in held if tensor.device.type == kind)

    def empty_cache(self) -> None:
        self._drop_gradients()
        if is_accelerator(self.world.device):
            torch.get_device_module(self.world.device).empty_cache()

    def _drop_gradients(self) -> None:
        if self.optimizer is not None and not self._batches:
            self.optimizer.free_gradients()

    def _forget(self) -> None:
        self._restart()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _restart(self) -> None:
        self._batches, self._loss, self._copied = [], torch.zeros((), device=self.world.device), 0
