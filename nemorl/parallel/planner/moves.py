"""What one step of reinforcement learning moves, through whom, and how long: bytes that the tests
compare with counted ones, and times that are estimates.
"""

import math
from dataclasses import dataclass, fields, replace

from nemorl.parallel.planner.cost import Traffic, step_traffic
from nemorl.parallel.planner.hardware import LINKS
from nemorl.parallel.planner.megatron import Stage
from nemorl.parallel.planner.memory import STATE, Step
from nemorl.parallel.planner.model_shape import shard_ranks
from nemorl.parallel.planner.sharing import stages_of
from nemorl.parallel.planner.timing import step_times

TOKEN = 50
"""Bytes of a token in a batch, padding included: ids, segments, positions and policy versions of 8,
two masks, and weights, advantages and two logprobs of 4.
"""
CHOICE = 2
"""Bytes of the number of an expert that a sampler chose."""
STORE = 2e9
"""Bytes per second through a process's main memory and Ray's object store; an estimate."""
DISK = 2e9
"""Bytes per second that a machine writes to a file system; an estimate."""
MESSAGE, CALL_SECONDS = 2000, 1e-3
"""At most so many bytes of a call without its batch, an answer, or metrics; and the controller's
seconds for a call of one rank: 0.9 to 1.7 ms of its CPU with 8 and 32 ranks, by
benchmarks/controller.py.
"""


@dataclass(frozen=True, kw_only=True)
class Move:
    """Bytes of one kind in a step."""

    what: str
    through: str
    """Where all of them pass: the controller, rank 0, or each rank its own."""
    of_rank: float
    """Bytes that the busiest rank sends, of a batch receives, or writes."""
    total: float
    """Bytes of all ranks together; of what the controller puts out, of all machines."""
    seconds: float
    """Estimated."""


def step_moves(step: Step, *, replays: bool = False) -> tuple[Move, ...]:
    """Return what a step moves: the batch, what ranks exchange, weights to engines, a checkpoint.

    replays: whether ranks get the sampler's experts (trainer.router_replay).
    """
    found = [_batch(step), *_exchanges(step), *_weights(step), _checkpoint(step), _calls(step)]
    if replays and step.model.num_local_experts:
        found.insert(1, _routes(step))
    return tuple(found)


def machines(step: Step) -> int:
    """Return how many machines the ranks of a step are on."""
    return math.ceil(step.plan.num_ranks / step.work.gpus_per_node)


def batch_tokens(step: Step) -> int:
    """Return the tokens of a step's rows, with padding."""
    return step.micro_batches * step.work.micro_batch_rows * step.width * step.plan.data_ranks


def _batch(step: Step) -> Move:
    """Each machine fetches the batch once, and each rank reads all of it. Rows are taken to be as
    wide as the longest.
    """
    size = TOKEN * batch_tokens(step)
    sent = size * machines(step)
    seconds = _stored(step, size, sent)
    return Move(what="batch", through="controller", of_rank=size, total=sent, seconds=seconds)


def _routes(step: Step) -> Move:
    """Each rank gets the choices for its own rows, in its own layers: an object that machines of
    tp and cp ranks fetch once each.
    """
    model, alike = step.model, step.plan.tp * step.plan.cp
    rows = batch_tokens(step) // step.plan.data_ranks
    layers = max(stage.num_layers for stage in _stages(step))
    choice = CHOICE * model.num_experts_per_tok
    put = choice * model.num_hidden_layers * batch_tokens(step)
    hardware = replace(step.work.hardware, gpus=step.plan.num_ranks)
    total = put * alike // hardware.together(1, alike)
    return Move(
        what="routes",
        through="controller",
        of_rank=choice * layers * rows,
        total=total,
        seconds=_stored(step, put, total),
    )


def _stages(step: Step) -> list[Stage]:
    return [Stage(step, index) for index in range(step.plan.pp)]


EXCHANGES = {
    "parameters and gradients": ("data", ("shard", "expert_shard", "replicate")),
    "activations of tp": ("tensor", ("tensor",)),
    "activations of cp": ("context", ("context",)),
    "tokens to experts": ("experts", ("experts",)),
    "activations of pp": ("pipeline", ("pipeline",)),
}
"""Names, of `Times` and of `Traffic`."""


def _exchanges(step: Step) -> list[Move]:
    whole = step.shards_optimizer
    sent = [stage.traffic() for stage in _stages(step)] if whole else [step_traffic(step)]
    times, ranks = step_times(step), step.plan.num_ranks // len(sent)
    assert {name for _, names in EXCHANGES.values() for name in names} == {
        each.name for each in fields(Traffic)
    }
    found = []
    for what, (time, names) in EXCHANGES.items():
        sizes = [sum(getattr(traffic, name) for name in names) for traffic in sent]
        seconds = getattr(times, time)
        if any(sizes):
            move = Move(
                what=what,
                through="each rank",
                of_rank=max(sizes),
                total=ranks * sum(sizes),
                seconds=seconds,
            )
            found.append(move)
    return found


def _weights(step: Step) -> list[Move]:
    """All weights in the model's type, gathered on the ranks, and then by each of the ways to as
    many engines: on the same GPUs, where they are copied, or on others.
    """
    gathered = _gathered(step)
    size, processes = step.dtype_size * step.model.num_parameters(), step.plan.num_ranks
    put, first = size * machines(step), gathered.seconds
    by_nccl = size / (LINKS * step.work.hardware.far)
    ways = (
        ("weights by cuda_ipc", "each rank", size * processes, first),
        ("weights by nccl", "rank 0", size * processes, first + by_nccl),
        ("weights by object_store", "rank 0", put, first + _stored(step, size, put)),
    )
    return [gathered] + [
        Move(what=what, through=through, of_rank=size, total=total, seconds=seconds)
        for what, through, total, seconds in ways
    ]


