"""Responses in progress, decoded together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nemorl.data.batch import pad, round_up, to_device
from nemorl.losses.logprobs import filter_logits, running_mass
from nemorl.models.attention import PLAIN, Rule, attend, use_attention, without_cudnn_attention
from nemorl.rollout.generation import Completion, FinishReason, SamplingParams, text_before
from nemorl.rollout.random import stream, uniform
from nemorl.rollout.scheduler import Request, require_finite

FILTERS_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class Slot:
    """A response in progress, on the host."""

    request: Request
    sample: int
    limit: int
    """Its most tokens."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    """`[tokens, layers, topk]` of prompt and response so far, if recorded."""
    finish_reason: FinishReason | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def length(self) -> int:
        """With the prompt."""
        return len(self.request.prompt) + len(self.token_ids)


@dataclass
class SlotTensors:
    """The active slots on the device; from token to token only the last four fields change."""

    slots: list[Slot]
    streams: Tensor
    greedy: Tensor | None
    """Rows that take the most likely token, if any."""
    filters: dict[str, Any]
    """temperature, top_k, top_p and min_p: a number for all slots, or one for each."""
    places: Tensor
    """Tokens that each has so far."""
    positions: Tensor
    """Of the newest token of each."""
    tokens: Tensor
    """The newest of each; 0 after a prompt."""
    width: int
    """The largest position + 1."""

    @classmethod
    def of(cls, slots: list[Slot], device: torch.device) -> SlotTensors:
        def column(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        def same_or_column(values: list[Any], dtype: torch.dtype) -> Any:
            return values[0] if len(set(values)) == 1 else column(values, dtype)

        params = [s.params for s in slots]
        greedy = [p.temperature == 0 for p in params]
        return cls(
            slots=slots,
            streams=stream(column([p.seed for p in params]), column([s.sample for s in slots])),
            greedy=column(greedy, torch.bool) if any(greedy) else None,
            filters={
                name: same_or_column(
                    [getattr(p, name) if p.temperature else off for p in params],
                    torch.int64 if name == "top_k" else torch.float32,
                )
                for name, off in FILTERS_OFF.items()
            },
            places=column([len(s.token_ids) for s in slots]),
            positions=column([s.length - 1 for s in slots]),
            tokens=column([s.token_ids[-1] if s.token_ids else 0 for s in slots]),
            width=max(s.length for s in slots),
        )

    def advance(self, tokens: Tensor) -> None:
        self.tokens, self.width = tokens, self.width + 1
        self.places, self.positions = self.places + 1, self.positions + 1


def sample_tokens(logits: Tensor, batch: SlotTensors) -> tuple[Tensor, Tensor]:
    """Return each row's next token and its logprob under the distribution that it was drawn from.

    The cumulative distribution is inverted at the row's `uniform(stream, place)`; greedy rows take
    the best token and the model's own logprob.
    """
    logits = filter_logits(logits.float(), **batch.filters)
    logprobs = logits.log_softmax(-1)
    cumulative = running_mass(logprobs.exp())
    threshold = (uniform(batch.streams, batch.places) * cumulative[:, -1]).long()
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


LEAST_LENGTH = 32
"""The cache's shortest length, of which the others are multiples."""


