"""A right loss, and those whose graphs torch.compile must break."""

import torch
from torch import Tensor

from nemorl.losses.types import LossOutput, Mean
from tests.helpers import Case

INPUTS = ("token_logprobs", "prev_logprobs", "advantages", "loss_weights", "segment_ids")


def right(
    logprobs: Tensor, prev: Tensor, advantages: Tensor, weights: Tensor, segment_ids: Tensor
) -> LossOutput:
    """A correct importance-weighted policy gradient, which breaks no law."""
    mask = weights != 0
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    losses = (
        -torch.where(mask, advantages, 0.0).to(wide)
        * (torch.where(mask, logprobs, 0.0).to(wide) - torch.where(mask, prev, 0.0).to(wide)).exp()
    )
    losses = torch.where(mask, losses, 0.0)
    return LossOutput(
        (weights * losses).sum(), {"loss": Mean(losses.detach().sum(), mask.sum().to(wide))}
    )


def host_sync(*arrays):
    scale = 1.0 if arrays[0].sum().item() < 1e9 else 2.0
    return LossOutput(right(*arrays).loss * scale, {})


def raises_on_values(*arrays):
    if arrays[0].isnan().any():
        raise ValueError("NaN")
    return right(*arrays)


BREAKING = (host_sync, raises_on_values)


UNCOMPILABLE = {
    function.__name__: Case(function.__name__, function, INPUTS, ("token_logprobs",))
    for function in BREAKING
}
"""For test_compile.py: graphs that break."""
