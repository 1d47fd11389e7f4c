"""What `nemorl plan` is asked for. Free of torch."""

from dataclasses import dataclass
from typing import Literal

from nemorl.checks import at_least, require
from nemorl.parallel.plan import Precision
from nemorl.parallel.planner.memory import LINEAR


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How a model could be spread over GPUs: which plans fit into their memory, what they send to
    each other, and which one to take.

    Needs neither weights nor GPUs. What it shows is reckoned from the sizes in the model's
    config.json.
    """

    model: str
    """A folder with a model's config.json, that file itself, or the name of a model on the hub."""
    gpus: int
    """Devices to spread it over."""
    gpu_memory: float = 80.0
    """Memory of each, in GB (10^9 bytes)."""
    host_memory: float | None = None
    """Main memory of a machine, in GB, in which plans with cpu_offload have to fit; unless given,
    what they take is shown and not judged.
    """
    seq_len: int = 4096
    """Width of a row in tokens: that of the longest sequence, or trainer.packed_row_tokens."""
    micro_batch_rows: int = 1
    """Rows per forward pass on each device (trainer.train_micro_batch_size)."""
    batch_rows: int | None = None
    """Rows of an optimizer step on all devices; two micro-batches for each device unless given."""
    gpus_per_node: int = 8
    """GPUs that a machine has, and that are linked faster than machines are; tensor parallelism
    stays within them.
    """
    param_dtype: Precision = "bfloat16"
    """What the model computes in (parallel.param_dtype)."""
    tp: int | None = None
    """Only plans with this parallel.tp."""
    cp: int | None = None
    """Only plans with this parallel.cp."""
    dp_shard: int | None = None
    """Only plans with this parallel.dp_shard."""
    dp_replicate: int | None = None
    """Only plans with this parallel.dp_replicate."""
    cp_method: Literal["ulysses", "allgather"] | None = None
    """Only plans with this parallel.cp_method; ulysses where it can be, unless given."""
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
    """Whether a frozen copy of the model is kept, as for a KL term or DPO (with LoRA the model
    without its adapters is that).
    """
    lora_rank: int = 0
    """Rank of the adapters, where they are all that trains (lora.rank); 0: the whole model trains.
    """
    lora_target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter (lora.target_modules), such as q_proj v_proj;
    all but the output layer unless given.
    """
    colocated_generation: bool = False
    """Whether engines that generate share the GPUs, and sleep while the model trains
    (generation.colocated).
    """
    generation_tp: int = 1
    """Devices over which each engine splits the model (generation.tensor_parallel_size)."""
    generation_sequences: int = 64
    """Sequences of seq_len tokens for which an engine's cache has room at a time."""
    reserve: float = 0.1
    """Share of the memory that is left to the CUDA context, to buffers of NCCL and to
    fragmentation.
    """
    show: int = 10
    """How many plans are shown, the best first."""

    def __post_init__(self) -> None:
        at_least(1, gpus=self.gpus, seq_len=self.seq_len, micro_batch_rows=self.micro_batch_rows, batch_rows=self.batch_rows,
                 gpus_per_node=self.gpus_per_node, tp=self.tp, cp=self.cp, dp_shard=self.dp_shard, dp_replicate=self.dp_replicate,
                 logprob_chunk=self.logprob_chunk, generation_tp=self.generation_tp, generation_sequences=self.generation_sequences,
                 show=self.show)  # fmt: skip
        require(
            self.gpu_memory > 0,
            "gpu_memory",
            "must be positive",
            self.gpu_memory,
            "give that of a GPU in GB, such as 80",
        )
        require(
            0 <= self.reserve < 1,
            "reserve",
            "must lie in 0 … 1 (1 excluded)",
            self.reserve,
            "0.1 leaves a tenth free",
        )
        for name in ("tp", "cp", "dp_shard", "dp_replicate"):
            degree = getattr(self, name) or 1
            require(
                self.gpus % degree == 0,
                name,
                f"must divide the {self.gpus} GPUs",
                degree,
                "change it or gpus",
            )
        require(self.host_memory is None or self.host_memory > 0, "host_memory", "must be positive", self.host_memory,
                "give that of a machine in GB, such as 512")  # fmt: skip
        require(self.host_memory is None or self.cpu_offload, "host_memory", "needs cpu_offload", self.host_memory,
                "add --cpu-offload, or leave it out")  # fmt: skip
        self._check_lora()
        require((self.tp or 1) <= self.gpus_per_node, "tp", f"must be at most the {self.gpus_per_node} GPUs of a machine", self.tp,
                "tensor parallelism over a network is slow; --gpus-per-node says how many are linked")  # fmt: skip
        engines, there = self.generation_tp, self.colocated_generation or self.generation_tp == 1
        require(
            there,
            "generation_tp",
            "needs colocated_generation",
            engines,
            "add --colocated-generation, or leave it out",
        )
        require(
            self.gpus % engines == 0,
            "generation_tp",
            f"must divide the {self.gpus} GPUs",
            engines,
            "1, 2, 4 or 8 is usual",
        )

    def _check_lora(self) -> None:
        at_least(0, lora_rank=self.lora_rank)
        require(not self.lora_rank or (self.tp or 1) == 1, "lora_rank", "must be 0 with tp above 1", self.lora_rank,
                "spread adapters by dp_shard and cp")  # fmt: skip
        require(not self.lora_target_modules or self.lora_rank > 0, "lora_target_modules", "needs lora_rank", self.lora_target_modules,
                "add --lora-rank 16, or leave it out")  # fmt: skip
        for name in self.lora_target_modules:
            require(
                name in LINEAR,
                "lora_target_modules",
                f"must be of {', '.join(LINEAR)}",
                name,
                "name a layer's linear layers",
            )
