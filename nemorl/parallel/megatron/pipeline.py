"""Microbatches in megatron-core's pipeline."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from nemorl.data.batch import TokenBatch, to_device
from nemorl.losses.types import Needs
from nemorl.parallel.attention import kernel_of
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.experts import Load
from nemorl.parallel.layout import Layout
from nemorl.parallel.megatron.core import get_forward_backward_func, runtime
from nemorl.parallel.megatron.routing import balancing, by_state, routes_of
from nemorl.parallel.tokens import RankInputs, planned
from nemorl.parallel.world import DTYPES, World


class Pipeline:
    """A rank's part of the pipeline."""

    def __init__(self, world: World, trainer: TrainerConfig, model: PretrainedConfig) -> None:
        self.world, self.trainer, self.model = world, trainer, model
        self.kernel = kernel_of(model, world.device, DTYPES[world.plan.precision])
        self.copied = 0
        """Tokens that the last `run` with a loss did not compute again."""

    def run(
        self,
        stages: Any,
        layout: Layout,
        mask: str | None,
        needs: Needs,
        loss_fn: LossFn | None = None,
    ) -> list[Any]:
        """Take this rank's microbatches through the pipeline. Return the last stage's result for
        each: a loss, whose gradient is added, or without `loss_fn` a ForwardOutput.
        """
        self.copied = 0
        parts, plan = layout.parts(self.world.data_rank), self.world.plan
        if plan.vpp > 1:
            settings = getattr(stages[0], "module", stages[0]).config
            settings.microbatch_group_size_per_vp_stage = plan.microbatch_group(len(parts))
        vpp = plan.vpp if plan.vpp > 1 else None
        schedule = get_forward_backward_func(pp_size=plan.pp, vp_size=vpp)
        with runtime(self.world.device), torch.set_grad_enabled(loss_fn is not None):
            return schedule(
                forward_step_func=partial(self._forward, mask, needs, loss_fn),
                data_iterator=[iter(parts) for _ in stages],
                model=list(stages),
                num_microbatches=len(parts),
                seq_length=self.model.hidden_size,  # not used: stages send shapes
                micro_batch_size=1,
                forward_only=loss_fn is None,
                collect_non_loss_data=loss_fn is None,
            )

    def load(self, stages: Any, layout: Layout, needs: Needs) -> Load:
        """Return the load of the experts over a whole batch; a collective call."""
        experts, device = self.model.num_local_experts, self.world.device
        sums = torch.zeros(2, experts, dtype=torch.float64, device=device)
        load = Load(self.model.num_experts_per_tok, sums)
        stages.eval()
        with balancing(stages, load):
            self.run(stages, layout, None, Needs(values=needs.values))
        dist.all_reduce(sums)  # each rank had other tokens, or other layers
        return load

    def _forward(
        self,
        mask: str | None,
        needs: Needs,
        loss_fn: LossFn | None,
        parts: Iterator[TokenBatch],
        model: Any,
    ) -> tuple[Any, Callable[..., Any]]:
        stage = getattr(model, "module", model)
        part, trainer = next(parts), self.trainer
        wanted = getattr(part, mask) if mask else torch.zeros_like(part.loss_mask)
        share = trainer.share_prompts
        work = planned(part, wanted, self.world, share=share, kernel=self.kernel)
        first = stage.number == self.world.pp_rank
        self.copied += work.copied * (first and loss_fn is not None)
        layers = self.model.num_hidden_layers
        routing = {"routes": routes_of(part, work, self.world, stage.number, num_layers=layers)}
        if trainer.router_aux_loss_coef:
            routing["copies"] = by_state(work.copies(part.segment_ids.cpu() > 0), self.world)
        part = replace(part, routed_experts=None, route_ids=None)
        rows, work, routing = to_device((part, work, routing), self.world.device)
        inputs = RankInputs.of(rows, work, self.world, chunk=trainer.chunk, needs=needs)
        found = model(**inputs.values, **routing)

        def finish(output_tensor: torch.Tensor, non_loss_data: bool = False) -> Any:
            whole = inputs.whole(found, rows)
            outputs = ForwardOutput(**dict(zip(needs.outputs, whole, strict=True)))
            if loss_fn is None:
                return outputs
            output = loss_fn(outputs, rows)
            # The schedule would divide by the tokens, and frees what it is given.
            no_tokens = torch.zeros((), dtype=torch.int, device=self.world.device)
            return output.loss.clone(), no_tokens, output

        # The schedule wants one tensor for experts; `finish` has all.
        return found[0] if stage.post_process else found, finish
