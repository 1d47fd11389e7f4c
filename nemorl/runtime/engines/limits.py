"""What generation.backend vllm can't do, before anything starts. Free of torch, Ray and vLLM."""

import os
import sys
from typing import Any

from nemorl.checks import require
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import Machine

VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's CPUAttentionBackend.get_supported_head_sizes returns (0.32); importing it takes
seconds.
"""


def check(config: GenerationConfig, model: Any, machine: Machine) -> None:
    """Raise ValueError for engines that need more GPUs or cores than this machine has for them, and
    for a model whose attention vLLM can't compute on a CPU.
    """
    if machine.cluster:
        return
    if model is not None and not machine.gpus:
        check_heads(model)
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


def check_heads(model: Any) -> None:
    """Raise ValueError if vLLM can't compute a model's attention on CPUs."""
    heads = getattr(model, "num_attention_heads", None)
    size = getattr(model, "head_dim", None) or (heads and model.hidden_size // heads)
    require(
        size is None or size in VLLM_CPU_HEADS,
        "generation.backend",
        f"must be torch on CPUs for a model with attention heads of {size} dimensions",
        "vllm",
        f"vLLM has kernels for {', '.join(map(str, VLLM_CPU_HEADS))}",
    )
