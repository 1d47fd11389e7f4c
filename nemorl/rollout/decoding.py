"""Responses in progress, decoded together: what an engine does beside its forward passes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemorl.data.padding import pad, round_up
from nemorl.data.transfer import to_device
from nemorl.rollout.generation import Completion, FinishReason, text_before
from nemorl.rollout.kv_cache import SlotCache
from nemorl.rollout.sampling import Slot, SlotTensors, sample_tokens
from nemorl.rollout.scheduler import Request

PREFILL_TOKENS = 8192
"""Prompt tokens of a pass, padding included."""
PREFILL_MULTIPLE = 8
"""Padded prompts have a multiple of it: a kernel of CUDA pads other masks in each layer."""
MARGIN = 8
"""Characters that a text may begin with wrongly where it is decoded from the middle of a response:
parts of a character, or a space that is left out.
"""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward pass: of whole sequences, or of the newest token of each."""

    input_ids: Int[Tensor, "rows new"]
    position_ids: Int[Tensor, "rows new"]
    visible: Bool[Tensor, "_ 1 new keys"]
    """What each new token sees."""
    states: Int[Tensor, "rows"]
    """Places, in the flattened rows, of the tokens after which others are drawn."""
    sources: Int[Tensor, "samples"] | None
    """The row of each sample; None: each row has one."""
    rows: Sequence[int]
    slots: SlotTensors
    cache: SlotCache

    def keep(self, experts: Int[Tensor, "tokens layers topk"]) -> None:
        """Give each sample the experts of new tokens, in int16. Those of tokens that are computed
        again stay: the response was drawn with them.
        """
        # They stay on the device, for the host not to wait.
        rows = experts.short().unflatten(0, self.input_ids.shape)
        for slot, row in zip(self.slots.slots, self.rows, strict=True):
            first = slot.length - rows.shape[1] if self.sources is None else 0
            known = sum(map(len, slot.experts))
            slot.experts.append(rows[row, known - first : slot.length - first])


def draw_tokens(logits: Float[Tensor, "rows vocab"], work: Pass) -> Float[Tensor, "2 samples"]:
    """Return each sample's next token and log-probability, as float64, in which ids are exact."""
    if work.sources is not None:
        logits = logits[work.sources]
    tokens, logprobs = sample_tokens(logits, work.slots)
    return torch.stack((tokens.double(), logprobs.double()))


