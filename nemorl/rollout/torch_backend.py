"""The embedded generation engine: plain PyTorch in the trainer's process, on its weights."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.data.padding import pad
from nemorl.models.adapters import has_adapters
from nemorl.models.causal_lm import decoder_of, end_tokens, head_weight, load_causal_lm
from nemorl.models.hub import check_supported
from nemorl.rollout.attention import decoding
from nemorl.rollout.generation import (
    Completion,
    FinishReason,
    SamplingParams,
    checked_requests,
    text_before,
)
from nemorl.rollout.kv_cache import SlotCache
from nemorl.rollout.sampling import Slot, SlotTensors, sample_tokens

PREFILL_TOKENS = 8192
"""Prompt tokens of a pass, padding included."""


class TorchGenerationBackend:
    """`GenerationBackend` "torch" on the trainer's own model: no copy, nothing to sync.

    Decoding is continuous: waiting prompts take the slots of finished sequences. A prompt is
    computed once for all its samples.
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
        self.policy_version: int | None = 0
        self.end_tokens: set[int] = set()
        self.max_batch_size = 256
        self.cache: SlotCache | None = None
        self.asleep = False

    def setup(self, config: Any) -> None:
        self.max_batch_size = config.max_batch_size
        if self.model is None:
            self.model = load_causal_lm(self.model_path)
        check_supported(self.model.config)
        self.end_tokens = end_tokens(self.model, self.tokenizer)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy what is not the same memory already."""
        own, adapted = self._model.state_dict(keep_vars=True), has_adapters(self._model)
        self.policy_version = None  # until all of them are there
        with torch.no_grad():
            for name, tensor in weights:
                if adapted and name in own and own[name].data_ptr() == tensor.data_ptr():
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
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self.policy_version = version

    def sleep(self) -> None:
        self.cache, self.asleep = None, True

    def wake(self) -> None:
        self.asleep = False

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        self.cache = self.model = None

    @property
    def _model(self) -> nn.Module:
        if self.model is None:
            raise RuntimeError("the generation backend has no model: call setup() first")
        return self.model

    @property
    def _device(self) -> torch.device:
        return head_weight(self._model).device

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        if self.asleep:
            raise RuntimeError("the generation backend sleeps: call wake() before generate()")
        if self.policy_version is None:
            raise RuntimeError(
                "the generation backend's weights are incomplete, because an update failed: call"
                " update_weights() again"
            )
        waiting = self._requests(prompts, sampling_params)
        finished: list[Slot] = []
        active: list[Slot] = []
        batch: SlotTensors | None = None
        try:
            autocast = torch.autocast(
                self._device.type, torch.bfloat16, enabled=self.precision != "float32"
            )
            with torch.no_grad(), decoding(self._model), autocast:
                self._make_cache(waiting)
                while waiting or active:
                    while self._room_for(waiting, len(active)):
                        active = self._retire(
                            active + self._admit(prompts, waiting, len(active)), finished
                        )
                    if active:
                        if batch is None or batch.slots is not active:
                            batch = SlotTensors.of(active, self._device)
                        self._decode(batch)
                        active = self._retire(active, finished)
        except BaseException:
            self.cache = None  # it must not get into later answers
            raise
        finished.sort(key=lambda s: (s.request, s.sample))
        texts = [""] * len(finished)
        if self.tokenizer is not None and finished:
            texts = self._decode_texts([s.token_ids for s in finished])
        return [
            Completion(
                token_ids=tuple(s.token_ids),
                logprobs=tuple(s.logprobs),
                finish_reason=s.finish_reason or "length",
                text=text_before(s.params.stop_strings, text),
                policy_version=self.policy_version,
            )
            for s, text in zip(finished, texts, strict=True)
        ]

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> deque[list[Slot]]:
        """The samples of each prompt that share a prefill; short prompts first, to pad least."""
        positions = getattr(self._model.config, "max_position_embeddings", None) or sys.maxsize
        params = checked_requests(
            prompts,
            sampling_params,
            vocab_size=head_weight(self._model).shape[0],
            max_positions=positions,
        )
        waiting: deque[list[Slot]] = deque()
        for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            seed = int(torch.randint(2**62, ())) if p.seed is None else p.seed
            limit = min(p.max_new_tokens, positions - len(prompt))
            samples = [Slot(index, j, p, seed, len(prompt), limit) for j in range(p.n)]
            waiting.extend(
                samples[i : i + self.max_batch_size] for i in range(0, p.n, self.max_batch_size)
            )
        return deque(sorted(waiting, key=lambda group: group[0].prompt_length))

    def _make_cache(self, waiting: deque[list[Slot]]) -> None:
        slots = min(self.max_batch_size, sum(len(group) for group in waiting))
        length = max((s.prompt_length + s.limit for group in waiting for s in group), default=0)
        if self.cache is None or self.cache.num_slots < slots or self.cache.length < length:
            self.cache = SlotCache(slots, length)

    def _room_for(self, waiting: deque[list[Slot]], num_active: int) -> bool:
        """Whether to admit a group now: while others decode, once an eighth is free."""
        assert self.cache is not None
        free = self.cache.num_slots - num_active
        return bool(waiting) and free >= (
            max(len(waiting[0]), self.cache.num_slots // 8) if num_active else 1
        )

    def _admit(
        self, prompts: Sequence[Sequence[int]], waiting: deque[list[Slot]], num_active: int
    ) -> list[Slot]:
        """Compute waiting prompts in one pass of up to PREFILL_TOKENS and sample."""
        assert self.cache is not None
        free = self.cache.num_slots - num_active
        groups: list[list[Slot]] = []
        while (
            waiting
            and len(waiting[0]) <= free
            and (not groups or (len(groups) + 1) * waiting[0][0].prompt_length <= PREFILL_TOKENS)
        ):
            free -= len(waiting[0])
            groups.append(waiting.popleft())
        device = self._device
        input_ids, lengths = pad(
            [torch.tensor(prompts[group[0].request]) for group in groups], value=0
        )
        new = [s for group in groups for s in group]
        sources = torch.tensor(
            [row for row, group in enumerate(groups) for _ in group], device=device
        )
        self.cache.prefill(torch.arange(num_active, num_active + len(new), device=device), sources)
        width = input_ids.shape[1]
        causal = torch.ones(1, 1, width, width, dtype=torch.bool, device=device).tril()
        positions = torch.arange(width, device=device)[None].expand(len(groups), -1)
        hidden = self._forward(input_ids.to(device), positions, causal)
        last = hidden[torch.arange(len(groups), device=device), lengths.to(device) - 1]
        self._sample(self._logits(last)[sources], SlotTensors.of(new, device))
        return new

    def _decode(self, batch: SlotTensors) -> None:
        assert self.cache is not None
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
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError(
                "the model's logits are not finite: its weights hold NaN or infinity"
            )
        for s, token, logprob in zip(batch.slots, tokens.tolist(), logprobs.tolist(), strict=True):
            s.token_ids.append(token)
            s.logprobs.append(logprob)
            s.finish_reason = self._finish_reason(s, token)
        batch.advance(tokens)

    def _finish_reason(self, s: Slot, token: int) -> FinishReason | None:
        if token in s.params.stop_token_ids or token in self.end_tokens:
            return "stop"
        if s.params.stop_strings:
            # It began at most its length in bytes earlier.
            tail = self._decode_texts(
                [s.token_ids[-max(len(stop.encode()) for stop in s.params.stop_strings) - 4 :]]
            )[0]
            if any(stop in tail for stop in s.params.stop_strings):
                return "stop"
        return "length" if len(s.token_ids) >= s.limit else None

    def _retire(self, active: list[Slot], finished: list[Slot]) -> list[Slot]:
        """Take finished sequences out; the last active ones move into their slots."""
        assert self.cache is not None
        done = [s for s in active if s.finish_reason]
        if not done:
            return active
        finished += done
        remaining = len(active) - len(done)
        gaps = [slot for slot in range(remaining) if active[slot].finish_reason]
        movers = [slot for slot in range(remaining, len(active)) if not active[slot].finish_reason]
        if gaps:
            device = self._device
            self.cache.move(torch.tensor(gaps, device=device), torch.tensor(movers, device=device))
        kept = active[:remaining]
        for gap, mover in zip(gaps, movers, strict=True):
            kept[gap] = active[mover]
        return kept

    def _decode_texts(self, token_ids: list[list[int]]) -> list[str]:
        if self.tokenizer is None:
            raise ValueError(
                "stop_strings need a tokenizer: give the backend one, or use stop_token_ids"
            )
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
