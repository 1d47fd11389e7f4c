"""The blocks of a Hugging Face model that share out tokens among experts."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.library import register_autocast
from torch.overrides import TorchFunctionMode

from nemorl.models.causal_lm import decoder_of

for _device in ("cpu", "cuda"):
    # The product that fused experts are computed by: autocast leaves it in float32 (torch 2.13).
    register_autocast("aten::_grouped_mm", _device, torch.bfloat16)


def blocks_of(model: Any) -> list[Any]:
    """Return the blocks with `experts`, in the order of the layers; none of a dense model."""
    parts = decoder_of(model).modules()
    return [part for part in parts if isinstance(getattr(part, "experts", None), nn.Module)]


@contextmanager
def recorded(blocks: list[Any]) -> Iterator[list[Int[Tensor, "tokens topk"]]]:
    """Record the experts that compute each token in the block, one entry per block and pass."""
    found: list[Tensor] = []
    with ExitStack() as hooks:
        for block in blocks:
            hook = block.experts.register_forward_pre_hook(lambda _, args: found.append(args[1]))
            hooks.enter_context(hook)
        yield found


class Given(TorchFunctionMode):
    """Has a router choose given experts: it takes those in place of the largest scores, and weighs
    them as if it had chosen them itself. -1: the router's own choice.
    """

    def __init__(self, experts: Int[Tensor, "tokens topk"], total: int) -> None:
        super().__init__()
        self.experts, self.total, self.taken = experts.long(), total, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        largest = func in (torch.topk, Tensor.topk) and args[0].shape[-1] == self.total
        if not largest or found.indices.shape != self.experts.shape:
            return found  # of groups of experts, as in DeepSeek-V3
        self.taken = True
        own = (self.experts < 0).any(-1, keepdim=True)
        experts = torch.where(own, found.indices, self.experts)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))


def choosing(router: nn.Module, experts: Int[Tensor, "tokens topk"], total: int) -> Any:
    """Return the router's `forward` with `Given` experts, of `total` ones."""
    return partial(_choose, router.forward, experts, total)


def _choose(forward: Any, experts: Tensor, total: int, *args: Any, **options: Any) -> Any:
    with Given(experts, total) as given:
        found = forward(*args, **options)
    if not given.taken:
        raise RuntimeError(
            "the sampler's experts can't be replayed: the model's router does not choose by"
            " torch.topk over all experts; remove trainer.router_replay"
        )
    return found
