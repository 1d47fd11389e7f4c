"""What an engine needs to start, answers, and can't do, without torch, Ray and vLLM."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nemorl.checks import require, warn
from nemorl.models.hub import copy_code, has_own_code, max_positions
from nemorl.parallel.plan import num_experts
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import FinishReason, Machine
from nemorl.runtime.store.files import temporary_folder, writing

if TYPE_CHECKING:
    import numpy as np

    from nemorl.losses.logprobs import LogprobKind
    from nemorl.models.source import ModelSource


OURS = {
    "model": "set model.path",
    "skip_tokenizer_init": "set model.tokenizer",
    "dtype": "set parallel.param_dtype",
    "seed": "set run.seed",
    "max_num_seqs": "set generation.max_batch_size",
    "max_model_len": "set generation.max_model_len",
    "tensor_parallel_size": "set generation.tensor_parallel_size",
    "data_parallel_size": "set generation.num_replicas",
    **dict.fromkeys(
        ("pipeline_parallel_size", "nnodes", "node_rank", "master_addr", "master_port"),
        "set generation.pipeline_parallel_size",
    ),
    "enable_sleep_mode": "set generation.sleep_level",
    "weight_transfer_config": "set generation.weight_transport",
    "worker_extension_cls": "it is what takes the trainer's weights",
    "load_format": "the weights are the trainer's",
    "trust_remote_code": "set model.trust_remote_code",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "set generation.adapter_rank"),
    "generation_config": "set generation.temperature and the fields beside it",
    **dict.fromkeys(
        ("enable_return_routed_experts", "aux_output_config"), "set trainer.router_replay"
    ),
    "logprobs_mode": "nemorl needs the logprobs of the distribution that is sampled from",
}
"""Engine arguments that are not the user's."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine for one model, without its weights."""

    files: Mapping[str, bytes]
    """config.json and the tokenizer's files, by name."""
    vocabulary: str | None
    """`vocabulary_hash` of the trainer's tokenizer; None: no tokenizer, and no stop strings."""
    dtype: str
    max_num_seqs: int
    max_model_len: int | None
    """Of prompt and response together; None: vLLM's."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    stage: int = 0
    """Which part of the layers this process's workers have."""
    meeting: tuple[str, int] | None = None
    """Address and port at which the stages' workers meet, of the first one's process."""
    sleep_level: int = 0
    trust_remote_code: bool = False
    """Whether `files` hold code that the run was allowed to run."""
    engine: Mapping[str, Any]
    """The user's further arguments."""
    on_gpus: bool = False
    adapter_rank: int = 0
    """Largest rank of its adapters; 0: it gets merged weights."""
    records_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An engine's response."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason
    routed_experts: "np.ndarray | None" = field(default=None, compare=False, repr=False)
    """`[positions, layers, topk]` in int16: the experts of each token of prompt and response but
    the last, in the layers with experts. None: not recorded.
    """


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """In the place of SamplingParams: what a prompt's tokens are scored by."""

    top_k: int
    kind: "LogprobKind"
    n: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """A prompt's tokens, each before the likeliest in its place: `[length, 1 + top_k]`."""

    token_ids: "np.ndarray"
    logprobs: "np.ndarray"
    policy_version: int


@dataclass(frozen=True)
class Answer:
    """A prompt's samples or its one `Scored`, and how busy their engine is."""

    samples: tuple[Any, ...]
    partial: int
    """Finished samples of unanswered prompts."""
    busy_s: float
    """Seconds of computing since its start."""


def vocabulary_hash(tokenizer: Any) -> str:
    """Hash a vocabulary: equal for tokenizers that give every token the same number."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(tokens.encode()).hexdigest()


def check_arguments(engine: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that nemorl sets itself."""
    for name, remedy in OURS.items():
        field, value = f"generation.engine's {name}", engine.get(name)
        require(name not in engine, field, "must be left to nemorl", value, remedy)


