"""The embedded generation engine: plain PyTorch in the trainer's process, on its weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nemorl.checks import warn
from nemorl.data.batch import TokenBatch, to_device
from nemorl.data.packing import merge, split, split_microbatches
from nemorl.losses.logprobs import flat_linear_logprobs
from nemorl.models.adapters import has_adapters
from nemorl.models.capabilities import Proof, known
from nemorl.models.causal_lm import (
    blocks_of,
    decoder_of,
    end_tokens,
    head_weight,
    logits_of,
    recorded,
)
from nemorl.models.hub import check_supported
from nemorl.models.source import ModelSource
from nemorl.models.tensor_files import Stored, as_stored, check_held, misfits, sampled, stored_names
from nemorl.rollout.decoding import PREFILL_TOKENS, Decoding, Pass, decoding, draw_tokens
from nemorl.rollout.generation import EMBEDDED, InFlight, WeightSource
from nemorl.rollout.scheduler import Request, ScheduledBackend

STEP_S = 0.05
"""Seconds of a step, of several tokens; its start takes 0.5 ms."""


class TorchGenerationBackend(ScheduledBackend):
    """`GenerationBackend` "torch" on the trainer's own model: no copy, nothing to sync.

    After an update or sleep, the cache of unfinished sequences is computed again: each token has
    the logprob of its version's weights for all before.
    """

    traits = EMBEDDED

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any = None,
        precision: str = "float32",
        cached: bool | None = None,
        records_experts: bool = False,
    ) -> None:
        """cached: keep keys and values of the past. None: where that is proved of the model.

        records_experts: completions get `routed_experts`.
        """
        super().__init__(self._step, tokenizer)
        self._cached, self._records = cached, records_experts
        self._source, self.precision = ModelSource.of(model), precision
        self.model: Any = None
        self._decoding: Decoding | None = None

    def setup(self, config: Any) -> None:
        self.model = self._source.load()
        check_supported(self.model.config)
        self.limits(self.model.config)
        if self._cached is None:
            self._cached = has_cache(self.model.config)
        self._decoding = Decoding(
            self._draw,
            device=head_weight(self.model).device,
            max_batch_size=config.max_batch_size,
            max_positions=self.max_positions,
            end_tokens=end_tokens(self.model, self.tokenizer),
            tokenizer=self.tokenizer,
            cached=self._cached,
        )

    async def update_weights(self, source: WeightSource, *, in_flight: InFlight = "keep") -> int:
        """Take the newest weights.

        Raises: RuntimeError for "wait" where requests are in flight on the same memory.
        """
        in_progress, own = self.decoding, dict(self.model.named_parameters())
        version, weights = source.newest()
        first = next(weights, None)
        same = first is not None and first[0] in own and shared(own[first[0]], first[1])
        with self._scheduler.updating(version, in_flight, shared=same):
            in_progress.preempt()
            weights = weights if first is None else chain([first], weights)
            copy_weights(self.model, weights, version)
        return version

    def sleep(self) -> None:
        with self._scheduler.lock:
            self.decoding.preempt()
            self.decoding.cache.clear()
            self._scheduler.asleep = True

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        with self._scheduler.lock:
            super().shutdown()
            self.model = self._decoding = None

    @property
    def decoding(self) -> Decoding:
        if self._decoding is None:
            raise RuntimeError("the generation backend has no model: call setup() first")
        return self._decoding

    def _scored(self, batch: TokenBatch, top_k: int) -> Sequence[Tensor]:
        assert self.decoding
        return scored(self.model, batch, top_k, precision=self.precision)

    def _step(self, new: list[Request], dropped: list[Request]) -> None:
        end, version = time.monotonic() + STEP_S, self.policy_version
        assert version is not None
        try:
            self.decoding.queue(new, dropped)
            with sampling_from(self.model, self.precision):
                while self.decoding.advance(version) and time.monotonic() < end:
                    pass
        except BaseException:
            self.decoding.forget()  # it must not get into later answers
            raise

    def _draw(self, work: Pass) -> Tensor:
        past = {"attention_mask": work.visible, "past_key_values": work.cache}
        with recorded(blocks_of(self.model) if self._records else []) as experts:
            hidden = decoder_of(self.model)(
                input_ids=work.input_ids,
                position_ids=work.position_ids,
                use_cache=self._cached,
                **(past if self._cached else {}),
            )[0]
        if experts:
            work.keep(torch.stack(experts, 1))
        hidden = hidden.flatten(0, 1)[work.states]
        return draw_tokens(logits_of(self.model.config)(hidden, head_weight(self.model)), work)


@contextmanager
def sampling_from(model: Any, precision: str) -> Iterator[None]:
    """Compute as the engine samples inside the block: `decoding`, without gradients."""
    half = torch.autocast(
        head_weight(model).device.type, torch.bfloat16, enabled=precision != "float32"
    )
    with torch.no_grad(), decoding(model), half:
        yield


def scored(model: Any, batch: TokenBatch, top_k: int, *, precision: str) -> Sequence[Tensor]:
    """Return `ScheduledBackend._scored` by a model of this process, in passes of up to
    PREFILL_TOKENS.
    """
    head, logits = head_weight(model), logits_of(model.config)
    plan = split_microbatches(batch, token_budget=max(PREFILL_TOKENS, batch.input_ids.shape[1]))
    parts = []
    with sampling_from(model, precision):
        for part in to_device(split(batch, plan), head.device):
            hidden = decoder_of(model)(
                input_ids=part.input_ids, position_ids=part.position_ids, use_cache=False
            )[0]
            predicted = part.position_ids > 0
            found = flat_linear_logprobs(
                logits.scaled(hidden[:, :-1][predicted[:, 1:]]),
                head,
                part.input_ids[predicted],
                kind=part.logprob_kind,
                softcap=logits.softcap,
                top_k=top_k,
            )
            top = (found.top_ids, found.top_logprobs) if top_k else ()
            laid = (
                each.new_zeros(*predicted.shape, *each.shape[1:]).index_put((predicted,), each)
                for each in (found.token_logprobs, *top)
            )
            parts.append([each.cpu() for each in laid])
    return [merge(each, plan) for each in zip(*parts, strict=True)]


def has_cache(config: Any) -> bool:
    """Return whether a model is proved to sample right with a cache; warn where it is not."""
    proofs = known(config)
    proof = Proof(False, None, "it was not checked") if proofs is None else proofs["cached"]
    if not proof.holds:
        warn(
            f"{config.model_type} is sampled from without a cache ({proof.reason}): each token"
            " computes all before it again, so sample with generation.backend vllm if it can"
        )
    return proof.holds


def shared(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are one memory."""
    return a.data_ptr() == b.data_ptr()


