"""How long an optimizer step would take: its products, kernels and collectives, one by one."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from nemorl.parallel.planner.cost import Traffic, attention_passes, step_traffic, tensor_sends
from nemorl.parallel.planner.hardware import Hardware
from nemorl.parallel.planner.megatron import Stage, telling_stages
from nemorl.parallel.planner.memory import STATE, Memory, Step, largest_rank

HOST_BANDWIDTH = 25e9
"""Bytes per second from a GPU to main memory; an estimate (half of PCIe 5.0's)."""
KERNELS, OF_EXPERT = 100, 13
"""Kernels of a layer, forward and backward, besides products, and of each of its experts. Counted
of tiny models on a CPU: 13 per expert, and 101 (llama, dtensor), 103 (llama, megatron) and 163
(qwen3, packed, megatron), some of which are one on a GPU.
"""
OF_MLP, OF_ROUTING = 3, 24
"""The same of megatron-core's feed-forward block, forward alone, and of what a mixture does besides
its experts: 21, and 27 with ep.
"""
HOST_MEMORY = 2e11
"""Bytes per second of a machine's main memory; an estimate."""
HEAD_PASSES = 6
"""Times that a logit is read or written, in float32; an estimate."""
ADAMW = 3.5
"""Bytes that AdamW moves for each byte of its two numbers: both and the parameter in float32 twice,
and the gradient.
"""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of an optimizer step on the slowest device, by what takes them."""

    compute: float
    """Products, attention and other kernels, with recomputation, and the optimizer."""
    data: float
    """Parameters gathered and gradients reduced, over devices with other rows."""
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    pipeline: float = 0.0
    idle: float = 0.0
    """While a pipeline fills and drains."""
    host: float = 0.0
    """What is offloaded for generation, there and back; AdamW in main memory with cpu_offload."""
    overlaps: bool = False
    """Whether data travels while layers compute (FSDP2), so that the longer of them counts."""

    @property
    def total(self) -> float:
        names = asdict(self) | {"overlaps": 0}
        return sum(names.values()) - self.overlaps * min(self.compute, self.data)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product [rows, inner] · [inner, columns] of a layer on a device."""

    rows: float
    inner: int
    columns: int
    count: int = 1
    """Products of this size, one after the other: experts."""
    rank: int = 0
    """Rank of its adapter."""

    def seconds(self, hardware: Hardware, size: int, *, frozen: bool) -> tuple[float, float]:
        """Return the seconds forward and backward: the inputs' gradient, and the parameters', which
        is added up in float32.
        """
        rows, inner, columns = self.rows, self.inner, self.columns
        forward = hardware.product(rows, inner, columns, size=size)
        backward = hardware.product(rows, columns, inner, size=size)
        if not frozen:
            summed = 2 * STATE * inner * columns
            backward += hardware.product(inner, rows, columns, size=size, more=summed)
        if self.rank:
            parts = ((inner, self.rank), (self.rank, columns))
            own = sum(hardware.product(rows, *part, size=size) for part in parts)
            forward, backward = forward + own, backward + 2 * own
        return self.count * forward, self.count * backward


def products(step: Step, *, block: str = "") -> Iterator[Product]:
    """Yield the products of a layer: megatron-core multiplies q, k and v at once, and gate and up;
    experts come one after the other.

    block: self_attn or mlp, or all of it.
    """
    model, plan, adapted = step.model, step.plan, step.adapted()
    fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up_proj"}
    found = []
    for name, (rows, columns), _, axis in model.linear():
        of, own = name.split(".")
        if block not in ("", of):
            continue
        width = max(rows // plan.tp, model.head_dim) if axis == 0 else rows
        inner = columns // plan.tp if axis == 1 else columns
        rank = largest_rank(step, own) if own in adapted else 0
        merged = fused.get(own, own) if not adapted and step.shards_optimizer else own
        found.append((merged, Product(rows=step.tokens, inner=inner, columns=width, rank=rank)))
    for _, group in groupby(found, key=lambda pair: pair[0]):
        parts = [product for _, product in group]
        yield replace(parts[0], columns=sum(part.columns for part in parts))
    if model.num_local_experts and block != "self_attn":
        stage, hidden = Stage(step, 0), model.hidden_size
        count, inner = local_experts(step), stage.experts_width
        each, split = step.tokens * stage.rows_of_experts / count, step.tokens / step.token_split()
        yield Product(rows=split, inner=hidden, columns=model.num_local_experts)
        yield Product(rows=each, inner=hidden, columns=2 * inner, count=count)
        yield Product(rows=each, inner=inner, columns=hidden, count=count)


def local_experts(step: Step) -> int:
    """Return the experts of a layer that a device computes."""
    return step.model.num_local_experts // step.plan.ep


def layer_seconds(step: Step, hardware: Hardware) -> float:
    """Return the seconds of a layer for a microbatch, forward and backward."""
    plan, size, frozen = step.plan, step.dtype_size, step.work.lora.rank > 0
    pairs = [each.seconds(hardware, size, frozen=frozen) for each in products(step)]
    forward, backward = (sum(part) for part in zip(*pairs, strict=True))
    attention = hardware.attention(attention_flops(step), size=size)
    whole = step.shards_optimizer
    kept = Stage(step, 0).kept_per_layer(recomputed="none") if whole else step.saved_per_layer()
    count = KERNELS + OF_EXPERT * local_experts(step)
    first = hardware.kernels(2 * kept, count / 3)  # each is written and read, and twice backward
    again = {
        "none": 0.0,
        "selective": modules_seconds(step, hardware) if whole else forward / 2 + first,
        "full": forward + attention + first,
    }
    # Attention multiplies twice forward, five times backward.
    return forward + backward + 3.5 * attention + 3 * first + again[plan.activation_checkpointing]


def modules_seconds(step: Step, hardware: Hardware) -> float:
    """Return the seconds forward of what megatron-core recomputes of a layer with selective."""
    modules, size, seconds = step.recomputed_modules, step.dtype_size, 0.0
    if "core_attn" in modules:
        seconds += hardware.attention(attention_flops(step), size=size)
    if {"mlp", "moe"} & {*modules}:
        parts, count = products(step, block="mlp"), float(OF_MLP)
        seconds += sum(part.seconds(hardware, size, frozen=True)[0] for part in parts)
        if step.model.num_local_experts:
            count = OF_ROUTING + OF_EXPERT * local_experts(step) / 3
        moved = 2 * step.tokens * Stage(step, 0).kept_of_feed_forward()
        seconds += hardware.kernels(moved, count)
    return seconds


def attention_flops(step: Step) -> float:
    """Return the operations of a microbatch's attention forward, in a layer.

    A causal mask spares half, and packed rows have segments of a quarter of their width; not where
    context parallelism gathers keys, whose mask is an array.
    """
    whole = 4 * step.tokens * step.width * step.heads_width[0]
    if step.plan.cp > 1 and step.plan.cp_method == "allgather":
        return whole
    return whole / 2 / (4 if step.work.trainer.sequence_packing else 1)


def head_seconds(step: Step, hardware: Hardware) -> float:
    """Return the seconds of the head for a microbatch, forward and backward, which computes each
    chunk's logits again.
    """
    columns, size = step.model.vocab_size // step.plan.tp, step.dtype_size
    product = Product(rows=step.tokens, inner=step.model.hidden_size, columns=columns)
    moved = HEAD_PASSES * STATE * step.tokens * columns
    frozen = step.work.lora.rank > 0
    forward, backward = product.seconds(hardware, size, frozen=frozen)
    return 2 * forward + backward + moved / hardware.memory


def step_times(step: Step) -> Times:
    """Return the times of an optimizer step on its slowest device."""
    hardware = replace(step.work.hardware, gpus=step.plan.num_ranks)
    layer, head = layer_seconds(step, hardware), head_seconds(step, hardware)
    if not step.shards_optimizer:
        count = step.model.num_hidden_layers
        compute = step.micro_batches * (count * layer + head)
        states = step.states()
        parts = (compute, states, states.optimizer, count, step_traffic(step))
        return _times(step, hardware, *parts)
    found = []
    for stage in telling_stages(step):
        compute = step.micro_batches * (stage.num_layers * layer + head * stage.is_last)
        updated = 2 * STATE * stage.updated
        parts = (compute, stage.states(), updated, stage.num_layers, stage.traffic())
        found.append(_times(step, hardware, *parts))
    return max(found, key=lambda times: times.total)


def _times(
    step: Step,
    hardware: Hardware,
    compute: float,
    states: Memory,
    updated: int,
    layers: int,
    traffic: Traffic,
) -> Times:
    """Return the times of a device: of some layers, what it keeps from step to step, and the bytes
    of AdamW's two numbers on it, without megatron-core's parameters in float32.

    A pipeline of p devices, each with v parts of the layers, is idle for (p - 1) / v microbatches,
    each as slow as on the slowest device. Nothing hides what is offloaded for generation, once a
    step, and AdamW in main memory, which the devices of a machine share.
    """
    plan, work = step.plan, step.work
    waiting = waits(step, hardware, layers, traffic)
    one = (compute + sum(waiting.values())) / step.micro_batches
    data, host = data_seconds(step, hardware, layers, traffic), 0.0
    if plan.cpu_offload:  # parameters come twice from main memory, and gradients go there
        moved = 2 * step.kept() + step.trained()
        data = max(data, step.micro_batches * STATE * moved / HOST_BANDWIDTH)
        devices = min(hardware.gpus, hardware.per_machine)
        host = ADAMW * 2 * STATE * step.trained() * devices / HOST_MEMORY
    if work.trainer.offload_during_generation:
        moved = states.total - states.gradients  # there and back; for the engine weights once more
        host = (2 * moved + states.parameters) / HOST_BANDWIDTH
    return Times(
        compute=compute + ADAMW * updated / hardware.memory,
        data=data,
        **waiting,
        idle=(plan.pp - 1) / plan.vpp * one,
        host=host,
        overlaps=not step.shards_optimizer,
    )


def data_seconds(step: Step, hardware: Hardware, layers: int, traffic: Traffic) -> float:
    """Return the seconds in which parameters are gathered and gradients reduced: by layer and
    microbatch, or with megatron-core once a step.
    """
    plan, shards = step.plan, step.plan.cp * (step.plan.dp_shard or 1)
    calls = 2 if step.shards_optimizer else 3 * step.micro_batches * layers
    inner = hardware.ring(traffic.shard, calls, stride=plan.tp, size=shards)
    outer = hardware.ring(
        traffic.replicate, calls / 3, stride=plan.tp * shards, size=plan.dp_replicate
    )
    stride = plan.ep if plan.ep > 1 else plan.tp
    alike = shards * plan.tp // stride
    return inner + outer + hardware.ring(traffic.expert_shard, calls, stride=stride, size=alike)


def waits(step: Step, hardware: Hardware, layers: int, traffic: Traffic) -> dict[str, float]:
    """Return the seconds in which layers wait for activations, by axis.

    Ranks of tp are neighbors, then those of cp, dp_shard, dp_replicate and pp; experts are divided
    between neighbors.
    """
    plan, work = step.plan, step.micro_batches * layers
    ulysses = plan.cp_method == "ulysses"
    send = hardware.exchange if ulysses else hardware.ring
    # Without sequence parallelism they are all-reduces.
    calls = tensor_sends(step) / (1 if plan.sequence_parallel else 2)
    passes = (4 if ulysses else 2) * attention_passes(step)
    # How many tokens, these, their probabilities and results; the last three backward, too.
    experts, of_experts = 0.0, 11 if step.recomputes_experts else 7
    if plan.ep > 1:
        experts = hardware.exchange(traffic.experts, of_experts * work, stride=1, size=plan.ep)
    elif step.model.num_local_experts:
        experts = hardware.ring(traffic.experts, of_experts * work, stride=1, size=plan.tp)
    hops = 2 * plan.vpp * step.micro_batches
    return {
        "tensor": hardware.ring(traffic.tensor, calls * work, stride=1, size=plan.tp),
        "context": send(traffic.context, passes * work, stride=plan.tp, size=plan.cp),
        "experts": experts,
        # Where there are several machines, some stage sends to another one.
        "pipeline": hardware.ring(
            traffic.pipeline, hops, stride=hardware.gpus, size=min(2, plan.pp)
        ),
    }
