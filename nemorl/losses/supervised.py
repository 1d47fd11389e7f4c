"""The loss of supervised fine-tuning."""

import torch

from nemorl.losses.types import LossOutput, Metrics, PerToken, Sum, masked, mean_of, weighted_sum


def nll(token_logprobs: PerToken, loss_weights: PerToken, *, dynamic: bool = False) -> LossOutput:
    """Return the negative log-likelihood −Σ w · log π, in nats.

    dynamic: −Σ w · sg(π) · log π, so that an unlikely token counts less (dynamic fine-tuning).

    Metrics over the trained tokens: `nll` (the mean, whatever the weights), `token_probability`
    (mean π of the right token), `num_tokens`.
    Source: TRL SFTTrainer `loss_type="nll"`, NeMo RL `NLLLossFn`; dynamic: Wu et al. 2025, TRL
    `loss_type="dft"`.

    >>> nll(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.5, 0.5]])).loss  # (log 8) / 2
    tensor(1.0397)
    """
    mask = loss_weights != 0
    logprobs = masked(mask, token_logprobs)
    metrics: Metrics = {
        "nll": mean_of(-logprobs, mask),
        "token_probability": mean_of(logprobs.detach().exp(), mask),
        "num_tokens": Sum(mask.sum().to(torch.float32)),
    }
    losses = -logprobs.detach().exp() * logprobs if dynamic else -logprobs
    return LossOutput(weighted_sum(loss_weights, losses), metrics)
