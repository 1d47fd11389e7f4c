"""The section `generation`."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from nemorl.checks import at_least, refuse_unused, require
from nemorl.rollout.conversation import Limits
from nemorl.rollout.generation import EMBEDDED, GenerationTraits, SamplingParams

TRAITS = {
    "torch": EMBEDDED,
    "megatron": GenerationTraits(
        on_trainer=True, shares_model=False, embedded=True, records_experts=True
    ),
    "vllm": GenerationTraits(shares_model=False, engines=True, records_experts=True),
}
"""What generation backends can do, by name; registered ones join."""


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM (0.32) makes room."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How conversations with an environment are led."""

    environment: str | dict[str, str] | None = None
    """calculator, python, toolbox, or a class with turns or tools, as module:Class
    or ./file.py:Class (docs/environments.md). A mapping has one for each name that rows choose by
    their column `environment`. Default: `reward` judges one response.
    """
    agent: str | None = None
    """A command for each conversation, such as "python my_agent.py": an agent that asks the policy
    at OPENAI_BASE_URL or ANTHROPIC_BASE_URL, with the row as JSON on its standard input and its
    reward in the last line that it prints (docs/agents.md).
    """
    sandbox: bool = False
    """agent runs in bubblewrap: it reads the working folder, and reaches only the policy."""
    max_turns: int | None = None
    """Responses after which a conversation ends. Default: the environment's own, or 16."""
    timeout_s: float = 60.0
    """Longest call of an environment or a reward, in seconds; its conversation fails after it."""
    discount: float = 1.0
    """A reward t turns later counts discount^t of its value."""
    workers: int = 0
    """Processes, placed by Ray, for an environment that blocks long, may hang or crash, or needs
    other packages; each has one conversation at a time. 0: threads of the trainer.
    """
    worker: dict[str, Any] = field(default_factory=dict)
    """Options of each worker, by Ray's names, such as '{"num_cpus": 1}'; "runtime_env" has packages
    and interpreters.
    """

    def __post_init__(self) -> None:
        at_least(1, rollout__max_turns=self.max_turns)
        require(
            not (self.agent and self.environment),
            "rollout.agent",
            "must be left out beside an environment",
            self.agent,
            "remove one of them",
        )
        require(
            bool(self.agent) or not self.sandbox,
            "rollout.sandbox",
            "is for rollout.agent",
            True,
            "name a command",
        )
        at_least(0, rollout__workers=self.workers)
        require(
            bool(self.workers) or not self.worker,
            "rollout.worker",
            "is for rollout.workers",
            self.worker,
            "say how many",
        )
        require(
            self.timeout_s > 0,
            "rollout.timeout_s",
            "must be positive",
            self.timeout_s,
            "60 is usual",
        )
        require(
            0 <= self.discount <= 1,
            "rollout.discount",
            "must be from 0 to 1",
            self.discount,
            "1 turns it off",
        )

    def limits(self, max_tokens: int | None = None) -> Limits:
        return Limits(
            max_turns=self.max_turns,
            max_tokens=max_tokens,
            timeout_s=self.timeout_s,
            discount=self.discount,
        )


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How responses are sampled."""

    backend: str = "torch"
    """torch: embedded, with the trainer's weights; vllm: fast on GPUs, also on a cluster; megatron:
    the ranks of trainer.backend megatron.
    """
    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy (evaluation only)."""
    top_k: int = 0
    """Number of likeliest tokens to sample from. 0: all."""
    top_p: float = 1.0
    """Total probability of the likeliest tokens to sample from."""
    min_p: float = 0.0
    """Share of the likeliest token's probability below which tokens are dropped."""
    max_new_tokens: int | None = None
    """Longest response, in tokens. Default: 256, at most half of data.max_total_sequence_length."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the end-of-sequence token."""
    ignore_eos: bool = False
    """End-of-sequence tokens are sampled, and trained on, like all others: each response has
    max_new_tokens, as for measuring speed.
    """
    max_batch_size: int = 256
    """Sequences that an engine decodes at a time; megatron: each replica of the model."""
    num_replicas: int = 1
    """vllm: engines, which Ray places (on the cluster at RAY_ADDRESS, or on this machine)."""
    tensor_parallel_size: int = 1
    """vllm: devices of one node over which each engine splits every layer."""
    pipeline_parallel_size: int = 1
    """vllm: parts of the layers of each engine, each on tensor_parallel_size devices, also of
    several nodes.
    """
    cpus_per_replica: int = 1
    """vllm: CPU cores of each part of a replica; without GPUs, threads of each device's worker."""
    max_model_len: int | None = None
    """vllm: longest prompt and response together, in tokens. Default and least in a run:
    data.max_total_sequence_length.
    """
    adapter_rank: int = 0
    """vllm: largest rank of adapters (LoRA) that the engines apply themselves: they get the base
    once, and then the adapters alone. 0: merged weights are sent.
    """
    engine: dict[str, Any] = field(default_factory=dict)
    """vllm: further arguments by vLLM's own names, such as '{"gpu_memory_utilization": 0.5}'."""
    python: str | None = None
    """vllm: Python interpreter of the replicas, with the same versions of nemorl and Ray. Default:
    the trainer's.
    """
    colocated: bool = True
    """vllm: replicas share the trainer's GPUs, and sleep while it trains."""
    sleep_level: Literal[0, 1, 2] | None = None
    """vllm: GPU memory freed while the trainer works: none (0), cache and weights, to main memory
    (1) or for good (2). None: 2 if colocated on GPUs.
    """
    weight_transport: Literal["auto", "object_store", "cuda_ipc", "nccl"] = "auto"
    """vllm: transport of new weights (docs/cluster.md). auto: the fastest that works, which a run
    shows at its start.
    """
    timeout_s: float = 300.0
    """vllm: seconds without progress after which a replica is replaced, and for engines to take new
    weights by cuda_ipc or nccl. With several ranks below runtime.timeout_s.
    """
    start_timeout_s: float = 600.0
    """vllm: longest start of a replica, in seconds."""
    max_restarts: int = 3
    """vllm: replacements of a replica in a row without a finished prompt."""
    log_dir: str | None = None
    """vllm: folder of the replicas' logs. Default: logs/ of the run."""
    trainer_gpus: int | None = None
    """vllm: GPUs of this machine that train in this process, without engines unless colocated.
    Default: as many as train.
    """

    def __post_init__(self) -> None:
        at_least(
            1,
            generation__max_new_tokens=self.max_new_tokens,
            generation__max_batch_size=self.max_batch_size,
            generation__num_replicas=self.num_replicas,
            generation__tensor_parallel_size=self.tensor_parallel_size,
            generation__pipeline_parallel_size=self.pipeline_parallel_size,
            generation__cpus_per_replica=self.cpus_per_replica,
            generation__max_model_len=self.max_model_len,
            generation__timeout_s=self.timeout_s,
            generation__start_timeout_s=self.start_timeout_s,
        )
        at_least(
            0,
            generation__max_restarts=self.max_restarts,
            generation__adapter_rank=self.adapter_rank,
            generation__trainer_gpus=self.trainer_gpus,
        )
        only = "pipeline_parallel_size above 1" if self.pipeline_parallel_size > 1 else ""
        if self.adapter_rank:
            require(
                self.adapter_rank <= VLLM_RANKS[-1],
                "generation.adapter_rank",
                f"must be at most {VLLM_RANKS[-1]}",
                self.adapter_rank,
                "merge larger adapters (0)",
            )
            require(
                self.sleep_level != 2,
                "generation.sleep_level",
                "must be at most 1 with generation.adapter_rank: the base is sent once",
                self.sleep_level,
                "remove it",
            )
            only = "adapter_rank"
        require(
            not only or self.weight_transport in ("auto", "object_store"),
            "generation.weight_transport",
            f"must be object_store with generation.{only}",
            self.weight_transport,
            "remove it",
        )
        if self.traits.embedded:
            names = [item.name for item in fields(self)]
            refuse_unused(
                "generation",
                self,
                f"is not for {self.backend}, which computes where the trainer does",
                "add --generation.backend vllm, or omit it",
                names=names[names.index("num_replicas") :],
            )
        self.sampling_params()

    @property
    def traits(self) -> GenerationTraits:
        """The defaults for a name that is not registered."""
        return TRAITS.get(self.backend, GenerationTraits())

    @property
    def devices_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def longest_response(self) -> int:
        return self.max_new_tokens or 256

    def sampling_params(self, *, greedy: bool = False) -> SamplingParams:
        """Return the parameters of a request; `greedy`: at temperature 0, without filters."""
        found = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_new_tokens=self.longest_response,
            stop_strings=tuple(self.stop_strings),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )
        return replace(found, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0) if greedy else found