def engine_spec(
    model: ModelSource,
    tokenizer: Any,
    config: GenerationConfig,
    *,
    precision: str,
    on_gpus: bool = False,
    records_experts: bool = False,
) -> EngineSpec:
    """Return the engine for a model, whose weights are not read."""
    level = config.sleep_level
    if level is None:  # at 2 the base of adapters, which is sent once, would be lost
        level = (1 if config.adapter_rank else 2) if on_gpus and config.colocated else 0
    positions = max_positions(model.config)
    lengths = [length for length in (config.max_model_len, positions) if length is not None]
    if len(lengths) == 2 and lengths[0] > lengths[1]:
        warn(
            f"generation.max_model_len is lowered from {lengths[0]} to {positions}, the positions"
            " that the model has"
        )
    return EngineSpec(
        files=_files(model.outline, tokenizer),
        vocabulary=None if tokenizer is None else vocabulary_hash(tokenizer),
        dtype=precision,
        max_num_seqs=config.max_batch_size,
        max_model_len=min(lengths) if lengths else None,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        sleep_level=level,
        trust_remote_code=any(map(has_own_code, (model.outline, model.config, tokenizer))),
        engine=dict(config.engine),
        on_gpus=on_gpus,
        adapter_rank=config.adapter_rank,
        records_experts=records_experts and num_experts(model.config) > 0,
    )


def _files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    # No engine knows the class of a sharded model.
    name = next(cls.__name__ for cls in type(model).__mro__ if not cls.__name__.startswith("FSDP"))
    settings = {
        **json.loads(model.config.to_json_string()),
        "architectures": model.config.architectures or [name],
    }
    if settings["model_type"] == "cohere2" and settings["sliding_window"]:
        settings["sliding_window"] -= 1  # vLLM reaches one token further than transformers
    with temporary_folder() as folder:
        if tokenizer is not None:
            with writing("the tokenizer of the engines", folder):
                tokenizer.save_pretrained(folder / "tokenizer")
        copy_code(folder / "tokenizer", model, model.config)
        paths = filter(Path.is_file, folder.glob("tokenizer/*"))
        files = {path.name: path.read_bytes() for path in paths}
    return {**files, "config.json": json.dumps(settings).encode()}


VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's CPUAttentionBackend.get_supported_head_sizes returns (0.32), without its import."""


def check_machine(config: GenerationConfig, model: Any, machine: Machine) -> None:
    """Raise ValueError for engines that need more GPUs or cores than this machine has, and for a
    model whose attention vLLM can't compute on a CPU.
    """
    if machine.cluster:
        return
    if model is not None and not machine.gpus:
        heads = getattr(model, "num_attention_heads", None)
        size = getattr(model, "head_dim", None) or (heads and model.hidden_size // heads)
        require(
            size is None or size in VLLM_CPU_HEADS,
            "generation.backend",
            f"must be torch on CPUs for a model with attention heads of {size} dimensions",
            "vllm",
            f"vLLM has kernels for {', '.join(map(str, VLLM_CPU_HEADS))}",
        )
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # a cluster of the caller's
        return
    cores, devices = os.cpu_count() or 1, config.num_replicas * config.devices_per_replica
    processes = config.num_replicas * config.pipeline_parallel_size
    threads = config.cpus_per_replica * (processes if machine.gpus else devices)
    left = machine.gpus - (0 if config.colocated else machine.taken)
    for needed, there, what in ((devices, left, "GPUs"), (threads, cores, "CPU cores")):
        require(
            needed <= there or (not machine.gpus and what == "GPUs"),
            "generation.num_replicas",
            f"times what a replica takes must be at most the {there} {what} that this machine has"
            " for engines",
            needed,
            "lower it, tensor_parallel_size, pipeline_parallel_size or cpus_per_replica, or use a"
            " cluster (RAY_ADDRESS)",
        )


def check_shares(config: GenerationConfig, room: int, ranks: str) -> None:
    """Raise ValueError for more colocated engines than ranks have GPUs for."""
    size = config.devices_per_replica
    require(
        config.num_replicas <= room,
        "generation.num_replicas",
        f"must be at most {room} where replicas of {size} GPUs share those of {ranks}",
        config.num_replicas,
        "lower it, generation.tensor_parallel_size or pipeline_parallel_size, use more ranks, or"
        " give engines GPUs of their own (--generation.no-colocated)",
    )