def stepped(count: int, least: int = 1) -> int:
    """Return a count rounded up, by an eighth or less than `least`: few sizes, little waste.

    >>> [stepped(count, 32) for count in (1, 33, 300, 2000, 2100)]
    [32, 64, 320, 2048, 2304]
    """
    return round_up(count, max(least, (1 << count.bit_length()) // 16))


class SlotCache:
    """Keys and values of sequences, `[slots, kv_heads, length, head_dim]` a layer, in the type in
    which attention is computed.

    A model calls `update` in every layer, as of a `transformers` cache, after `prefill` or `decode`
    said where new keys belong. Room is made as zeros: a masked weight 0 times NaN is NaN.
    """

    def __init__(self, max_slots: int, max_length: int) -> None:
        self.max_slots, self.max_length = max_slots, max_length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.clear()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model needs a cache with {name}, not of keys and values alone")

    def clear(self) -> None:
        self.num_slots = self.length = self._width = 0
        self.keys.clear()
        self.values.clear()
        self._prefill: tuple[Tensor, Tensor] | None = None
        self._positions: Tensor | None = None
        self._lines: Tensor | None = None

    def prefill(self, slots: Tensor, sources: Tensor, *, num_slots: int, length: int) -> None:
        """Announce a pass of whole prompts: `slots[i]` keeps a copy of prompt `sources[i]`."""
        self._fit(num_slots, length)
        self._prefill = (slots, sources)

    def decode(self, positions: Tensor, longest: int) -> int:
        """Announce a pass of one token for the first `len(positions)` slots; return the length of
        their keys.
        """
        self._fit(len(positions), longest)
        self._prefill, self._positions, self._lines = None, positions, None
        self._width = min(stepped(longest, LEAST_LENGTH), self.max_length)
        return self._width

    def move(self, targets: Tensor, sources: Tensor) -> None:
        for store in (*self.keys, *self.values):
            store[targets] = store[sources]

    def _fit(self, num_slots: int, length: int) -> None:
        num_slots = min(stepped(num_slots), self.max_slots)
        length = min(stepped(length, LEAST_LENGTH), self.max_length)
        lacks = num_slots > self.num_slots or length > self.length
        if not lacks and 2 * self.num_slots * self.length <= 3 * num_slots * length:
            return
        slots, shared = min(num_slots, self.num_slots), min(length, self.length)
        for stores in (self.keys, self.values):
            for i, old in enumerate(stores):  # one by one: the peak is a layer above both
                stores[i] = old.new_zeros(num_slots, old.shape[1], length, old.shape[3])
                stores[i][:slots, :, :shared] = old[:slots, :, :shared]
        self.num_slots, self.length = num_slots, length

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, cache_kwargs: object = None
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return the ones to attend to."""
        device = key.device.type
        if torch.is_autocast_enabled(device):  # attention would cast all of them for every token
            dtype = torch.get_autocast_dtype(device)
            key, value = key.to(dtype), value.to(dtype)
        if layer_idx == len(self.keys):
            for stores, new in ((self.keys, key), (self.values, value)):
                stores.append(
                    new.new_zeros(self.num_slots, new.shape[1], self.length, new.shape[3])
                )
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._prefill is not None:
            slots, sources = self._prefill
            keys[slots, :, : key.shape[2]] = key[sources]
            values[slots, :, : value.shape[2]] = value[sources]
            return key, value
        assert self._positions is not None
        rows, heads = key.shape[:2]
        if self._lines is None:  # for all layers: places in a store seen as lines of head_dim
            self._lines = (
                torch.arange(rows * heads, device=key.device).view(rows, heads) * self.length
                + self._positions[:, None]
            ).flatten()
        for store, new in ((keys, key), (values, value)):
            store.view(-1, store.shape[-1]).index_copy_(
                0, self._lines, new.reshape(rows * heads, -1)
            )
        return keys[:rows, :, : self._width], values[:rows, :, : self._width]


ATTENTION_NAME = "nemorl_cached"


def cached_attention(
    query: Float[Tensor, "batch heads new dim"],
    key: Float[Tensor, "batch kv_heads seq dim"],
    value: Float[Tensor, "batch kv_heads seq value_dim"],
    mask: Tensor | None,
    *,
    rule: Rule = PLAIN,
) -> Float[Tensor, "batch new heads value_dim"]:
    """Return the attention of new tokens to the cached ones that mask and rule show.

    mask: `[batch, 1, new, seq]`, True for a token's own place and all before it. None: the new
    tokens are all there are. One new token's heads that share a key head are taken as several
    tokens of that head: repeating keys and values would copy the whole cache in every layer.
    """
    batch, heads, new, dim = query.shape
    if mask is None:
        return attend(query, key, value, rule=rule, causal=True)
    if rule.hides(key.shape[2]):
        places = torch.arange(key.shape[2], device=key.device)
        mask = mask & rule.visible(mask.sum(-1, keepdim=True) - 1, places[None])
    if new > 1 or rule.explicit:
        return attend(query, key, value, mask, rule=rule)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, dropout_p=rule.dropout, scale=rule.scaling
    )
    return output.reshape(batch, 1, heads, value.shape[3])


@contextmanager
def decoding(model: nn.Module) -> Iterator[None]:
    """Give the model this attention and no dropout inside the block, and no cuDNN, which would make
    a plan for each number of sequences and keys.
    """
    before = model.config._attn_implementation  # type: ignore[union-attr]
    was_training = model.training
    use_attention(model, ATTENTION_NAME, cached_attention)
    model.eval()
    try:
        with without_cudnn_attention:
            yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
        model.train(was_training)


PREFILL_TOKENS = 8192
"""Prompt tokens of a pass, padding included."""
PREFILL_MULTIPLE = 8
"""Padded prompts have a multiple of it: a kernel of CUDA pads other masks in each layer."""
MARGIN = 8
"""Characters that may be wrong at the beginning of a text that is decoded from the middle of a
response: a part of one, or a lost space.
"""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward pass: of whole sequences, or of the newest token of each."""

    input_ids: Int[Tensor, "rows new"]
    position_ids: Int[Tensor, "rows new"]
    visible: Bool[Tensor, "_ 1 new keys"]
    """What each new token sees."""
    states: Int[Tensor, "rows"]
    """Places in the flattened rows after which tokens are drawn."""
    sources: Int[Tensor, "samples"] | None
    """The row of each sample; None: each row has one."""
    rows: Sequence[int]
    slots: SlotTensors
    cache: SlotCache

    def keep(self, experts: Int[Tensor, "tokens layers topk"]) -> None:
        """Give each sample the experts of new tokens, in int16; tokens that are computed again keep
        the ones with which they were drawn.
        """
        rows = experts.short().unflatten(0, self.input_ids.shape)  # on the device: no wait
        for slot, row in zip(self.slots.slots, self.rows, strict=True):
            first = slot.length - rows.shape[1] if self.sources is None else 0
            known = sum(map(len, slot.experts))
            slot.experts.append(rows[row, known - first : slot.length - first])


def draw_tokens(logits: Float[Tensor, "rows vocab"], work: Pass) -> Float[Tensor, "2 samples"]:
    """Return each sample's next token and logprob, in float64, in which ids are exact."""
    if work.sources is not None:
        logits = logits[work.sources]
    tokens, logprobs = sample_tokens(logits, work.slots)
    return torch.stack((tokens.double(), logprobs.double()))


class Decoding:
    """The sequences that an engine decodes, and the ones that wait for slots. A prompt is computed
    once for all that begin with it at a time.
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
        """draw: computes a pass, and returns what `draw_tokens` does. cached: keep keys and values
        of the past; else each pass is of whole sequences.
        """
        self.draw, self.cached, self.device, self.tokenizer = draw, cached, device, tokenizer
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
        """Drop the cache of unfinished sequences, to compute it again from their tokens."""
        self.waiting.extendleft([one] for one in reversed(self.active))
        self.active, self._batch = [], None

    def queue(self, new: list[Request], dropped: list[Request]) -> None:
        """Take requests, short prompts first, to pad least; and drop others."""
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
        """Compute a pass, if any: of waiting sequences where there is room, else a token of each
        active one. Return whether there was one.
        """
        if not self.cached and self.active:
            self.preempt()
        free = self.max_batch_size - len(self.active)
        least = self.max_batch_size // 8 if self.active else 1  # an eighth while others decode
        if self.waiting and free >= max(len(self.waiting[0]), least):
            self._admit(version)
        elif self.active:
            self._decode(version)
        else:
            return False
        self._retire()
        return True

    def _admit(self, version: int) -> None:
        num_active = len(self.active)
        free = self.max_batch_size - num_active
        wanted = num_active + sum(map(len, self.waiting))
        new, rows, width = list[Slot](), list[int](), 0
        row_of: dict[tuple[int, ...], int] = {}
        while self.waiting and len(self.waiting[0]) <= free:
            first = self.waiting[0][0]
            sequence = (*first.request.prompt, *first.token_ids)
            length = round_up(len(sequence), PREFILL_MULTIPLE)
            width = max(width, min(length, self.max_positions))
            if row_of and (len(row_of) + (sequence not in row_of)) * width > PREFILL_TOKENS:
                break
            group = self.waiting.popleft()
            free -= len(group)
            new += group
            rows += [row_of.setdefault(sequence, len(row_of))] * len(group)
        padded = pad([torch.tensor(each) for each in row_of], value=0, length=width)
        device = self.device
        input_ids, lengths, sources = to_device((*padded, torch.tensor(rows)), device)
        slots = torch.arange(num_active, num_active + len(new), device=device)
        longest = max([width, *(s.length for s in self.active)])
        self.cache.prefill(slots, sources, num_slots=wanted, length=longest)
        work = Pass(
            input_ids=input_ids,
            position_ids=torch.arange(width, device=device)[None].expand(len(row_of), -1),
            visible=torch.ones(1, 1, width, width, dtype=torch.bool, device=device).tril(),
            states=torch.arange(len(row_of), device=device) * width + lengths - 1,
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
        require_finite(all(map(math.isfinite, logprobs)))
        for s, token, logprob in zip(work.slots.slots, map(int, tokens), logprobs, strict=True):
            s.token_ids.append(token)
            s.logprobs.append(logprob)
            s.versions.append(version)
            s.finish_reason = self._finish_reason(s, token)
        work.slots.advance(drawn[0].long())

    def _finish_reason(self, s: Slot, token: int) -> FinishReason | None:
        params = s.params
        if (
            (token in self.end_tokens and not params.ignore_eos)
            or token in params.stop_token_ids
            or (params.stop_strings and self.stops.end(s.token_ids, params.stop_strings))
        ):
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
        for request in dict.fromkeys(s.request for s in done):
            if all(s.finish_reason for s in request.parts):
                request.answer([self._completion(s) for s in request.parts])

    def _completion(self, s: Slot) -> Completion:
        text = "" if self.tokenizer is None else self.stops.decoded(s.token_ids)
        return Completion(
            token_ids=tuple(s.token_ids),
            logprobs=tuple(s.logprobs),
            finish_reason=s.finish_reason or "length",
            text=text_before(s.params.stop_strings, text),
            policy_versions=tuple(s.versions),
            routed_experts=torch.cat(s.experts).cpu() if s.experts else None,
            tokenizer=self.tokenizer,
        )


class StopStrings:
    """Finds stop strings in growing responses, of which only the end is decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lengths: dict[int, int | None] = {}

    def end(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        """Return whether the newest token completes a stop string, special tokens left out."""
        newest = self._length(token_ids[-1])
        if newest is None:
            return False
        # Most tokens have a byte or more; special ones, any number of which may lie between, none.
        enough = max(map(len, stop_strings)) + newest + MARGIN
        count = max(len(stop.encode()) for stop in stop_strings) + newest + MARGIN
        while True:
            text = self.decoded(token_ids[-count:])
            if any(stop in text for stop in stop_strings):
                return True
            if len(text) >= enough or count >= len(token_ids):
                return False
            count *= 2

    def _length(self, token: int) -> int | None:
        """The most characters that a token adds to a text; None of a special one."""
        if token not in self._lengths:
            twice = [token, token]  # the first may lose its space
            length = len(self.decoded(twice))
            special = not length and self.tokenizer.decode(twice) != ""
            self._lengths[token] = None if special else length
        return self._lengths[token]

    def decoded(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
