"""How much a plan has each device send, estimated from the model's sizes alone: pure, free of
torch, compared with counted bytes by the tests.
"""

from dataclasses import dataclass, fields

from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.memory import (
    BYTES,
    Workload,
    kept_parameters,
    plain,
    trained_parameters,
)
from nemorl.parallel.planner.model_shape import ModelShape, shard_ranks


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a device sends in one optimizer step, and receives, where collectives go round in
    rings.
    """

    shard: int = 0
    """FSDP2: parameters gathered forward and again backward, gradients of those that train reduced
    to shards.
    """
    replicate: int = 0
    """HSDP: gradients summed over the copies of the model."""
    tensor: int = 0
    """Tensor parallelism: activations, twice in each half of a layer."""
    context: int = 0
    """Context parallelism: heads for tokens, or keys and values."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, item.name) for item in fields(self))


def micro_batches(plan: ParallelPlan, work: Workload, *, batch_rows: int) -> int:
    """Micro-batches of each device in a step of `batch_rows` rows on all of them.

    >>> micro_batches(ParallelPlan(dp_shard=4, tp=2), Workload(rows=2, seq_len=8), batch_rows=32)
    4
    """
    return -(-batch_rows // (plan.data_ranks * work.rows))


def step_traffic(
    model: ModelShape, plan: ParallelPlan, work: Workload, *, micro_batches: int = 1
) -> Traffic:
    """What each device sends in a step of so many micro-batches. Gradients (of adapters alone where
    there are any) are reduced after each.

    >>> from nemorl.parallel.planner.model_shape import model_shape
    >>> sizes = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, vocab_size=128256)
    >>> model, work = model_shape({"model_type": "llama", "num_key_value_heads": 8, **sizes}), Workload(seq_len=8192)
    >>> plans = [ParallelPlan(dp_shard=8), ParallelPlan(dp_shard=4, tp=2)]
    >>> [round(step_traffic(model, plan, work).total / 1e9) for plan in plans]
    [82, 53]
    """
    if plain(plan):
        return Traffic()
    parts = {"shard": _shard(model, plan, work), "replicate": _replicate(model, plan, work), "tensor": _tensor(model, plan, work),
             "context": _context(model, plan, work)}  # fmt: skip
    return Traffic(**{name: int(micro_batches * value) for name, value in parts.items()})


def _others(size: int) -> float:
    """The share of an array that a device doesn't have where `size` devices share it: what it sends
    when they gather, reduce or exchange it.
    """
    return (size - 1) / size


def _shard(model: ModelShape, plan: ParallelPlan, work: Workload) -> float:
    ranks, (embedding, norm, *head) = shard_ranks(plan), model.ends()
    # The head's parameters stay from forward to backward, and with them the embedding's where they
    # are the same.
    once = sum(matrix.shard(plan) for matrix in (norm, *(head or [embedding])))
    gathered = BYTES[plan.param_dtype] * (2 * kept_parameters(model, plan, work) - once)
    return (
        (gathered + BYTES[plan.reduce_dtype] * trained_parameters(model, plan, work))
        * ranks
        * _others(ranks)
    )


def _replicate(model: ModelShape, plan: ParallelPlan, work: Workload) -> float:
    return (
        2
        * BYTES[plan.reduce_dtype]
        * trained_parameters(model, plan, work)
        * _others(plan.dp_replicate)
    )


def _tensor(model: ModelShape, plan: ParallelPlan, work: Workload) -> float:
    """Collectives of an array of all the device's tokens; an all-reduce counts as two."""
    array = work.tokens(plan) * model.hidden_size * BYTES[plan.param_dtype]
    forward, backward, ends = (4, 4, 2 + 2) if plan.sequence_parallel else (4, 10, 2 + 2)
    kept = (
        2 if plan.sequence_parallel else 0
    )  # selective checkpointing keeps what reduce-scatter gave
    again = {"none": 0, "selective": forward - kept, "full": forward}[plan.activation_checkpointing]
    return (
        (model.num_hidden_layers * (forward + backward + again) + ends) * array * _others(plan.tp)
    )


def _context(model: ModelShape, plan: ParallelPlan, work: Workload) -> float:
    q, kv = model.q_size // plan.tp, model.kv_size // plan.tp
    repeated = (model.num_key_value_heads // plan.tp) % plan.cp > 0
    width = (
        2 * kv * plan.cp if plan.cp_method == "allgather" else 2 * q + 2 * (q if repeated else kv)
    )
    passes = 2 if plan.activation_checkpointing == "none" else 3
    return (
        passes
        * model.num_hidden_layers
        * work.tokens(plan)
        * width
        * BYTES[plan.param_dtype]
        * _others(plan.cp)
    )
