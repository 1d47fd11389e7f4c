"""`TrainingBackend` "dtensor": a Hugging Face causal language model in training, in one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nemorl.checks import require
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs, linear_token_logprobs
from nemorl.losses.types import Mean, Metrics, Sum, merge
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.dtensor.attention import ATTENTION_NAME, register_attention, segment_buckets
from nemorl.parallel.dtensor.checkpoint import load_model, load_optimizer, save_model, save_optimizer
from nemorl.parallel.dtensor.lora import adapters_off, add_adapters, check_base, check_initial, fingerprint, load_adapter, save_adapter
from nemorl.parallel.dtensor.optimizer import clip_gradients, learning_rate, make_optimizer, require_finite
from nemorl.parallel.layout import cut
from nemorl.rollout.adapters import CONFIG, has_adapters, merge_adapters, merged_tensors, require_peft
from nemorl.rollout.causal_lm import check_supported, decoder_of, head_weight, load_causal_lm, usable_device


class DTensorBackend:
    """Give it a loaded model, or let `setup` load the one that the configuration names. Parameters and optimizer state are float32.

    Dropout, where a model or its adapters have any, is on in `train_step` and off in `get_logprobs`.

    With LoRA (`config.lora.rank` above 0) only adapters train: checkpoints hold them alone, the reference is the model without them, exported weights
    have them merged, and the model that is handed back is a plain one with them merged.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._given = model
        self._model: nn.Module | None = None
        self._reference: nn.Module | None = None
        self.step = 0

    def setup(self, config: BackendConfig) -> None:
        self.config = config
        if config.lora.rank:
            require_peft("lora.rank")
        device = usable_device(config.trainer.device)
        model = self._given
        if model is None:
            model = load_causal_lm(config.model.path, from_scratch=config.model.from_scratch, seed=config.seed, device=device)
        check_supported(model)
        if has_adapters(model):
            raise ValueError(
                "model must be a plain one, but it has PEFT adapters: merge them first (merge_and_unload()); lora.rank gives it new ones"
            )
        model = model.to(device=device, dtype=torch.float32)
        self._found = (model.config._attn_implementation, model.training, [p for p in model.parameters() if p.requires_grad])  # type: ignore[union-attr]
        self._model = model  # from here on shutdown() has something to undo
        self._base = fingerprint(model)
        if config.same_initial_model_as is not None:
            check_initial(_state(config.same_initial_model_as)["base"], self._base, config.same_initial_model_as)
        if config.lora.rank:
            add_adapters(model, config.lora, base=_lasting_name(config.model.path or getattr(model, "name_or_path", "")), seed=config.seed)
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        if config.trainer.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if config.keep_reference and not config.lora.rank:
            self._reference = copy.deepcopy(model).eval().requires_grad_(False)
        self.device = device
        self.optimizer = make_optimizer(model, config.optimizer)
        torch.manual_seed(config.seed)

    @property
    def model(self) -> nn.Module:
        """The live model: a generator in the same process shares it."""
        if self._model is None:
            raise RuntimeError("the training backend has no model: call setup() first, and nothing after shutdown()")
        return self._model

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Raises FloatingPointError, before the weights are touched, if the loss or a gradient is not finite."""
        if batch.loss_weights is None:
            raise ValueError(
                "train_step needs batch.loss_weights, but they are None: build them for the whole step, as with token_mean_weights(batch.loss_mask)"
            )
        model = self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        metrics: Metrics = {}
        loss = torch.zeros((), device=self.device)
        for part in cut(batch, self.config.trainer).parts:
            part = self._to_device(part)
            logprobs, entropy = self._forward(model, part, with_entropy=True)
            assert entropy is not None
            output = loss_fn(ForwardOutput(logprobs, entropy), part)
            output.loss.backward()
            metrics, loss = merge(metrics, output.metrics), loss + output.loss.detach()
        grad_norm = clip_gradients(model.parameters(), self.config.optimizer.max_grad_norm).detach()
        require_finite(loss, grad_norm, step=self.step + 1)
        lr = learning_rate(self.step, self.config.optimizer, total_steps=self.config.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.step += 1  # before the weights change: an error in the midst of it must not pass for a step not begun
        self.optimizer.step()
        one, lr_now, num_tokens = (torch.tensor(float(value)) for value in (1, lr, batch.num_tokens))
        return {**metrics, "loss": Mean(loss, one), "grad_norm": Mean(grad_norm, one), "lr": Mean(lr_now, one), "num_tokens": Sum(num_tokens)}

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._logprobs(self.model, batch)

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        if not self.config.keep_reference:
            raise RuntimeError("no reference model is kept: set up the backend with keep_reference=True")
        if self._reference is None:
            with adapters_off(self.model):
                return self._logprobs(self.model, batch)
        return self._logprobs(self._reference, batch)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The live tensors, not copies; with LoRA those of the adapted layers are new ones, with the adapters merged."""
        return merged_tensors(self.model)

    def save_checkpoint(self, path: Path) -> None:
        """A folder that `transformers` (with LoRA: PEFT) loads as it is, with the optimizer's state beside the model's (the adapters')."""
        path.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {"step": self.step, "base": self._base}
        if self.config.lora.rank:
            save_adapter(self.model, path)
        else:
            self.model.config.save_pretrained(path)  # type: ignore[union-attr, operator]
            save_model(self.model, path / "model.safetensors")
        save_optimizer(self.optimizer, path / "optimizer.safetensors")
        (path / "backend.json").write_text(json.dumps(state))

    def load_checkpoint(self, path: Path) -> None:
        state, with_adapters = _state(path), (path / CONFIG).exists()
        rank = self.config.lora.rank
        require(bool(rank) == with_adapters, "lora.rank", f"must be {'above 0' if with_adapters else '0'}, as when {path} was written", rank,
                "go on with the settings of that run")  # fmt: skip
        if with_adapters:
            check_base(state["base"], self._base, path)
            load_adapter(self.model, path)
        else:
            if self.config.keep_reference:
                check_initial(state["base"], self._base, path)
            load_model(self.model, path / "model.safetensors")
        load_optimizer(self.optimizer, path / "optimizer.safetensors")
        self.step, self._base = state["step"], state["base"]  # what the run began with, whatever this backend was set up with

    def shutdown(self) -> None:
        """The model is handed back as it came, but for its weights: in float32, with its own attention and mode. Also after a setup that failed."""
        if self._model is not None:
            attention, training, trainable = self._found
            if self.config.lora.rank:
                merge_adapters(self._model)
                for parameter in trainable:
                    parameter.requires_grad_(True)
            self._model.set_attn_implementation(attention)  # type: ignore[operator]
            if self.config.trainer.gradient_checkpointing:
                self._model.gradient_checkpointing_disable()  # type: ignore[operator]
            self._model.train(training)
            self._model.zero_grad(set_to_none=True)
        self._model = self._reference = self._given = None

    def _logprobs(self, model: nn.Module, batch: TokenBatch) -> Logprobs:
        was_training = model.training
        model.eval()
        layout = cut(batch, self.config.trainer)
        with torch.no_grad():
            values = [self._forward(model, self._to_device(part), with_entropy=False)[0].to(batch.input_ids.device) for part in layout.parts]
        model.train(was_training)
        return Logprobs(layout.restore(values), batch.logprob_kind)

    def _forward(self, model: nn.Module, batch: TokenBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        # No attention mask and no cache: with either, transformers would drop the separation of the segments without a word.
        segments = {"segment_buckets": segment_buckets(batch.segment_ids)}
        with self._autocast():
            hidden = decoder_of(model)(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **segments)[0]
            return linear_token_logprobs(
                hidden,
                head_weight(model),
                batch.input_ids,
                segment_ids=batch.segment_ids,
                kind=batch.logprob_kind,
                chunk=self.config.trainer.logprob_chunk,
                with_entropy=with_entropy,
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.trainer.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _to_device(self, batch: TokenBatch) -> TokenBatch:
        return pytree.tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), batch)


def _state(checkpoint: Path) -> dict[str, Any]:
    """The optimizer steps of a checkpoint, and the fingerprint of what its run began with."""
    return json.loads((checkpoint / "backend.json").read_text())


def _lasting_name(name: str) -> str | None:
    """The model's folder from the root on, so that others find it from anywhere, or its hub name; None where it has neither."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name or None
