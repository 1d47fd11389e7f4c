"""Weights on their way, without the way: which names and shapes are expected, how a stream of them
is cut into buckets, and a bucket's layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from nemorl.models.adapters import merged_tensors

BUCKET_BYTES = 2**26
"""64 MB: a sender has two of these.

Small enough that one is packed while the other is read, large enough that what a call costs is lost
in it.
"""
ALIGNMENT = 64


class WeightMismatch(ValueError):
    """The weights that came are not those of the engine's model."""


@runtime_checkable
class Payload(Protocol):
    """What travels to a receiver: a bucket of weights, or word for vLLM's own transfer engine to
    fetch them.
    """

    @property
    def lasts(self) -> bool:
        """Whether the tensors may be kept until the update is finished; else only until the
        receiver has answered.
        """

    @property
    def transfer(self) -> tuple[str, dict[str, Any]] | None:
        """For vLLM's own transfer engine: init or update, and its information."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The weights, readable in this process."""

    def nearby(self) -> Payload:
        """The same for other processes on this machine, until they have all answered."""


@dataclass(frozen=True)
class Entry:
    """Where in a bucket a tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next tensor may begin."""
        return self.offset + aligned(self.num_bytes)

    def of(self, memory: Tensor) -> Tensor:
        """This tensor as a view of a bucket's bytes."""
        return memory[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


def aligned(num_bytes: int) -> int:
    """Rounded up so that a tensor may begin there.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def expected_weights(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a model of this Hugging Face configuration (an object,
    or a config.json's text) has; tied ones once.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(config, str | bytes):
        config = AutoConfig.for_model(**json.loads(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in merged_tensors(model)}


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The same weights; raises WeightMismatch, which lists all that does not fit, before the first
    one that doesn't would come (or at the end).
    """
    missing, wrong = dict(expected), []
    for name, tensor in weights:
        shape = missing.pop(name, None)
        if shape is None:
            wrong.append(
                f"{name!r} does not fit"
                f" ({'it came twice' if name in expected else 'no such parameter'})"
            )
        elif shape != tuple(tensor.shape):
            wrong.append(
                f"{name!r} does not fit (shape {tuple(tensor.shape)}, where {shape} is expected)"
            )
        if not wrong:
            yield name, tensor
    if wrong := wrong + [f"{name!r} is missing" for name in missing]:
        raise WeightMismatch(
            f"weights must be those of the generator's model, but {', '.join(wrong)}: use the same"
            " model on both sides"
        )


def wire_dtype(tensor_dtype: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a tensor is cast to before it travels: floating point numbers to the engine's type.

    >>> wire_dtype(torch.float32, torch.bfloat16), wire_dtype(torch.int64, torch.bfloat16)
    (torch.bfloat16, torch.int64)
    """
    return dtype if tensor_dtype.is_floating_point else tensor_dtype


class BucketCutter:
    """Where to end a bucket: an engine processes a layer when it is complete, so layers stay whole
    where they fit into a bucket.

    A tensor larger than a bucket gets one of its own.

    >>> cutter = BucketCutter({"embed": 3, "layers.0.a": 2, "layers.0.b": 2, "layers.1.a": 2, "layers.1.b": 2}, 8)
    >>> [cutter.fits("layers.0.a", 3), cutter.fits("layers.0.b", 5), cutter.fits("layers.1.a", 7)]
    [True, True, False]
    """

    def __init__(self, num_bytes: Mapping[str, int], bucket_bytes: int) -> None:
        self.num_bytes, self.bucket_bytes = num_bytes, bucket_bytes
        self.groups: dict[str, int] = {}
        for name, size in num_bytes.items():
            self.groups[layer_of(name)] = self.groups.get(layer_of(name), 0) + size
        self.group = ""

    @property
    def capacity(self) -> int:
        """What the fullest bucket can hold."""
        return min(sum(self.num_bytes.values()), max(self.bucket_bytes, *self.num_bytes.values()))

    def fits(self, name: str, used: int) -> bool:
        """Whether this tensor goes into the bucket that holds `used` bytes."""
        group, before = layer_of(name), self.group
        self.group = group
        whole = self.groups[group]
        need = whole if group != before and whole <= self.bucket_bytes else self.num_bytes[name]
        return not used or used + need <= self.bucket_bytes


def layer_of(name: str) -> str:
    """The layer that a weight belongs to: its name up to the first number.

    >>> layer_of("model.layers.3.mlp.experts.7.up.weight"), layer_of("model.norm.weight")
    ('model.layers.3', 'model.norm.weight')
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
