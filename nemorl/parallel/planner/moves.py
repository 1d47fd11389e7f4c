"""What one step of reinforcement learning moves, through whom, and how long: bytes that the tests
compare with counted ones, and times that are estimates.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.cost import Traffic, step_traffic
from nemorl.parallel.planner.hardware import LINKS
from nemorl.parallel.planner.megatron import Stage
from nemorl.parallel.planner.memory import STATE, Step
from nemorl.parallel.planner.model_shape import Matrix, shard_ranks
from nemorl.parallel.planner.timing import step_times

TOKEN = 50
"""Bytes of a token in a batch, padding included: ids, segments, positions and policy versions of 8,
two masks, and weights, advantages and two logprobs of 4.
"""
CHOICE, ROUTE = 2, 4
"""Bytes of the number of an expert that a sampler chose, and with pp of a token's number, which is
equal for equal choices of all layers.
"""
STORE = 2e9
"""Bytes per second into Ray's object store, and out of it; an estimate."""
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

    COLUMNS: ClassVar = ("what", "through", "GB of the busiest rank", "GB in all", "seconds")

    what: str
    through: str
    """Where all of them pass: the controller, rank 0, or each rank its own."""
    of_rank: float
    """Bytes that the busiest rank sends, of a batch and routes receives, or writes."""
    total: float
    """Bytes of all ranks together; of what is put into the object store, of all machines."""
    seconds: float
    """Estimated."""

    @property
    def cells(self) -> tuple[str, ...]:
        """This move in a table with COLUMNS."""
        sizes = amount(self.of_rank), amount(self.total)
        return self.what, self.through, *sizes, brief(self.seconds)


def step_moves(step: Step) -> tuple[Move, ...]:
    """Return what a step moves: the batch, what ranks exchange, weights to engines, a checkpoint;
    with experts also the sampler's choices, which ranks get with trainer.router_replay.
    """
    routes = [_routes(step)] if step.model.num_local_experts else []
    rest = (*_exchanges(step), *_weights(step), _checkpoint(step), _calls(step))
    return (_batch(step), *routes, *rest)


def amount(size: float) -> str:
    """Write bytes in GB, with three digits.

    >>> [amount(size) for size in (1234e9, 12.34e9, 3e6)]
    ['1,234', '12.3', '0.003']
    """
    value = size / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "< 0.001"


