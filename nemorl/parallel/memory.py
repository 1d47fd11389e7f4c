"""What a plan costs each device in memory, estimated from the model's sizes alone: pure, free of torch, compared with measured peaks by the tests."""

from dataclasses import dataclass, fields

from nemorl.checks import at_least
from nemorl.parallel.model_shape import ModelShape
from nemorl.parallel.plan import ParallelPlan

BYTES = {"float32": 4, "bfloat16": 2}
STATE = 4
"""Bytes of a parameter, of its gradient, and of each of AdamW's two numbers for it: float32, whatever the model computes in."""


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
    """Whether a step has several micro-batches, so that gradients wait while the next one is computed."""
    logprob_chunk: int = 1024
    """Tokens whose logits are held at a time."""
    entropy_gradient: bool = False
    """Whether the loss has an entropy term."""
    keep_reference: bool = False
    """Whether a frozen copy of the model is kept, as for a KL term."""

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows, seq_len=self.seq_len, logprob_chunk=self.logprob_chunk)

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
    """Parameters and gradients of the layers that are being computed, whole; in bfloat16 what they are cast to."""
    generation: int = 0
    """Weights and key-value cache of a generator on the same device."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, item.name) for item in fields(self))


def training_memory(model: ModelShape, plan: ParallelPlan, work: Workload) -> Memory:
    """The fullest moment of an optimizer step, on each device of the plan. A dp_shard that is left open counts as 1.

    Moments that compete: the head's backward pass, when all activations are there; the last layer's, when what it recomputes is there, too, and its
    end, when its gradients are; the first layer's, when gradients have taken the place of activations; the embedding's, with the largest gradient.

    >>> from nemorl.parallel.model_shape import model_shape
    >>> sizes = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, vocab_size=128256)
    >>> model, work = model_shape({"model_type": "llama", "num_key_value_heads": 8, **sizes}), Workload(seq_len=8192)
    >>> plans = [ParallelPlan(dp_shard=8), ParallelPlan(dp_shard=8, param_dtype="bfloat16", activation_checkpointing="full")]
    >>> [round(training_memory(model, plan, work).total / 1e9) for plan in plans]
    [124, 24]
    """
    return max(training_moments(model, plan, work), key=lambda moment: moment.total)


def generation_memory(model: ModelShape, plan: ParallelPlan, work: Workload, *, tokens: int, tensor_parallel_size: int = 1,
                      dtype: str = "bfloat16") -> Memory:  # fmt: skip
    """The same while a generator on the same devices samples: what training leaves there between steps, weights, and a cache of `tokens` tokens."""
    shard = 0 if plan.cpu_offload else STATE * model.shard_parameters(plan)
    weights = model.num_parameters() * BYTES[dtype] // tensor_parallel_size
    kv_heads = max(1, model.num_key_value_heads // tensor_parallel_size)
    cache = 2 * model.num_hidden_layers * kv_heads * model.head_dim * BYTES[dtype] * tokens
    return Memory(parameters=shard, optimizer=2 * shard, reference=shard * work.keep_reference, generation=weights + cache)


def training_moments(model: ModelShape, plan: ParallelPlan, work: Workload) -> list[Memory]:
    """The moments of a step that may be its fullest, in their order."""
    layers, on_device = model.num_hidden_layers, 0 if plan.cpu_offload else 1
    shard = on_device * STATE * model.shard_parameters(plan)
    states = {"parameters": shard, "optimizer": 2 * shard, "reference": shard * work.keep_reference}
    before = shard if work.accumulates else 0
    head_only = max(before, on_device * STATE * sum(matrix.shard(plan) for matrix in model.ends()))
    kept, saved = kept_per_layer(model, plan, work), saved_per_layer(model, plan, work)
    own = (saved if plan.activation_checkpointing == "full" else max(0, saved - kept)) + layer_backward(model, plan, work)
    stream = work.tokens(plan) * BYTES[plan.param_dtype] * model.hidden_size
    sizes = _Gathered.of(model, plan)
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
    """Whole parameters and gradients, in bytes, at the head, after it, in a layer's backward pass at its begin and end, and at the embedding."""

    head: int
    after_head: int
    layer_begins: int
    layer_ends: int
    embedding: int

    @classmethod
    def of(cls, model: ModelShape, plan: ParallelPlan) -> "_Gathered":
        size, reduced = BYTES[plan.param_dtype], BYTES[plan.reduce_dtype]
        layer, head = sum(matrix.on(plan) for matrix in model.layer()), model.vocab_size // plan.tp * model.hidden_size
        tied = model.tie_word_embeddings
        # The head's gradient is summed in float32; from bfloat16, and from a part of the vocabulary, each chunk's is an array of its own.
        head_grad = head * (STATE + (size if size < STATE or plan.tp > 1 else 0))
        if plain(plan):
            casts = (model.num_hidden_layers * layer + head) * size if size < STATE else 0
            once = layer * STATE + casts
            return cls(head=head_grad + casts, after_head=casts, layer_begins=0, layer_ends=once - casts, embedding=casts + 2 * head * STATE)
        # FSDP2 gathers the next layer while one computes: a buffer, and the parameters copied out of it. Reducing takes another buffer.
        waiting = head * 2 * size if tied else head * reduced
        ends = layer * (3 * size + size + reduced)
        return cls(head=head * size + head_grad + layer * size, after_head=waiting, layer_begins=2 * layer * size, layer_ends=ends,
                   embedding=head * (3 * size + reduced) + layer * reduced)  # fmt: skip


