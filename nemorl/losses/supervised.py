"""Negative log-likelihood."""

import torch
from jaxtyping import Float
from torch import Tensor

from nemorl.losses.masked import masked, mean_of, weighted_sum
from nemorl.losses.types import LossOutput, Metrics, Sum


def nll(
    token_logprobs: Float[Tensor, "batch seq"], loss_weights: Float[Tensor, "batch seq"]
) -> LossOutput:
    """Supervised fine-tuning: −Σ w · log π. With `token_mean_weights` it is the cross-entropy per
    token in nats.

    Metrics over the trained tokens: `nll` (the mean, whatever the weights; perplexity is its
    exponential, taken after merging), `token_probability` (mean π of the right token),
    `num_tokens`. Source: TRL SFTTrainer `loss_type="nll"`, NeMo RL `NLLLossFn`.

    >>> nll(torch.tensor([[0.5, 0.25, 0.9]]).log(), torch.tensor([[0.5, 0.5, 0.0]])).loss  # (log 2 + log 4) / 2
    tensor(1.0397)
    """
    mask = loss_weights != 0
    logprobs = masked(mask, token_logprobs)
    metrics: Metrics = {
        "nll": mean_of(-logprobs, mask),
        "token_probability": mean_of(logprobs.detach().exp(), mask),
        "num_tokens": Sum(mask.sum().to(torch.float32)),
    }
    return LossOutput(weighted_sum(loss_weights, -logprobs), metrics)
