"""How one model is spread over many devices. Free of torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from nemorl.checks import at_least, require


@dataclass(frozen=True, kw_only=True)
class TrainingTraits:
    """What a training backend can do; the defaults are those of a class that says nothing."""

    packages: tuple[str, ...] = ()
    """Packages that it imports and nemorl does not require."""
    needs_ranks: bool = False
    """Whether it runs on ranks in other processes, even on a single one."""
    pipelines: bool = False
    """Whether devices may have different layers (parallel.pp and vpp)."""
    experts: tuple[str, ...] = ()
    """Settings for mixtures of experts that it has: parallel.ep, and of the section trainer
    router_replay, router_aux_loss_coef and router_bias_update_rate.
    """
    proves: bool = False
    """Whether it trains any decoder, by its proofs (`BackendConfig.proofs`)."""
    repeats_kv_heads: bool = False
    """Whether parallel.tp may exceed the model's key-value heads; ranks then have copies."""
    shards: Literal["parameters", "optimizer"] = "parameters"
    """What dp_shard divides: parameters, gradients and optimizer state (FSDP2, which has
    dp_replicate and cpu_offload), or optimizer state alone.
    """
    heads: tuple[Literal["lm", "scalar"], ...] = ("lm",)
    """Last layers of a model that it can train (`BackendConfig.head`)."""
    adapters: bool = True
    """Whether it trains LoRA adapters."""
    generates: bool = False
    """Whether its ranks can sample (`open_engine`, `decode`, `take_weights`), for a generation
    backend whose traits say `on_trainer`.
    """


