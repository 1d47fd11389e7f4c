"""Mixtures of experts in Hugging Face models: which experts tokens get, and a loss and biases that
balance this.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemorl.checks import require
from nemorl.data.batch import TokenBatch
from nemorl.losses.types import Mean, Metric, Metrics
from nemorl.models.causal_lm import blocks_of, choosing, decoder_of
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.dtensor.tensor_parallel import experts_of
from nemorl.parallel.experts import Load, Pull
from nemorl.parallel.plan import num_experts
from nemorl.parallel.tokens import Work
from nemorl.parallel.world import World

BIAS = "e_score_correction_bias"
"""Buffer that is added to the scores by which experts are chosen, but not to their weights."""


class Mixtures:
    """A model's blocks with experts, in the order of its layers."""

    def __init__(self, model: Any, world: World, trainer: TrainerConfig) -> None:
        decoder = decoder_of(model)
        recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", None)
        self.world, self.config, self.trainer = world, model.config, trainer
        self.routers = [part for part in decoder.modules() if kind and isinstance(part, kind)]
        self.blocks = blocks_of(model)
        self._check()
        self._index: int = getattr(recorder, "index", 0)  # of logits in what a router returns
        self.forget()

    def _check(self) -> None:
        kind, biased = self.config.model_type, any(True for _ in self._biases())
        known = bool(self.routers) and hasattr(self.config, "router_aux_loss_coef")
        require(
            known or not self.trainer.router_aux_loss_coef,
            "trainer.router_aux_loss_coef",
            f"must be 0 for {kind}, for which Hugging Face has no such loss",
            self.trainer.router_aux_loss_coef,
            "take trainer.router_bias_update_rate" if biased else "remove it",
        )
        require(
            biased or not self.trainer.router_bias_update_rate,
            "trainer.router_bias_update_rate",
            f"must be 0 for {kind}, whose routers have no {BIAS}",
            self.trainer.router_bias_update_rate,
            "take trainer.router_aux_loss_coef" if known else "remove it",
        )
        can = bool(experts_of(self.config)) and len(self.routers) == len(self.blocks)
        require(
            can or not self.trainer.router_replay,
            "trainer.router_replay",
            f"must be off for {kind}, whose experts get all tokens",
            True,
            "remove it",
        )

    def forget(self) -> None:
        """Drop what was counted since the last step."""
        self._counted: Tensor | None = None
        """Tokens of each expert since the last step, `[blocks, experts]`."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._balance: Load | Pull | None = None
        self._loss: Tensor | None = None
        self._counts: dict[int, Tensor] = {}
        """Tokens of each expert by the number of its block, of this rank, up to a factor."""
        with ExitStack() as hooks:
            for router in self.routers:
                hooks.enter_context(router.register_forward_hook(self._routed))
                hooks.callback(router.__dict__.pop, "forward", None)  # the one of `follow`
            for number, block in enumerate(self.blocks):
                hook = partial(self._chosen, number)
                hooks.enter_context(block.experts.register_forward_pre_hook(hook))
            yield

    def tokens(self, part: TokenBatch, work: Work) -> tuple[Tensor, Tensor | None] | None:
        """Return for how many each token that routers get stands (0: padding), and the sampler's
        experts, if the batch has some; None for a dense model.
        """
        if not self.blocks:
            return None
        copies, given = work.copies(part.segment_ids.cpu() > 0), part.routed_experts
        assert given is None or isinstance(given, Tensor)
        routes = None if given is None else work.computed(given.cpu(), free=-1).flatten(0, 1)
        return copies.flatten(), routes

    def follow(self, tokens: tuple[Tensor, Tensor | None] | None) -> None:
        self._copies, routes = tokens or (torch.zeros(0), None)
        if routes is not None:
            for router, experts in zip(self.routers, routes.unbind(1), strict=True):
                router.__dict__.pop("forward", None)
                router.forward = choosing(router, experts, num_experts(self.config))

    def weigh(self, num_tokens: int, passes: Iterable[Any]) -> None:
        """Have routers add the gradient of the loss that balances experts over a batch, after
        `passes` over all its microbatches; a collective call.
        """
        experts, device = num_experts(self.config), self.world.device
        sums = torch.zeros(2, experts, dtype=torch.float64, device=device)
        self._balance = load = Load(self.config.num_experts_per_tok, sums)
        with torch.no_grad():
            for _ in passes:
                pass
        self._counts.clear()  # they are computed again
        self._sum_over_ranks(sums)
        count, coef = num_tokens * len(self.routers), self.trainer.router_aux_loss_coef
        self._balance, self._loss = load.pull(count, coef=coef), load.loss(count)

    def end_batch(self) -> tuple[Metrics, Tensor | float]:
        """Return metrics of a computed batch, and the loss that balances experts; a collective
        call.
        """
        metrics: dict[str, Metric] = {}
        more: Tensor | float = 0.0
        if self._counts:
            counts = torch.stack([each for _, each in sorted(self._counts.items())])
            self._sum_over_ranks(counts)
            self._counted = counts if self._counted is None else self._counted + counts
            load = counts.amax(-1) / counts.mean(-1).clamp(min=1e-9)
            one, idle = counts.new_ones(()), (counts == 0).double().mean()
            metrics = {"experts/max_load": Mean(load.mean(), one), "experts/idle": Mean(idle, one)}
        if self._loss is not None:
            metrics["router_aux_loss"] = Mean(self._loss, torch.ones(()))
            more = self.trainer.router_aux_loss_coef * self._loss
        return metrics, more

    def move_biases(self) -> None:
        """Move the bias of each expert's score up, in place, if it got less tokens than its layer's
        mean since the last step, and down if more.

        Source: DeepSeek-V3 (arXiv 2412.19437), auxiliary-loss-free load balancing.
        """
        rate = self.trainer.router_bias_update_rate
        if rate and self._counted is not None:
            steps = rate * (self._counted.mean(-1, keepdim=True) - self._counted).sign()
            for bias, step in zip(self._biases(), steps, strict=True):
                bias.add_(step.to(bias.dtype))
        self._counted = None

    def _biases(self) -> Iterable[Tensor]:
        return (
            bias
            for block in self.blocks
            for part in block.modules()
            if (bias := part._buffers.get(BIAS)) is not None
        )

    def _routed(self, router: nn.Module, args: Any, output: Any) -> Any:
        if self._balance is None:
            return None
        logits = output[self._index].flatten(0, -2)
        if isinstance(self._balance, Load):
            self._balance.seen(logits, self._copies)
            return None
        # The block computes with weights that follow from the logits, not with these.
        carrier = next(
            number
            for number, part in enumerate(output)
            if part.is_floating_point() and number != self._index
        )
        pulled = self._balance.on(output[carrier], logits, self._copies)
        return (*output[:carrier], pulled, *output[carrier + 1 :])

    def _chosen(self, number: int, experts: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) < 3:
            return  # Llama 4's experts get all tokens, most of them as zeros
        chosen, size = args[1].detach(), num_experts(self.config)
        weights = self._copies.double().repeat_interleave(chosen.shape[-1])
        counts = weights.new_zeros(size).index_add_(0, chosen.flatten().long(), weights)
        self._counts[number] = self._counts.get(number, 0.0) + counts

    def _sum_over_ranks(self, sums: Tensor) -> None:
        for group in (self.world.data_group, self.world.cp_group):
            if group is not None:
                dist.all_reduce(sums, group=group)
