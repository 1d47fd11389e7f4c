"""What a plan sends in an optimizer step, and how much of it over the link between machines."""

import math
from dataclasses import dataclass

from nemorl.parallel.planner.megatron import Stage
from nemorl.parallel.planner.memory import BYTES, STATE, Step
from nemorl.parallel.planner.model_shape import shard_ranks


@dataclass(frozen=True)
class Sent:
    """What a device sends in groups of `size` ranks that are `stride` apart."""

    nbytes: float
    stride: int
    size: int
    exchanged: bool = False
    """Whether each rank sends to all others, not to the next in a ring."""

    def slow(self, machine: int) -> float:
        """Return the bytes that leave a machine of so many devices."""
        # Groups whose span does not divide a machine begin in one and end in the next.
        span = self.stride * self.size
        together = max(1, min(self.size, math.gcd(machine, span) // self.stride))
        if together == self.size:
            return 0
        out = (self.size - together) / (self.size - 1) if self.exchanged else 1 / together
        return self.nbytes * out


def traffic(stage: Step | Stage) -> tuple[float, float]:
    """Return the bytes that a device sends in a step, and of these over the slow link."""
    step = stage.step if isinstance(stage, Stage) else stage
    gpus, machine = step.work.gpus, step.work.gpus_per_node
    found = sends(stage)
    total = sum(each.nbytes for each in found)
    return total, sum(each.slow(machine) for each in found) if gpus > machine else total


def sends(stage: Step | Stage) -> list[Sent]:
    """Return what a device sends in a step. Ranks of tp are neighbors, then those of cp, dp_shard,
    dp_replicate and pp; experts are divided between neighbors.
    """
    if isinstance(stage, Stage):
        return _of_stage(stage)
    step, plan, model = stage, stage.plan, stage.model
    if not plan.needs_ranks:
        return []
    ranks, count, layers = shard_ranks(plan), step.micro_batches, model.num_hidden_layers
    # All but the head's parameters are gathered twice.
    once = sum(each.shard(plan) for each in (model.ends if model.tied else model.ends[1:]))
    gradients = BYTES[plan.reduce_dtype] * step.trained()
    sharded = BYTES[plan.precision] * (2 * step.kept() - once) + gradients
    array = step.tokens * model.hidden_size * step.dtype_size
    return [
        Sent(count * sharded * (ranks - 1), plan.tp, ranks),
        Sent(_part(2 * count * gradients, plan.dp_replicate), plan.tp * ranks, plan.dp_replicate),
        Sent(_part(count * array, plan.tp) * (layers * _tensor_sends(step) + 4), 1, plan.tp),
        _context(step, layers),
    ]


def _of_stage(stage: Stage) -> list[Sent]:
    """Return the same with megatron-core, which reduces gradients at a step's end."""
    step, plan, model = stage.step, stage.step.plan, stage.step.model
    count, layers = step.micro_batches, stage.num_layers
    stream = count * step.tokens * model.hidden_size * step.dtype_size
    per_parameter = BYTES[plan.reduce_dtype] + step.dtype_size
    ends = (stage.index == 0) + 3 * stage.is_last
    tensor = layers * _tensor_sends(step) + ends
    again = plan.recomputes == "full" or "moe" in plan.recompute_modules
    routed = stage.rows_of_experts * layers * (6 if again else 4)
    hops = 2 * plan.vpp - (stage.index == 0) - stage.is_last
    tied = model.tied and plan.pp > 1 and (stage.index == 0 or stage.is_last)
    embedding = STATE * model.vocab_size // plan.tp * model.hidden_size
    (together, alike), near = stage.shares(), plan.ep if plan.ep > 1 else plan.tp
    handed = hops * stream // step.token_split() + tied * embedding
    return [
        Sent(_part(per_parameter * stage.parameters, together), plan.tp, together),
        Sent(_part(per_parameter * stage.of_experts, alike), near, alike),
        Sent(_part(stream, plan.tp) * tensor, 1, plan.tp),
        Sent(_part(stream, near) * routed, 1, near, exchanged=True),
        Sent(handed, plan.num_ranks // plan.pp, plan.pp),
        _context(step, layers),
    ]


def _part(array: float, devices: int) -> float:
    return array * (devices - 1) / devices


def _tensor_sends(step: Step) -> int:
    """Return how often a layer sends its tokens over tp."""
    parts, how = step.plan.sequence_parallel, step.plan.recomputes
    if not step.shards_optimizer:
        # Selective checkpointing keeps what reduce-scatter gave.
        forward, backward, kept = (4, 4, 2) if parts else (4, 10, 0)
        if step.model.num_experts and parts:
            forward, backward = 5, 5
        return forward + backward + {"none": 0, "selective": forward - kept, "full": forward}[how]
    # With sequence parallelism the backward pass gathers the inputs of products again.
    half = 5 if parts else 4
    if step.model.num_experts:  # what these send is counted on its own
        return half + 2 * (how == "full")
    selected = how == "selective" and "mlp" in step.recomputed_modules
    return 2 * half + (4 if how == "full" else 2 * selected)


def _context(step: Step, layers: int) -> Sent:
    """Return what attention exchanges over cp."""
    plan, (q, kv, _), how = step.plan, step.heads_width, step.plan.recomputes
    gathers = plan.cp_method == "allgather"
    exchanged = 2 * q + 2 * (q if step.kv_heads % plan.cp else kv)
    width = 2 * kv * plan.cp if gathers else exchanged
    selected = how == "selective" and "core_attn" in step.recomputed_modules
    times = step.micro_batches * layers * (2 + (how == "full" or selected))
    array = times * step.tokens * width * step.dtype_size
    return Sent(_part(array, plan.cp), plan.tp, plan.cp, exchanged=not gathers)
