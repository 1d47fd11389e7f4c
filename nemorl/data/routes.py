"""The sampler's experts as one of several ranks gets them, without those of other ranks."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class RankRoutes:
    """The experts of a rank's tokens and layers, in the order of its microbatches, no padding."""

    experts: Int[Tensor, "tokens layers topk"]
    ids: Int[Tensor, "tokens"] | None
    """Equal, and in order, where the experts of all layers are; None where these are all layers."""
    cut: Any
    """The plans by which the batch was cut: a rank that cuts it otherwise would mix up tokens."""