def copy_weights(model: Module, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Copy into a model what is not the same memory already.

    Raises: ValueError for weights of another model, or not all of them; WeightsDiffer for a tensor
    that does not hold what came.
    """
    live, adapted = model.state_dict(keep_vars=True), has_adapters(model)
    stored: Stored = {} if adapted else stored_names(model)
    # A single expert's tensor, as files have it, is a view.
    own = {**dict(as_stored(live.items(), stored)), **live}
    whole = {each: name for name, names in stored.items() for each in chain(*names)}
    came: Counter[int] = Counter()
    sent: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in weights:
            if adapted:
                if name in own and shared(own[name], tensor):
                    return  # merged adapters are for others
                raise ValueError(
                    "a generator whose model has adapters must share it with the trainer, but"
                    " these weights are of another: make it with model=trainer.model"
                )
            if name not in own or own[name].shape != tensor.shape:
                expected = f"has shape {tuple(own[name].shape)}" if name in own else "lacks it"
                raise misfits(
                    [f"{name!r} does not fit (shape {tuple(tensor.shape)}; the model {expected})"]
                )
            came[live[whole.get(name, name)].data_ptr()] += tensor.numel()
            if not shared(own[name], tensor):
                own[name].copy_(tensor)
                sent[name] = sampled(tensor, version).to(own[name])
        found = {name: sampled(own[name], version) for name in sent}
    lacking = [
        f"{name!r} is missing"
        for name, one in model.named_parameters()
        if came[one.data_ptr()] < one.numel()
    ]
    if lacking:
        raise misfits(lacking)
    check_held("the generator's copy", sent, found)