class Decoding:
    """The sequences that an engine decodes at a time, and those that wait for their slots. A prompt
    is computed once for all its samples.
    """

    def __init__(
        self,
        draw: Callable[[Pass], Float[Tensor, "2 samples"]],
        *,
        device: torch.device,
        max_batch_size: int,
        max_positions: int,
        end_tokens: Iterable[int],
        tokenizer: Any = None,
        cached: bool = True,
    ) -> None:
        """draw: computes a pass, and returns what `draw_tokens` does. cached: keys and values of
        the past are kept; else each pass is of whole sequences.
        """
        self.cached = cached
        self.draw, self.device, self.tokenizer = draw, device, tokenizer
        self.max_batch_size, self.max_positions = max_batch_size, max_positions
        self.end_tokens = set(end_tokens)
        self.stops = StopStrings(tokenizer)
        self.cache = SlotCache(max_batch_size, max_positions)
        self.active: list[Slot] = []
        self.waiting: deque[list[Slot]] = deque()
        self._batch: SlotTensors | None = None

    def forget(self) -> None:
        self.cache.clear()
        self.active, self._batch = [], None
        self.waiting.clear()

    def preempt(self) -> None:
        """Drop the cache of unfinished sequences, to compute it again from their tokens so far."""
        self.waiting.extendleft([one] for one in reversed(self.active))
        self.active, self._batch = [], None

    def queue(self, new: list[Request], dropped: list[Request]) -> None:
        """Take requests, short prompts first, to pad least; and let go of others."""
        size, groups = self.max_batch_size, []
        for request in new:
            n, length = request.params.n, len(request.prompt)
            limit = min(request.params.max_new_tokens, self.max_positions - length)
            request.parts = [Slot(request, j, limit) for j in range(n)]
            groups += [request.parts[i : i + size] for i in range(0, n, size)]
        self.waiting.extend(sorted(groups, key=lambda group: group[0].length))
        if dropped:
            gone = set(dropped)
            for slot in self.active:
                if slot.request in gone:
                    slot.finish_reason = "stop"
            self.waiting = deque(group for group in self.waiting if group[0].request not in gone)
            self._retire()

    def advance(self, version: int) -> bool:
        """Compute a pass: of waiting sequences where there is room, else a token for each active
        one. Return whether there was one.
        """
        if not self.cached and self.active:
            self.preempt()
        if self._room():
            self._admit(version)
        elif self.active:
            self._decode(version)
        else:
            return False
        self._retire()
        return True

    def _room(self) -> bool:
        """Whether to admit a group now: while others decode, once an eighth is free."""
        if not self.waiting:
            return False
        free = self.max_batch_size - len(self.active)
        return free >= (max(len(self.waiting[0]), self.max_batch_size // 8) if self.active else 1)

    def _admit(self, version: int) -> None:
        """Compute waiting sequences in one pass of up to PREFILL_TOKENS."""
        num_active = len(self.active)
        free = self.max_batch_size - num_active
        wanted = num_active + sum(map(len, self.waiting))
        groups: list[list[Slot]] = []
        width = 0
        while self.waiting and len(self.waiting[0]) <= free:
            length = round_up(self.waiting[0][0].length, PREFILL_MULTIPLE)
            width = max(width, min(length, self.max_positions))
            if groups and (len(groups) + 1) * width > PREFILL_TOKENS:
                break
            free -= len(self.waiting[0])
            groups.append(self.waiting.popleft())
        input_ids, lengths = pad(
            [torch.tensor([*first.request.prompt, *first.token_ids]) for first, *_ in groups],
            value=0,
            length=width,
        )
        new = [s for group in groups for s in group]
        rows = [row for row, group in enumerate(groups) for _ in group]
        device = self.device
        input_ids, sources, lengths = to_device((input_ids, torch.tensor(rows), lengths), device)
        slots = torch.arange(num_active, num_active + len(new), device=device)
        longest = max([width, *(s.length for s in self.active)])
        wanted = min(wanted, self.max_batch_size)
        self.cache.prefill(slots, sources, num_slots=wanted, length=longest)
        work = Pass(
            input_ids=input_ids,
            position_ids=torch.arange(width, device=device)[None].expand(len(groups), -1),
            visible=torch.ones(1, 1, width, width, dtype=torch.bool, device=device).tril(),
            states=torch.arange(len(groups), device=device) * width + lengths - 1,
            sources=sources,
            rows=rows,
            slots=SlotTensors.of(new, device),
            cache=self.cache,
        )
        self._sample(work, version)
        self.active = self.active + new

    def _decode(self, version: int) -> None:
        device, batch = self.device, self._batch
        if batch is None or batch.slots is not self.active:
            batch = self._batch = SlotTensors.of(self.active, device)
        width = self.cache.decode(batch.positions, batch.width)
        places = torch.arange(width, device=device)
        work = Pass(
            input_ids=batch.tokens[:, None],
            position_ids=batch.positions[:, None],
            visible=(places <= batch.positions[:, None])[:, None, None],
            states=torch.arange(len(batch.slots), device=device),
            sources=None,
            rows=range(len(batch.slots)),
            slots=batch,
            cache=self.cache,
        )
        self._sample(work, version)

    def _sample(self, work: Pass, version: int) -> None:
        drawn = self.draw(work)
        tokens, logprobs = drawn.tolist()
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(
                "the model's logits are not finite: its weights hold NaN or infinity"
            )
        for s, token, logprob in zip(work.slots.slots, map(int, tokens), logprobs, strict=True):
            s.token_ids.append(token)
            s.logprobs.append(logprob)
            s.versions.append(version)
            s.finish_reason = self._finish_reason(s, token)
        work.slots.advance(drawn[0].long())

    def _finish_reason(self, s: Slot, token: int) -> FinishReason | None:
        ends = token in self.end_tokens and not s.params.ignore_eos
        if ends or token in s.params.stop_token_ids:
            return "stop"
        if s.params.stop_strings and self.stops.end(s.token_ids, s.params.stop_strings):
            return "stop"
        return "length" if len(s.token_ids) >= s.limit else None

    def _retire(self) -> None:
        """Take finished sequences out; the last active ones move into their slots."""
        active = self.active
        done = [s for s in active if s.finish_reason]
        if not done:
            return
        remaining = len(active) - len(done)
        gaps = [slot for slot in range(remaining) if active[slot].finish_reason]
        movers = [slot for slot in range(remaining, len(active)) if not active[slot].finish_reason]
        if gaps:
            self.cache.move(*to_device((torch.tensor(gaps), torch.tensor(movers)), self.device))
        kept = active[:remaining]
        for gap, mover in zip(gaps, movers, strict=True):
            kept[gap] = active[mover]
        self.active = kept
        if not kept and not self.waiting:
            self.cache.clear()
        self._answer(list(dict.fromkeys(s.request for s in done)))

    def _answer(self, requests: list[Request]) -> None:
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
                routed_experts=torch.cat(s.experts).cpu() if s.experts else None,
                tokenizer=self.tokenizer,
            )
            for s, text in zip(samples, texts, strict=True)
        ]
        rest = iter(made)
        for request in whole:
            request.answer(list(islice(rest, request.params.n)))


class StopStrings:
    """Finds stop strings in growing responses, decoding only as much of their end as it takes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lengths: dict[int, int | None] = {}

    def end(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        """Return whether the newest token completes a stop string, special tokens left out."""
        newest = self._length(token_ids[-1])
        if newest is None or not stop_strings:
            return False
        # Most tokens have a byte or more; special ones, any number of which may lie between, none.
        enough = max(map(len, stop_strings)) + newest + MARGIN
        count = max(len(stop.encode()) for stop in stop_strings) + newest + MARGIN
        while True:
            text = self._decode(token_ids[-count:])
            if any(stop in text for stop in stop_strings):
                return True
            if len(text) >= enough or count >= len(token_ids):
                return False
            count *= 2

    def _length(self, token: int) -> int | None:
        """The most characters that a token adds to a text; None: it is special, and adds none."""
        if token not in self._lengths:
            twice = [token, token]  # the first may lose its space
            length = len(self._decode(twice))
            special = not length and self.tokenizer.decode(twice) != ""
            self._lengths[token] = None if special else length
        return self._lengths[token]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