def brief(value: float) -> str:
    """Write seconds with two digits.

    >>> [brief(value) for value in (235.1, 12.2, 0.0451)]
    ['240', '12', '0.045']
    """
    return f"{float(f'{value:.2g}'):g}"


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
    choice, pp = CHOICE * model.num_experts_per_tok, step.plan.pp
    number = ROUTE if pp > 1 else 0
    put = (choice * model.num_hidden_layers + number * pp) * batch_tokens(step)
    hardware = replace(step.work.hardware, gpus=step.plan.num_ranks)
    total = put * alike // hardware.together(1, alike)
    return Move(
        what="routes",
        through="controller",
        of_rank=(choice * layers + number) * rows,
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
    many engines: on the same GPUs, where they are copied, or on others. Adapters are merged into
    them, unless engines apply these themselves (generation.adapter_rank).
    """
    found = _rings_of_stages(step) if step.shards_optimizer else _rings_of_shards(step)
    gathered = _gathered(step, found)
    size, processes = step.dtype_size * step.model.num_parameters(), step.plan.num_ranks
    put, first = size * machines(step), gathered.seconds
    by_nccl = size / (LINKS * step.work.hardware.far)
    ways = (
        ("weights by cuda_ipc", "each rank", size * processes, first),
        ("weights by nccl", "rank 0", size * processes, first + by_nccl),
        ("weights by object_store", "rank 0", put, first + _stored(step, size, put)),
    )
    return [
        gathered,
        *(
            Move(what=what, through=through, of_rank=size, total=total, seconds=seconds)
            for what, through, total, seconds in ways
        ),
        *_adapters(step),
    ]


def _adapters(step: Step) -> Iterator[Move]:
    """Yield what engines that have the base get, with adapters."""
    if numbers := step.adapter_parameters():
        size = step.dtype_size * numbers
        put = size * machines(step)
        first = _gathered(step, _rings_of(step, _adapter_tensors(step))).seconds
        yield Move(
            what="adapters by object_store",
            through="rank 0",
            of_rank=size,
            total=put,
            seconds=first + _stored(step, size, put),
        )


def _stored(step: Step, size: int, fetched: int) -> float:
    """Return the seconds in which a process puts so many bytes into the object store, and each
    machine takes its share of what all fetch out of it, as if all had it at hand.
    """
    return (size + fetched / machines(step)) / STORE


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


def _gathered(step: Step, found: list[Ring]) -> Move:
    """Each tensor comes on all ranks: by FSDP2's own collectives, or with megatron-core from the
    ranks that have it. All ranks go through all tensors together.
    """
    hardware = replace(step.work.hardware, gpus=step.plan.num_ranks)
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
    """Return FSDP2's. Matrices with adapters come in float32, as they are merged afterwards."""
    adapted = {f"{name}.weight" for name in step.adapted()}
    layer = [
        (each, STATE if each.name.split(".", 1)[1] in adapted else step.dtype_size)
        for each in step.model.layer()
    ]
    ends = [(each, step.dtype_size) for each in step.model.ends()]
    return _rings_of(step, layer * step.model.num_hidden_layers + ends + [*_adapter_tensors(step)])


def _adapter_tensors(step: Step) -> list[tuple[Matrix, int]]:
    """Return adapters, and the bytes of a number while they are gathered."""
    return [(each, STATE) for each in step.adapters()] * step.model.num_hidden_layers


def _rings_of(step: Step, tensors: list[tuple[Matrix, int]]) -> list[Ring]:
    """Return FSDP2's rings of matrices with so many bytes a number: parts of tp, then shards."""
    plan, shards = step.plan, shard_ranks(step.plan)
    whole = sum(size * each.size for each, size in tensors)
    cut = sum(size * each.size for each, size in tensors if each.tp is not None)

    def ring(sent: float, devices: int, stride: int) -> Ring:
        sent *= (devices - 1) / devices
        return Ring(devices, stride, len(tensors), sent, sent, sent * plan.num_ranks)

    return [ring(cut / shards, plan.tp, 1), ring(whole, shards, plan.tp)]


def _rings_of_stages(step: Step) -> list[Ring]:
    """Return megatron-core's: parts of tp; experts to all of ep, on each stage; and everything to
    all stages.
    """
    plan, model, size = step.plan, step.model, step.dtype_size
    ranks, of_layer = plan.num_ranks, sum(each.size for each in model.layer() if each.of_experts)
    experts = model.num_hidden_layers * of_layer
    others = model.num_parameters() - experts

    def ring(devices: int, stride: int, calls: int, sent: float, *, of: int = 1) -> Ring:
        """of: stages or parts of experts that take turns."""
        sent *= (devices - 1) / devices
        return Ring(devices, stride, calls, sent / of, sent, ranks * sent / of)

    count, of_experts = _tensors(step)
    divided, cut = others, count
    if plan.ep == 1:
        divided, cut = others + experts, count + of_experts
    return [
        ring(plan.tp, 1, cut, size * divided, of=plan.pp),
        ring(plan.ep, 1, of_experts, size * experts),
        ring(plan.pp, ranks // plan.pp, count + of_experts, size * (others + experts)),
    ]


def _checkpoint(step: Step) -> Move:
    """Of what trains, parameters in float32 and the optimizer's state: each rank writes what it
    holds, but rank 0 adapters as a whole.
    """
    ranks = min(step.plan.num_ranks, step.work.gpus_per_node)
    own, alone = _written(step), STATE * step.adapter_parameters()
    whole = replace(step, plan=ParallelPlan())
    return Move(
        what="checkpoint",
        through="each rank",
        of_rank=own + alone,
        total=STATE * whole.trained() + whole.states().optimizer,
        seconds=(own * ranks + alone) / DISK,
    )


def _written(step: Step) -> float:
    """Return the bytes that the busiest rank writes, without adapters' own. Ranks with the same
    share them out.
    """
    plan, model, adapted = step.plan, step.model, bool(step.adapted())
    if step.shards_optimizer:
        return 3 * STATE * max(stage.updated for stage in _stages(step))

    def share(matrices: Iterable[Matrix]) -> float:
        found = (each.shard(plan) / (plan.tp if each.tp is None else 1) for each in matrices)
        return sum(found) / plan.dp_replicate

    layer = share(step.adapters() if adapted else model.layer())
    numbers = model.num_hidden_layers * layer + (0 if adapted else share(model.ends()))
    resident = replace(step, plan=replace(plan, cpu_offload=False))  # which changes no file
    state = resident.states().optimizer / step.trained()
    return (state + (0 if adapted else STATE)) * numbers


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
