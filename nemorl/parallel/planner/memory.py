"""The memory that a plan takes on each device; the tests compare it with measured peaks."""

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace

from nemorl.parallel.backends import implements, limits_of
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.model_shape import LINEAR, Matrix, ModelShape
from nemorl.parallel.traits import TrainingTraits

BYTES = {"float32": 4, "bfloat16": 2}
ENGINE = 2 * 10**9
"""Bytes of an engine's activations and sampler, without CUDA graphs; an estimate."""
STATE = 4
"""Bytes of a parameter, its gradient, and each of AdamW's two numbers: float32 in any case."""

SPARED = {"adamw": 0, "muon": STATE, "adamw8bit": 2 * (STATE - 1 - STATE / 256)}
"""Bytes that an optimizer keeps less than AdamW of a parameter in a layer's matrices."""
QUANTIZED = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a parameter in 4 bits: a block of 64 has a scale of 8 bits, and 256 of these another."""


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
    """A chunk of logits, with the arrays of softmax and gradient."""
    gathered: int = 0
    """Whole parameters and gradients of the layers being computed, or their casts."""
    generation: int = 0
    """Weights and key-value cache of a generator on the same device."""
    cache: int = 0
    """What PyTorch's allocator still has of training's peak while an engine generates."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class Step:
    """An optimizer step on each device; a dp_shard that is left open counts as 1."""

    model: ModelShape
    plan: ParallelPlan
    work: PlanConfig
    """Rows, adapters and the like; its section parallel does not count."""

    @property
    def traits(self) -> TrainingTraits:
        """Traits of the training backend."""
        return limits_of(self.work.trainer.backend).traits

    @property
    def shards_optimizer(self) -> bool:
        """Whether dp_shard divides the optimizer's state alone, as megatron-core does."""
        return self.traits.shards == "optimizer"

    @property
    def width(self) -> int:
        """Tokens of a row, with the padding that the plan needs."""
        return -(-self.work.row_tokens // self.plan.row_multiple) * self.plan.row_multiple

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a device, with padding."""
        return self.work.micro_batch_rows * self.width // self.plan.cp

    @property
    def micro_batches(self) -> int:
        rows = self.work.batch_rows or 2 * self.work.gpus * self.work.micro_batch_rows
        count = -(-rows // (self.plan.data_ranks * self.work.micro_batch_rows))
        return max(count, self.plan.min_microbatches)

    @property
    def dtype_size(self) -> int:
        return BYTES[self.plan.precision]

    @property
    def heads_width(self) -> tuple[int, int, int]:
        """Widths on a device of queries, of keys, and of the feed-forward."""
        model, tp = self.model, self.plan.tp
        return model.q_size // tp, self.kv_heads * model.head_dim, model.intermediate_size // tp

    @property
    def kv_heads(self) -> int:
        """Key-value heads on a device: where tp exceeds them, several ranks have the same one."""
        return max(1, self.model.num_key_value_heads // self.plan.tp)

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """What megatron-core recomputes with activation_checkpointing selective."""
        return self.plan.recompute_modules or ("core_attn",)

    @property
    def recomputes_experts(self) -> bool:
        """Whether the backward pass computes experts again."""
        how = self.plan.activation_checkpointing
        return how == "full" or (how == "selective" and "moe" in self.recomputed_modules)

    @property
    def can_offload(self) -> bool:
        """Whether the trainer can leave the device while engines generate."""
        return implements(self.work.trainer.backend, "offload") and not self.plan.cpu_offload

    def adapted(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each matrix of a layer that gets an adapter."""
        names = (self.work.lora.target_modules or LINEAR) if self.work.lora.rank else ()
        shapes = {name.split(".")[1]: shape for name, shape, *_ in self.model.linear()}
        return {name: shape for name, shape in shapes.items() if name in names}

    def adapters(self) -> Iterator[Matrix]:
        """Yield a layer's adapters: from each matrix's inputs to the rank, and to its outputs."""
        axes = {name.split(".")[1]: axis for name, *_, axis in self.model.linear()}
        for name, (rows, columns) in self.adapted().items():
            rank, cut = largest_rank(self, name), axes[name]
            yield Matrix(f"{name}.lora_A.weight", (rank, columns), cut or None)
            yield Matrix(f"{name}.lora_B.weight", (rows, rank), None if cut else cut)

    def adapter_parameters(self) -> int:
        return self.model.num_hidden_layers * sum(each.size for each in self.adapters())

    def _adapter_shard(self) -> int:
        shards = sum(each.shard(self.plan) for each in self.adapters())
        return self.model.num_hidden_layers * shards

    def kept(self) -> int:
        """Return the parameters that a device keeps, adapters among them."""
        return self.model.shard_parameters(self.plan) + self._adapter_shard()

    def trained(self) -> int:
        """Return the parameters that a device trains."""
        return self._adapter_shard() if self.work.lora.rank else self.kept()

    @property
    def copied(self) -> bool:
        """Whether there is a frozen copy."""
        return self.work.keep_reference and not self.work.lora.rank

    def states(self) -> Memory:
        """Return what a device keeps from step to step."""
        if self.plan.cpu_offload:
            return Memory()
        spared = round(SPARED[self.work.optimizer.name] * trained_matrices(self))
        return Memory(
            parameters=STATE * self.kept() - round((STATE - QUANTIZED) * quantized(self)),
            optimizer=2 * STATE * self.trained() - spared,
            reference=STATE * self.model.shard_parameters(self.plan) * self.copied,
        )

    def generation_memory(
        self, states: Memory, *, generation: int | None = None, cache: int = 0
    ) -> Memory:
        """Return the memory while an engine samples beside a trainer's states without gradients,
        and its cache unless the trainer is offloaded.

        generation: what the engine takes. Default: weights, and a cache for the whole batch.
        """
        model, work = self.model, self.work
        if generation is None:
            generation = engine_memory(self, work.generation.max_batch_size)
        if not work.trainer.offload_during_generation:
            return replace(states, gradients=0, generation=generation, cache=cache)
        # Weights are handed over one by one.
        largest = max(matrix.size for matrix in (*model.layer(), *model.ends()))
        return Memory(gathered=STATE * largest, generation=generation)

    def host_memory(self, *, pinned: bool = True) -> int:
        """Return the main memory that a process takes for what is offloaded: parameters, optimizer,
        the frozen copy and, with cpu_offload, gradients.

        pinned: beside GPUs all is pinned but the optimizer of cpu_offload, and torch gives out
        pinned memory in powers of two.
        """
        if not (self.plan.cpu_offload or self.work.trainer.offload_during_generation):
            return 0

        def held(matrices: Iterable[Matrix]) -> int:
            sizes = [STATE * matrix.shard(self.plan) for matrix in matrices]
            return sum(pinned_size(size) if pinned else size for size in sizes)

        trained = 2 if self.plan.cpu_offload else 3
        copies = 1 if self.work.lora.rank else trained + self.work.keep_reference
        layer = copies * held(self.model.layer()) + trained * held(self.adapters())
        whole = self.model.num_hidden_layers * layer + copies * held(self.model.ends())
        return whole + 2 * STATE * self.trained() * self.plan.cpu_offload

    def training_memory(self) -> Memory:
        """Return the fullest moment: the backward pass of the head, with all activations; of the
        last layer, at its begin or end; or of the embedding.
        """
        plan, layers = self.plan, self.model.num_hidden_layers
        kept, saved = self.kept_per_layer(), self.saved_per_layer()
        again = saved if plan.activation_checkpointing == "full" else max(0, saved - kept)
        stream = 3 * self.tokens * self.dtype_size * self.model.hidden_size
        head, after, begins, layer_ends, embedding = self._gathered()
        moments = (
            (layers * kept + self.outer_activations(), self.logits_memory(), head),
            (layers * kept + again + self.layer_backward(), 0, after + begins),
            ((layers - 1) * kept + stream, 0, after + layer_ends),
            (stream, 0, embedding),
        )
        activations, logits, gathered = max(moments, key=sum)
        return replace(
            self.states(),
            gradients=0 if plan.cpu_offload else STATE * self.trained(),
            activations=activations + self.mask_memory(),
            logits=logits,
            gathered=gathered,
        )

    def _gathered(self) -> tuple[int, int, int, int, int]:
        """Return bytes of whole parameters and gradients, or of their casts: at the head, after it,
        at the begin and end of a layer's backward pass, and at the embedding.
        """
        plan, model, size = self.plan, self.model, self.dtype_size
        reduced, tied = BYTES[plan.reduce_dtype], model.tie_word_embeddings
        layer = sum(matrix.on(plan) for matrix in model.layer())
        head = model.vocab_size // plan.tp * model.hidden_size
        adapter = sum(matrix.size for matrix in self.adapters())
        cast = size if size < STATE else 0
        if self.work.lora.rank and not plan.needs_ranks:
            # A product keeps the frozen matrix's cast that its backward needs; autocast does not.
            again = plan.activation_checkpointing != "none"
            kept = 0 if again else cast * model.num_hidden_layers * layer
            begins = cast * (adapter + again * layer)
            return kept + cast * head, kept, begins, adapter * STATE, 0
        if self.work.lora.rank:
            # The buffer that FSDP2 gathers last stays until the next forward pass: the head's, or
            # the last layer's, where a tied head was gathered first.
            layer += adapter
            last = layer if tied else head
            after = last + (head if tied else 0)
            end = 2 * layer * size + adapter * (size + reduced)
            return (head + last + layer) * size, after * size, 2 * layer * size, end, 0
        # The head's gradient is summed in float32; in bfloat16, and of a part of the vocabulary,
        # each chunk's is an array of its own.
        head_grad = head * (STATE + (size if cast or plan.tp > 1 else 0))
        if not plan.needs_ranks:
            casts = (model.num_hidden_layers * layer + head) * cast
            return head_grad + casts, casts, 0, layer * STATE, casts + 2 * head * STATE
        # FSDP2 gathers the next layer while one computes: a buffer, and the parameters copied out
        # of it. Reducing takes another buffer.
        after = head * 2 * size if tied else head * reduced
        end = layer * (4 * size + reduced)
        embedding = head * (3 * size + reduced) + layer * reduced
        return (head + layer) * size + head_grad, after, 2 * layer * size, end, embedding

    def saved_per_layer(self) -> int:
        """Return what a layer keeps for its backward pass without recomputation, op by op.

        Each norm: its input in float32, the normed input, its output. Attention: queries, keys,
        values, output. The feed-forward: four. Under autocast norms stay in float32, and each
        product casts their output. With adapters only inputs that they read are kept.
        """
        model, plan, size = self.model, self.plan, self.dtype_size
        (q, kv, inner), hidden = self.heads_width, model.hidden_size
        autocast, frozen = not plan.needs_ranks and size < STATE, self.work.lora.rank > 0
        adapted = self.adapted().keys()
        reads = set(adapted if frozen else LINEAR)
        into = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
        outputs = sum(len(reads & names) if autocast else bool(reads & names) for names in into)
        normed = 0 if frozen else STATE if autocast else size
        norms = 2 * hidden * (STATE + normed) // self.token_split() + outputs * hidden * size
        head_norms = (q + kv) * (STATE + (0 if frozen else size)) if model.qk_norm else 0
        # Attention's output in its own order and in the rows'; adapters under autocast cast it
        # back and forth.
        packed = self.work.trainer.sequence_packing
        reordered = plan.cp_method == "ulysses" if plan.cp > 1 else packed
        twice = (reordered or (frozen and autocast)) and "o_proj" in reads
        attention = (q * (2 + twice) + 2 * self.kept_keys()) * size
        attention += 4 * (model.num_attention_heads // plan.tp)
        feed_forward = (3 + ("down_proj" in reads)) * inner * size
        between = sum(largest_rank(self, name) for name in adapted) * size
        return self.tokens * (norms + head_norms + attention + feed_forward + between)

    def kept_per_layer(self) -> int:
        """Return `saved_per_layer`, or with recomputation the input and, if selective, half of the
        products.
        """
        how = self.plan.activation_checkpointing
        if how == "none":
            return self.saved_per_layer()
        size = self.dtype_size if self.plan.needs_ranks else STATE
        kept = self.model.hidden_size * size // self.token_split()
        return self.tokens * (kept + (size * kept_products(self) if how == "selective" else 0))

    def layer_backward(self) -> int:
        """Return the gradients held at a time: three arrays of the feed-forward, or attention's."""
        q, kv, inner = self.heads_width
        widest = max(3 * inner, 3 * q + 2 * kv)
        return self.tokens * self.dtype_size * (widest + 2 * self.model.hidden_size)

    def outer_activations(self) -> int:
        """Return last norm, hidden states' gradient, rotary tables and token ids."""
        size, hidden = self.dtype_size, self.model.hidden_size
        norm = hidden * (STATE + size) // self.token_split() + hidden * size
        return self.tokens * (norm + hidden * size + 2 * self.model.head_dim * size + 40)

    def logits_memory(self) -> int:
        """Return a chunk of logits in float32 with the arrays of softmax and gradient."""
        rows = min(self.work.trainer.logprob_chunk, self.tokens)
        arrays = 2 + (self.plan.tp > 1) * 2 + self.work.entropy * 2
        return STATE * rows * (self.model.vocab_size // self.plan.tp) * arrays

    def token_split(self) -> int:
        """Return the ranks over which sequence parallelism splits norms and residuals."""
        return self.plan.tp if self.plan.sequence_parallel else 1

    def mask_memory(self) -> int:
        """Return the mask of the device's tokens with all of their row, which layers share."""
        if self.plan.cp == 1 or self.plan.cp_method == "ulysses":
            return 0
        return self.tokens * self.width * self.dtype_size

    def kept_keys(self) -> int:
        """Return the width of the keys that attention keeps, per token of one device."""
        (q, kv, _), plan = self.heads_width, self.plan
        if plan.cp == 1:
            return kv
        if plan.cp_method == "allgather":
            return kv * plan.cp
        return q if self.kv_heads % plan.cp else kv


def pinned_size(size: int) -> int:
    """Return the bytes that torch takes for so many in pinned memory: a power of two.

    >>> pinned_size(48), pinned_size(64)
    (64, 64)
    """
    return 1 << (size - 1).bit_length()


def engine_memory(step: Step, sequences: int) -> int:
    """Return the bytes that an engine takes of each of its devices, with a cache for so many
    sequences of the greatest length.
    """
    model, generation = step.model, step.work.generation
    tp, pp = generation.tensor_parallel_size, generation.pipeline_parallel_size
    kv_heads = max(1, model.num_key_value_heads // tp)
    token = 2 * -(-model.num_hidden_layers // pp) * kv_heads * model.head_dim
    # The first stage also has the embedding, and the last one the output layer.
    ends = model.vocab_size * model.hidden_size
    weights = ends + (model.num_parameters() - ends) // pp
    numbers = weights // tp + sequences * step.work.seq_len * token
    return step.dtype_size * numbers + ENGINE


def largest_rank(step: Step, name: str) -> int:
    """Return the largest rank that a layer's adapter of this name has."""
    block = "self_attn" if name[0] in "qkvo" else "mlp"
    layers = range(step.model.num_hidden_layers)
    names = (f"model.layers.{number}.{block}.{name}" for number in layers)
    return max(map(step.work.lora.rank_of, names))


def trained_matrices(step: Step) -> int:
    """Return the parameters in layers' matrices, or adapters, that a device trains."""
    if step.work.lora.rank:
        return step.trained()
    matrices = [each for each in step.model.layer() if len(each.shape) == 2]
    return step.model.num_hidden_layers * sum(each.shard(step.plan) for each in matrices)


def quantized(step: Step) -> int:
    """Return the parameters that are in 4 bits."""
    sizes = [rows * columns for _, (rows, columns), *_ in step.model.linear()]
    nf4 = step.work.lora.quantize != "none"
    return step.model.num_hidden_layers * sum(sizes) if nf4 else 0


def kept_products(step: Step) -> int:
    """Return the width that selective checkpointing keeps of a token: attention's output, every
    product with a bias, and every second one without.
    """
    adapted, with_bias, without = step.adapted(), 0, []
    for name, (rows, _), bias, axis in step.model.linear():
        width = rows if axis else rows // step.plan.tp
        with_bias += width * bias
        without += [width] * (not bias)
        own = name.split(".")[1]
        without += [largest_rank(step, own), width] * (own in adapted)
    return step.heads_width[0] + with_bias + sum(without[::2])
