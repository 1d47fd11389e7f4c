"""`TrainingBackend` "dtensor": a Hugging Face causal language model in training, in one process or spread over many."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nemorl.checks import require
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import Mean, Metrics, Sum, merge
from nemorl.models.adapters import (
    CONFIG,
    has_adapters,
    merge_adapters,
    merged_tensors,
    require_peft,
)
from nemorl.models.causal_lm import check_supported, load_causal_lm, usable_device
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.determinism import use_deterministic_kernels
from nemorl.parallel.dtensor.attention import ATTENTION_NAME, register_attention
from nemorl.parallel.dtensor.build import build, export
from nemorl.parallel.dtensor.checkpoint import (
    CheckpointWriter,
    load_optimizer,
    load_state,
    load_weights,
)
from nemorl.parallel.dtensor.head import plain_logprobs, sharded_logprobs
from nemorl.parallel.dtensor.lora import (
    adapters_off,
    add_adapters,
    check_base,
    check_initial,
    fingerprint,
)
from nemorl.parallel.dtensor.mesh import World, is_started_as_rank
from nemorl.parallel.dtensor.optimizer import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    require_finite,
)
from nemorl.parallel.layout import Layout, cut
from nemorl.parallel.measure import StepMeter
from nemorl.parallel.profiling import close_profile, profile_folder, profiled
from nemorl.rollout.random import derive_seed


class DTensorBackend:
    """Give it a loaded model, or let `setup` load the one that the configuration names. Parameters
    and optimizer state are float32.

    In a process by itself the model consists of plain tensors. In one that was started as a rank
    (see `mesh.is_started_as_rank`) it is spread as `config.parallel` says: every rank makes the
    same calls with the same arguments, whole batches among them, and each gets the whole result.

    Dropout, where a model or its adapters have any, is on in `train_step` and off in
    `get_logprobs`.

    With LoRA (`config.lora.rank` above 0) only adapters train: checkpoints hold them alone, the
    reference is the model without them, exported weights have them merged, and the model that is
    handed back is a plain one with them merged.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._given = model
        self._model: nn.Module | None = None
        self._reference: nn.Module | None = None
        self._restore: list[Callable[[], None]] = []
        self._writer: CheckpointWriter | None = None
        self.step = 0

    def setup(self, config: BackendConfig) -> None:
        self.config = config
        if config.lora.rank:
            require_peft("lora.rank")
        profile_folder(config.profile)
        if config.trainer.deterministic:
            self._restore.append(use_deterministic_kernels())
        if self._given is not None and has_adapters(self._given):
            raise ValueError(
                "model must be a plain one, but it has PEFT adapters: merge them first"
                " (merge_and_unload()); lora.rank gives it new ones"
            )
        if is_started_as_rank():
            self._set_up_sharded()
        else:
            self._set_up_plain()
        model = self.model
        if config.same_initial_model_as is not None:
            check_initial(
                load_state(config.same_initial_model_as)["base"],
                self._base,
                config.same_initial_model_as,
            )
        self.optimizer = make_optimizer(model, config.optimizer)
        self._writer = CheckpointWriter(self.world)
        self.meter = StepMeter(
            model.config, self.device, self.world.size, frozen_weights=bool(config.lora.rank)
        )
        torch.manual_seed(config.seed)

    def _set_up_plain(self) -> None:
        config = self.config
        plan = config.parallel.on(1)
        require(not plan.needs_ranks, "parallel", "with compile, cpu_offload or selective checkpointing needs a process started as a rank", plan,
                "torchrun --nproc-per-node 1 starts one, and so does nemorl by itself")  # fmt: skip
        self.device = usable_device(config.trainer.device)
        self.world = World.alone(self.device, plan)
        model = self._given
        if model is None:
            model = load_causal_lm(
                config.model.path,
                from_scratch=config.model.from_scratch,
                seed=config.seed,
                device=self.device,
            )
        check_supported(model)
        model = model.to(device=self.device, dtype=torch.float32)
        self._found = (
            model.config._attn_implementation,
            model.training,
            [p for p in model.parameters() if p.requires_grad],
        )  # type: ignore[union-attr]
        self._model = model  # from here on shutdown() has something to undo
        self._base = fingerprint(model)
        if config.lora.rank:
            add_adapters(
                model,
                config.lora,
                base=_lasting_name(config.model.path or getattr(model, "name_or_path", "")),
                seed=config.seed,
            )
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        if plan.activation_checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if config.keep_reference and not config.lora.rank:
            self._reference = copy.deepcopy(model).eval().requires_grad_(False)

    def _set_up_sharded(self) -> None:
        config = self.config
        self.world = World.of(
            config.parallel, config.trainer.device, timeout_s=config.collective_timeout_s
        )
        self.device = self.world.device
        self._model = build(config, self.world, given=self._given)
        self._base = fingerprint(self._model)
        if config.keep_reference and not config.lora.rank:
            self._reference = build(config, self.world, given=self._given, frozen=True).eval()
        self._given = None

    @property
    def model(self) -> nn.Module:
        """The live model: a generator in the same process shares it, unless its parameters are
        shards.
        """
        if self._model is None:
            raise RuntimeError(
                "the training backend has no model: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._model

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Raises FloatingPointError, before the weights are touched, if the loss or a gradient is
        not finite.
        """
        if batch.loss_weights is None:
            raise ValueError(
                "train_step needs batch.loss_weights, but they are None: build them for the whole"
                " step, as with token_mean_weights(batch.loss_mask)"
            )
        with profiled(self.config.profile, step=self.step + 1, rank=self.world.rank):
            self.meter.begin()
            metrics, loss = self._gradients(batch, loss_fn)
            grad_norm = self._clip()
            require_finite(loss, grad_norm, step=self.step + 1)
            lr = learning_rate(
                self.step, self.config.optimizer, total_steps=self.config.total_steps
            )
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.step += 1  # before the weights change: an error in the midst of it must not pass for a step not begun
            self.optimizer.step()
            metrics = {**metrics, **self._merged(self.meter.end(batch), data_ranks_only=False)}
        one, lr_now, num_tokens = (
            torch.tensor(float(value)) for value in (1, lr, batch.num_tokens)
        )
        return {
            **metrics,
            "loss": Mean(loss, one),
            "grad_norm": Mean(grad_norm, one),
            "lr": Mean(lr_now, one),
            "num_tokens": Sum(num_tokens),
        }

    def _gradients(self, batch: TokenBatch, loss_fn: LossFn) -> tuple[Metrics, Tensor]:
        """Put the batch's gradient into the parameters; its metrics and loss, summed over
        microbatches and ranks.
        """
        model, world = self.model.train(), self.world
        self.optimizer.zero_grad(set_to_none=True)
        if world.sharded:
            torch.manual_seed(
                derive_seed(self.config.seed, self.step, world.data_rank, world.cp_rank)
            )  # dropout: the same in a resumed run
        metrics: Metrics = {}
        loss = torch.zeros((), device=self.device)
        with self._gathering(model):
            for part in map(self._to_device, self._cut(batch).parts(world.data_rank)):
                logprobs, entropy = self._forward(model, part, with_entropy=True)
                assert entropy is not None
                output = loss_fn(ForwardOutput(logprobs, entropy), part)
                output.loss.backward()
                metrics, loss = merge(metrics, output.metrics), loss + output.loss.detach()
        if world.data_group is not None:
            dist.all_reduce(loss, group=world.data_group)
        return self._merged(metrics), loss

    def _clip(self) -> Tensor:
        """Clip the gradient's norm over all devices; returns the norm before."""
        max_norm = self.config.optimizer.max_grad_norm
        if not self.world.sharded:
            return clip_gradients(self.model.parameters(), max_norm).detach()
        from nemorl.parallel.dtensor import titan

        return titan.clip_gradients(
            self.model.parameters(), math.inf if max_norm is None else max_norm
        ).detach()

    def _merged(self, metrics: Metrics, *, data_ranks_only: bool = True) -> Metrics:
        """Of all ranks, but of those that share rows only the first, unless it matters which rank
        measured them.
        """
        if self.world.size == 1:
            return metrics
        first = self.world.cp_rank == self.world.tp_rank == 0 or not data_ranks_only
        everyone = self.world.gather_objects(
            pytree.tree_map_only(Tensor, lambda x: x.detach().cpu(), metrics) if first else None
        )
        found: Metrics = {}
        for other in everyone:
            found = merge(found, other or {})
        return found

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._logprobs(self.model, batch)

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        if not self.config.keep_reference:
            raise RuntimeError(
                "no reference model is kept: set up the backend with keep_reference=True"
            )
        if self._reference is None:
            with adapters_off(self.model):
                return self._logprobs(self.model, batch)
        return self._logprobs(self._reference, batch)

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The live tensors, not copies; with LoRA those of the adapted layers are new ones, with
        the adapters merged.

        Of a spread model each is gathered when its turn comes, cast to `dtype` before that; all
        ranks have to go through them together.
        """
        self.optimizer.zero_grad(
            set_to_none=True
        )  # their memory is the generator's, if there is one
        if self.world.sharded:
            yield from export(self.model, dtype=dtype)
        else:
            for name, tensor in merged_tensors(self.model):
                yield name, tensor if dtype is None else tensor.to(dtype)

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """A folder that `transformers` (with LoRA: PEFT) loads as it is, with the optimizer's state
        beside the model's (the adapters').

        The same whatever the plan, so that every other plan goes on with it. With `background` a
        copy in main memory is what is written.
        """
        model = self.model
        assert self._writer is not None
        self._writer.save(
            model,
            self.optimizer,
            path,
            state={"step": self.step, "base": self._base},
            background=background,
        )

    def wait_for_checkpoint(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def load_checkpoint(self, path: Path) -> None:
        state, with_adapters = load_state(path), (path / CONFIG).exists()
        rank = self.config.lora.rank
        require(bool(rank) == with_adapters, "lora.rank", f"must be {'above 0' if with_adapters else '0'}, as when {path} was written", rank,
                "go on with the settings of that run")  # fmt: skip
        if with_adapters:
            check_base(state["base"], self._base, path)
        elif self.config.keep_reference:
            check_initial(state["base"], self._base, path)
        load_weights(self.model, path)
        load_optimizer(self.optimizer, self.model, path)
        self.step, self._base = (
            state["step"],
            state["base"],
        )  # what the run began with, whatever this backend was set up with

    def shutdown(self) -> None:
        """The model is handed back as it came, but for its weights: in float32, with its own
        attention and mode. Also after a setup that failed.
        """
        close_profile()
        if self._writer is not None:
            self._writer.close()
        if self._model is not None and not self.world.sharded:
            attention, training, trainable = self._found
            if self.config.lora.rank:
                merge_adapters(self._model)
                for parameter in trainable:
                    parameter.requires_grad_(True)
            self._model.set_attn_implementation(attention)  # type: ignore[operator]
            if self.config.parallel.activation_checkpointing == "full":
                self._model.gradient_checkpointing_disable()  # type: ignore[operator]
            self._model.train(training)
            self._model.zero_grad(set_to_none=True)
        self._model = self._reference = self._given = None
        while self._restore:
            self._restore.pop()()

    def _cut(self, batch: TokenBatch) -> Layout:
        plan = self.world.plan
        return cut(
            batch, self.config.trainer, num_ranks=plan.data_ranks, multiple_of=plan.row_multiple
        )

    def _logprobs(self, model: nn.Module, batch: TokenBatch) -> Logprobs:
        was_training = model.training
        model.eval()
        layout, rank = self._cut(batch), self.world.data_rank
        with torch.no_grad(), self._gathering(model):
            values = [
                self._forward(model, self._to_device(part), with_entropy=False)[0]
                for part in layout.parts(rank)
            ]
        placed = layout.place(values, rank)
        model.train(was_training)
        if self.world.data_group is not None:
            dist.all_reduce(placed, group=self.world.data_group)
        return Logprobs(layout.restore(placed.to(batch.input_ids.device)), batch.logprob_kind)

    def _forward(
        self, model: nn.Module, batch: TokenBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        chunk = self.config.trainer.logprob_chunk
        if self.world.sharded:
            return sharded_logprobs(
                model, self.world, batch, chunk=chunk, with_entropy=with_entropy
            )
        with self._autocast():
            return plain_logprobs(model, batch, chunk=chunk, with_entropy=with_entropy)

    @contextmanager
    def _gathering(self, model: nn.Module) -> Iterator[None]:
        """Forward passes, after which, whatever becomes of them, a spread model's parameters are
        shards again.
        """
        try:
            yield
        finally:
            if self.world.sharded:
                from nemorl.parallel.dtensor.fsdp import reshard

                reshard(model)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.parallel.param_dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _to_device(self, batch: TokenBatch) -> TokenBatch:
        return pytree.tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), batch)


def _lasting_name(name: str) -> str | None:
    """The model's folder from the root on, so that others find it from anywhere, or its hub name;
    None where it has neither.
    """
    return str(Path(name).resolve()) if name and Path(name).exists() else name or None
