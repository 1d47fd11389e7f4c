"""The memory that a plan takes on each device; the tests compare it with measured peaks."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property

from nemorl.parallel.backends import implements, limits_of
from nemorl.parallel.config import FUSED, LoRAConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.model_shape import Block, Layer, Matrix, ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
ENGINE = 2 * 10**9
"""Bytes of an engine's activations and sampler, estimated."""
STATE = 4
"""Bytes of a parameter, its gradient, and each of AdamW's two numbers."""
SPARED = {"adamw": 0, "muon": STATE, "adamw8bit": 2 * (STATE - 1 - STATE / 256)}
"""Bytes that an optimizer saves over AdamW, of a number in a matrix."""
QUANTIZED = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a parameter in 4 bits, with its block's scales."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device at one moment."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    activations: int = 0
    """What the backward pass needs, from the forward pass and besides."""
    logits: int = 0
    """A chunk of them, with the arrays of softmax and gradient."""
    gathered: int = 0
    """Whole parameters and gradients of the layers being computed, or their casts."""
    generation: int = 0
    """An engine's weights and key-value cache."""
    cache: int = 0
    """What PyTorch's allocator still has of training's peak."""

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(**{name: n + getattr(other, name) for name, n in vars(self).items()})


@dataclass(frozen=True)
class PlannedStep:
    """An optimizer step on a device."""

    model: ModelShape
    plan: ParallelPlan
    work: PlanConfig
    """Its `parallel`, `teacher` and `critic` are not read."""
    trains: bool = True
    beside: dict[str, ModelShape] = field(default_factory=dict)
    """A teacher and a critic on the same devices."""

    @property
    def models(self) -> dict[str, "PlannedStep"]:
        """Each model's part, this one first."""
        work = replace(self.work, lora=LoRAConfig(), keep_reference=False, entropy=False)
        return {"policy": self} | {
            name: PlannedStep(model, self.plan, work, trains=name == "critic")
            for name, model in self.beside.items()
        }

    @property
    def frozen(self) -> bool:
        """Whether the model itself gets no gradients."""
        return not self.trains or self.work.lora.rank > 0

    @property
    def shards_optimizer(self) -> bool:
        """Whether dp_shard divides the optimizer's state alone."""
        return limits_of(self.work.trainer.backend).traits.shards == "optimizer"

    @property
    def width(self) -> int:
        """Tokens of a row, with padding."""
        return -(-self.work.row_tokens // self.plan.row_multiple) * self.plan.row_multiple

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a device."""
        return self.work.micro_batch_rows * self.width // self.plan.cp

    @property
    def micro_batches(self) -> int:
        size = self.work.micro_batch_rows
        rows = self.work.batch_rows or 2 * self.work.gpus * size
        return max(-(-rows // (self.plan.data_ranks * size)), self.plan.min_microbatches)

    @property
    def dtype_size(self) -> int:
        return BYTES[self.plan.precision]

    @property
    def heads_width(self) -> tuple[int, int, int]:
        """Widths on a device of queries, of keys, and of the feed-forward."""
        model, tp = self.model, self.plan.tp
        query_dim = getattr(model.config, "qk_head_dim", None) or model.head_dim  # latent attention
        queries = model.num_attention_heads * query_dim // tp
        return queries, self.kv_heads * model.head_dim, model.config.intermediate_size // tp

    @property
    def kv_heads(self) -> int:
        """Key-value heads on a device; where tp exceeds them, ranks have copies."""
        return max(1, self.model.num_key_value_heads // self.plan.tp)

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """What megatron-core's selective checkpointing recomputes."""
        return self.plan.recompute_modules or ("core_attn",)

    @property
    def can_offload(self) -> bool:
        """Whether the trainer can leave the device while engines generate."""
        return implements(self.work.trainer.backend, "offload") and not self.plan.cpu_offload

    def adapted(self, layer: Layer) -> tuple[Matrix, ...]:
        lora, fused = self.work.lora, FUSED if self.model.num_experts else ()
        if not lora.rank:
            return ()
        if not lora.target_modules:
            return tuple(m for m in layer.linear if not m.module.endswith(fused))
        wanted = tuple(f".{name}" for name in lora.target_modules)
        return tuple(m for m in layer.linear if f".{m.module}".endswith(wanted))

    def adapters(self, layer: Layer) -> Iterator[Matrix]:
        for each in self.adapted(layer):
            (rows, columns), rank = each.shape, self.work.lora.largest_rank
            yield Matrix(f"{each.module}.lora_A.weight", (rank, columns), each.tp or None)
            yield Matrix(f"{each.module}.lora_B.weight", (rows, rank), None if each.tp else each.tp)

    def _all_adapters(self) -> Iterator[tuple[int, Matrix]]:
        return ((x.count, each) for x in self.model.layers for each in self.adapters(x))

    def adapter_parameters(self) -> int:
        return sum(count * each.size for count, each in self._all_adapters())

    @cached_property
    def _adapter_shard(self) -> int:
        return sum(count * each.shard(self.plan) for count, each in self._all_adapters())

    @cached_property
    def whole_shard(self) -> int:
        """Parameters that a device keeps, without adapters, padded as FSDP2 does."""
        return sum(count * each.shard(self.plan) for count, each in self.model.all())

    def kept(self) -> int:
        return self.whole_shard + self._adapter_shard

    def trained(self) -> int:
        return self._adapter_shard if self.frozen else self.kept()

    def states(self) -> Memory:
        if self.plan.cpu_offload:
            return Memory()
        layers, adapted = self.model.layers, self.frozen
        own = sum(
            x.count * m.shard(self.plan)
            for x in layers
            for m in x
            if len(m.shape) == 2 + m.of_experts
        )
        spared = SPARED[self.work.optimizer.name] * (self.trained() if adapted else own)
        linear = sum(x.count * each.size for x in layers for each in x.linear)
        quantized = linear if self.work.lora.quantize != "none" else 0
        return Memory(
            parameters=STATE * self.kept() - round((STATE - QUANTIZED) * quantized),
            gradients=STATE * self.trained(),
            optimizer=2 * STATE * self.trained() - round(spared),
            reference=0 if adapted else STATE * self.whole_shard * self.work.keep_reference,
        )

    def generation_memory(self, states: Memory, *, generation: int = 0, cache: int = 0) -> Memory:
        """Return the memory while an engine samples beside the trainer."""
        if not self.work.trainer.offload_during_generation:
            return replace(states, gradients=0, generation=generation, cache=cache)
        # Weights go to it one by one.
        largest = max(m.size // m.shape[0] ** m.of_experts for _, m in self.model.all())
        return Memory(gathered=STATE * largest, generation=generation)

    def training_memory(self) -> Memory:
        """Return the fullest moment: the backward pass of the head, or an end of a layer's."""
        layers = self.model.layers
        kept = [kept_of(self, layer) for layer in layers]
        every = sum(layer.count * size for layer, size in zip(layers, kept, strict=True))
        most = max(
            saved_of(self, layer) - size + layer_backward(self, layer) * self.trains
            for layer, size in zip(layers, kept, strict=True)
        )
        head, begin, end = self._gathered()
        last = every - max(kept) + 3 * self.tokens * self.dtype_size * self.model.hidden_size
        moments = (
            (every + self.outer_activations(), self.logits_memory(), head),
            (every + most, 0, begin),
            (last, 0, end),
        )
        activations, logits, gathered = max(moments, key=sum)
        return replace(
            self.states(),
            activations=activations + self.mask_memory(),
            logits=logits,
            gathered=gathered,
        )

    def _gathered(self) -> tuple[int, int, int]:
        """Return bytes of whole parameters and gradients, or casts, at each moment."""
        plan, model, size = self.plan, self.model, self.dtype_size
        reduced, adapted = BYTES[plan.reduce_dtype], self.frozen
        sizes = [(x.count, sum(each.on(plan) for each in x)) for x in model.layers]
        layer, every = max(n for _, n in sizes), sum(count * n for count, n in sizes)
        head = model.head.on(plan)
        adapter = max(sum(matrix.size for matrix in self.adapters(x)) for x in model.layers)
        trained, cast = adapter if adapted else layer, size if size < STATE else 0
        # The head's gradient is summed in float32; in bfloat16, or with tp, beside each chunk's.
        head_grad = head * (STATE + (size if cast or plan.tp > 1 else 0)) * (not adapted)
        if not plan.needs_ranks:
            # Autocast keeps all casts; a frozen matrix's only the product that reads it does.
            again = adapted and (plan.recomputes != "none" or not self.trains)
            casts = cast * (layer if again else every)
            return head_grad + casts + cast * head, casts, casts + STATE * trained
        # While a layer computes, FSDP2 gathers the next into a buffer, which it copies. Reducing
        # takes another buffer. The head's stays.
        layer += adapter
        stays = head * (size if adapted else reduced)
        begin = stays + 2 * layer * size
        end = begin + trained * (2 * size + reduced)
        last = layer if model.tied else head
        return (head + layer) * size + max(head_grad, last * size), begin, end

    def outer_activations(self) -> int:
        """Return bytes of the last norm and of the hidden states' gradient."""
        size, hidden = self.dtype_size, self.model.hidden_size
        return self.tokens * (hidden * (STATE + size) // self.token_split() + 2 * hidden * size)

    def logits_memory(self) -> int:
        rows = min(self.work.trainer.chunk, self.tokens)
        arrays = 2 + (self.plan.tp > 1) * 2 + self.work.entropy * 2
        return STATE * rows * self.model.head.local(self.plan)[0] * arrays

    def token_split(self) -> int:
        """Return over how many ranks sequence parallelism splits norms and residuals."""
        return self.plan.tp if self.plan.sequence_parallel else 1

    def mask_memory(self) -> int:
        """Return bytes of the mask of gathered keys."""
        if self.plan.cp == 1 or self.plan.cp_method == "ulysses":
            return 0
        return self.tokens * self.width * self.dtype_size

    def kept_keys(self) -> int:
        """Return the width of the keys that attention keeps."""
        (q, kv, _), plan = self.heads_width, self.plan
        if plan.cp == 1:
            return kv
        if plan.cp_method == "allgather":
            return kv * plan.cp
        return q if self.kv_heads % plan.cp else kv


def saved_of(step: PlannedStep, layer: Layer) -> int:
    """Return the bytes that a layer keeps for its backward pass without recomputation.

    Norms: input in float32, normed input, output. Attention: queries, keys, values, output.
    Feed-forward: four, without a gate two; experts: the same of each token that they get.
    Under autocast norms stay in float32, and each product casts their output.
    """
    model, plan, size = step.model, step.plan, step.dtype_size
    hidden, frozen = model.hidden_size, step.frozen
    autocast = not plan.needs_ranks and size < STATE
    reads = step.adapted(layer) if frozen else layer.linear
    normed = 0 if frozen else STATE if autocast else size
    wide = sum(each.size == hidden for each in layer.norms)
    numbers = wide * hidden * (STATE + normed) // step.token_split()
    for block in layer.blocks:
        readers = sum(each.shape[1] == hidden for each in block.inner if each in reads)
        numbers += (readers if autocast else readers > 0) * hidden * size
        numbers += _kept_of_block(step, block, block.output in reads)
    widths = {"q_norm": step.heads_width[0], "k_norm": step.heads_width[1]}
    for each in layer.norms:
        if each.size != hidden:
            width = widths.get(each.module.rpartition(".")[2], each.size)
            numbers += width * (STATE + (0 if frozen else size))
    return step.tokens * (numbers + _experts_width(step, layer) * size)


def _kept_of_block(step: PlannedStep, block: Block, read: bool) -> int:
    """Return bytes of a token. read: whether the last product's input is kept."""
    plan, (outs, taken) = step.plan, block.widths(step.plan)
    if not block.mixes:
        return (outs + block.gated * taken + read * taken) * step.dtype_size
    # Attention's output is kept in its own order and in the rows'.
    reordered = plan.cp_method == "ulysses" if plan.cp > 1 else step.work.trainer.sequence_packing
    more = 2 * (step.kept_keys() - step.heads_width[1])
    return (outs + taken * (1 + (reordered and read)) + more) * step.dtype_size


def _experts_width(step: PlannedStep, layer: Layer) -> int:
    """Return the numbers that experts keep of a token."""
    model, trained = step.model, not step.frozen
    if not layer.experts:
        return 0
    inner = sum(m.size for m in layer.experts) // (model.num_experts * model.hidden_size)
    width = (1 + trained) * model.hidden_size + inner + trained * model.moe_intermediate_size
    every = model.config.model_type == "llama4_text"  # the others compute zeros
    return (model.num_experts if every else model.num_experts_per_tok) * width


def kept_of(step: PlannedStep, layer: Layer) -> int:
    """Return the bytes that a layer keeps: with recomputation its input, and maybe products."""
    if not step.trains:
        return 0
    how = step.plan.recomputes
    if how == "none":
        return saved_of(step, layer)
    size = step.dtype_size if step.plan.needs_ranks else STATE
    kept = step.model.hidden_size * size // step.token_split()
    if how == "selective":  # attention's output, and half of the products
        adapted, products = step.adapted(layer), []
        for block in layer.blocks:
            kept += size * block.widths(step.plan)[1] * block.mixes
            for each in (*block.inner, *filter(None, (block.output,))):
                width = each.local(step.plan)[0]
                products += [width] + [step.work.lora.largest_rank, width] * (each in adapted)
        kept += size * sum(products[::2])
    return step.tokens * kept


def layer_backward(step: PlannedStep, layer: Layer) -> int:
    """Return the bytes of gradients held at a time."""
    widest = _experts_width(step, layer)
    for block in layer.blocks:
        outs, taken = block.widths(step.plan)
        widest = max(widest, outs + taken * (1 + block.mixes))
    return step.tokens * step.dtype_size * (widest + 2 * step.model.hidden_size)


def engine_memory(step: PlannedStep, sequences: int) -> int:
    """Return the bytes of an engine on a device, with a cache for so many sequences."""
    model, generation = step.model, step.work.generation
    tp, pp = generation.tensor_parallel_size, generation.pipeline_parallel_size
    token = -(-model.cached_numbers(tp) // pp)
    numbers = model.num_parameters // (tp * pp) + sequences * step.work.seq_len * token
    return step.dtype_size * numbers + ENGINE
