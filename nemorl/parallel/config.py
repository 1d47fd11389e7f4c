"""Sections that set up a training backend: frozen, free of torch, checked when made."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from nemorl.checks import at_least, refuse_unused, require
from nemorl.models.capabilities import Proofs
from nemorl.parallel.plan import ParallelPlan, TrainingTraits

MICRO_BATCH_TOKENS = 16_384
"""Default size of a microbatch, in tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    path: str = ""
    """A folder with a Hugging Face causal language model, or its name on the hub."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer. Default: the model's own."""
    chat_template: str | None = None
    """Jinja chat template, path of a file with one, or passthrough (contents as they are). Default:
    the tokenizer's.
    """
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values for the chat template, such as '{"enable_thinking": false}'; exported with the
    tokenizer.
    """
    from_scratch: bool = False
    """Initialize the weights at random instead of loading them."""
    trust_remote_code: bool = False
    """Run Python code of the model or the tokenizer (auto_map). It can do what you can: read it
    first.
    """


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How a batch is turned into one optimizer step."""

    backend: str = "dtensor"
    """Training backend: dtensor (FSDP2, tensor and context parallelism), megatron (megatron-core;
    pipeline parallelism, too), or one of yours.
    """
    train_micro_batch_size: int | None = None
    """Sequences (or packed rows) per forward pass, instead of micro_batch_tokens; changes memory,
    not the result.
    """
    micro_batch_tokens: int | None = None
    """Tokens per forward pass, padding included. None: 16,384, or a single longer sequence."""
    sequence_packing: bool = False
    """Put several sequences into one row, without padding."""
    packed_row_tokens: int | None = None
    """Tokens of a packed row. None: the longest sequence, or micro_batch_tokens if that is set."""
    share_prompts: bool = True
    """Compute once per forward pass what several sequences begin with: prompts, and earlier turns.
    Not with context parallelism.
    """
    logprob_chunk: int | None = None
    """Tokens whose logits are in memory at a time. None: 4,096 on GPUs that have room for it and
    that no engine shares; else 1,024.
    """
    device: str | None = None
    """Device: cpu, cuda, cuda:1, …; with several ranks cpu, or cuda for a GPU each. Default: the
    first GPU if there is one.
    """
    offload_during_generation: bool | None = None
    """While engines on the trainer's GPUs generate, keep its parameters, gradients, optimizer state
    and reference model in pinned main memory; parameters stay with generation.backend megatron, and
    torch in its process. None: where vLLM's engines share its GPUs and don't fit beside it.
    """
    router_replay: bool = False
    """Train each token with the experts that the sampler chose, weighted by the trainer's router.
    For grpo, with generation.backend torch, megatron or vllm.
    """
    router_aux_loss_coef: float = 0.0
    """Weight of Hugging Face's loss that balances experts over the whole batch; it takes another
    forward pass.
    """
    router_bias_update_rate: float = 0.0
    """Change of the biases by which experts are chosen, after each optimizer step: up for experts
    with less tokens than the mean, down for the others (DeepSeek-V3: 0.001). For models with such
    biases, with trainer.backend dtensor.
    """
    deterministic: bool = False
    """Use only kernels that give the same bits in every run (slower on GPUs; CPUs always do)."""

    def __post_init__(self) -> None:
        at_least(
            1,
            trainer__train_micro_batch_size=self.train_micro_batch_size,
            trainer__micro_batch_tokens=self.micro_batch_tokens,
            trainer__packed_row_tokens=self.packed_row_tokens,
            trainer__logprob_chunk=self.logprob_chunk,
        )
        at_least(
            0,
            trainer__router_aux_loss_coef=self.router_aux_loss_coef,
            trainer__router_bias_update_rate=self.router_bias_update_rate,
        )
        require(
            self.train_micro_batch_size is None or self.micro_batch_tokens is None,
            "trainer.micro_batch_tokens",
            "can't be given together with trainer.train_micro_batch_size",
            self.micro_batch_tokens,
            "keep one of the two",
        )
        require(
            self.packed_row_tokens is None or self.sequence_packing,
            "trainer.packed_row_tokens",
            "needs trainer.sequence_packing",
            self.packed_row_tokens,
            "add --trainer.sequence-packing",
        )

    @cached_property
    def chunk(self) -> int:
        """Tokens whose logits are in memory at a time: `logprob_chunk`, or 1,024."""
        return self.logprob_chunk or 1024


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or another optimizer, its learning-rate schedule and gradient clipping."""

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw; for the matrices of hidden layers alone adamw8bit (bitsandbytes' AdamW, with a state
    in 8 bits) or muon. Embeddings, the output layer and vectors are AdamW's in each.
    """
    lr: float = 1e-5
    """Peak learning rate. Muon multiplies it by 0.2 √max(r, c) for an r × c matrix (Moonlight), so
    that AdamW's lr and weight decay suit it.
    """
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up, to min_lr_ratio · lr one step after the end."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly, from lr / warmup_steps to lr."""
    min_lr_ratio: float = 0.0
    """End of linear and cosine schedules, as a share of lr."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only (not on biases and norms)."""
    beta1: float = 0.9
    """Decay of the running mean of the gradient."""
    beta2: float = 0.95
    """Decay of the running mean of the squared gradient."""
    eps: float = 1e-8
    """Constant added to the denominator of AdamW's update."""
    max_grad_norm: float | None = 1.0
    """Largest global gradient norm; above it gradients are scaled down. None: no clipping."""
    implementation: Literal["fused", "foreach"] = "fused"
    """Kernels of AdamW's step: one for all of it, or one for each operation."""
    momentum: float = 0.95
    """Decay of Muon's running mean of the gradient (Nesterov's)."""

    def __post_init__(self) -> None:
        require(
            0 < self.lr < math.inf,
            "optimizer.lr",
            "must be positive and finite" if self.lr > 0 else "must be positive",
            self.lr,
            "1e-6 to 1e-5 suits RL of pretrained models, 1e-5 to 1e-4 SFT",
        )
        at_least(
            0, optimizer__warmup_steps=self.warmup_steps, optimizer__weight_decay=self.weight_decay
        )
        require(
            0 <= self.min_lr_ratio <= 1,
            "optimizer.min_lr_ratio",
            "must lie in 0 … 1",
            self.min_lr_ratio,
            "0.1 ends at a tenth of lr",
        )
        require(self.eps > 0, "optimizer.eps", "must be positive", self.eps, "1e-8 is usual")
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            "optimizer.max_grad_norm",
            "must be positive or None",
            self.max_grad_norm,
            "1.0 is usual",
        )
        if self.name != "muon":
            refuse_unused(
                "optimizer",
                self,
                "needs optimizer.name muon",
                "add --optimizer.name muon",
                names=("momentum",),
            )
        for name in ("beta1", "beta2", "momentum"):
            require(
                0 <= getattr(self, name) < 1,
                f"optimizer.{name}",
                "must lie in 0 … 1 (1 excluded)",
                getattr(self, name),
                "0.9 and 0.95 are usual",
            )


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """What one `optim_step` takes in place of the configuration's; None: as configured."""

    lr: float | None = None
    """None: the schedule's. May be 0."""
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    """On matrices only."""
    max_grad_norm: float | None = None
    """math.inf: no clipping."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        OptimizerConfig(**{**given, "lr": 1.0} if self.lr == 0 else given)


def matching(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """Return the value of the first of PEFT's patterns that fits a layer's name."""
    fits = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer))
    return next(fits, otherwise)


FUSED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that files give to experts' matrices, which are fused in a live model: no adapter is in
them.
"""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Small adapters that are trained in place of the model's weights (LoRA, through PEFT)."""

    rank: int = 0
    """Rank of the adapters: 8 to 64 are usual, with about ten times the optimizer.lr of full
    training. 0: none; the whole model is trained.
    """
    alpha: float = 32.0
    """Scale of the adapters: alpha / rank."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Ranks of some layers, such as {"q_proj": 8, "layers.1.mlp.down_proj": 32}: PEFT's
    rank_pattern, by ends of names or regular expressions; the first that fits counts.
    """
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Alphas of some layers, as in rank_pattern; the scale is a layer's own alpha / rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs dropped in training. Keep it 0 in RL: the trained model should
    be the one that sampled.
    """
    target_modules: tuple[str, ...] = ()
    """Linear layers that get an adapter, such as q_proj. Default: all but the output layer."""
    quantize: Literal["none", "nf4"] = "none"
    """Keep the frozen linear layers, but the output layer, in 4 bits (QLoRA, by bitsandbytes); on
    one device, in a process by itself.
    """
    export: Literal["merged", "adapter"] = "merged"
    """Contents of hf/: the whole model, adapters merged, or a PEFT folder of the adapters alone."""

    def __post_init__(self) -> None:
        at_least(0, lora__rank=self.rank)
        require(self.alpha > 0, "lora.alpha", "must be positive", self.alpha, "32 is usual")
        require(
            0 <= self.dropout < 1,
            "lora.dropout",
            "must lie in 0 … 1 (1 excluded)",
            self.dropout,
            "0.05 is usual in SFT, 0 in RL",
        )
        for name, values in self.patterns().items():
            for key, value in values.items():
                field_name = f"lora.{name}, for {key}"
                require(value > 0, field_name, "must be positive", value, "remove it")
                try:
                    re.compile(key)
                except re.error as error:
                    require(
                        False,
                        f"lora.{name}",
                        "must be a regular expression",
                        key,
                        f"it is none ({error}): correct it",
                    )
        if not self.rank:
            refuse_unused("lora", self, "needs lora.rank", "add --lora.rank 16, or remove it")

    def patterns(self) -> dict[str, dict[str, Any]]:
        """Return rank_pattern and alpha_pattern by name."""
        return {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}

    @property
    def largest_rank(self) -> int:
        """Return the largest rank of any layer; 0 without adapters."""
        return max([self.rank, *self.rank_pattern.values()])


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Traces of training steps, for https://ui.perfetto.dev or chrome://tracing."""

    steps: str | None = None
    """First and last optimizer step to record, such as 10:12; "10" means 10:10. None: no traces."""
    dir: str | None = None
    """Folder of the traces, one file per device. Default: profile/ of the run."""

    def __post_init__(self) -> None:
        require(
            self.span is not None or self.dir is None,
            "profile.dir",
            "needs profile.steps",
            self.dir,
            "add --profile.steps 10:12",
        )

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """Return `steps` as numbers. Raises ValueError for what can't be read."""
        if self.steps is None:
            return None
        first, colon, last = self.steps.partition(":")
        last = last if colon else first
        require(
            first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last),
            "profile.steps",
            "must be FIRST:LAST, counted from 1",
            self.steps,
            "10:12 records three steps",
        )
        return int(first), int(last)


