"""What a plan sends, compared with counted bytes by the tests, and how long a step would take."""

from dataclasses import astuple, dataclass

from nemorl.parallel.planner.memory import BYTES, STATE, Step
from nemorl.parallel.planner.model_shape import shard_ranks

FLOPS = {"bfloat16": 400e12, "float32": 50e12}
NODE_BANDWIDTH, NETWORK_BANDWIDTH, HOST_BANDWIDTH = 300e9, 40e9, 25e9
"""Operations and bytes per second of a GPU of the H100's kind: to its neighbors, to other machines,
to main memory.
"""
RECOMPUTED = {"none": 0.0, "selective": 0.15, "full": 1 / 3}
"""What recomputation adds to forward and backward pass where the whole model trains."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends in an optimizer step; collectives run in rings."""

    shard: int = 0
    """FSDP2: parameters gathered forward and backward, gradients reduced to shards."""
    replicate: int = 0
    """HSDP: gradients summed over the copies of the model."""
    tensor: int = 0
    """Tensor parallelism: activations, twice in each half of a layer."""
    context: int = 0
    """Context parallelism: heads for tokens, or keys and values."""
    experts: int = 0
    """Tokens to experts on other devices, and back."""
    pipeline: int = 0
    """Pipeline parallelism: what stages hand to each other, and a tied embedding's gradient."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


def step_traffic(step: Step) -> Traffic:
    """Return what each device sends in a step; gradients are reduced after each microbatch."""
    model, plan, layers = step.model, step.plan, step.model.num_hidden_layers
    if not plan.needs_ranks:
        return Traffic()

    def sent(array: float, devices: int, times: float = 1) -> int:
        """A device sends the parts of an array that the others have."""
        return int(step.micro_batches * times * array * (devices - 1) / devices)

    ranks, (embedding, norm, *head) = shard_ranks(plan), model.ends()
    # The head's parameters stay from forward to backward, and a tied embedding's with them.
    once = norm.shard(plan) + (head or [embedding])[0].shard(plan)
    gathered = BYTES[plan.precision] * (2 * step.kept() - once)
    gradients = BYTES[plan.reduce_dtype] * step.trained()

    # Arrays of all the device's tokens; an all-reduce counts as two. Selective checkpointing keeps
    # what reduce-scatter gave.
    forward, backward, kept = (4, 4, 2) if plan.sequence_parallel else (4, 10, 0)
    again = {"none": 0, "selective": forward - kept, "full": forward}
    per_layer = forward + backward + again[plan.activation_checkpointing]
    array = step.tokens * model.hidden_size * step.dtype_size

    return Traffic(
        shard=sent((gathered + gradients) * ranks, ranks),
        replicate=sent(gradients, plan.dp_replicate, 2),
        tensor=sent(array, plan.tp, layers * per_layer + 4),
        context=sent(context_array(step), plan.cp, layers),
    )


def context_array(step: Step) -> int:
    """Return the bytes that a layer exchanges of a microbatch for context parallelism."""
    plan, (q, kv, _) = step.plan, step.heads_width
    repeated = (step.model.num_key_value_heads // plan.tp) % plan.cp > 0
    exchanged = 2 * q + 2 * (q if repeated else kv)
    width = 2 * kv * plan.cp if plan.cp_method == "allgather" else exchanged
    passes = 2 if plan.activation_checkpointing == "none" else 3
    return step.tokens * width * step.dtype_size * passes


def seconds(step: Step, traffic: Traffic) -> float:
    """Return the time of an optimizer step, to compare plans by.

    Parameters travel while layers compute, activations while they wait; in megatron-core both wait.
    Axes lie in a machine from the innermost: tp, cp, dp_shard, pp. Groups whose size does not
    divide a machine's span several. A pipeline of p devices, each with v parts of the layers, which
    take m microbatches through is idle (p - 1) / (m · v + p - 1) of the time, and as slow as its
    last device, which has the head.
    Of offloading for generation, which nothing hides, once a step.
    """
    model, plan, work = step.model, step.plan, step.work
    head = model.vocab_size * model.hidden_size
    embedding = 0 if model.tie_word_embeddings else head
    weights = (model.active_parameters() - embedding - head) / plan.pp + head
    attention = 2 * model.num_hidden_layers * model.q_size * step.width / plan.pp
    attention /= 4 if work.trainer.sequence_packing else 1
    # Two operations forward, two for the inputs' gradient, two for the trained weights'.
    small = step.adapter_parameters()
    passes = 4 * weights + 6 * (small + attention) if work.lora.rank else 6 * (weights + attention)
    again = RECOMPUTED[plan.activation_checkpointing] * 6 * (weights + small + attention)
    whole = step.traits.shards == "optimizer"  # nothing is gathered: recomputes attention alone
    if whole and plan.activation_checkpointing == "selective":
        again = 2 * attention
    turns = step.micro_batches + (plan.pp - 1) / plan.vpp
    compute = turns * step.tokens * (passes + again) / plan.tp

    def speed(devices: int) -> float:
        near = plan.num_ranks <= work.gpus_per_node or work.gpus_per_node % devices == 0
        return NODE_BANDWIDTH if near else NETWORK_BANDWIDTH

    shards = plan.tp * plan.cp * (plan.dp_shard or 1)
    hidden = traffic.shard / speed(shards) + traffic.replicate / speed(plan.num_ranks)
    if plan.cpu_offload:  # parameters come twice from main memory, and gradients go there
        moved = 2 * step.kept() + step.trained()
        hidden = max(hidden, step.micro_batches * STATE * moved / HOST_BANDWIDTH)
    waiting = traffic.tensor / speed(plan.tp) + traffic.context / speed(plan.tp * plan.cp)
    waiting += traffic.experts / speed(max(plan.ep, plan.tp))
    waiting += traffic.pipeline / speed(plan.num_ranks)
    if whole:
        hidden, waiting = 0, waiting + hidden
    if work.trainer.offload_during_generation:
        states = step.states()  # there and back; weights come once more, for the engine
        waiting += (2 * states.total + states.parameters) / HOST_BANDWIDTH
    return max(compute / FLOPS[plan.precision], hidden) + waiting
