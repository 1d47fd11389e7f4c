"""Generation by the ranks that train, with the weights that they train."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from nemorl.parallel.megatron.routing import recorded_routes
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import World, all_gather
from nemorl.rollout.decoding import Decoding, Pass, Slot, SlotCache, SlotTensors, draw_tokens
from nemorl.rollout.generation import Completion, SamplingParams
from nemorl.rollout.scheduler import Request


@dataclass(frozen=True, kw_only=True)
class Order:
    """What all ranks do next. Requests are numbered."""

    new: Sequence[tuple[int, Sequence[int], SamplingParams]] = ()
    dropped: Sequence[int] = ()
    passes: int = 0
    version: int = 0
    anew: bool = False
    asleep: bool = False


class MegatronEngine:
    """A rank's share of the decoding: each replica of the model takes some of the requests, and its
    ranks compute the same passes in lockstep.
    """

    def __init__(self, stages: Any, world: World, *, records_experts: bool, **options: Any) -> None:
        self.stages, self.world, self.records_experts = stages, world, records_experts
        self.decoding = Decoding(self._draw, device=world.device, **options)
        self.requests: dict[int, Request] = {}
        self.replicas = world.plan.data_ranks * world.plan.cp
        self.replica = world.data_rank * world.plan.cp + world.cp_rank

    def follow(self, order: Order) -> tuple[dict[int, list[Completion]], float]:
        """Do what is ordered; return complete answers, on rank 0 of all replicas, and a pass's
        seconds. A collective call, inside `runtime`.
        """
        if order.anew or order.asleep:
            self.decoding.preempt()
        if order.asleep:
            self.decoding.cache.clear()
        new = {
            number: Request(prompt, params)
            for number, prompt, params in order.new
            if number % self.replicas == self.replica
        }
        gone = [self.requests.pop(number, None) for number in order.dropped]
        self.requests |= new
        self.stages.eval()
        passes, begun = 0, time.monotonic()
        try:
            with torch.no_grad():
                self.decoding.queue(list(new.values()), [one for one in gone if one])
                while passes < order.passes and self._advance(order.version):
                    passes += 1
        except BaseException:
            self.decoding.forget()  # it must not get into later answers
            self.requests.clear()
            raise
        done = [number for number, request in self.requests.items() if request.future.done()]
        answers = {number: self.requests.pop(number).future.result() for number in done}
        seconds = (time.monotonic() - begun) / passes if passes else 0.0
        if self.replicas > 1:
            answers = self.world.merge_objects(answers, or_, everywhere=False)
        return answers, seconds

    def _advance(self, version: int) -> bool:
        if self.world.plan.ep == 1 or self.replicas == 1:
            return self.decoding.advance(version)
        own = bool(self.decoding.waiting or self.decoding.active)
        busy = torch.tensor([own], dtype=torch.int)
        dist.all_reduce(busy, dist.ReduceOp.MAX, group=self.world.control_group)
        if own:
            return self.decoding.advance(version)
        if busy:
            self._forward(_nothing(self.world.device))
        return bool(busy)

    def _draw(self, work: Pass) -> Tensor:
        world = self.world
        if self.records_experts:
            with recorded_routes(self.stages) as routes:
                logits = self._forward(work)
                self._keep(routes(), work)
        else:
            logits = self._forward(work)
        drawn = torch.zeros((2, len(work.slots.slots)), dtype=torch.float64, device=world.device)
        if logits is not None and world.tp_rank == 0:
            drawn = draw_tokens(logits, work)
        if world.is_last_stage and world.tp_group is not None:
            dist.broadcast(drawn, group=world.tp_group, group_src=0)
        if world.pp_group is not None:
            dist.broadcast(drawn, group=world.pp_group, group_src=world.plan.pp - 1)
        return drawn

    def _forward(self, work: Pass) -> Tensor | None:
        world, plan = self.world, self.world.plan
        parts = plan.tp if plan.sequence_parallel else 1
        # All tokens in one row, of which a rank of sequence parallelism has a part.
        rows = torch.stack((work.input_ids.flatten(), work.position_ids.flatten()))
        input_ids, position_ids = pad(rows, (0, -rows.shape[1] % parts))[:, None]
        shape = input_ids.shape[1] // parts, 1, self.stages[0].config.hidden_size
        for stage in self.stages:
            if not stage.pre_process:
                states = torch.empty(shape, dtype=stage.config.params_dtype, device=world.device)
                dist.recv(states, group=world.pp_group, group_src=(world.pp_rank - 1) % plan.pp)
                stage.set_input_tensor(states)
            found = stage(input_ids=input_ids, position_ids=position_ids, cached=work)
            if not stage.post_process:
                dist.send(found, group=world.pp_group, group_dst=(world.pp_rank + 1) % plan.pp)
        if not world.is_last_stage:
            return None
        return found if world.tp_group is None else all_gather(found, 1, world.tp_group)

    def _keep(self, experts: Tensor, work: Pass) -> None:
        world = self.world
        if world.plan.sequence_parallel and world.tp_group is not None:
            experts = all_gather(experts, 0, world.tp_group)
        if world.pp_group is not None:
            places, most = _places(world.plan, self.stages[0].config.num_layers)
            experts = pad(experts, (0, 0, 0, most - experts.shape[1]))
            experts = all_gather(experts, 1, world.pp_group)[:, places]
        work.keep(experts[: work.input_ids.numel()])


def _places(plan: ParallelPlan, num_layers: int) -> tuple[list[int], int]:
    """Return where each layer lies among those of all ranks of a pipeline, and how many places each
    rank has.

    >>> _places(ParallelPlan(pp=2, vpp=2), 7)
    ([0, 1, 4, 5, 2, 3, 6], 4)
    """
    stages = plan.stages.layers(num_layers)
    of_ranks = [list(chain(*stages[rank :: plan.pp])) for rank in range(plan.pp)]
    most = max(map(len, of_ranks))
    laid = [*chain(*(layers + [-1] * (most - len(layers)) for layers in of_ranks))]
    return [laid.index(layer) for layer in range(num_layers)], most


def _nothing(device: torch.device) -> Pass:
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    slot = Slot(Request([0], SamplingParams(seed=0)), sample=0, limit=1)
    work = Pass(
        input_ids=zero,
        position_ids=zero,
        visible=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device),
        states=zero[0],
        sources=None,
        rows=[0],
        slots=SlotTensors.of([slot], device),
        cache=SlotCache(1, 1),
    )
    work.cache.prefill(zero[0], zero[0], num_slots=1, length=1)
    return work
