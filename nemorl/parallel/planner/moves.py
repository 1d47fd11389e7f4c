"""What one step of reinforcement learning moves, through whom, and how long: bytes that the tests
compare with counted ones, and times that are estimates.
"""

import math
from dataclasses import dataclass, fields, replace

from nemorl.parallel.planner.cost import Traffic, step_traffic
from nemorl.parallel.planner.hardware import LINKS
from nemorl.parallel.planner.megatron import Stage
from nemorl.parallel.planner.memory import STATE, Step
from nemorl.parallel.planner.sharing import stages_of
from nemorl.parallel.planner.timing import step_times

TOKEN = 50
"""Bytes of a token in a batch: ids, segments, positions and policy versions of 8, two masks, and
weights, advantages and two logprobs of 4.
"""
CHOICE = 2
"""Bytes of the number of an expert that a sampler chose."""
STORE = 2e9
"""Bytes per second through a process's main memory and Ray's object store; an estimate."""
DISK = 2e9
"""Bytes per second that a machine writes to a file system; an estimate."""
MESSAGE, CALL_SECONDS = 2000, 1e-3
"""At most so many bytes of a call without its batch, an answer, or metrics; and the controller's
seconds for a call of one rank (an estimate).
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
    return math.ceil(step.plan.num_ranks / step.work.gpus_per_node)


def batch_tokens(step: Step) -> int:
    """Return the tokens of a step's rows, with padding."""
    return step.micro_batches * step.work.micro_batch_rows * step.width * step.plan.data_ranks


def _batch(step: Step) -> Move:
    """Each machine fetches the batch once, and each rank reads all of it."""
    size = TOKEN * batch_tokens(step)
    sent = size * machines(step)
    seconds = size / STORE + sent / step.work.hardware.far
    return Move(what="batch", through="controller", of_rank=size, total=sent, seconds=seconds)


def _routes(step: Step) -> Move:
    """Each rank gets the choices for its own rows, in its own layers."""
    model = step.model
    rows = batch_tokens(step) // step.plan.data_ranks
    layers = max(stage.num_layers for stage in _stages(step))
    choice = CHOICE * model.num_experts_per_tok
    total = choice * model.num_hidden_layers * batch_tokens(step) * step.plan.tp * step.plan.cp
    return Move(
        what="routes",
        through="controller",
        of_rank=choice * layers * rows,
        total=total,
        seconds=total / STORE,
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
    """All weights in the model's type, by each of the ways to engines."""
    hardware = replace(step.work.hardware, gpus=step.plan.num_ranks)
    size = step.dtype_size * step.model.num_parameters()
    processes = step.plan.num_ranks
    gathered = hardware.ring(size, step.model.num_hidden_layers, stride=1, size=processes)
    ways = (
        ("weights by cuda_ipc", "each rank", size, size * processes, gathered),
        ("weights by nccl", "rank 0", size, size * processes, size / (LINKS * hardware.far)),
        ("weights by object_store", "rank 0", size, size * machines(step), size / STORE),
    )
    return [
        Move(what=what, through=through, of_rank=of_rank, total=total, seconds=seconds)
        for what, through, of_rank, total, seconds in ways
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
