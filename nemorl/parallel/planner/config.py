"""The settings of `nemorl plan`. Free of torch."""

from dataclasses import dataclass
from typing import Literal

from nemorl.checks import at_least, require
from nemorl.parallel.backends import LIMITS, limits_of
from nemorl.parallel.plan import Precision
from nemorl.parallel.planner.model_shape import LINEAR


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Show how a model could be spread over GPUs: the plans that fit into memory, and the best one.

    Needs neither weights nor GPUs. All is estimated from the sizes in the model's config.json.
    """

    model: str
    """A folder with a model's config.json, that file itself, or the name of a model on the hub."""
    gpus: int
    """Devices to spread it over."""
    gpu_memory: float = 80.0
    """Memory of each, in GB (10^9 bytes)."""
    seq_len: int = 4096
    """Width of a row in tokens: that of the longest sequence, or trainer.packed_row_tokens."""
    micro_batch_rows: int = 1
    """Rows per forward pass on each device (trainer.train_micro_batch_size)."""
    batch_rows: int | None = None
    """Rows of an optimizer step on all devices; two microbatches per device unless given."""
    gpus_per_node: int = 8
    """GPUs of a machine, which have faster links; tensor parallelism stays within them."""
    param_dtype: Precision = "bfloat16"
    """What the model computes in (parallel.param_dtype)."""
    backend: str = "dtensor"
    """The training backend (trainer.backend): dtensor, megatron or a registered name."""
    tp: int | None = None
    """Only plans with this parallel.tp."""
    cp: int | None = None
    """Only plans with this parallel.cp."""
    pp: int | None = None
    """Only plans with this parallel.pp (backend megatron)."""
    vpp: int = 1
    """Only plans with this parallel.vpp, which above 1 needs a pipeline (backend megatron)."""
    ep: int | None = None
    """Only plans with this parallel.ep (backend megatron, mixtures of experts)."""
    dp_shard: int | None = None
    """Only plans with this parallel.dp_shard."""
    dp_replicate: int | None = None
    """Only plans with this parallel.dp_replicate."""
    cp_method: Literal["ulysses", "allgather"] | None = None
    """Only plans with this parallel.cp_method; unless given, ulysses where heads divide."""
    activation_checkpointing: Literal["none", "selective", "full"] | None = None
    """Only plans with this parallel.activation_checkpointing."""
    cpu_offload: bool = False
    """Plans that keep parameters, gradients and optimizer in main memory (parallel.cpu_offload)."""
    logprob_chunk: int = 1024
    """Tokens whose logits are held at a time (trainer.logprob_chunk)."""
    packed: bool = True
    """Whether rows hold several sequences each (trainer.sequence_packing)."""
    entropy: bool = False
    """Whether the loss has an entropy term."""
    reference: bool = False
    """Whether a frozen copy of the model is kept, for a KL term or DPO (not with LoRA)."""
    lora_rank: int = 0
    """Rank of the adapters, if only they train (lora.rank); 0: the whole model trains."""
    lora_target_modules: tuple[str, ...] = ()
    """Linear layers with an adapter (lora.target_modules); all but the output layer unless given.
    """
    colocated_generation: bool = False
    """Whether engines share the GPUs, and sleep while the model trains (generation.colocated)."""
    generation_tp: int = 1
    """Devices over which each engine splits the model (generation.tensor_parallel_size)."""
    generation_sequences: int = 64
    """Sequences of seq_len tokens that an engine's cache holds at a time."""
    offload_during_generation: bool = False
    """Whether the model is in main memory meanwhile (trainer.offload_during_generation)."""
    reserve: float = 0.1
    """Share of the memory left to the CUDA context, NCCL's buffers and fragmentation."""
    show: int = 10
    """Number of plans shown, the best first."""

    def __post_init__(self) -> None:
        counts = "gpus seq_len micro_batch_rows batch_rows gpus_per_node logprob_chunk"
        degrees = ("tp", "pp", "ep", "cp", "dp_shard", "dp_replicate", "generation_tp")
        names = (*counts.split(), *degrees, "vpp", "generation_sequences", "show")
        at_least(1, **{name: getattr(self, name) for name in names})
        at_least(0, lora_rank=self.lora_rank)
        memory, remedy = self.gpu_memory, "give it in GB, such as 80"
        require(memory > 0, "gpu_memory", "must be positive", memory, remedy)
        valid, requirement = 0 <= self.reserve < 1, "must lie in 0 … 1 (1 excluded)"
        require(valid, "reserve", requirement, self.reserve, "0.1 leaves a tenth free")
        for name in degrees:
            degree = getattr(self, name) or 1
            divides = self.gpus % degree == 0
            requirement = f"must divide the {self.gpus} GPUs"
            require(divides, name, requirement, degree, "change it or gpus")
        needs = {
            "lora_target_modules": ("lora_rank", not self.lora_target_modules),
            "generation_tp": ("colocated_generation", self.generation_tp == 1),
            "offload_during_generation": (
                "colocated_generation",
                not self.offload_during_generation,
            ),
        }
        for name, (needed, unset) in needs.items():
            remedy = f"add --{needed.replace('_', '-')}, or omit it"
            met = unset or bool(getattr(self, needed))
            require(met, name, f"needs {needed}", getattr(self, name), remedy)
        both = self.offload_during_generation and self.cpu_offload
        name, requirement = "offload_during_generation", "is not for cpu_offload"
        require(not both, name, requirement, True, "omit one of them")
        within = (self.tp or 1) <= self.gpus_per_node
        requirement = f"must be at most the {self.gpus_per_node} GPUs of a machine"
        require(within, "tp", requirement, self.tp, "raise --gpus-per-node if more are linked")
        single = not self.lora_rank or (self.tp or 1) == 1
        remedy = "spread adapters by dp_shard and cp"
        require(single, "lora_rank", "must be 0 with tp above 1", self.lora_rank, remedy)
        requirement, known = f"must be of {', '.join(LIMITS)}", self.backend in LIMITS
        remedy = "name one, or register yours (nemorl --import MODULE plan …)"
        require(known, "backend", requirement, self.backend, remedy)
        traits = limits_of(self.backend).traits
        sharded = traits.shards == "parameters"
        for name, unset in {
            "pp": traits.pipelines or (self.pp or 1) == 1,
            "vpp": traits.pipelines or self.vpp == 1,
            "ep": traits.experts or (self.ep or 1) == 1,
            "lora_rank": traits.adapters or not self.lora_rank,
            "cpu_offload": sharded or not self.cpu_offload,
            "offload_during_generation": sharded or not self.offload_during_generation,
            "dp_replicate": sharded or (self.dp_replicate or 1) == 1,
        }.items():
            requirement = f"is not for backend {self.backend}"
            require(unset, name, requirement, getattr(self, name), "remove it, or change backend")
        piped = self.vpp == 1 or (self.gpus > 1 and self.pp != 1)
        remedy = "remove it, or change pp or gpus"
        require(piped, "vpp", "must be 1 without a pipeline", self.vpp, remedy)
        for name in self.lora_target_modules:
            requirement = f"must be of {', '.join(LINEAR)}"
            require(name in LINEAR, "lora_target_modules", requirement, name, "name linear layers")