FIRST, LAST = (f"parallel.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


@dataclass(frozen=True)
class Stages:
    """The stages of `pp` devices, each with every pp-th stage, `vpp` of them.

    first, last: layers of all stages of the first and the last device; None: as equal as can be.
    """

    pp: int
    vpp: int
    first: int | None
    last: int | None

    def check(self) -> None:
        fits, remedy = self.vpp == 1 or self.pp > 1, "remove it, or raise parallel.pp"
        require(fits, "parallel.vpp", "must be 1 without parallel.pp", self.vpp, remedy)
        for field, layers in self._given().items():
            at_least(1, **{field.replace(".", "__"): layers})
            require(self.pp > 1, field, "needs parallel.pp above 1", layers, remedy)
            require(
                not layers % self.vpp,
                field,
                f"must be a multiple of parallel.vpp, which is {self.vpp}",
                layers,
                "change one of them",
            )

    def layers(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each of the pp · vpp stages, in order.

        >>> [len(stage) for stage in Stages(4, 1, None, None).layers(94)]
        [23, 24, 24, 23]
        >>> [len(stage) for stage in Stages(2, 2, 2, None).layers(8)]
        [1, 3, 1, 3]
        """
        count = self.pp * self.vpp
        given: dict[int, int] = {}
        for rank, layers in ((0, self.first), (self.pp - 1, self.last)):
            if layers is not None:
                given |= dict.fromkeys(range(rank, count, self.pp), layers // self.vpp)
        free = [index for index in range(count) if index not in given]
        costs = [(index == 0) + (index == count - 1) for index in free]
        shared = _shared(num_layers - sum(given.values()), costs)
        counts = given | dict(zip(free, shared, strict=True))
        bounds = accumulate((counts[index] for index in range(count)), initial=0)
        return tuple(range(*ends) for ends in pairwise(bounds))

    def problem(self, num_layers: int) -> str | None:
        of_model = f"the model's num_hidden_layers {num_layers}"
        given = self._given()
        left, others = num_layers - sum(given.values()), (self.pp - len(given)) * self.vpp
        if left >= others and (others or not left):
            return None
        if not given:
            vpp = f" · vpp {self.vpp}" * (self.vpp > 1)
            return f"parallel.pp {self.pp}{vpp} has more stages than {of_model}"
        settings = " and ".join(f"{field} {layers}" for field, layers in given.items())
        stages = f"the other {others} stages" if others else "no other stage"
        return f"{settings} leave {left} of {of_model} for {stages}"

    def remedy(self, num_layers: int) -> str:
        if self._given():
            return "change these, or remove them for stages of nearly equal size"
        most = num_layers // self.vpp
        with_vpp = " with this vpp, or remove vpp" * (self.vpp > 1)
        if self.vpp > 1 and most < 2:
            return "remove parallel.vpp"
        return f"parallel.pp may be at most {most} here{with_vpp}"

    def _given(self) -> dict[str, int]:
        ends = (FIRST, self.first), (LAST, self.last)
        return {field: layers for field, layers in ends if layers is not None}


def _shared(num_layers: int, costs: list[int]) -> Iterator[int]:
    """Yield the layers of stages, as equal as can be with what else `costs` as much as layers.

    The rest goes to the ends, then to the latest stages, which keep the fewest activations.

    >>> [[*_shared(layers, [1, 0, 0, 1])] for layers in (4, 5, 6, 7, 8)]
    [[1, 1, 1, 1], [1, 1, 2, 1], [1, 2, 2, 1], [2, 2, 2, 1], [2, 2, 2, 2]]
    """
    if not costs:
        return
    each, more = divmod(num_layers + sum(costs), len(costs))
    ends = [index for index, cost in enumerate(costs) if cost]
    others = [index for index, cost in enumerate(costs) if not cost]
    larger = [*ends, *reversed(others)][:more]
    for index, cost in enumerate(costs):
        yield each - cost + (index in larger)


Precision = Literal["float32", "bfloat16"]
Recomputation = Literal["none", "selective", "full"]
RecomputedModule = Literal["core_attn", "mlp", "moe"]
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "ep", "cp")
TRAITS = TrainingTraits()


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How one model is spread over many devices, and what is traded for memory.

    Every plan gives the same numbers, up to rounding.
    """

    dp_replicate: int = 1
    """Copies of the model that train on different rows (HSDP's outer degree)."""
    dp_shard: int | None = None
    """Devices over which parameters, gradients and optimizer are sharded (FSDP2), each with its own
    rows. None: all that the others leave.
    """
    tp: int = 1
    """Devices that split every layer (tensor parallelism). Keep it within a machine."""
    pp: int = 1
    """Devices that have different layers (pipeline parallelism), with trainer.backend megatron."""
    vpp: int = 1
    """Parts of the layers on each device of pp, dealt out in turn (virtual pipeline parallelism,
    interleaved 1F1B), with trainer.backend megatron and pp above 1. It divides the pipeline's idle
    time and multiplies what is sent.
    """
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first device of pp, a multiple of vpp. Default: stages are as equal as can be,
    where the embedding and the head count as a layer each if pp · vpp does not divide the layers.
    """
    num_layers_in_last_pipeline_stage: int | None = None
    """The same of the last device of pp."""
    ep: int = 1
    """Devices of a pipeline stage's (dp_shard · cp · tp) that divide a mixture's experts (expert
    parallelism), with trainer.backend megatron.
    """
    cp: int = 1
    """Devices that split every row (context parallelism), for long sequences."""
    cp_method: Literal["ulysses", "allgather"] = "ulysses"
    """How the parts of a row attend to each other. ulysses: exchange heads for tokens (cp must
    divide them); allgather: collect keys and values.
    """
    sequence_parallel: bool = True
    """With tp: split norms and residuals over the row's tokens instead of repeating them."""
    param_dtype: Precision | None = None
    """What the model computes in; parameters and optimizer stay float32. Default: bfloat16 on a
    GPU, float32 on a CPU.
    """
    reduce_dtype: Precision = "float32"
    """What gradients are summed over devices in."""
    overlap_grad_reduce: bool = False
    """Sum gradients over devices during the backward pass of a step's last microbatch, with
    trainer.backend megatron.
    """
    overlap_param_gather: bool = False
    """Gather parameters after a step in the background, until a layer needs them. Needs
    overlap_grad_reduce.
    """
    activation_checkpointing: Recomputation | None = None
    """Recompute in the backward pass: nothing, all but every second matrix product (with
    trainer.backend megatron, recompute_modules), or whole layers (less memory, about a third more
    time). Default: none, or full where a run would not fit into its GPUs otherwise.
    """
    recompute_modules: tuple[RecomputedModule, ...] = ()
    """What activation_checkpointing selective recomputes with trainer.backend megatron: core_attn
    (attention between its projections; the default), mlp (a dense feed-forward) or moe (a mixture
    of experts with its router).
    """
    compile: bool = False
    """Compile every layer with torch.compile: slow to start, faster on GPUs."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in main memory (needs FSDP2); slow, for models that
    fit in no other way.
    """

    def __post_init__(self) -> None:
        at_least(1, **{f"parallel__{name}": getattr(self, name) for name in DEGREES})
        self.stages.check()
        selects = self.activation_checkpointing == "selective"
        for name, fits, needed in (
            ("overlap_param_gather", self.overlap_grad_reduce, "overlap_grad_reduce"),
            ("recompute_modules", selects, "activation_checkpointing selective"),
        ):
            value, needs = getattr(self, name), f"needs parallel.{needed}"
            require(fits or not value, f"parallel.{name}", needs, value, "add that, or remove it")

    @cached_property
    def model_ranks(self) -> int:
        """Devices that work on the same rows."""
        return self.tp * self.pp * self.cp

    @cached_property
    def data_ranks(self) -> int:
        """Parts into which the rows of a batch are split."""
        return self.dp_replicate * (self.dp_shard or 1)

    @property
    def num_ranks(self) -> int:
        """Devices that the plan asks for; the fewest if dp_shard is left open."""
        return self.data_ranks * self.model_ranks

    @property
    def stages(self) -> Stages:
        """The stages of the pipeline; a device of pp has every pp-th one."""
        ends = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        return Stages(self.pp, self.vpp, *ends)

    @cached_property
    def min_microbatches(self) -> int:
        """The fewest that interleaved stages take; some may be empty."""
        return self.pp if self.vpp > 1 else 1

    def microbatch_group(self, count: int) -> int:
        """Return how many of `count` microbatches a device's part of the layers takes before its
        next part: the fewest that leave no group of less than pp.

        >>> [ParallelPlan(pp=4, vpp=2).microbatch_group(count) for count in (4, 5, 8, 9, 11)]
        [4, 5, 4, 5, 6]
        """
        return next(size for size in range(self.pp, count + 1) if not 0 < count % size < self.pp)

    @cached_property
    def precision(self) -> Precision:
        """What the model computes in, once `with_precision` has filled it in."""
        assert self.param_dtype is not None
        return self.param_dtype

    @property
    def recomputes(self) -> Recomputation:
        """What the backward pass recomputes: `activation_checkpointing`, or none."""
        return self.activation_checkpointing or "none"

    @property
    def needs_ranks(self) -> bool:
        """Whether it takes processes started as ranks (FSDP2), even a single one."""
        own = self.compile or self.cpu_offload or self.activation_checkpointing == "selective"
        return own or self.num_ranks > 1

    @cached_property
    def row_multiple(self) -> int:
        """Divisor of a row's width: two chunks per device of cp (zig-zag), each divisible by tp."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def on(self, num_devices: int) -> "ParallelPlan":
        """Return the plan with dp_shard filled in.

        Raises: ValueError that names the number that does not divide `num_devices`.

        >>> ParallelPlan(tp=2).on(8).dp_shard
        4
        """
        given = self.dp_shard is not None
        shard = f"dp_shard {self.dp_shard} · " if given else ""
        asked = (
            f"{self.num_ranks} = dp_replicate {self.dp_replicate} · {shard}tp {self.tp} · pp"
            f" {self.pp} · cp {self.cp}"
        )
        fits = self.num_ranks == num_devices if given else num_devices % self.num_ranks == 0
        require(
            fits,
            "parallel",
            f"must {'ask for' if given else 'divide'} the {num_devices} devices that there are",
            asked,
            "change a degree or the number of devices" + ", or omit parallel.dp_shard" * given,
        )
        plan = self if given else replace(self, dp_shard=num_devices // self.num_ranks)
        sharing = plan.data_ranks * plan.cp * plan.tp
        require(
            not sharing % self.ep,
            "parallel.ep",
            f"must divide the {sharing} devices of dp_shard · cp · tp",
            self.ep,
            "raise dp_shard",
        )
        return plan

    def with_precision(self, *, accelerator: bool) -> "ParallelPlan":
        """Return the plan with param_dtype filled in, for an accelerator or a CPU.

        >>> ParallelPlan().with_precision(accelerator=True).param_dtype
        'bfloat16'
        """
        usual: Precision = "bfloat16" if accelerator else "float32"
        return replace(self, param_dtype=self.param_dtype or usual)

    def problems(self, model: Any, *, traits: TrainingTraits = TRAITS) -> Iterator[str]:
        """Yield a sentence per number that does not divide, for a model's (Hugging Face)
        configuration and what the training backend can do.
        """
        heads = model.num_attention_heads
        kv_heads = getattr(model, "num_key_value_heads", None) or heads
        sizes = {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": model.intermediate_size,
            "vocab_size": model.vocab_size,
        }
        if traits.repeats_kv_heads and not self.tp % kv_heads:
            del sizes["num_key_value_heads"]
        for name, size in sizes.items():
            if size % self.tp:
                yield f"parallel.tp {self.tp} does not divide the model's {name} {size}"
        experts = num_experts(model)
        if self.ep > 1 and (not experts or experts % self.ep):
            divides = f"does not divide the model's num_local_experts {experts}"
            yield f"parallel.ep {self.ep} {divides if experts else 'is for mixtures of experts'}"
        elif self.ep > 1 and "parallel.ep" not in traits.experts:
            yield f"parallel.ep {self.ep} is for trainer.backend megatron"
        width = getattr(model, "moe_intermediate_size", None) or self.tp
        shares = experts and "parallel.ep" in traits.experts
        if shares and self.ep == 1 and width % self.tp:
            yield f"parallel.tp {self.tp} does not divide the model's moe_intermediate_size {width}"
        if shares and self.tp > 1 and not self.sequence_parallel:
            yield f"experts with parallel.tp {self.tp} need parallel.sequence_parallel"
        if self.pp > 1 and not traits.pipelines:
            yield f"parallel.pp {self.pp} is for trainer.backend megatron"
        elif problem := self.stages.problem(model.num_hidden_layers):
            yield problem
        if self.cp > 1 and self.cp_method == "ulysses" and heads % (self.tp * self.cp):
            yield (
                f"parallel.cp {self.cp} · tp {self.tp} does not divide the model's"
                f" num_attention_heads {heads}, which cp_method ulysses needs (allgather does not)"
            )

    def check(self, model: Any, *, traits: TrainingTraits = TRAITS) -> None:
        """Raise a ValueError with everything in `problems`."""
        if not (found := list(self.problems(model, traits=traits))):
            return
        ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        one_stage: Any = {"cp": 1, "pp": 1, "vpp": 1, **dict.fromkeys(ends)}
        alone = [replace(self, **one_stage, tp=tp, ep=1) for tp in range(1, 65)]
        fits = [plan.tp for plan in alone if not any(plan.problems(model, traits=traits))]
        remedy = f"parallel.tp may be {', '.join(map(str, fits))} here"
        if self.tp in fits:
            remedy = "take parallel.cp_method allgather, or another cp"
            if any(replace(self, **one_stage).problems(model, traits=traits)):
                remedy = "change parallel.ep, or remove it"
            elif self.pp > 1 and not traits.pipelines:
                remedy = "add --trainer.backend megatron, or remove it"
            elif any(replace(self, cp=1).problems(model, traits=traits)):
                remedy = self.stages.remedy(model.num_hidden_layers)
        raise ValueError(f"parallel must suit the model, but {'; '.join(found)}: {remedy}")


def num_experts(config: Any) -> int:
    """Return the experts of a layer, by a Hugging Face configuration; 0 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((n for name in names if (n := getattr(config, name, None))), 0)
