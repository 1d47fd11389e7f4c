"""The critic's loss."""

from collections.abc import Mapping

import torch

from nemorl.checks import require
from nemorl.losses.types import LossOutput, PerToken, masked, mean_of, share_of, weighted_sum


def value_loss(
    values: PerToken,
    old_values: PerToken,
    returns: PerToken,
    loss_weights: PerToken,
    *,
    clip: float | None = 0.2,
) -> LossOutput:
    """Return the loss of a critic's values V against returns G.

    ℓ = ½·max((V − G)², (clip(V, V_old − ε, V_old + ε) − G)²), ε = `clip`, in the reward's unit;
    None: ½(V − G)².

    Args:
        values: V, the only one that gets a gradient.
        old_values: V_old, before the update.
        returns: G, of `gae`.
        loss_weights: w; 0 = not trained.
    Metrics over the trained tokens: `value_clip_fraction` (the clipped square is the larger one),
    `value_mean`, and for `explained_variance` `return_mean`, `return_square_mean`,
    `value_error_mean` (G − V), `value_error_square_mean`.
    Raises: ValueError unless clip > 0 or None.
    Source: Schulman et al. 2017; verl `cliprange_value` = 0.5, TRL `cliprange_value` = 0.2, NeMo RL
    `cliprange`.

    >>> values, old = torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0]])
    >>> returns, weights = torch.tensor([[2.0, 2.0]]), torch.tensor([[0.5, 0.5]])
    >>> value_loss(values, old, returns, weights, clip=0.5).loss  # ½ · mean of max(1, 2.25) and 1
    tensor(0.8125)
    """
    require(clip is None or clip > 0, "clip", "must be above 0", clip, "None turns it off")
    mask = loss_weights != 0
    values, returns = masked(mask, values), masked(mask, returns.detach())
    old_values = masked(mask, old_values.detach())
    square = (values - returns).square()
    larger, clipped = square, torch.zeros_like(mask)
    if clip is not None:
        # Not V_old + clamp(V − V_old), whose rounding would count as clipping.
        clipped_square = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        larger, clipped = torch.maximum(square, clipped_square), clipped_square > square
    # In float64, because `explained_variance` subtracts squares of means.
    exact, error = returns.double(), (returns - values).double()
    metrics = {
        "value_clip_fraction": share_of(clipped, mask),
        "value_mean": mean_of(values, mask),
        "return_mean": mean_of(exact, mask),
        "return_square_mean": mean_of(exact.square(), mask),
        "value_error_mean": mean_of(error, mask),
        "value_error_square_mean": mean_of(error.square(), mask),
    }
    return LossOutput(weighted_sum(loss_weights, 0.5 * larger), metrics)


def explained_variance(metrics: Mapping[str, float]) -> float:
    """Return 1 − Var(G − V)/Var(G) of finalized `value_loss` metrics.

    1 = perfect, 0 = no better than the mean return; 0 where all returns are equal, to the precision
    of float32 (σ < 3e-7 of their root mean square).

    >>> from nemorl.losses.types import finalize
    >>> values, returns = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    >>> metrics = value_loss(values, values, returns, torch.ones(1, 2)).metrics
    >>> explained_variance(finalize(metrics))  # 1 - 0.25 / 1
    0.75
    """
    square = metrics["return_square_mean"]
    variance = square - metrics["return_mean"] ** 2
    residual = metrics["value_error_square_mean"] - metrics["value_error_mean"] ** 2
    return 1 - residual / variance if variance > 1e-13 * square else 0.0
