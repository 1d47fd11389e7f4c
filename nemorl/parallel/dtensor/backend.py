"""`TrainingBackend` "dtensor": a Hugging Face decoder and its head in one process or on many."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.accelerator import is_accelerator
from nemorl.checks import require
from nemorl.data.batch import TokenBatch, to_device
from nemorl.losses.types import Metrics, Needs, merge
from nemorl.models import adapters
from nemorl.models.adapters import Adapters, base_of, merged_tensors, quantize_layers
from nemorl.models.attention import use_attention
from nemorl.models.capabilities import known
from nemorl.models.causal_lm import require_head, usable_device
from nemorl.models.hub import check_supported, loading, read_config
from nemorl.parallel.accumulation import Accumulating, load_whole, storage_of
from nemorl.parallel.attention import ATTENTION_NAME, kernel_of, segment_attention
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.parallel.checkpoint import Contents, Saved
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.dtensor import limits, mesh
from nemorl.parallel.dtensor.build import build
from nemorl.parallel.dtensor.experts import Mixtures
from nemorl.parallel.dtensor.lora import (
    adapters_off,
    add_adapters,
    leave_base,
    others_weights,
    share_base,
)
from nemorl.parallel.dtensor.optimizers import make_optimizer
from nemorl.parallel.dtensor.pieces import contents_of, gathering, load
from nemorl.parallel.experts import require_one_batch
from nemorl.parallel.fingerprint import fingerprint
from nemorl.parallel.layout import Cutting, Layout
from nemorl.parallel.tokens import Work, plain_outputs, planned, sharded_outputs
from nemorl.parallel.world import DTYPES, World, is_started_as_rank
from nemorl.rollout.random import derive_seed

Forward = Callable[[TokenBatch, Work, Needs], ForwardOutput]


class DTensorBackend(Accumulating):
    """Trains a given model, or one that `setup` loads; parameters and optimizer are float32.

    In a process by itself the model has plain tensors; in a rank (`is_started_as_rank`) it is
    spread as `config.parallel` says. Dropout is on in `train_step` only.

    With LoRA only adapters train: checkpoints hold them alone, the reference is the model without
    them; exported weights, and the model that is handed back, have them merged. Backends of a
    process that adapt equal weights share them; they stay on the device while one is offloaded.
    """

    traits, check = limits.traits, staticmethod(limits.check)

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        self._reference: nn.Module | None = None
        self._forward: dict[nn.Module, Forward] = {}

    def _load(self) -> None:
        self.config = config = _settled(self.config, self._given)
        if config.lora.rank:
            adapters.require_peft("lora.rank")
        if self._given is not None:
            if adapters.has_adapters(self._given):
                raise ValueError(
                    "model must be a plain one, but it has PEFT adapters: merge them first"
                    " (merge_and_unload()); lora.rank gives it new ones"
                )
            require_head(self._given, config.head)
        keeps_reference = config.keep_reference and not config.lora.rank
        shares = bool(config.lora.rank) and self._given is None
        if is_started_as_rank():
            limits.check_quantized(config.lora.quantize, ranks=True)
            self._set_up_sharded(keeps_reference)
        else:
            self._set_up_plain(keeps_reference)
        dtype = DTYPES[self.world.plan.precision]
        sinks = any(name.endswith("sinks") for name, _ in self.model.named_parameters())
        self._kernel = kernel_of(self.model.config, self.device, dtype, sinks=sinks)
        if shares:
            share_base(self)
        mixtures = Mixtures(self.model, self.world, config.trainer)
        self._mixtures = mixtures if mixtures.routers or mixtures.blocks else None
        if config.trains:
            self.optimizer = make_optimizer(self.model, config.optimizer)
        models = (self.model, self._reference)
        self._forward = {each: _outputs_of(self, each) for each in models if each is not None}

    def _set_up_plain(self, keeps_reference: bool) -> None:
        config, path = self.config, self.config.model.path
        plan = config.parallel.on(1)
        require(
            not plan.needs_ranks,
            "parallel",
            "needs a process started as a rank",
            plan,
            "start it by torchrun --nproc-per-node 1",
        )
        self.device = usable_device(config.trainer.device)
        if is_accelerator(self.device) and self.device.index is not None:
            # By which engines know what GPU trains.
            torch.get_device_module(self.device).set_device(self.device)
        plan = plan.with_precision(accelerator=is_accelerator(self.device))
        self.world = World(plan=plan, device=self.device)
        model: Any = load_whole(config) if self._given is None else self._given
        quantized = config.lora.quantize != "none"
        model = model.to(device=None if quantized else self.device, dtype=torch.float32)
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._before = model.config._attn_implementation, model.training, trainable
        self._model = model
        self._base = fingerprint(model)
        if quantized:
            quantize_layers(model, device=self.device, dtype=DTYPES[plan.precision])
            model.to(device=self.device)
        if config.lora.rank:
            base = path or getattr(model, "name_or_path", "")
            base = str(Path(base).resolve()) if base and Path(base).exists() else base
            add_adapters(model, config.lora, base=base or None, seed=config.seed)
        if not config.trains:
            model.requires_grad_(False)
        use_attention(model, ATTENTION_NAME, segment_attention)
        if plan.recomputes == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if keeps_reference:
            self._reference = copy.deepcopy(model).eval().requires_grad_(False)

    def _set_up_sharded(self, keeps_reference: bool) -> None:
        config, given = self.config, self._given
        self.world = mesh.join(
            config.parallel, config.trainer.device, timeout_s=config.collective_timeout_s
        )
        self.device = self.world.device
        self._model = build(config, self.world, given=given, frozen=not config.trains)
        self._base = fingerprint(self._model, self.world)
        if keeps_reference:
            self._reference = build(config, self.world, given=given, frozen=True).eval()
        self._given = None

    @property
    def cutting(self) -> Cutting:
        layers = len(self._mixtures.blocks) if self._mixtures else 0
        trainer, plan = self.config.trainer, self.world.plan
        return Cutting(trainer=trainer, plan=plan, model=self._loaded().config, layers=layers)

    def _gradients(self, layout: Layout, loss_fn: LossFn, needs: Needs) -> tuple[Metrics, Tensor]:
        model, world = self.model.train(), self.world
        if world.sharded:  # dropout that is the same in a resumed run
            later = (len(self._batches),) if self._batches else ()
            seed = derive_seed(self.config.seed, self.step, world.data_rank, world.cp_rank, *later)
            torch.manual_seed(seed)
        metrics: Metrics = {}
        loss = torch.zeros((), device=self.device)
        parts = layout.parts(world.data_rank)
        with _passes(self, model):
            if self._mixtures is not None:
                if not self._batches:
                    self._mixtures.forget()
                if require_one_batch(self.config.trainer, self._batches):
                    empty = (_next(self, x, torch.zeros_like(x.loss_mask)) for x in parts)
                    passes = (self._forward[model](*each, Needs()) for each in empty)
                    self._mixtures.weigh(layout.rows.num_tokens, passes)
            for part in parts:
                rows, work = _next(self, part, part.loss_mask)
                self._copied += work.copied
                output = loss_fn(self._forward[model](rows, work, needs), rows)
                output.loss.backward()
                metrics, loss = merge(metrics, output.metrics), loss + output.loss.detach()
        if world.size > 1:
            loss = world.total(loss)
        if self._mixtures is None:
            return metrics, loss
        of_experts, more = self._mixtures.end_batch()
        return {**metrics, **of_experts}, loss + more

    def _grad_norm(self) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True).detach()
        return adapters.full_tensor(norm) if self.world.sharded else norm

    def _update(self, grad_norm: Tensor, limit: float) -> None:
        if limit < math.inf:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, grad_norm, foreach=True)
        self.optimizer.step()
        if self._mixtures is not None:
            self._mixtures.move_biases()

    def weights(
        self, dtype: torch.dtype | None = None, *, adapters: Adapters = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as `merged_tensors`; of a sharded model in a collective call."""
        self._drop_gradients()
        yield from merged_tensors(
            self._loaded(), dtype=dtype, present=self._away.present, adapters=adapters
        )

    def _held(self, *, keep_weights: bool) -> list[Tensor]:
        parameters = list(self._loaded().parameters())
        found = [p.grad for p in parameters if p.grad is not None]
        for state in [] if self.optimizer is None else self.optimizer.state.values():
            found += [x for x in state.values() if isinstance(x, Tensor)]
        found += [] if self._reference is None else self._reference.parameters()
        found += [] if keep_weights else parameters
        others = others_weights(self)
        return [each for each in found if storage_of(each) not in others]

    def _contents(self) -> Contents:
        return contents_of(self.model, self.optimizer, self.world)

    def _restore(self, saved: Saved) -> None:
        load(saved, self.model, self.optimizer)

    def shutdown(self) -> None:
        """Restore a given model but for its weights, which stay trained and in float32."""
        shared = self._model is not None and leave_base(self)
        if self._model is not None and not self.world.sharded and not shared:
            model, (attention, training, trainable) = self.model, self._before
            if self.config.lora.rank:
                adapters.merge_adapters(model)
            for parameter in trainable:
                parameter.requires_grad_(True)
            model.set_attn_implementation(attention)
            if self.config.parallel.recomputes == "full":
                model.gradient_checkpointing_disable()
            model.train(training)
            model.zero_grad(set_to_none=True)
        self._reference, self._forward = None, {}
        super().shutdown()

    def _outputs(self, layout: Layout, needs: Needs, *, reference: bool) -> list[ForwardOutput]:
        model = self._reference if reference and self._reference is not None else self.model
        forward, was_training = self._forward[model], model.training
        model.eval()
        with torch.no_grad(), _passes(self, model, reference=reference):
            parts = layout.parts(self.world.data_rank)
            found = [forward(*_next(self, x, x.response_mask), needs) for x in parts]
        model.train(was_training)
        return found


