"""Optional terms of a policy loss, each a `LossOutput` to add: `clipped(...) + kl_loss(...)`."""

import torch

from nemorl.losses.kl import kl
from nemorl.losses.masked import masked, mean_of, share_of, weighted_sum
from nemorl.losses.types import LossOutput, PerToken, TokenMask


def kl_loss(
    token_logprobs: PerToken,
    reference_logprobs: PerToken,
    loss_weights: PerToken,
    generation_logprobs: PerToken | None = None,
    *,
    coef: float,
    estimator: str = "k3",
    gradient: str = "pathwise",
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> LossOutput:
    """Return coef · Σ w · KL(π‖π_ref), estimated per token by `kl` with the other options.

    Metric: `kl`, the mean in nats; coef=0 reports it and trains nothing.
    Source: NeMo RL `reference_policy_kl_penalty`, TRL `beta`, verl `kl_loss_coef`.

    >>> policy, reference = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> output = kl_loss(policy, reference, torch.ones(1, 1), coef=0.1)
    >>> round(output.loss.item(), 4)  # 0.1 · (0.5 - 1 + log 2)
    0.0193
    """
    mask = loss_weights != 0
    values = kl(
        token_logprobs,
        reference_logprobs,
        mask,
        estimator=estimator,
        gradient=gradient,
        generation_logprobs=generation_logprobs,
        input_clamp=input_clamp,
        output_clamp=output_clamp,
    )
    return LossOutput(coef * weighted_sum(loss_weights, values), {"kl": mean_of(values, mask)})


def entropy_bonus(entropy: PerToken, loss_weights: PerToken, *, coef: float) -> LossOutput:
    """Return −coef · Σ w · H: a positive `coef` keeps the policy random.

    Metric: `entropy`, the mean in nats; coef=0 reports it and trains nothing.
    Source: Mnih et al. 2016; verl `entropy_coeff`.

    >>> entropy_bonus(torch.tensor([[2.0, 4.0]]), torch.tensor([[0.5, 0.5]]), coef=0.1).loss
    tensor(-0.3000)
    """
    return LossOutput(
        -coef * weighted_sum(loss_weights, entropy),
        {"entropy": mean_of(entropy, loss_weights != 0)},
    )


def log_ratio_penalty(
    token_logprobs: PerToken,
    generation_logprobs: PerToken,
    loss_weights: PerToken,
    *,
    coef: float,
) -> LossOutput:
    """Return coef · Σ w · (log π − log π_gen)²: a penalty for leaving the policy that sampled.

    A token whose sampler logprob is not finite has none.

    Metric: `log_ratio_squared`, the mean in nats²; coef=0 reports it and trains nothing.
    Source: prime-rl `kl_tau` (0.001), after Kimi K2.5 (2026).

    >>> now, generation = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.5]]).log()
    >>> output = log_ratio_penalty(now, generation, torch.ones(1, 2), coef=0.1)
    >>> round(output.loss.item(), 4)  # 0.1 · (log 2)²
    0.048
    """
    usable = (loss_weights != 0) & generation_logprobs.isfinite()
    gap = masked(usable, token_logprobs) - masked(usable, generation_logprobs.detach())
    return LossOutput(
        coef * weighted_sum(loss_weights, gap**2), {"log_ratio_squared": mean_of(gap**2, usable)}
    )


def positive_nll(
    token_logprobs: PerToken,
    positive: TokenMask,
    loss_weights: PerToken,
    *,
    coef: float = 0.1,
) -> LossOutput:
    """Return −coef · Σ_{t positive} w · log π: imitation of rewarded sequences.

    `positive` is True on their tokens. VAPO's mean over them is
    `loss_weights=token_mean_weights(loss_mask & positive)`.

    Metrics: `positive_nll` (mean over the positive tokens), `positive_fraction`.
    Source: VAPO (2025), 0.1; NeMo RL `positive_example_nll_weight` (there a mean over each
    microbatch's positive tokens).

    >>> logprobs, positive = torch.tensor([[-2.0, -3.0]]), torch.tensor([[True, False]])
    >>> positive_nll(logprobs, positive, torch.tensor([[0.5, 0.5]]), coef=0.1).loss
    tensor(0.1000)
    """
    mask = loss_weights != 0
    kept = mask & positive
    losses = -masked(kept, token_logprobs)
    metrics = {"positive_nll": mean_of(losses, kept), "positive_fraction": share_of(positive, mask)}
    return LossOutput(coef * weighted_sum(loss_weights, torch.where(kept, losses, 0.0)), metrics)
