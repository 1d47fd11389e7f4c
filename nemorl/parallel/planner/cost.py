"""How long an optimizer step of a plan would take, reckoned with round numbers.

Pure and free of torch.
"""

from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.memory import (
    STATE,
    Workload,
    adapters,
    kept_parameters,
    trained_parameters,
)
from nemorl.parallel.planner.model_shape import ModelShape
from nemorl.parallel.planner.traffic import Traffic

FLOPS = {"bfloat16": 400e12, "float32": 50e12}
NODE_BANDWIDTH, NETWORK_BANDWIDTH, HOST_BANDWIDTH = 300e9, 40e9, 25e9
"""Operations and bytes per second of a device in a machine of the H100's kind: to its neighbours,
to other machines and to main memory. They put the plans in order, and promise nothing.
"""
RECOMPUTED = {"none": 0.0, "selective": 0.15, "full": 1 / 3}
"""Of the time of forward and backward pass, what recomputation adds where the whole model trains.
"""


def seconds(
    model: ModelShape,
    plan: ParallelPlan,
    work: Workload,
    sent: Traffic,
    *,
    micro_batches: int,
    gpus_per_node: int,
) -> float:
    """Of an optimizer step, to compare plans by: parameters travel while the layers compute,
    activations while they wait.

    Axes of the mesh lie in a machine from the innermost on: tp, cp, then dp_shard. Groups whose
    size does not divide a machine's lie across machines.
    """
    weights = model.num_parameters() - (
        0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    )
    attention = (
        2 * model.num_hidden_layers * model.q_size * work.width(plan) / (4 if work.packed else 1)
    )
    # Two operations forward, two for the gradient of the inputs, and two for that of the weights,
    # unless they are frozen.
    small = model.num_hidden_layers * sum(matrix.size for matrix in adapters(model, work))
    passes = 4 * weights + 6 * (small + attention) if work.lora_rank else 6 * (weights + attention)
    again = RECOMPUTED[plan.activation_checkpointing] * 6 * (weights + small + attention)
    compute = micro_batches * work.tokens(plan) * (passes + again) / plan.tp

    def speed(span: int) -> float:
        return (
            NODE_BANDWIDTH
            if plan.num_ranks <= gpus_per_node or gpus_per_node % span == 0
            else NETWORK_BANDWIDTH
        )

    inner, shards = plan.tp * plan.cp, plan.model_ranks * (plan.dp_shard or 1)
    hidden = sent.shard / speed(shards) + sent.replicate / speed(plan.num_ranks)
    if plan.cpu_offload:  # parameters come twice from main memory, and gradients go there
        moved = 2 * kept_parameters(model, plan, work) + trained_parameters(model, plan, work)
        hidden = max(hidden, micro_batches * STATE * moved / HOST_BANDWIDTH)
    return (
        max(compute / FLOPS[plan.param_dtype], hidden)
        + sent.tensor / speed(plan.tp)
        + sent.context / speed(inner)
    )