def _stored(step: Step, size: int, fetched: int) -> float:
    """Return the seconds in which a process puts so many bytes into the object store, and its
    machine sends what machines fetch.
    """
    return size / STORE + fetched / step.work.hardware.far


@dataclass(frozen=True)
class Ring:
    """A collective of the ranks that are `stride` apart, for each of some tensors."""

    size: int
    stride: int
    calls: int
    """Tensors."""
    of_rank: float
    """Bytes that a rank sends, of stages that are taken as equal."""
    whole: float
    """Bytes that some rank sends while all wait: stages and parts of experts take turns."""
    total: float
    """Bytes that all ranks send."""


def _gathered(step: Step) -> Move:
    """Each tensor comes on all ranks: by FSDP2's own collectives, or with megatron-core from the
    ranks that have it. All ranks go through all tensors together.
    """
    hardware = replace(step.work.hardware, gpus=step.plan.num_ranks)
    found = _rings_of_stages(step) if step.shards_optimizer else _rings_of_shards(step)
    rings = [ring for ring in found if ring.total]
    return Move(
        what="weights, gathered",
        through="each rank",
        of_rank=sum(ring.of_rank for ring in rings),
        total=sum(ring.total for ring in rings),
        seconds=sum(
            hardware.ring(ring.whole, ring.calls, stride=ring.stride, size=ring.size)
            for ring in rings
        ),
    )


def _tensors(step: Step) -> tuple[int, int]:
    """Return the model's tensors by their names on the hub, and those of experts: three of each."""
    layers, model = step.model.num_hidden_layers, step.model
    own = sum(not matrix.of_experts for matrix in model.layer())
    return layers * own + len([*model.ends()]), 3 * layers * model.num_local_experts


def _rings_of_shards(step: Step) -> list[Ring]:
    """Return FSDP2's: parts of tp, and then shards."""
    plan, size, shards = step.plan, step.dtype_size, shard_ranks(step.plan)
    layers = [*step.model.layer()] * step.model.num_hidden_layers
    cut = size * sum(each.size for each in (*layers, *step.model.ends()) if each.tp is not None)
    whole = size * step.model.num_parameters()

    def ring(sent: float, devices: int, stride: int) -> Ring:
        sent *= (devices - 1) / devices
        return Ring(devices, stride, sum(_tensors(step)), sent, sent, sent * plan.num_ranks)

    return [ring(cut / shards, plan.tp, 1), ring(whole, shards, plan.tp)]


def _rings_of_stages(step: Step) -> list[Ring]:
    """Return megatron-core's: spans of the optimizer in float32, unless the model is, summed up;
    parts of tp; experts to all of ep, on each stage; and everything to all stages.
    """
    plan, model, size = step.plan, step.model, step.dtype_size
    ranks, of_layer = plan.num_ranks, sum(each.size for each in model.layer() if each.of_experts)
    experts = model.num_hidden_layers * of_layer
    others = model.num_parameters() - experts

    def ring(devices: int, stride: int, calls: int, sent: float, *, of: int = 1) -> Ring:
        """of: stages or parts of experts that take turns."""
        sent *= (devices - 1) / devices
        return Ring(devices, stride, calls, sent / of, sent, ranks * sent / of)

    together, alike = Stage(step, 0).shares()
    count, of_experts = _tensors(step)
    stages, parts = plan.pp, plan.pp * plan.ep
    main = STATE if size < STATE else 0
    own = experts / (plan.tp if plan.ep == 1 else 1)
    if plan.ep > 1:
        stride, divided, cut = plan.ep, others, count
    else:
        stride, divided, cut = plan.tp, others + experts, count + of_experts
    return [
        ring(together, plan.tp, count, 2 * main * others / plan.tp, of=stages),
        ring(alike, stride, of_experts, 2 * main * own, of=parts),
        ring(plan.tp, 1, cut, size * divided, of=stages),
        ring(plan.ep, 1, of_experts, size * experts),
        ring(plan.pp, ranks // plan.pp, count + of_experts, size * (others + experts)),
    ]


def _checkpoint(step: Step) -> Move:
    """Parameters in float32 and the optimizer's state, of which each rank writes what it holds."""
    of_rank = max(map(_written, stages_of(step)))
    total = 3 * STATE * step.model.num_parameters()
    seconds = of_rank * min(step.plan.num_ranks, step.work.gpus_per_node) / DISK
    return Move(
        what="checkpoint", through="each rank", of_rank=of_rank, total=total, seconds=seconds
    )


def _written(stage: Step | Stage) -> int:
    """Return the bytes that a device writes: megatron-core's optimizer has its parameters in
    float32 in its state, unless they are in float32 themselves; then those ranks share them, too.
    """
    states = stage.states()
    if isinstance(stage, Step):
        return states.parameters + states.optimizer
    return states.optimizer if stage.step.dtype_size < STATE else states.optimizer * 3 // 2


def _calls(step: Step) -> Move:
    """A call to each rank, its answer, and metrics merged along a tree of all ranks, twice."""
    ranks = step.plan.num_ranks
    rounds = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    return Move(
        what="calls, answers and metrics",
        through="controller",
        of_rank=MESSAGE * (2 + 2 * rounds),
        total=MESSAGE * 4 * ranks,
        seconds=2 * ranks * CALL_SECONDS,
    )
