"""A static key-value cache with one slot per sequence, each at its own position."""

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of up to `num_slots` sequences.

    `[slots, kv_heads, length, head_dim]` a layer. In place of a `transformers` cache: models call
    `update` in every layer, after `prefill` or `decode` said where new keys belong. Made on first
    use, as zeros: a masked slot's weight 0 times NaN is NaN.
    """

    def __init__(self, num_slots: int, length: int) -> None:
        self.num_slots, self.length = num_slots, length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._prefill: tuple[Tensor, Tensor] | None = None
        self._positions: Tensor | None = None
        self._width = 0
        self._lines: Tensor | None = None

    def grow(self, num_slots: int, length: int) -> None:
        """Make room for more or longer sequences, with the same contents."""
        for stores in (self.keys, self.values):
            for i, old in enumerate(stores):
                stores[i] = old.new_zeros(num_slots, old.shape[1], length, old.shape[3])
                stores[i][: self.num_slots, :, : self.length] = old
        self.num_slots, self.length = num_slots, length

    def prefill(self, slots: Tensor, sources: Tensor) -> None:
        """Announce a pass of whole prompts: slot `slots[i]` keeps a copy of prompt `sources[i]`."""
        self._prefill = (slots, sources)

    def decode(self, positions: Tensor, width: int) -> None:
        """Announce a pass of one token for the first `len(positions)` slots, up to `width`."""
        self._prefill, self._positions, self._width, self._lines = None, positions, width, None

    def move(self, targets: Tensor, sources: Tensor) -> None:
        """Copy whole slots, to close gaps of finished sequences."""
        for store in (*self.keys, *self.values):
            store[targets] = store[sources]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, cache_kwargs: object = None
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return the ones to attend to.

        cache_kwargs: positions and rotary angles, from some models; for other kinds of caches.
        """
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
