"""Optional terms of a policy loss (docs/numerics.md, Policy losses).

Each is a `LossOutput` of its own; the caller adds those it wants: `clipped(...) + kl_loss(...)`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemorl.losses.kl import kl
from nemorl.losses.masked import masked, mean_of, share_of, weighted_sum
from nemorl.losses.types import LossOutput


def kl_loss(
    token_logprobs: Float[Tensor, "batch seq"],
    reference_logprobs: Float[Tensor, "batch seq"],
    loss_weights: Float[Tensor, "batch seq"],
    generation_logprobs: Float[Tensor, "batch seq"] | None = None,
    *,
    coef: float,
    estimator: str = "k3",
    gradient: str = "pathwise",
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> LossOutput:
    """coef · Σ w · KL(π‖π_ref), estimated per token as `kl` does: see there for `estimator`,
    `gradient` and the clamps. Metric: `kl`, the mean estimate in nats.

    `coef=0` reports the metric and trains nothing. Source: NeMo RL `reference_policy_kl_penalty`,
    TRL `beta`, verl `kl_loss_coef`.

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


def entropy_bonus(
    entropy: Float[Tensor, "batch seq"], loss_weights: Float[Tensor, "batch seq"], *, coef: float
) -> LossOutput:
    """−coef · Σ w · H: a positive `coef` keeps the policy random. Metric: `entropy`, the mean in
    nats; `coef=0` reports it and trains nothing.

    Source: Mnih et al. 2016; verl `entropy_coeff`.

    >>> entropy_bonus(torch.tensor([[2.0, 4.0]]), torch.tensor([[0.5, 0.5]]), coef=0.1).loss
    tensor(-0.3000)
    """
    return LossOutput(
        -coef * weighted_sum(loss_weights, entropy),
        {"entropy": mean_of(entropy, loss_weights != 0)},
    )


def positive_nll(
    token_logprobs: Float[Tensor, "batch seq"],
    positive: Bool[Tensor, "batch seq"],
    loss_weights: Float[Tensor, "batch seq"],
    *,
    coef: float = 0.1,
) -> LossOutput:
    """−coef · Σ_{t positive} w · log π: imitation of the sequences that were rewarded.

    `positive` is True on the tokens of rewarded sequences. The weights are the step's, like
    everybody's: VAPO's mean over the positive tokens is `loss_weights=token_mean_weights(loss_mask
    & positive)`; with the policy loss's own weights the term shrinks with the share of positive
    tokens. Metrics: `positive_nll` (mean over the positive tokens), `positive_fraction`. Source:
    VAPO (2025), coefficient 0.1; NeMo RL `positive_example_nll_weight` (a mean over each
    microbatch's own positive tokens there).

    >>> output = positive_nll(torch.tensor([[-2.0, -3.0]]), torch.tensor([[True, False]]), torch.tensor([[0.5, 0.5]]), coef=0.1)
    >>> output.loss
    tensor(0.1000)
    """
    mask = loss_weights != 0
    kept = mask & positive
    losses = -masked(kept, token_logprobs)
    metrics = {"positive_nll": mean_of(losses, kept), "positive_fraction": share_of(positive, mask)}
    return LossOutput(coef * weighted_sum(loss_weights, torch.where(kept, losses, 0.0)), metrics)
