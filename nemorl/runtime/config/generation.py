"""How responses are sampled, and by which engines: frozen, free of torch, checked when made."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from nemorl.checks import at_least, require
from nemorl.rollout.generation import SamplingParams

OF_REPLICAS = (
    "cpus_per_replica",
    "python",
    "colocated",
    "weight_transport",
    "timeout_s",
    "start_timeout_s",
    "max_restarts",
    "log_dir",
    "trainer_gpus",
)
"""Settings of engines in processes of their own."""

LONGEST_RESPONSE = 256
"""Tokens, where generation.max_new_tokens is not given."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How responses are sampled."""

    backend: str = "torch"
    """Name of the generation backend: torch is embedded and shares the trainer's weights; vllm is
    fast on GPUs, and spreads over a cluster.
    """
    temperature: float = 1.0
    """Divides the logits; 0 is greedy (evaluation only)."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    max_new_tokens: int | None = None
    """Longest response, in tokens.

    Unless given: 256, or in a run half of data.max_total_sequence_length where that is less.
    """
    stop_strings: tuple[str, ...] = ()
    """A response ends where one of these appears in its text."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with one of these tokens, as with the tokenizer's end-of-sequence token."""
    max_batch_size: int = 256
    """Sequences that an engine decodes at a time; the rest wait for a free place."""
    num_replicas: int = 0
    """vllm: engines in processes of their own, which Ray places (on the cluster at RAY_ADDRESS, or
    here); 0: one engine in the trainer's process.
    """
    tensor_parallel_size: int = 1
    """vllm: devices over which each engine splits the model."""
    cpus_per_replica: int = 1
    """vllm:

    CPU cores of each replica; where there is no GPU, each device's worker computes with as many
    threads.
    """
    max_model_len: int | None = None
    """vllm: room for prompt and response together, in tokens; in a run
    data.max_total_sequence_length unless given, and no less.
    """
    engine: dict[str, Any] = field(default_factory=dict)
    """vllm: further arguments of the engine by vLLM's own names, such as gpu_memory_utilization:
    0.5.
    """
    python: str | None = None
    """vllm: the Python interpreter of the replicas, if not the trainer's; extra:NAME builds an
    environment from nemorl's extra NAME and keeps it.
    """
    colocated: bool = True
    """vllm: replicas share the trainer's GPUs and sleep while it trains; false: they have GPUs of
    their own.
    """
    sleep_level: Literal[0, 1, 2] | None = None
    """vllm: given back while the trainer works: nothing (0), the cache, and weights to main memory
    (1), both (2). None: 2 if colocated on GPUs.
    """
    weight_transport: Literal["auto", "shared_memory", "object_store", "cuda_ipc", "nccl"] = "auto"
    """vllm: how new weights reach the replicas; auto: the fastest one that works where they are."""
    timeout_s: float = 300.0
    """vllm: a replica that makes no progress for so many seconds is replaced."""
    start_timeout_s: float = 600.0
    """vllm: how long a replica may take to start, in seconds."""
    max_restarts: int = 3
    """vllm: how often in a row a replica may be replaced without finishing a prompt; then the run
    goes on without it, or ends if it was the last.
    """
    log_dir: str | None = None
    """vllm: folder for the replicas' logs; logs/ of the run unless given."""
    trainer_gpus: int | None = None
    """vllm:

    GPUs of this machine that are set aside for training where colocated is false; as many as train
    here outside Ray unless given.
    """

    def __post_init__(self) -> None:
        at_least(
            1,
            generation__max_new_tokens=self.max_new_tokens,
            generation__max_batch_size=self.max_batch_size,
            generation__tensor_parallel_size=self.tensor_parallel_size,
            generation__cpus_per_replica=self.cpus_per_replica,
            generation__max_model_len=self.max_model_len,
        )
        at_least(
            0,
            generation__num_replicas=self.num_replicas,
            generation__max_restarts=self.max_restarts,
            generation__trainer_gpus=self.trainer_gpus,
        )
        for name in ("timeout_s", "start_timeout_s"):
            require(
                getattr(self, name) > 0,
                f"generation.{name}",
                "must be positive",
                getattr(self, name),
                "300 is five minutes",
            )
        if self.backend == "torch":
            names, default = [item.name for item in fields(self)], GenerationConfig(backend="vllm")
            for name in names[names.index("num_replicas") :]:
                value, remedy = (
                    getattr(self, name),
                    "add --generation.backend vllm, or leave it out",
                )
                require(
                    value == getattr(default, name),
                    f"generation.{name}",
                    "is not for torch, the embedded engine",
                    value,
                    remedy,
                )
        for name in OF_REPLICAS:
            remedy = (
                "an engine in the trainer's own process has its interpreter, its memory and its"
                " output; add --generation.num-replicas 1"
            )
            given, unset = (
                getattr(self, name),
                next(item.default for item in fields(self) if item.name == name),
            )
            require(
                given == unset or self.num_replicas > 0,
                f"generation.{name}",
                "needs generation.num_replicas",
                given,
                remedy,
            )
        self.sampling_params()

    @property
    def longest_response(self) -> int:
        """`max_new_tokens`, or what stands for it."""
        return LONGEST_RESPONSE if self.max_new_tokens is None else self.max_new_tokens

    def sampling_params(self, *, greedy: bool = False) -> SamplingParams:
        """What a request of this run asks for; greedy: the same limits and stops, but always the
        likeliest token.
        """
        filters: dict[str, Any] = (
            {} if greedy else {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        )
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            max_new_tokens=self.longest_response,
            stop_strings=tuple(self.stop_strings),
            stop_token_ids=tuple(self.stop_token_ids),
            **filters,
        )