def _passes(backend: DTensorBackend, model: nn.Module, *, reference: bool = False) -> ExitStack:
    stack = ExitStack()
    if backend.world.sharded:
        stack.enter_context(gathering(model))
    if reference:
        stack.enter_context(adapters_off(model))
    elif backend._mixtures is not None:
        stack.enter_context(backend._mixtures.watched())
    return stack


def _next(backend: DTensorBackend, part: TokenBatch, wanted: Tensor) -> tuple[TokenBatch, Work]:
    mixtures, share = backend._mixtures, backend.config.trainer.share_prompts
    proof, ids = (backend.config.proofs or {}).get("left_padded"), part.segment_ids
    if proof and not proof.holds and ((ids[:, 1:] > 0) & (ids[:, :-1] == 0)).any():
        raise ValueError(
            "rows must be padded on the right for this model, but some are on the left"
            f" ({proof.reason}): make batches with collate"
        )
    work = planned(part, wanted, backend.world, share=share, kernel=backend._kernel)
    rows = replace(part, routed_experts=None, route_ids=None)
    tokens = None if mixtures is None else mixtures.tokens(part, work)
    rows, work, tokens = to_device((rows, work, tokens), backend.device)
    if mixtures is not None:
        mixtures.follow(tokens)
    return rows, work


