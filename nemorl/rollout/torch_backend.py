"""The embedded generation engine: plain PyTorch in the trainer's process, on its weights."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.data.padding import pad
from nemorl.data.transfer import to_device
from nemorl.models.adapters import has_adapters
from nemorl.models.causal_lm import decoder_of, end_tokens, head_weight, load_causal_lm
from nemorl.models.hub import check_supported
from nemorl.rollout.attention import decoding
from nemorl.rollout.generation import (
    Completion,
    FinishReason,
    SamplingParams,
    checked_requests,
    seeded,
    text_before,
)
from nemorl.rollout.kv_cache import SlotCache
from nemorl.rollout.sampling import Slot, SlotTensors, sample_tokens
from nemorl.rollout.scheduler import Request, Scheduler

PREFILL_TOKENS = 8192
"""Prompt tokens of a pass, padding included."""
STEP_S = 0.05
"""Seconds of a step, of several tokens: an event loop waits so long; its start takes 0.5 ms."""


class TorchGenerationBackend:
    """`GenerationBackend` "torch" on the trainer's own model: no copy, nothing to sync.

    Decoding is continuous: waiting prompts take the slots of finished sequences. A prompt is
    computed once for all its samples. After an update, and after sleep, the cache of unfinished
    sequences is computed anew: each token has the logprob of its version's weights for all before.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        tokenizer: Any = None,
        model_path: str = "",
        precision: str = "float32",
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.model_path, self.precision = model_path, precision
        self.end_tokens: set[int] = set()
        self.max_batch_size = 256
        self.cache: SlotCache | None = None
        self._scheduler = Scheduler(self._step)
        self._waiting: deque[list[Slot]] = deque()
        """Samples that share a prefill."""
        self._active: list[Slot] = []
        self._batch: SlotTensors | None = None

    @property
    def policy_version(self) -> int | None:
        return self._scheduler.policy_version

    def setup(self, config: Any) -> None:
        self.max_batch_size = config.max_batch_size
        if self.model is None:
            self.model = load_causal_lm(self.model_path)
        check_supported(self.model.config)
        self.end_tokens = end_tokens(self.model, self.tokenizer)

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        self._scheduler.check()
        return await self._scheduler.sample(self._requests([prompt], params)[0])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        self._scheduler.check()
        return self._scheduler.generate(self._requests(prompts, sampling_params))

    def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        in_flight: str = "keep",
    ) -> None:
        """Copy what is not the same memory already.

        Raises: RuntimeError for "wait" where requests are in flight and it is the same memory: the
        old weights are gone.
        """
        weights = iter(weights)
        first = next(weights, None)
        own = dict(self._model.named_parameters())
        same = first is not None and first[0] in own and shared(own[first[0]], first[1])
        if in_flight == "wait" and same and self._scheduler.busy:
            raise RuntimeError(
                "in_flight='wait' needs the old weights, but this engine computes on the trainer's"
                " own: await the requests before the trainer's step, or use in_flight='keep'"
            )
        with self._scheduler.updating(version, in_flight):
            self._preempt()
            copy_weights(self._model, weights if first is None else chain([first], weights))

    def sleep(self) -> None:
        with self._scheduler.lock:
            self._preempt()
            self.cache, self._scheduler.asleep = None, True

    def wake(self) -> None:
        self._scheduler.asleep = False

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        with self._scheduler.lock:
            self._scheduler.shutdown()
            self._forget()
            self.model = None

    @property
    def _model(self) -> nn.Module:
        if self.model is None:
            raise RuntimeError("the generation backend has no model: call setup() first")
        return self.model

    @property
    def _device(self) -> torch.device:
        return head_weight(self._model).device

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Request]:
        params = checked_requests(
            prompts,
            sampling_params,
            vocab_size=head_weight(self._model).shape[0],
            max_positions=self._positions,
        )
        return [
            Request(prompt, seeded(p, self.tokenizer))
            for prompt, p in zip(prompts, params, strict=True)
        ]

    @property
    def _positions(self) -> int:
        return getattr(self._model.config, "max_position_embeddings", None) or sys.maxsize

    def _step(self, new: list[Request], dropped: list[Request]) -> None:
        """Decode for STEP_S, or until nothing is left."""
        end = time.monotonic() + STEP_S
        autocast = torch.autocast(
            self._device.type, torch.bfloat16, enabled=self.precision != "float32"
        )
        try:
            self._queue(new, dropped)
            with torch.no_grad(), decoding(self._model), autocast:
                while self._waiting or self._active:
                    while self._room():
                        self._admit()
                        self._retire()
                    if self._active:
                        self._decode()
                        self._retire()
                    if time.monotonic() >= end:
                        break
        except BaseException:
            self._forget()  # it must not get into later answers
            raise

    def _forget(self) -> None:
        self.cache = self._batch = None
        self._active = []
        self._waiting.clear()

    def _preempt(self) -> None:
        """Have the cache of unfinished sequences computed anew, from their tokens so far."""
        self._waiting.extendleft([one] for one in reversed(self._active))
        self._active, self._batch = [], None

    def _queue(self, new: list[Request], dropped: list[Request]) -> None:
        """Take requests, short prompts first, to pad least; and let go of others."""
        size, groups = self.max_batch_size, []
        for request in new:
            n, length = request.params.n, len(request.prompt)
            limit = min(request.params.max_new_tokens, self._positions - length)
            request.parts = [Slot(request, j, limit) for j in range(n)]
            groups += [request.parts[i : i + size] for i in range(0, n, size)]
        self._waiting.extend(sorted(groups, key=lambda group: group[0].length))
        if dropped:
            gone = set(dropped)
            for slot in self._active:
                if slot.request in gone:
                    slot.finish_reason = "stop"
            self._retire()
            self._waiting = deque(group for group in self._waiting if group[0].request not in gone)
        if self._waiting and (new or self.cache is None):
            self._make_room()

    def _make_room(self) -> None:
        """Make the cache large enough for all requests, or for a full batch of them."""
        everything = [s for group in self._waiting for s in group] + self._active
        length = max(len(s.request.prompt) + s.limit for s in everything)
        slots = min(self.max_batch_size, len(everything))
        if self.cache is None:
            self.cache = SlotCache(slots, length)
        elif self.cache.num_slots < slots or self.cache.length < length:
            if self._active:  # requests come one by one: not a copy for each
                slots = min(self.max_batch_size, max(slots, 2 * self.cache.num_slots))
                length = max(length, self.cache.length)
                self.cache.grow(max(slots, self.cache.num_slots), length)
            else:
                self.cache = SlotCache(slots, length)

    def _room(self) -> bool:
        """Whether to admit a group now: while others decode, once an eighth is free."""
        if not self._waiting:
            return False
        assert self.cache is not None
        free = self.cache.num_slots - len(self._active)
        return free >= (
            max(len(self._waiting[0]), self.cache.num_slots // 8) if self._active else 1
        )

    def _admit(self) -> None:
        """Compute waiting sequences in one pass of up to PREFILL_TOKENS, and sample."""
        assert self.cache is not None
        num_active, device = len(self._active), self._device
        free = self.cache.num_slots - num_active
        groups: list[list[Slot]] = []
        width = 0
        while self._waiting and len(self._waiting[0]) <= free:
            width = max(width, self._waiting[0][0].length)
            if groups and (len(groups) + 1) * width > PREFILL_TOKENS:
                break
            free -= len(self._waiting[0])
            groups.append(self._waiting.popleft())
        input_ids, lengths = pad(
            [torch.tensor([*first.request.prompt, *first.token_ids]) for first, *_ in groups],
            value=0,
        )
        new = [s for group in groups for s in group]
        rows = [row for row, group in enumerate(groups) for _ in group]
        input_ids, sources, last = to_device(
            (input_ids, torch.tensor(rows), lengths - 1), self._device
        )
        self.cache.prefill(torch.arange(num_active, num_active + len(new), device=device), sources)
        width = input_ids.shape[1]
        causal = torch.ones(1, 1, width, width, dtype=torch.bool, device=device).tril()
        positions = torch.arange(width, device=device)[None].expand(len(groups), -1)
        hidden = self._forward(input_ids, positions, causal)
        hidden = hidden[torch.arange(len(groups), device=device), last]
        self._sample(self._logits(hidden)[sources], SlotTensors.of(new, device))
        self._active = self._active + new

    def _decode(self) -> None:
        assert self.cache is not None
        batch = self._batch
        if batch is None or batch.slots is not self._active:
            batch = self._batch = SlotTensors.of(self._active, self._device)
        self.cache.decode(batch.positions, batch.width)
        visible = (torch.arange(batch.width, device=self._device) <= batch.positions[:, None])[
            :, None, None
        ]
        hidden = self._forward(batch.tokens[:, None], batch.positions[:, None], visible)[:, 0]
        self._sample(self._logits(hidden), batch)

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden @ head_weight(self._model).to(hidden.dtype).t()

    def _forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        decoder = decoder_of(self._model)
        return decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=self.cache,
            use_cache=True,
        )[0]

    def _sample(self, logits: Tensor, batch: SlotTensors) -> None:
        tokens, logprobs = sample_tokens(logits, batch)
        # The one moment of a step in which the host waits. Token ids are exact in float64.
        drawn, found = torch.stack((tokens.double(), logprobs.double())).tolist()
        if not all(map(math.isfinite, found)):
            raise FloatingPointError(
                "the model's logits are not finite: its weights hold NaN or infinity"
            )
        version = self.policy_version
        assert version is not None
        for s, token, logprob in zip(batch.slots, map(int, drawn), found, strict=True):
            s.token_ids.append(token)
            s.logprobs.append(logprob)
            s.versions.append(version)
            s.finish_reason = self._finish_reason(s, token)
        batch.advance(tokens)

    def _finish_reason(self, s: Slot, token: int) -> FinishReason | None:
        if token in s.params.stop_token_ids or token in self.end_tokens:
            return "stop"
        if s.params.stop_strings:
            # It began at most its length in bytes earlier.
            longest = max(len(stop.encode()) for stop in s.params.stop_strings)
            tail = self.tokenizer.decode(s.token_ids[-longest - 4 :], skip_special_tokens=True)
            if any(stop in tail for stop in s.params.stop_strings):
                return "stop"
        return "length" if len(s.token_ids) >= s.limit else None

    def _retire(self) -> None:
        """Take finished sequences out; the last active ones move into their slots."""
        active = self._active
        done = [s for s in active if s.finish_reason]
        if not done:
            return
        assert self.cache is not None
        remaining = len(active) - len(done)
        gaps = [slot for slot in range(remaining) if active[slot].finish_reason]
        movers = [slot for slot in range(remaining, len(active)) if not active[slot].finish_reason]
        if gaps:
            self.cache.move(*to_device((torch.tensor(gaps), torch.tensor(movers)), self._device))
        kept = active[:remaining]
        for gap, mover in zip(gaps, movers, strict=True):
            kept[gap] = active[mover]
        self._active = kept
        self._answer(list(dict.fromkeys(s.request for s in done)))

    def _answer(self, requests: list[Request]) -> None:
        """Answer the requests of which all samples are finished."""
        whole = [request for request in requests if all(s.finish_reason for s in request.parts)]
        samples = [s for request in whole for s in request.parts]
        texts = [""] * len(samples)
        if self.tokenizer is not None and samples:
            ids = [s.token_ids for s in samples]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        made = [
            Completion(
                token_ids=tuple(s.token_ids),
                logprobs=tuple(s.logprobs),
                finish_reason=s.finish_reason or "length",
                text=text_before(s.params.stop_strings, text),
                policy_versions=tuple(s.versions),
            )
            for s, text in zip(samples, texts, strict=True)
        ]
        rest = iter(made)
        for request in whole:
            request.answer(list(islice(rest, request.params.n)))


def shared(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same memory."""
    return a.data_ptr() == b.data_ptr()


def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy into a model what is not the same memory already.

    Raises: ValueError for weights of another model.
    """
    own, adapted = model.state_dict(keep_vars=True), has_adapters(model)
    with torch.no_grad():
        for name, tensor in weights:
            if adapted and name in own and shared(own[name], tensor):
                break  # merged adapters are for others
            if adapted:
                raise ValueError(
                    "a generator whose model has adapters must share it with the trainer, but"
                    " these weights are of another"
                )
            if name not in own or own[name].shape != tensor.shape:
                expected = f"has shape {tuple(own[name].shape)}" if name in own else "lacks it"
                raise ValueError(
                    f"weights must be those of the generator's model, but {name!r} does not fit"
                    f" (shape {tuple(tensor.shape)}; the model {expected})"
                )
            if not shared(own[name], tensor):
                own[name].copy_(tensor)
