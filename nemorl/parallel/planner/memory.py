"""What a plan costs each device in memory, estimated from the model's sizes alone: pure, free of
torch, compared with measured peaks by the tests.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from nemorl.checks import at_least
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.model_shape import Matrix, ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
STATE = 4
"""Bytes of a parameter, of its gradient, and of each of AdamW's two numbers for it: float32,
whatever the model computes in.
"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a device is given to do."""

    rows: int = 1
    """Rows of a micro-batch."""
    seq_len: int
    """Their width in tokens."""
    packed: bool = True
    """Whether rows hold several sequences each."""
    accumulates: bool = True
    """Whether a step has several micro-batches, so that gradients wait while the next one is
    computed.
    """
    logprob_chunk: int = 1024
    """Tokens whose logits are held at a time."""
    entropy_gradient: bool = False
    """Whether the loss has an entropy term."""
    keep_reference: bool = False
    """Whether a frozen copy of the model is kept, as for a KL term; with adapters that is the model
    without them.
    """
    lora_rank: int = 0
    """Rank of the adapters that train beside a frozen model; 0: the whole model trains."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; all but the output layer unless given."""

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows, seq_len=self.seq_len, logprob_chunk=self.logprob_chunk)
        at_least(0, lora_rank=self.lora_rank)

    def tokens(self, plan: ParallelPlan) -> int:
        """Tokens of a micro-batch that a device computes, with the padding that the plan needs."""
        return self.rows * self.width(plan) // plan.cp

    def width(self, plan: ParallelPlan) -> int:
        """The rows' width with that padding."""
        return -(-self.seq_len // plan.row_multiple) * plan.row_multiple


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device at one moment."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    """The frozen copy."""
    activations: int = 0
    """What forward keeps for backward, and what backward needs besides."""
    logits: int = 0
    """A chunk of logits, and what softmax and gradient make of it."""
    gathered: int = 0
    """Parameters and gradients of the layers that are being computed, whole; in bfloat16 what they
    are cast to.
    """
    generation: int = 0
    """Weights and key-value cache of a generator on the same device."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, item.name) for item in fields(self))


def training_memory(model: ModelShape, plan: ParallelPlan, work: Workload) -> Memory:
    """The fullest moment of an optimizer step, on each device of the plan. A dp_shard that is left
    open counts as 1.

    Moments that compete: the head's backward pass, when all activations are there; the last
    layer's, when what it recomputes is there, too, and its end, when its gradients are; the first
    layer's, when gradients have taken the place of activations; the embedding's, with the largest
    gradient.

    >>> from nemorl.parallel.planner.model_shape import model_shape
    >>> sizes = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, vocab_size=128256)
    >>> model, work = model_shape({"model_type": "llama", "num_key_value_heads": 8, **sizes}), Workload(seq_len=8192)
    >>> plans = [ParallelPlan(dp_shard=8), ParallelPlan(dp_shard=8, param_dtype="bfloat16", activation_checkpointing="full")]
    >>> [round(training_memory(model, plan, work).total / 1e9) for plan in plans]
    [124, 24]
    """
    return max(training_moments(model, plan, work), key=lambda moment: moment.total)


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""A layer's matrices, which may get adapters."""


def adapters(model: ModelShape, work: Workload) -> Iterator[Matrix]:
    """The adapters' parameters in one layer: for each matrix one from its inputs to the rank, and
    one from there to its outputs.
    """
    for name, (rows, columns) in _adapted(model, work):
        yield Matrix(name=f"{name}.lora_A.weight", shape=(work.lora_rank, columns))
        yield Matrix(name=f"{name}.lora_B.weight", shape=(rows, work.lora_rank))


def _adapted(model: ModelShape, work: Workload) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each matrix of a layer that gets an adapter."""
    for matrix in model.layer() if work.lora_rank else ():
        name = matrix.name.split(".")[1]
        if name in (work.lora_targets or LINEAR) and matrix.name.endswith(".weight"):
            yield name, matrix.shape


def kept_parameters(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Numbers that each device keeps of all parameters, adapters among them."""
    return model.shard_parameters(plan) + _adapter_shard(model, plan, work)


def trained_parameters(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Numbers that each device trains: for each it keeps a gradient, and the optimizer's two."""
    return _adapter_shard(model, plan, work) if work.lora_rank else model.shard_parameters(plan)


def _adapter_shard(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    return model.num_hidden_layers * sum(matrix.shard(plan) for matrix in adapters(model, work))


def generation_memory(model: ModelShape, plan: ParallelPlan, work: Workload, *, tokens: int, tensor_parallel_size: int = 1,
                      dtype: str = "bfloat16") -> Memory:  # fmt: skip
    """The same while a generator on the same devices samples: what training leaves there between
    steps, weights, and a cache of `tokens` tokens.
    """
    states = _states(model, plan, work)
    weights = model.num_parameters() * BYTES[dtype] // tensor_parallel_size
    kv_heads = max(1, model.num_key_value_heads // tensor_parallel_size)
    cache = 2 * model.num_hidden_layers * kv_heads * model.head_dim * BYTES[dtype] * tokens
    return Memory(**states, generation=weights + cache)


def _states(model: ModelShape, plan: ParallelPlan, work: Workload) -> dict[str, int]:
    """Bytes that a device keeps from step to step."""
    if plan.cpu_offload:
        return {}
    reference = (
        STATE * model.shard_parameters(plan) if work.keep_reference and not work.lora_rank else 0
    )
    optimizer = 2 * STATE * trained_parameters(model, plan, work)
    return {
        "parameters": STATE * kept_parameters(model, plan, work),
        "optimizer": optimizer,
        "reference": reference,
    }


def host_memory(
    model: ModelShape, plan: ParallelPlan, work: Workload, *, pinned: bool = True
) -> int:
    """Bytes of main memory that a process holds for what `cpu_offload` keeps there: parameters,
    gradients, optimizer, and the frozen copy.

    Beside GPUs FSDP2 pins parameters and gradients, and torch gives out pinned memory in powers of
    two: up to twice of what they are.

    >>> from nemorl.parallel.planner.model_shape import model_shape
    >>> sizes = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, vocab_size=128256)
    >>> model = model_shape({"model_type": "llama", "num_key_value_heads": 8, **sizes})
    >>> plan, work = ParallelPlan(dp_shard=8, cpu_offload=True), Workload(seq_len=8192)
    >>> [round(host_memory(model, plan, work, pinned=pinned) / 1e9) for pinned in (True, False)]
    [17, 16]
    """
    if not plan.cpu_offload:
        return 0

    def held(matrices: Iterable[Matrix]) -> int:
        sizes = [STATE * matrix.shard(plan) for matrix in matrices]
        return sum(1 << (size - 1).bit_length() if pinned else size for size in sizes)

    copies = 1 if work.lora_rank else 2 + work.keep_reference
    layer = copies * held(model.layer()) + 2 * held(adapters(model, work))
    return (
        model.num_hidden_layers * layer
        + copies * held(model.ends())
        + 2 * STATE * trained_parameters(model, plan, work)
    )


def training_moments(model: ModelShape, plan: ParallelPlan, work: Workload) -> list[Memory]:
    """The moments of a step that may be its fullest, in their order."""
    layers, states = model.num_hidden_layers, _states(model, plan, work)
    shard = 0 if plan.cpu_offload else STATE * trained_parameters(model, plan, work)
    before = shard if work.accumulates else 0
    head_only = min(shard, max(before, STATE * sum(matrix.shard(plan) for matrix in model.ends())))
    kept, saved = kept_per_layer(model, plan, work), saved_per_layer(model, plan, work)
    own = (
        saved if plan.activation_checkpointing == "full" else max(0, saved - kept)
    ) + layer_backward(model, plan, work)
    stream = work.tokens(plan) * BYTES[plan.param_dtype] * model.hidden_size
    sizes = _Gathered.of(model, plan, work)
    mask = _mask(plan, work)
    return [
        Memory(**states, gradients=before, activations=layers * kept + outer_activations(model, plan, work) + mask, logits=logits(model, plan, work),
               gathered=sizes.head),
        Memory(**states, gradients=head_only, activations=layers * kept + own + mask, gathered=sizes.after_head + sizes.layer_begins),
        Memory(**states, gradients=head_only, activations=(layers - 1) * kept + 3 * stream + mask, gathered=sizes.after_head + sizes.layer_ends),
        Memory(**states, gradients=shard, activations=kept + own + mask, gathered=sizes.after_head + sizes.layer_begins),
        Memory(**states, gradients=shard, activations=3 * stream + mask, gathered=sizes.embedding),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Gathered:
    """Whole parameters and gradients, in bytes, at the head, after it, in a layer's backward pass
    at its begin and end, and at the embedding.
    """

    head: int
    after_head: int
    layer_begins: int
    layer_ends: int
    embedding: int

    @classmethod
    def of(cls, model: ModelShape, plan: ParallelPlan, work: Workload) -> "_Gathered":
        """What a plan gathers, or, of plain tensors in bfloat16, casts."""
        if work.lora_rank:
            return (
                cls._plain_frozen(model, plan, work)
                if plain(plan)
                else cls._sharded_frozen(model, plan, work)
            )
        size, reduced = BYTES[plan.param_dtype], BYTES[plan.reduce_dtype]
        layer, head, tied = _layer_on(model, plan), _head_on(model, plan), model.tie_word_embeddings
        # The head's gradient is summed in float32; from bfloat16, and from a part of the
        # vocabulary, each chunk's is an array of its own.
        head_grad = head * (STATE + (size if size < STATE or plan.tp > 1 else 0))
        if plain(plan):
            casts = (model.num_hidden_layers * layer + head) * size if size < STATE else 0
            once = layer * STATE + casts
            return cls(
                head=head_grad + casts,
                after_head=casts,
                layer_begins=0,
                layer_ends=once - casts,
                embedding=casts + 2 * head * STATE,
            )
        # FSDP2 gathers the next layer while one computes: a buffer, and the parameters copied out
        # of it. Reducing takes another buffer.
        waiting = head * 2 * size if tied else head * reduced
        ends = layer * (3 * size + size + reduced)
        return cls(head=head * size + head_grad + layer * size, after_head=waiting, layer_begins=2 * layer * size, layer_ends=ends,
                   embedding=head * (3 * size + reduced) + layer * reduced)  # fmt: skip

    @classmethod
    def _plain_frozen(cls, model: ModelShape, plan: ParallelPlan, work: Workload) -> "_Gathered":
        """Beside adapters.

        Autocast does not keep a frozen matrix's cast, but the product does that needs it backward,
        until then.
        """
        cast = BYTES[plan.param_dtype] if BYTES[plan.param_dtype] < STATE else 0
        layer, adapter = (
            _layer_on(model, plan),
            sum(matrix.size for matrix in adapters(model, work)),
        )
        again = plan.activation_checkpointing != "none"
        kept = 0 if again else cast * model.num_hidden_layers * layer
        return cls(head=kept + cast * _head_on(model, plan), after_head=kept, layer_begins=cast * (adapter + again * layer),
                   layer_ends=adapter * STATE, embedding=0)  # fmt: skip

    @classmethod
    def _sharded_frozen(cls, model: ModelShape, plan: ParallelPlan, work: Workload) -> "_Gathered":
        """Beside adapters, where little has a gradient. The buffer that FSDP2 gathers last in a
        forward pass stays until the next one: the head's, or, where the head is tied and so was
        gathered first, the last layer's.
        """
        size, head, tied = BYTES[plan.param_dtype], _head_on(model, plan), model.tie_word_embeddings
        adapter = sum(matrix.size for matrix in adapters(model, work))
        layer = _layer_on(model, plan) + adapter
        last = layer if tied else head
        return cls(head=(head + last + layer) * size, after_head=(last + (head if tied else 0)) * size, layer_begins=2 * layer * size,
                   layer_ends=2 * layer * size + adapter * (size + BYTES[plan.reduce_dtype]), embedding=0)  # fmt: skip


def _layer_on(model: ModelShape, plan: ParallelPlan) -> int:
    return sum(matrix.on(plan) for matrix in model.layer())


def _head_on(model: ModelShape, plan: ParallelPlan) -> int:
    return model.vocab_size // plan.tp * model.hidden_size


def plain(plan: ParallelPlan) -> bool:
    """Whether the one process that the plan asks for holds plain tensors, and computes in bfloat16
    by autocast.
    """
    return (
        plan.num_ranks == 1
        and plan.activation_checkpointing != "selective"
        and not plan.compile
        and not plan.cpu_offload
    )


def saved_per_layer(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes that one layer keeps for its backward pass where nothing is recomputed (Llama's layer
    as transformers computes it, op by op).

    Each norm keeps its input in float32, the normed input and its output; attention keeps queries,
    keys, values and its output; the feed-forward four arrays of its own width. With sequence
    parallelism the norms' inputs are split over tokens, and what they give is gathered. Under
    autocast norms stay in float32, and what they give is cast for each product anew. Beside
    adapters what a frozen matrix or norm would need for its own gradient is not kept: a product's
    input only where an adapter reads it.
    """
    size, hidden = BYTES[plan.param_dtype], model.hidden_size
    q, kv, inner = (
        model.q_size // plan.tp,
        model.kv_size // plan.tp,
        model.intermediate_size // plan.tp,
    )
    autocast, frozen = plain(plan) and size < STATE, work.lora_rank > 0
    adapted = {name for name, _ in _adapted(model, work)}
    reads = adapted if frozen else set(LINEAR)
    into = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
    outputs = sum(len(reads & names) if autocast else bool(reads & names) for names in into)
    normed = 0 if frozen else STATE if autocast else size
    norms = 2 * hidden * (STATE + normed) // _token_split(plan) + outputs * hidden * size
    head_norms = (q + kv) * (STATE + (0 if frozen else size)) if model.qk_norm else 0
    # Attention's output in an order of its own, and in the rows' order; adapters under autocast
    # cast it back and forth.
    reordered = plan.cp_method == "ulysses" if plan.cp > 1 else work.packed
    twice = (reordered or (frozen and autocast)) and "o_proj" in reads
    attention = (q * (2 + twice) + 2 * _kept_keys(model, plan)) * size + 4 * (
        model.num_attention_heads // plan.tp
    )
    feed_forward = (3 + ("down_proj" in reads)) * inner * size
    return work.tokens(plan) * (
        norms + head_norms + attention + feed_forward + len(adapted) * work.lora_rank * size
    )


def kept_per_layer(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes that one layer keeps until its backward pass begins: all of `saved_per_layer`, or its
    input and, if selective, half of its products.
    """
    if plan.activation_checkpointing == "none":
        return saved_per_layer(model, plan, work)
    size = STATE if plain(plan) else BYTES[plan.param_dtype]
    kept = model.hidden_size * size // _token_split(plan)
    if plan.activation_checkpointing == "selective":
        kept += size * _kept_products(model, plan, work)
    return work.tokens(plan) * kept


def layer_backward(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes of the gradients that are there at a time while a layer's backward pass runs: three
    arrays of the feed-forward, or attention's.
    """
    widest = max(3 * model.intermediate_size, 3 * model.q_size + 2 * model.kv_size) // plan.tp
    return work.tokens(plan) * BYTES[plan.param_dtype] * (widest + 2 * model.hidden_size)


def outer_activations(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes kept outside the layers: the last norm's, the hidden states' gradient, the rotary
    tables, token ids and the like.
    """
    size, hidden = BYTES[plan.param_dtype], model.hidden_size
    norm = hidden * (STATE + size) // _token_split(plan) + hidden * size
    return work.tokens(plan) * (norm + hidden * size + 2 * model.head_dim * size + 40)


def logits(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes of the head's work space: a chunk of logits in float32, and the arrays of that size
    that softmax and gradient need at a time.
    """
    rows = min(work.logprob_chunk, work.tokens(plan))
    arrays = 2 + (plan.tp > 1) * 2 + work.entropy_gradient * 2
    return STATE * rows * (model.vocab_size // plan.tp) * arrays


def _token_split(plan: ParallelPlan) -> int:
    return plan.tp if plan.sequence_parallel else 1


def _mask(plan: ParallelPlan, work: Workload) -> int:
    """Bytes of the mask of each of the device's tokens with all of their row, which all layers
    share.
    """
    if plan.cp == 1 or plan.cp_method == "ulysses":
        return 0
    return work.tokens(plan) * work.width(plan) * BYTES[plan.param_dtype]


def _kept_keys(model: ModelShape, plan: ParallelPlan) -> int:
    """Width of a token's keys as attention keeps them, reckoned by the tokens of one device."""
    q, kv = model.q_size // plan.tp, model.kv_size // plan.tp
    if plan.cp == 1:
        return kv
    if plan.cp_method == "allgather":
        return kv * plan.cp
    return q if (model.num_key_value_heads // plan.tp) % plan.cp else kv


def _kept_products(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Width of what selective checkpointing keeps of a token: attention's output, every product
    with a bias, and every second one without.
    """
    q, kv, inner, hidden = (
        model.q_size // plan.tp,
        model.kv_size // plan.tp,
        model.intermediate_size // plan.tp,
        model.hidden_size,
    )
    products = [("q_proj", q, model.qkv_bias), ("k_proj", kv, model.qkv_bias), ("v_proj", kv, model.qkv_bias), ("o_proj", hidden, model.output_bias),
                ("gate_proj", inner, model.mlp_bias), ("up_proj", inner, model.mlp_bias), ("down_proj", hidden, model.mlp_bias)]  # fmt: skip
    adapted = {name for name, _ in _adapted(model, work)}
    without: list[int] = []
    for name, width, bias in products:
        without += [width] * (not bias) + [work.lora_rank, width] * (name in adapted)
    return q + sum(width for _, width, bias in products if bias) + sum(without[::2])
