"""A key-value cache with one slot per sequence, each at its own position, as large as is in use."""

from typing import Any

import torch
from torch import Tensor

from nemorl.data.padding import round_up

LEAST_LENGTH = 32
"""Lengths are multiples of it."""


def stepped(count: int, least: int = 1) -> int:
    """Return a count rounded up, by an eighth or less than `least`: few sizes, little waste.

    >>> [stepped(count, 32) for count in (1, 33, 300, 2000, 2100)]
    [32, 64, 320, 2048, 2304]
    """
    return round_up(count, max(least, (1 << count.bit_length()) // 16))


class SlotCache:
    """Keys and values of sequences, in the type in which attention is computed.

    `[slots, kv_heads, length, head_dim]` a layer. In place of a `transformers` cache: models call
    `update` in every layer, after `prefill` or `decode` said where new keys belong. Room is made as
    zeros: a masked slot's weight 0 times NaN is NaN.
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
        """Announce a pass of whole prompts: slot `slots[i]` keeps a copy of prompt `sources[i]`."""
        self._fit(num_slots, length)
        self._prefill = (slots, sources)

    def decode(self, positions: Tensor, longest: int) -> int:
        """Announce a pass of one token for the first `len(positions)` slots; return the length of
        their keys, `longest` rounded up.
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
