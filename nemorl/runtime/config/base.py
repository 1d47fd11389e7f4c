"""The sections that every algorithm has."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemorl.checks import require
from nemorl.parallel.config import (
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    ProfileConfig,
    TrainerConfig,
    check_lora,
)
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.config.data import DataConfig
from nemorl.runtime.config.run import RunConfig
from nemorl.runtime.config.runtime import RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The sections that every algorithm has.

    Derive your own config from this one and add its settings (see `register_algorithm`).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self.require_room(self.data.max_total_sequence_length, "the longest sequence")
        check_lora(self.lora, self.model)
        most, largest = self.generation.adapter_rank, self.lora.largest_rank
        require(
            not most or 0 < largest <= most,
            "generation.adapter_rank",
            f"must be 0 or as large as the largest rank of the adapters, which is {largest}",
            most,
            "set lora.rank, and this to the same, or remove it",
        )
        offloads, field = (
            self.trainer.offload_during_generation,
            "trainer.offload_during_generation",
        )
        for free, requirement in (
            (self.parallel.cpu_offload, "is not for parallel.cpu_offload, which keeps all there"),
            (not self.generation.colocated, "needs generation.colocated: others have own GPUs"),
        ):
            require(not (offloads and free), field, requirement, offloads, "remove it")
        require(
            self.optimizer.schedule != "constant" or not self.optimizer.min_lr_ratio,
            "optimizer.min_lr_ratio",
            "is for a schedule that decays",
            self.optimizer.min_lr_ratio,
            "add --optimizer.schedule cosine, or remove it",
        )
        require(
            not self.data.streaming or getattr(self, "max_num_steps", 1) is not None,
            "max_num_steps",
            "must be given with data.streaming, which counts no rows",
            None,
            "add --max-num-steps",
        )

    def planned_steps(self, num_rows: int) -> int | None:
        """Return the number of steps on `num_rows` rows, or None if unknown."""
        return getattr(self, "max_num_steps", None)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in each step."""
        return 1

    def generates(self, *, answers: bool) -> bool:
        """Return whether a run samples; answers: whether the rows to validate on have one."""
        return hasattr(self, "reward")

    def doubts(self) -> Iterator[str]:
        """Yield a sentence for each value that is allowed, but learns nothing."""
        lr = self.optimizer.lr
        if lr >= 0.1:
            yield (
                f"optimizer.lr is {lr:g}, about what each step adds to every weight: training will"
                " destroy the model; 1e-6 to 1e-4 is usual"
            )
        elif lr < 1e-9:
            yield (
                f"optimizer.lr is {lr:g}, too little to change a float32 weight: nothing will be"
                " learned; 1e-6 to 1e-4 is usual"
            )

    def refuse_replay(self) -> None:
        """Refuse trainer.router_replay where what is trained on was not sampled."""
        require(
            not self.trainer.router_replay,
            "trainer.router_replay",
            "is for runs that train on what an engine samples (grpo)",
            True,
            "remove it",
        )

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row of a batch."""
        return self.data.max_total_sequence_length

    def require_room(self, tokens: int, what: str) -> None:
        """Refuse microbatches and packed rows that can't hold `tokens`."""
        for name in ("micro_batch_tokens", "packed_row_tokens"):
            size = getattr(self.trainer, name)
            require(
                size is None or size >= tokens,
                f"trainer.{name}",
                f"must hold {what}",
                size,
                f"data.max_total_sequence_length is {self.data.max_total_sequence_length}, so make"
                f" it {tokens} or more",
            )
