"""A static key-value cache with one slot per sequence, each at its own position."""

from typing import Any

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of up to `num_slots` sequences of up to `length` tokens, `[slots, kv_heads, length, head_dim]` a layer.

    It stands in for a `transformers` cache: the model calls `update` in every layer, and `prefill` or `decode` said before where the new keys belong.
    The layers' tensors are made on first use, when their shapes are known. They start as zeros, because a masked slot's weight 0 times NaN is NaN.
    """

    def __init__(self, num_slots: int, length: int) -> None:
        self.num_slots, self.length = num_slots, length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._prefill: tuple[Tensor, Tensor] | None = None
        self._positions: Tensor | None = None
        self._width = 0

    def prefill(self, slots: Tensor, sources: Tensor) -> None:
        """The next forward pass computes whole prompts: keep a copy of prompt `sources[i]` in slot `slots[i]`."""
        self._prefill = (slots, sources)

    def decode(self, positions: Tensor, width: int) -> None:
        """The next forward pass computes one token for each of the first `len(positions)` slots; `width` = the largest position + 1."""
        self._prefill, self._positions, self._width = None, positions, width

    def move(self, targets: Tensor, sources: Tensor) -> None:
        """Copy whole slots, to close gaps that finished sequences left."""
        for store in (*self.keys, *self.values):
            store[targets] = store[sources]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: store the new keys and values, return those to attend to."""
        if layer_idx == len(self.keys):
            for stores, new in ((self.keys, key), (self.values, value)):
                stores.append(new.new_zeros(self.num_slots, new.shape[1], self.length, new.shape[3]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._prefill is not None:
            slots, sources = self._prefill
            keys[slots, :, : key.shape[2]] = key[sources]
            values[slots, :, : value.shape[2]] = value[sources]
            return key, value
        assert self._positions is not None
        rows = torch.arange(len(self._positions), device=key.device)
        keys[rows, :, self._positions] = key[:, :, 0]
        values[rows, :, self._positions] = value[:, :, 0]
        return keys[: len(rows), :, : self._width], values[: len(rows), :, : self._width]
