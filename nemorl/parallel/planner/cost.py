"""What a plan sends, compared with counted bytes by the tests."""

from dataclasses import astuple, dataclass

from nemorl.parallel.planner.memory import BYTES, Step
from nemorl.parallel.planner.model_shape import shard_ranks

RECOMPUTED = ("none", "selective", "full")
"""What the backward pass may recompute."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends in an optimizer step; collectives run in rings."""

    shard: int = 0
    """Parameters gathered (by FSDP2 forward and backward), gradients reduced to shards."""
    expert_shard: int = 0
    """The same of experts, which fewer devices have."""
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

    array = step.tokens * model.hidden_size * step.dtype_size

    return Traffic(
        shard=sent((gathered + gradients) * ranks, ranks),
        replicate=sent(gradients, plan.dp_replicate, 2),
        tensor=sent(array, plan.tp, layers * tensor_sends(step) + 4),
        context=sent(context_array(step), plan.cp, layers),
    )


def tensor_sends(step: Step) -> int:
    """Return how often a layer sends an array of all the device's tokens over tp, for a microbatch;
    an all-reduce counts as two.
    """
    parts, how = step.plan.sequence_parallel, step.plan.activation_checkpointing
    if not step.shards_optimizer:
        # Selective checkpointing keeps what reduce-scatter gave.
        forward, backward, kept = (4, 4, 2) if parts else (4, 10, 0)
        return forward + backward + {"none": 0, "selective": forward - kept, "full": forward}[how]
    # With sequence parallelism the backward pass gathers the inputs of products again.
    half = 5 if parts else 4
    if step.model.num_local_experts:  # what these send is counted on its own
        return half + 2 * (how == "full")
    selected = how == "selective" and "mlp" in step.recomputed_modules
    return 2 * half + (4 if how == "full" else 2 * selected)


def attention_passes(step: Step) -> int:
    """Return how often a layer's attention is computed for a microbatch: forward, backward, and
    where it is recomputed.
    """
    how = step.plan.activation_checkpointing
    selected = how == "selective" and "core_attn" in step.recomputed_modules
    return 2 + (how == "full" or selected)


def context_array(step: Step) -> int:
    """Return the bytes that a layer exchanges of a microbatch for context parallelism."""
    plan, (q, kv, _) = step.plan, step.heads_width
    repeated = step.kv_heads % plan.cp > 0
    exchanged = 2 * q + 2 * (q if repeated else kv)
    width = 2 * kv * plan.cp if plan.cp_method == "allgather" else exchanged
    return step.tokens * width * step.dtype_size * attention_passes(step)
