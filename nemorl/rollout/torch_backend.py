"""The embedded generation engine: plain PyTorch in the trainer's process, on the trainer's own weights."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.losses.logprobs import filter_logits
from nemorl.rollout.causal_lm import check_supported, decoder_of, head_weight, load_causal_lm
from nemorl.rollout.generation import Completion, FinishReason, SamplingParams
from nemorl.rollout.kv_cache import SlotCache
from nemorl.rollout.random import uniform

PREFILL_TOKENS = 8192
"""Prompt tokens that are computed at a time, padding included."""


@dataclass
class Slot:
    """One response on its way: what the host knows of a slot."""

    request: int
    sample: int
    params: SamplingParams
    seed: int
    prompt_length: int
    limit: int
    """Tokens that it may have: max_new_tokens, or what the model's positions leave."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def position(self) -> int:
        """Where the newest token stands, prompt included."""
        return self.prompt_length + len(self.token_ids) - 1


def sample_tokens(logits: Tensor, sequences: Sequence[Slot]) -> tuple[Tensor, Tensor]:
    """The next token of each row and its logprob under the distribution that it was sampled from (greedy: the model's own, at temperature 1).

    Sampling inverts the cumulative distribution at the row's own number of `uniform(seed, sample, place)`.
    """
    device, params = logits.device, [s.params for s in sequences]

    def column(values: list[Any], dtype: torch.dtype) -> Any:
        return values[0] if len(set(values)) == 1 else torch.tensor(values, dtype=dtype, device=device)

    greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
    logits = filter_logits(
        logits.float(),
        temperature=column([p.temperature or 1.0 for p in params], torch.float32),
        top_k=column([0 if p.temperature == 0 else p.top_k for p in params], torch.int64),
        top_p=column([1.0 if p.temperature == 0 else p.top_p for p in params], torch.float32),
        min_p=column([0.0 if p.temperature == 0 else p.min_p for p in params], torch.float32),
    )
    logprobs = logits.log_softmax(-1)
    draws = torch.tensor([[s.seed, s.sample, len(s.token_ids)] for s in sequences], dtype=torch.int64, device=device)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform(draws[:, 0], draws[:, 1], draws[:, 2]) * cumulative[:, -1]
    sampled = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), sampled)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