def check_lora(lora: LoRAConfig, model: ModelConfig) -> None:
    """Raise ValueError for adapters on random weights, which would stay random."""
    require(
        not (lora.rank and model.from_scratch),
        "lora.rank",
        "must be 0 with model.from_scratch",
        lora.rank,
        "adapt a trained model, or remove it",
    )


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """The settings that `TrainingBackend.setup` gets."""

    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    head: Literal["lm", "scalar"] = "lm"
    """Last layer of the model: lm (log-probabilities of tokens), or scalar (a critic's value per
    token): transformers' AutoModelForSequenceClassification with one label. A scalar head that
    the folder lacks is random, from `seed`.
    """
    trains: bool = True
    """Whether the model trains. One that does not, such as a teacher, has no optimizer and no
    checkpoint.
    """
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    seed: int = 0
    """Seed of random weights, adapters and dropout."""
    total_steps: int = 1
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    keep_reference: bool = False
    """Keep a frozen copy of the initial model for `get_reference_logprobs`; with LoRA it is the
    model without its adapters.
    """
    collective_timeout_s: float | None = None
    """Longest wait of ranks for each other, in seconds. None: torch's own."""
    proofs: Proofs | None = None
    """What is proved of the model. None: what the tested table, or an earlier check, says."""
    same_initial_model_as: Path | None = None
    """Checkpoint whose run must have begun with the same weights: for a resumed run that needs its
    initial model again.
    """

    def __post_init__(self) -> None:
        require(
            self.head in ("lm", "scalar"),
            "head",
            "must be lm or scalar",
            self.head,
            "scalar gives a value per token",
        )
        check_lora(self.lora, self.model)
        frozen, scalar = not self.trains, self.head == "scalar"
        for used, what in ((frozen, "a model that does not train"), (scalar, "a scalar head")):
            for name, value in (
                ("lora.rank", self.lora.rank),
                ("keep_reference", self.keep_reference),
            ):
                require(not (used and value), name, f"must be off for {what}", value, "remove it")


@runtime_checkable
class TrainingSections(Protocol):
    """The sections that a check reads, of a run's or a backend's settings."""

    @property
    def lora(self) -> LoRAConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def parallel(self) -> ParallelPlan: ...
    @property
    def trainer(self) -> TrainerConfig: ...


@runtime_checkable
class TrainingLimits(Protocol):
    """A training backend's class, or the light module of a built-in one."""

    @property
    def traits(self) -> TrainingTraits:
        """What it can do."""

    def check(self, config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
        """Raise ValueError for settings that it does not support, or that have no effect.

        config: a run's or a backend's settings.
        model: the model's Hugging Face configuration; None: it is not known yet.
        plan: the devices, without an open degree.
        """
