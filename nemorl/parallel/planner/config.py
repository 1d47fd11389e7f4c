"""The settings of `nemorl plan`: a run's sections and a few of its own. Free of torch."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from nemorl.checks import all_but, at_least, refuse_unused, require
from nemorl.parallel.config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.plan import DEGREES, ParallelPlan, Recomputation
from nemorl.rollout.config import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class OpenPlan(ParallelPlan):
    """Settings of a run that restrict the plans; those without a value are free. compile and the
    overlaps have no effect on the estimate.
    """

    dp_replicate: int | None = None  # type: ignore[assignment]
    tp: int | None = None  # type: ignore[assignment]
    pp: int | None = None  # type: ignore[assignment]
    ep: int | None = None  # type: ignore[assignment]
    cp: int | None = None  # type: ignore[assignment]
    cp_method: Literal["ulysses", "allgather"] | None = None  # type: ignore[assignment]
    """Default: ulysses where heads divide."""
    activation_checkpointing: Recomputation | None = None
    """What the backward pass recomputes; selective is all that recompute_modules allow."""

    def __post_init__(self) -> None:
        at_least(1, **{f"parallel__{name}": getattr(self, name) for name in DEGREES})


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Show how a model could be spread over GPUs: the plans that fit into memory, the best first.

    All is estimated from the sizes in the model's config.json, without weights or GPUs.
    """

    unused: ClassVar[dict[str, tuple[str, ...]]] = {
        "model": all_but(ModelConfig, "path"),
        "trainer": (
            *("share_prompts", "device", "router_replay"),
            *("router_aux_loss_coef", "router_bias_update_rate", "deterministic"),
        ),
        "optimizer": all_but(OptimizerConfig, "name"),
        "lora": all_but(LoRAConfig, "rank", "target_modules", "rank_pattern", "quantize"),
        "generation": all_but(
            *(GenerationConfig, "backend", "colocated"),
            *("max_batch_size", "tensor_parallel_size", "pipeline_parallel_size"),
        ),
    }
    """Settings that are refused and not shown."""

    gpus: int
    """Devices to spread it over."""
    gpu_memory: float = 80.0
    """Memory of each, in GB (10^9 bytes)."""
    gpus_per_node: int = 8
    """GPUs of a machine, which have faster links; tensor parallelism stays within them."""
    seq_len: int = 4096
    """Longest sequence in tokens: the width of a row, unless trainer.packed_row_tokens is."""
    batch_rows: int | None = None
    """Rows of an optimizer step on all devices. Default: two microbatches per device."""
    entropy: bool = False
    """Whether the loss has an entropy term."""
    teacher: str = ""
    """Model beside it that only scores: a folder, config.json or hub name."""
    critic: str = ""
    """Model beside it that trains with a scalar head."""
    keep_reference: bool = False
    """Whether there is a reference model, as for a KL term or DPO."""
    reserve: float = 0.1
    """Share of the memory left to the CUDA context, NCCL's buffers and fragmentation."""
    show: int = 10
    """Number of plans shown, the best first."""
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(sequence_packing=True))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    parallel: OpenPlan = field(default_factory=OpenPlan)
    generation: GenerationConfig = field(
        default_factory=lambda: GenerationConfig(max_batch_size=64)
    )

    def __post_init__(self) -> None:
        names = ("gpus", "seq_len", "batch_rows", "gpus_per_node", "show")
        at_least(1, **{name: getattr(self, name) for name in names})
        require(
            self.gpu_memory > 0,
            "gpu_memory",
            "must be positive",
            self.gpu_memory,
            "the default is 80",
        )
        require(
            0 <= self.reserve < 1,
            "reserve",
            "must lie in 0 … 1 (1 excluded)",
            self.reserve,
            "0.1 leaves a tenth free",
        )
        for section, unused in self.unused.items():
            refuse_unused(
                section,
                getattr(self, section),
                "has no effect on a plan",
                "remove it",
                names=unused,
            )
        if offloads := self.trainer.offload_during_generation:
            apart = not self.parallel.cpu_offload
            for fits, must, remedy in (
                (self.engines, "needs engines on these GPUs", "add --generation.backend vllm"),
                (apart, "is not for parallel.cpu_offload", "omit one of them"),
            ):
                require(fits, "trainer.offload_during_generation", must, offloads, remedy)
        if self.engines:
            size = self.generation.devices_per_replica
            require(
                self.gpus % size == 0,
                "generation.tensor_parallel_size · pipeline_parallel_size",
                f"must divide the {self.gpus} GPUs",
                size,
                "change it or gpus",
            )

    @property
    def engines(self) -> bool:
        """Whether engines share the GPUs, and sleep while the model trains."""
        return self.generation.traits.engines and self.generation.colocated

    @property
    def row_tokens(self) -> int:
        trainer = self.trainer
        packed = trainer.sequence_packing and trainer.micro_batch_tokens
        return trainer.packed_row_tokens or packed or self.seq_len

    @property
    def micro_batch_rows(self) -> int:
        """Rows per forward pass on each device."""
        tokens = self.trainer.micro_batch_tokens or 0
        return self.trainer.train_micro_batch_size or max(1, tokens // self.row_tokens)
