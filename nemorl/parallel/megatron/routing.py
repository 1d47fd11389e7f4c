"""Which experts compute a token: the router's choice, or the sampler's (router replay, arXiv
2510.11370), weighted by the router all the same. And the loss that balances their load.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from nemorl.data.batch import TokenBatch
from nemorl.parallel.experts import Load, Pull
from nemorl.parallel.tokens import Work
from nemorl.parallel.world import World


class Routes:
    """The experts that a layer's router was given for a microbatch, and those that it took.

    megatron-core's RouterReplay can't leave tokens to the router, and knows recomputed microbatches
    only by their order.
    """

    def __init__(self) -> None:
        self.given: Int[Tensor, "tokens topk"] | None = None
        self.taken: Int[Tensor, "tokens topk"] | None = None
        self.records = False
        self.copies: Float[Tensor, "tokens"] | None = None
        self.balance: Load | Pull | None = None

    def seen(
        self, logits: Float[Tensor, "part batch experts"]
    ) -> Float[Tensor, "part batch experts"]:
        """Show the router's logits to the loss that balances experts, and return them."""
        if self.balance is None:
            return logits
        assert self.copies is not None
        return self.balance.seen(logits.flatten(0, 1), self.copies).view(logits.shape)

    def get_replay_topk(
        self,
        scores: Float[Tensor, "tokens experts"],
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        largest: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Float[Tensor, "tokens topk"], Int[Tensor, "tokens topk"]]:
        found, experts = largest(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.given is not None:
            own = (self.given < 0).any(-1, keepdim=True)
            experts = torch.where(own, experts, self.given.long())
            found = scores.gather(1, experts)
        if self.records:
            self.taken = experts
        return found, experts


@contextmanager
def balancing(stages: Any, balance: Load | Pull | None) -> Iterator[None]:
    """Have the routers of a rank's stages show their logits to `balance` in the block."""
    found = [] if balance is None else _routes(stages)
    for each in found:
        each.balance = balance
    try:
        yield
    finally:
        for each in found:
            each.balance = None


def follow_rows(layers: nn.ModuleList) -> None:
    """Give the routers of a stage's layers what `packed_seq_params` has of the tokens."""
    for index, layer in enumerate(layers):
        if hasattr(layer.mlp, "router"):
            # Before each pass: a layer may be recomputed after other microbatches.
            layer.register_forward_pre_hook(partial(_give, index), with_kwargs=True)


def _give(index: int, layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    rows, own = kwargs.get("packed_seq_params"), layer.mlp.router.router_replay
    routes = getattr(rows, "routes", None)
    own.given = None if routes is None else routes[:, index]
    own.copies = getattr(rows, "copies", None)


def _routes(stages: Any) -> list[Routes]:
    return [layer.mlp.router.router_replay for stage in stages for layer in stage.decoder.layers]


@contextmanager
def recorded_routes(stages: Any) -> Iterator[Callable[[], Int[Tensor, "tokens layers topk"]]]:
    """Record the experts of the tokens in the block, which has forward passes of stages.

    Yields: a function that returns those of the last pass in int32, in the order of its hidden
    states, `[seq, batch]` flattened.
    """
    found = _routes(stages)
    for each in found:
        each.records = True
    try:
        yield lambda: torch.stack([each.taken for each in found], 1).int()  # type: ignore[misc]
    finally:
        for each in found:
            each.records, each.taken = False, None


def routes_of(
    part: TokenBatch, work: Work, world: World, stage: int, *, num_layers: int
) -> Int[Tensor, "tokens layers topk"] | None:
    """Return the sampler's experts of the tokens that this rank computes of a microbatch, in a
    stage's layers; None where the batch has none.
    """
    if part.routed_experts is None:
        return None
    assert isinstance(part.routed_experts, Tensor)
    pp, stages = world.plan.pp, world.plan.stages.layers(num_layers)
    own = part.routed_experts.cpu().split([*map(len, stages[world.pp_rank :: pp])], 2)
    return by_state(work.computed(own[stage // pp], free=-1), world)


def by_state(values: Shaped[Tensor, "batch part *rest"], world: World) -> Shaped[Tensor, "_ *rest"]:
    """Return a rank's values of tokens in the order of its routers' hidden states."""
    values = values.transpose(0, 1)
    if world.plan.sequence_parallel:
        values = values.chunk(world.plan.tp)[world.tp_rank]
    return values.flatten(0, 1).contiguous()