def _settled(config: BackendConfig, given: Any) -> BackendConfig:
    path, trust = config.model.path, config.model.trust_remote_code
    of_model = getattr(given, "config", None)
    if of_model is None:
        path = base_of(Path(path)) or path if (Path(path) / adapters.CONFIG).is_file() else path
        with loading(path):
            of_model = read_config(path, trust_remote_code=trust)
    check_supported(of_model)
    proofs = known(of_model) if config.proofs is None else config.proofs
    if proofs is None:
        raise ValueError(
            "the model must be of a type that was tested with these versions of packages, or be"
            f" checked before, but {of_model.model_type!r} is neither: run nemorl models check"
            f" {path or 'FOLDER'}, or give BackendConfig(proofs=nemorl.prove(model.config))"
        )
    return limits.settled(replace(config, proofs=proofs), of_model.model_type, proofs)


def _outputs_of(backend: DTensorBackend, model: nn.Module) -> Forward:
    world, chunk = backend.world, backend.config.trainer.chunk
    device, lower = world.device.type, world.plan.precision == "bfloat16" and not world.sharded
    outputs = sharded_outputs(model, world, chunk) if world.sharded else plain_outputs(model, chunk)

    def forward(batch: TokenBatch, work: Work, needs: Needs) -> ForwardOutput:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=lower):
            found = outputs(batch, work, needs)
        return ForwardOutput(**dict(zip(needs.outputs, found, strict=True)))

    return forward
