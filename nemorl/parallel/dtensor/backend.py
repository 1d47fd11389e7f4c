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

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs, linear_token_logprobs
from nemorl.losses.types import Mean, Metrics, Sum, merge
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.dtensor.attention import ATTENTION_NAME, register_attention, segment_buckets
from nemorl.parallel.dtensor.checkpoint import load_model, load_optimizer, save_model, save_optimizer, unique_tensors
from nemorl.parallel.dtensor.optimizer import clip_gradients, learning_rate, make_optimizer
from nemorl.parallel.layout import cut
from nemorl.rollout.causal_lm import check_supported, decoder_of, head_weight, load_causal_lm, usable_device


class DTensorBackend:
    """Give it a loaded model, or let `setup` load the one that the configuration names. Parameters and optimizer state are float32.

    Dropout, where a model has any, is on in `train_step` and off in `get_logprobs`.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._given = model
        self._model: nn.Module | None = None
        self._reference: nn.Module | None = None
        self.step = 0

    def setup(self, config: BackendConfig) -> None:
        self.config = config
        device = usable_device(config.trainer.device)
        model = self._given
        if model is None:
            model = load_causal_lm(config.model.path, from_scratch=config.model.from_scratch, seed=config.seed, device=device)
        check_supported(model)
        self._model = model = model.to(device=device, dtype=torch.float32)
        self._found = (model.config._attn_implementation, model.training)  # type: ignore[union-attr]
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        if config.trainer.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if config.keep_reference:
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
        """Raises FloatingPointError, before the weights are touched, if a gradient is not finite."""
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
        if not bool(grad_norm.isfinite()):
            raise FloatingPointError(
                f"the gradient of optimizer step {self.step + 1} is not finite (norm {float(grad_norm)}), so the weights were left as they are: "
                "look for extreme advantages or logprobs in the samples, or lower optimizer.lr"
            )
        lr = learning_rate(self.step, self.config.optimizer, total_steps=self.config.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.step += 1
        one, lr_now, num_tokens = (torch.tensor(float(value)) for value in (1, lr, batch.num_tokens))
        return {**metrics, "loss": Mean(loss, one), "grad_norm": Mean(grad_norm, one), "lr": Mean(lr_now, one), "num_tokens": Sum(num_tokens)}

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._logprobs(self.model, batch)

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        if self._reference is None:
            raise RuntimeError("no reference model is kept: set up the backend with keep_reference=True")
        return self._logprobs(self._reference, batch)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The live tensors, not copies."""
        yield from ((name, tensor.detach()) for name, tensor in unique_tensors(self.model).items())

    def save_checkpoint(self, path: Path) -> None:
        """A folder that `transformers` loads as it is, with the optimizer's state beside the model's."""
        path.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(path)  # type: ignore[union-attr, operator]
        save_model(self.model, path / "model.safetensors")
        save_optimizer(self.optimizer, path / "optimizer.safetensors")
        (path / "backend.json").write_text(json.dumps({"step": self.step}))

    def load_checkpoint(self, path: Path) -> None:
        step = json.loads((path / "backend.json").read_text())["step"]
        load_model(self.model, path / "model.safetensors")
        load_optimizer(self.optimizer, path / "optimizer.safetensors")
        self.step = step

    def shutdown(self) -> None:
        """The model is handed back as it came, but for its weights: in float32, with its own attention and mode."""
        if self._model is not None:
            attention, training = self._found
            self._model.set_attn_implementation(attention)  # type: ignore[operator]
            if self.config.trainer.gradient_checkpointing:
                self._model.gradient_checkpointing_disable()  # type: ignore[operator]
            self._model.train(training)
            self.optimizer.zero_grad(set_to_none=True)
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