def plain(plan: ParallelPlan) -> bool:
    """Whether the one process that the plan asks for holds plain tensors, and computes in bfloat16 by autocast."""
    return plan.num_ranks == 1 and plan.activation_checkpointing != "selective" and not plan.compile and not plan.cpu_offload


def saved_per_layer(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes that one layer keeps for its backward pass where nothing is recomputed (Llama's layer as transformers computes it, op by op).

    Each norm keeps its input in float32, the normed input and its output; attention keeps queries, keys, values and its output; the feed-forward
    four arrays of its own width. With sequence parallelism the norms' inputs are split over tokens, and what they give is gathered. Under autocast
    norms stay in float32, and what they give is cast for each product anew.
    """
    size, hidden = BYTES[plan.param_dtype], model.hidden_size
    q, kv, inner = model.q_size // plan.tp, model.kv_size // plan.tp, model.intermediate_size // plan.tp
    autocast = plain(plan) and size < STATE
    normed, casts = (STATE, 5) if autocast else (size, 2)
    norms = 2 * hidden * (STATE + normed) // _token_split(plan) + casts * hidden * size
    head_norms = (q + kv) * (STATE + size) if model.qk_norm else 0
    twice = plan.cp_method == "ulysses" if plan.cp > 1 else work.packed  # attention's output in an order of its own, and in the rows' order
    attention = (q * (2 + twice) + 2 * _kept_keys(model, plan)) * size + 4 * (model.num_attention_heads // plan.tp)
    return work.tokens(plan) * (norms + head_norms + attention + 4 * inner * size)


def kept_per_layer(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes that one layer keeps until its backward pass begins: all of `saved_per_layer`, or its input and, if selective, half of its products."""
    if plan.activation_checkpointing == "none":
        return saved_per_layer(model, plan, work)
    size = STATE if plain(plan) else BYTES[plan.param_dtype]
    kept = model.hidden_size * size // _token_split(plan)
    if plan.activation_checkpointing == "selective":
        kept += size * _kept_products(model, plan)
    return work.tokens(plan) * kept


def layer_backward(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes of the gradients that are there at a time while a layer's backward pass runs: three arrays of the feed-forward, or attention's."""
    widest = max(3 * model.intermediate_size, 3 * model.q_size + 2 * model.kv_size) // plan.tp
    return work.tokens(plan) * BYTES[plan.param_dtype] * (widest + 2 * model.hidden_size)


def outer_activations(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes kept outside the layers: the last norm's, the hidden states' gradient, the rotary tables, token ids and the like."""
    size, hidden = BYTES[plan.param_dtype], model.hidden_size
    norm = hidden * (STATE + size) // _token_split(plan) + hidden * size
    return work.tokens(plan) * (norm + hidden * size + 2 * model.head_dim * size + 40)


def logits(model: ModelShape, plan: ParallelPlan, work: Workload) -> int:
    """Bytes of the head's work space: a chunk of logits in float32, and the arrays of that size that softmax and gradient need at a time."""
    rows = min(work.logprob_chunk, work.tokens(plan))
    arrays = 2 + (plan.tp > 1) * 2 + work.entropy_gradient * 2
    return STATE * rows * (model.vocab_size // plan.tp) * arrays


def _token_split(plan: ParallelPlan) -> int:
    return plan.tp if plan.sequence_parallel else 1


def _mask(plan: ParallelPlan, work: Workload) -> int:
    """Bytes of the mask of each of the device's tokens with all of their row, which all layers share."""
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


def _kept_products(model: ModelShape, plan: ParallelPlan) -> int:
    """Width of what selective checkpointing keeps of a token: attention's output, every product with a bias, and every second one without."""
    q, kv, inner, hidden = model.q_size // plan.tp, model.kv_size // plan.tp, model.intermediate_size // plan.tp, model.hidden_size
    products = [(q, model.qkv_bias), (kv, model.qkv_bias), (kv, model.qkv_bias), (hidden, model.output_bias),
                (inner, model.mlp_bias), (inner, model.mlp_bias), (hidden, model.mlp_bias)]  # fmt: skip
    without = [width for width, bias in products if not bias]
    return q + sum(width for width, bias in products if bias) + sum(without[::2])
