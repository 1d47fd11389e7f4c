"""Mixtures of experts, with any training backend: a loss that balances their load (arXiv
2101.03961, as Hugging Face has it), and the sampler's experts of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nemorl.checks import require
from nemorl.data.batch import RankRoutes, TokenBatch
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.plan import num_experts


def require_one_batch(trainer: TrainerConfig, earlier: Sequence[Any]) -> float:
    """Return the loss's coefficient. Raises ValueError if it is not 0 and gradients of earlier
    batches wait for a step.
    """
    coef = trainer.router_aux_loss_coef
    require(
        not (coef and earlier),
        "trainer.router_aux_loss_coef",
        "must be 0 where gradients of several batches are added: its loss is of one",
        coef,
        "call optim_step() after each forward_backward(), with larger batches",
    )
    return coef


@dataclass(frozen=True)
class Load:
    """Sums over tokens and layers: how often experts are among the likeliest, and probabilities."""

    topk: int
    sums: Float[Tensor, "2 experts"]
    """In float64, so that they do not depend on the order of the tokens."""

    def seen(
        self, logits: Float[Tensor, "tokens experts"], copies: Float[Tensor, "tokens"]
    ) -> Float[Tensor, "tokens experts"]:
        probabilities = logits.float().softmax(-1)
        weights = copies.to(self.sums.dtype)
        likeliest = probabilities.topk(self.topk, -1).indices
        self.sums[0].index_add_(0, likeliest.flatten(), weights.repeat_interleave(self.topk))
        self.sums[1] += weights @ probabilities.to(self.sums.dtype)
        return logits

    def loss(self, count: int) -> Float[Tensor, ""]:
        """Return E · Σ_e share_e · mean probability_e, over `count` tokens of all layers.

        Source: Hugging Face's `load_balancing_loss_func`.
        """
        shares, means = self.sums / count
        return self.sums.shape[1] * (shares * means).sum().float()

    def pull(self, count: int, *, coef: float) -> "Pull":
        """Return what a token adds to the gradient of coef · `loss`, whose shares are fixed."""
        return Pull((coef * self.sums.shape[1] / count * (self.sums[0] / count)).float())


@dataclass(frozen=True)
class Pull:
    """The gradient of a loss that is Σ_e weight_e · probability_e, summed over tokens."""

    weights: Float[Tensor, "experts"]

    def seen(
        self, logits: Float[Tensor, "tokens experts"], copies: Float[Tensor, "tokens"]
    ) -> Float[Tensor, "tokens experts"]:
        return self.on(logits, logits, copies)

    def on(
        self,
        carrier: Float[Tensor, "..."],
        logits: Float[Tensor, "tokens experts"],
        copies: Float[Tensor, "tokens"],
    ) -> Float[Tensor, "..."]:
        """Return `carrier`, a tensor that the layer's result depends on; whenever that gets its
        gradient, the logits get theirs of this loss.
        """
        return _Pulled.apply(carrier, logits, self.weights, copies)


class _Pulled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, logits: Tensor, weights: Tensor, copies: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, weights, copies)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, weights, copies = ctx.saved_tensors
        probabilities = logits.float().softmax(-1)
        mean = probabilities @ weights
        pulled = copies[:, None] * probabilities * (weights - mean[:, None])
        return grads[0], pulled.to(logits.dtype), None, None


def require_routes(batch: TokenBatch, config: Any, *, layers: int) -> None:
    """Raise ValueError where a batch has no experts of the sampler, or another model's."""
    experts = batch.routed_experts
    if isinstance(experts, RankRoutes):
        return  # checked where it was cut
    require(
        experts is not None,
        "routed_experts",
        "must be in every batch with trainer.router_replay",
        experts,
        "have an engine sample that records them (generation.backend torch, megatron or vllm), or"
        " remove it",
    )
    assert experts is not None
    sizes, count = (layers, config.num_experts_per_tok), num_experts(config)
    shape, most = tuple(experts.shape[2:]), int(experts.max()) if experts.numel() else -1
    remedy = "sample with the model that is trained"
    require(
        shape == sizes,
        "routed_experts",
        f"must be [batch, seq, *{sizes}], the model's layers and experts of a token",
        tuple(experts.shape),
        remedy,
    )
    must = f"must be numbers of the model's {count} experts"
    require(most < count, "routed_experts", must, most, remedy)