class TorchGenerationBackend:
    """`GenerationBackend` "torch". Given the trainer's model it shares its weights: no copy and nothing to sync.

    Decoding is continuous: sequences that finish leave the batch and waiting prompts take their slots. A prompt is computed once for all its samples.
    """

    def __init__(self, *, model: nn.Module | None = None, tokenizer: Any = None, model_path: str = "", precision: str = "float32") -> None:
        self.model, self.tokenizer, self.model_path, self.precision = model, tokenizer, model_path, precision
        self.policy_version = 0
        self.end_tokens: set[Any] = set()
        self.max_batch_size = 256
        self.cache: SlotCache | None = None
        self.asleep = False

    def setup(self, config: Any) -> None:
        """`config` is the run's generation section: `max_batch_size` is read of it; how to sample comes with each request."""
        self.max_batch_size = config.max_batch_size
        if self.model is None:
            self.model = load_causal_lm(self.model_path)
        check_supported(self.model)
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        self.end_tokens = {getattr(self.tokenizer, "eos_token_id", None), *(ends if isinstance(ends, list) else [ends])} - {None}

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy what is not already the same memory; with the trainer's own model that is nothing."""
        own = self._model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own or own[name].shape != tensor.shape:
                    came = f"shape {tuple(tensor.shape)}, where {tuple(own[name].shape)} is expected" if name in own else "no such parameter"
                    raise ValueError(
                        f"weights must be those of the generator's model, but {name!r} does not fit ({came}): use the same model on both sides"
                    )
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self.policy_version = version

    def sleep(self) -> None:
        self.cache, self.asleep = None, True

    def wake(self) -> None:
        self.asleep = False

    def shutdown(self) -> None:
        self.cache = self.model = None

    @property
    def _model(self) -> nn.Module:
        if self.model is None:
            raise RuntimeError("the generation backend has no model: call setup() first, and nothing after shutdown()")
        return self.model

    def generate(self, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams | Sequence[SamplingParams]) -> list[Completion]:
        if self.asleep:
            raise RuntimeError("the generation backend sleeps: call wake() before generate()")
        params = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else list(sampling_params)
        waiting = self._requests(prompts, params)
        finished: list[Slot] = []
        active: list[Slot] = []
        model, was_training = self._model, self._model.training
        model.eval()
        try:
            with torch.no_grad(), self._autocast():
                self._make_cache(waiting)
                while waiting or active:
                    while self._room_for(waiting, len(active)):
                        active = self._retire(active + self._admit(prompts, waiting, len(active)), finished)
                    if active:
                        self._decode(active)
                        active = self._retire(active, finished)
        except BaseException:
            self.cache = None  # whatever it holds now must not get into later answers
            raise
        finally:
            model.train(was_training)
        return [self._completion(s) for s in sorted(finished, key=lambda s: (s.request, s.sample))]

    def _requests(self, prompts: Sequence[Sequence[int]], params: list[SamplingParams]) -> deque[list[Slot]]:
        """The samples of each prompt, together up to the batch size, so that they share a prefill. Short prompts first: they pad each other least."""
        if len(params) != len(prompts):
            raise ValueError(f"sampling_params must be one for all or one per prompt, but there are {len(params)} for {len(prompts)} prompts")
        positions = getattr(self._model.config, "max_position_embeddings", None) or sys.maxsize
        vocabulary = head_weight(self._model).shape[0]
        waiting: deque[list[Slot]] = deque()
        for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            if not len(prompt):
                raise ValueError(
                    f"prompts must have at least one token, but prompt {index} is empty: begin it with the tokenizer's bos token, for example"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocabulary:
                raise ValueError(
                    f"prompts must be of the model's {vocabulary} tokens, but prompt {index} has {max(prompt)}: use the model's own tokenizer"
                )
            if len(prompt) >= positions:
                raise ValueError(
                    f"prompts must leave room in the model's {positions} positions, but prompt {index} has {len(prompt)} tokens: shorten it"
                )
            seed = int(torch.randint(2**62, ())) if p.seed is None else p.seed
            limit = min(p.max_new_tokens, positions - len(prompt))
            samples = [Slot(index, j, p, seed, len(prompt), limit) for j in range(p.n)]
            waiting.extend(samples[i : i + self.max_batch_size] for i in range(0, p.n, self.max_batch_size))
        return deque(sorted(waiting, key=lambda group: group[0].prompt_length))

    def _make_cache(self, waiting: deque[list[Slot]]) -> None:
        slots = min(self.max_batch_size, sum(len(group) for group in waiting))
        length = max((s.prompt_length + s.limit for group in waiting for s in group), default=0)
        if self.cache is None or self.cache.num_slots < slots or self.cache.length < length:
            self.cache = SlotCache(slots, length)

    def _room_for(self, waiting: deque[list[Slot]], num_active: int) -> bool:
        """Whether to admit a group now. While others decode it waits until an eighth of the slots is free: one prefill of several costs less."""
        assert self.cache is not None
        free = self.cache.num_slots - num_active
        return bool(waiting) and free >= (max(len(waiting[0]), self.cache.num_slots // 8) if num_active else 1)

    def _admit(self, prompts: Sequence[Sequence[int]], waiting: deque[list[Slot]], num_active: int) -> list[Slot]:
        """Fill free slots with waiting groups: compute their prompts in one pass of up to PREFILL_TOKENS and sample their first tokens."""
        assert self.cache is not None
        free = self.cache.num_slots - num_active
        groups: list[list[Slot]] = []
        while waiting and len(waiting[0]) <= free and (not groups or (len(groups) + 1) * waiting[0][0].prompt_length <= PREFILL_TOKENS):
            free -= len(waiting[0])
            groups.append(waiting.popleft())
        device = head_weight(self._model).device
        lengths = [group[0].prompt_length for group in groups]
        input_ids = torch.zeros(len(groups), max(lengths), dtype=torch.long)
        for row, group in enumerate(groups):
            input_ids[row, : lengths[row]] = torch.tensor(prompts[group[0].request])
        new = [s for group in groups for s in group]
        sources = torch.tensor([row for row, group in enumerate(groups) for _ in group], device=device)
        self.cache.prefill(torch.arange(num_active, num_active + len(new), device=device), sources)
        causal = torch.ones(1, 1, max(lengths), max(lengths), dtype=torch.bool, device=device).tril()
        positions = torch.arange(max(lengths), device=device)[None].expand(len(groups), -1)
        hidden = self._forward(input_ids.to(device), positions, causal)
        last = hidden[torch.arange(len(groups), device=device), torch.tensor(lengths, device=device) - 1]
        self._sample((last @ head_weight(self._model).to(last.dtype).t())[sources], new)
        return new

    def _decode(self, active: list[Slot]) -> None:
        assert self.cache is not None
        device = head_weight(self._model).device
        positions = torch.tensor([s.position for s in active], device=device)
        width = max(s.position for s in active) + 1
        self.cache.decode(positions, width)
        visible = (torch.arange(width, device=device) <= positions[:, None])[:, None, None]
        tokens = torch.tensor([[s.token_ids[-1]] for s in active], device=device)
        hidden = self._forward(tokens, positions[:, None], visible)[:, 0]
        self._sample(hidden @ head_weight(self._model).to(hidden.dtype).t(), active)

    def _forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        decoder = decoder_of(self._model)
        return decoder(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, past_key_values=self.cache, use_cache=True)[0]

    def _sample(self, logits: Tensor, sequences: list[Slot]) -> None:
        tokens, logprobs = sample_tokens(logits, sequences)
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError("the model's logits are not finite, so that no token can be sampled: its weights hold NaN or infinity")
        for s, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            s.token_ids.append(token)
            s.logprobs.append(logprob)
            s.finish_reason = self._finish_reason(s, token)

    def _finish_reason(self, s: Slot, token: int) -> FinishReason | None:
        if token in s.params.stop_token_ids or token in self.end_tokens:
            return "stop"
        if s.params.stop_strings:
            # The newest token may complete a stop string that began at most its length in bytes earlier.
            tail = self._decode_text(s.token_ids[-max(len(stop.encode()) for stop in s.params.stop_strings) - 4 :])
            if any(stop in tail for stop in s.params.stop_strings):
                return "stop"
        return "length" if len(s.token_ids) >= s.limit else None

    def _retire(self, active: list[Slot], finished: list[Slot]) -> list[Slot]:
        """Take finished sequences out, and move the last active ones into their slots so that the active slots are the first."""
        assert self.cache is not None
        done = [s for s in active if s.finish_reason]
        if not done:
            return active
        finished += done
        remaining = len(active) - len(done)
        gaps = [slot for slot in range(remaining) if active[slot].finish_reason]
        movers = [slot for slot in range(remaining, len(active)) if not active[slot].finish_reason]
        if gaps:
            device = head_weight(self._model).device
            self.cache.move(torch.tensor(gaps, device=device), torch.tensor(movers, device=device))
        kept = active[:remaining]
        for gap, mover in zip(gaps, movers, strict=True):
            kept[gap] = active[mover]
        return kept

    def _decode_text(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: give the backend one, or use stop_token_ids")
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _completion(self, s: Slot) -> Completion:
        assert s.finish_reason is not None
        text = "" if self.tokenizer is None else self._decode_text(s.token_ids)
        ends = [text.index(stop) for stop in s.params.stop_strings if stop in text]
        return Completion(
            token_ids=tuple(s.token_ids),
            logprobs=tuple(s.logprobs),
            finish_reason=s.finish_reason,
            text=text[: min(ends)] if ends else text,
            policy_version=self.policy_version,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(head_weight(self._model).device.type, dtype=torch.bfloat16)
