"""On which devices a run trains, checked against model and machine before anything starts."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemorl.checks import refuse_unused, require
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.megatron import limits as megatron
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.environment import is_follower, torchrun_size
from nemorl.warn import warn

VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's CPUAttentionBackend.get_supported_head_sizes returns (0.32); importing it takes
seconds.
"""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run.

    >>> Devices.of(BaseConfig(parallel=ParallelPlan(tp=2)), {}).plan.dp_shard
    1
    """

    plan: ParallelPlan
    """Without an open degree."""
    backend: str = "dtensor"
    """Name of the training backend."""
    ranked: bool
    """Whether the model is on ranks in other processes; a single rank counts."""
    torchrun: bool = False
    """Whether torchrun has started the ranks, of which this process is one."""
    restarted: bool = False
    """Whether it has started them again after a failure."""
    on_gpus: bool = False
    vllm_on_cpu: bool = False
    """Whether vLLM samples on this machine, which has no GPU."""

    @classmethod
    def of(
        cls,
        config: BaseConfig,
        environ: Mapping[str, str] = os.environ,
        *,
        num_gpus: int | None = None,
    ) -> "Devices":
        """Return the devices that `config` asks for: under torchrun all of its processes, otherwise
        as many as the plan's degrees say. `num_gpus` are this machine's (default: looked up).
        """
        started = torchrun_size(environ)
        torchrun, num_ranks = started is not None, started or config.parallel.num_ranks
        plan, backend = config.parallel.on(num_ranks), config.trainer.backend
        ranked = torchrun or plan.needs_ranks or backend == "megatron"
        on_cluster = ranked and not torchrun and bool(environ.get("RAY_ADDRESS"))
        check_used(plan, config.runtime, torchrun=torchrun, ranked=ranked)
        if backend == "megatron":
            megatron.check(config)
        else:
            megatron.check_elsewhere(config.trainer)
        generates = config.generation.backend
        require(
            generates != "megatron" or backend == "megatron",
            "generation.backend",
            "must be torch or vllm unless the trainer's is megatron, whose ranks would generate",
            generates,
            "add --trainer.backend megatron, or remove it",
        )
        require(
            not (config.lora.rank and plan.tp > 1),
            "lora.rank",
            "must be 0 with parallel.tp above 1",
            config.lora.rank,
            "spread adapters by parallel.dp_shard and cp",
        )
        gpus = _num_gpus() if num_gpus is None else num_gpus
        check_device(config.trainer.device, ranked=ranked, has_gpus=on_cluster or gpus > 0)
        on_gpus = config.trainer.device != "cpu" and gpus > 0
        offloads = config.trainer.offload_during_generation
        require(
            not offloads or on_gpus or (on_cluster and config.trainer.device != "cpu"),
            "trainer.offload_during_generation",
            "needs a GPU that trains: on a CPU everything is in main memory",
            offloads,
            "remove it",
        )
        require(
            config.run.dir is not None or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0",
            "run.dir",
            "must be given where torchrun may start the run again",
            None,
            "add --run.dir",
        )
        if ranked and not on_cluster and (on_gpus or not torchrun):
            here = int(environ.get("LOCAL_WORLD_SIZE", 1)) if torchrun else num_ranks
            check_size(here, config.runtime, gpus=gpus if on_gpus else 0)
        for doubt in () if is_follower(environ) else config.doubts():
            warn(doubt)
        found = cls(
            plan=plan,
            backend=backend,
            ranked=ranked,
            torchrun=torchrun,
            restarted=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0,
            on_gpus=on_gpus,
            vllm_on_cpu=samples_with_vllm_on_cpu(config.generation, environ, num_gpus=gpus),
        )
        placed = num_ranks if on_gpus and ranked and not torchrun else 0
        given = config.generation.trainer_gpus
        taken = placed + (found.local_gpus if given is None else given)
        check_engines(config.generation, environ, num_gpus=gpus, taken=taken)
        return found

    @property
    def local_gpus(self) -> int:
        """The number of this machine's GPUs that train without Ray knowing it."""
        if not self.on_gpus or (self.ranked and not self.torchrun):
            return 0
        if self.torchrun:
            return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return self.plan.num_ranks

    def check_model(self, config: Any, trainer: TrainerConfig | None = None) -> None:
        """Raise ValueError if the plan can't spread a model of this configuration, if any, or if
        settings of the trainer are not for it.
        """
        needed = ("num_attention_heads", "intermediate_size", "vocab_size")
        if config is not None and all(hasattr(config, name) for name in needed):
            if self.backend == "megatron":
                megatron.check_model(config, trainer or TrainerConfig())
            self.plan.check(config, backend=self.backend)
        if self.vllm_on_cpu:
            check_heads(config)

    def check_cluster(self, config: BaseConfig, engines: GenerationConfig) -> None:
        """Raise ValueError where the Ray cluster at RAY_ADDRESS has no room for ranks and engines
        together: engines come last, after the model has been loaded.
        """
        if engines.backend != "vllm" or not os.environ.get("RAY_ADDRESS"):
            return
        from torch.cuda import is_available

        from nemorl.runtime.cluster.connection import connect, release
        from nemorl.runtime.cluster.placement import RayVirtualCluster, ResourcesError
        from nemorl.runtime.engines.replicas import engine_bundles
        from nemorl.runtime.ranks.actors import rank_bundles

        ranks = self.plan.num_ranks if self.ranked and not self.torchrun else 0
        connect()
        try:
            bundles = {"rank": rank_bundles(config, ranks)} if ranks else {}
            bundles |= engine_bundles(engines, cuda=is_available())
            RayVirtualCluster(bundles).shutdown()
        except ResourcesError as error:
            fields = "parallel and generation.num_replicas" if ranks else "generation.num_replicas"
            raise ResourcesError(f"{fields} must leave room for all: {error}") from None
        finally:
            release()

    def check_given(self, model: Any) -> None:
        """Raise ValueError for a model in memory where ranks have to load their parts of it."""
        require(
            model is None or not self.ranked,
            "model",
            f"must be a folder or a hub name, from which each of {self.plan.num_ranks} ranks loads"
            " its part",
            type(model).__name__,
            "save_pretrained() it, with its tokenizer, and name that folder",
        )


def check_used(plan: ParallelPlan, runtime: RuntimeConfig, *, torchrun: bool, ranked: bool) -> None:
    """Raise ValueError for settings of the plan and of the ranks that nothing would use."""
    for name, used, purpose in (
        ("cp_method", plan.cp > 1, "parallel.cp above 1"),
        ("sequence_parallel", plan.tp > 1, "parallel.tp above 1"),
        ("reduce_dtype", ranked, "gradients that several devices sum"),
    ):
        if not used:
            refuse_unused("parallel", plan, f"is for {purpose}", "remove it", names=[name])
    if torchrun:
        refuse_unused(
            "runtime",
            runtime,
            "is not for runs under torchrun, which starts the processes",
            "remove it; torchrun has --nproc-per-node and --max-restarts",
            names=["max_restarts", "cpus_per_rank", "oversubscribe"],
        )
    if not ranked:
        requirement, remedy = "is for several ranks", "add a degree of parallel, or remove it"
        refuse_unused("runtime", runtime, requirement, remedy)


def check_device(device: str | None, *, ranked: bool, has_gpus: bool) -> None:
    """Raise ValueError for a trainer.device that torch can't use."""
    if ranked:
        require(
            device in (None, "cpu", *["cuda"] * has_gpus),
            "trainer.device",
            f"must be cpu{' or cuda' * has_gpus} where the ranks have one each",
            device,
            "remove it; CUDA_VISIBLE_DEVICES says which GPUs are used",
        )
        return
    from nemorl.models.causal_lm import usable_device

    try:
        usable_device(device)
    except ValueError as error:
        raise ValueError(f"trainer.{error}") from error


def check_size(num_ranks: int, runtime: RuntimeConfig, *, gpus: int) -> None:
    """Raise ValueError for more ranks than this machine has GPUs or (0 GPUs) cores for, or more
    cores for each than it has.
    """
    cores = os.cpu_count() or 1
    require(
        runtime.cpus_per_rank <= cores,
        "runtime.cpus_per_rank",
        f"must be at most the {cores} CPU cores that this machine has",
        runtime.cpus_per_rank,
        "lower it",
    )
    if gpus:
        require(
            num_ranks <= gpus,
            "parallel",
            f"must ask for at most the {gpus} GPUs that this machine has",
            num_ranks,
            "lower a degree, use more machines (torchrun, or RAY_ADDRESS), or --trainer.device cpu",
        )
        return
    require(
        num_ranks * runtime.cpus_per_rank <= cores or runtime.oversubscribe,
        "parallel",
        f"must ask for at most as many ranks as the {cores} CPU cores that this machine has can"
        f" run, with {runtime.cpus_per_rank} for each",
        num_ranks,
        "lower a degree, use more machines (torchrun, or RAY_ADDRESS), or let them take turns"
        " (--runtime.oversubscribe)",
    )


def check_engines(
    config: GenerationConfig,
    environ: Mapping[str, str] = os.environ,
    *,
    num_gpus: int | None = None,
    taken: int = 0,
) -> None:
    """Raise ValueError for engines that need more GPUs, beside those `taken` by the trainer unless
    they are colocated, or more cores than this machine has. (A cluster says itself what it has.)
    """
    ray = sys.modules.get("ray")
    elsewhere = environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized())
    if config.backend != "vllm" or elsewhere:
        return
    gpus = _num_gpus() if num_gpus is None else num_gpus
    cores, devices = os.cpu_count() or 1, config.num_replicas * config.tensor_parallel_size
    threads = config.cpus_per_replica * (config.num_replicas if gpus else devices)
    left = gpus - (0 if config.colocated else taken)
    for needed, there, what in ((devices, left, "GPUs"), (threads, cores, "CPU cores")):
        require(
            needed <= there or (not gpus and what == "GPUs"),
            "generation.num_replicas",
            f"times the devices and cores of each must need at most the {there} {what} that this"
            " machine has for engines",
            needed,
            "lower it, tensor_parallel_size or cpus_per_replica, or use a cluster (RAY_ADDRESS)",
        )


def samples_with_vllm_on_cpu(
    config: GenerationConfig,
    environ: Mapping[str, str] = os.environ,
    *,
    num_gpus: int | None = None,
) -> bool:
    """Return whether vLLM samples on this machine, which has no GPU."""
    here = config.backend == "vllm" and not environ.get("RAY_ADDRESS")
    return here and (_num_gpus() if num_gpus is None else num_gpus) == 0


def check_heads(model: Any) -> None:
    """Raise ValueError if vLLM can't compute attention on CPUs for a model's configuration."""
    heads = getattr(model, "num_attention_heads", None)
    size = getattr(model, "head_dim", None) or (heads and model.hidden_size // heads)
    require(
        size is None or size in VLLM_CPU_HEADS,
        "generation.backend",
        f"must be torch on CPUs for a model with attention heads of {size} dimensions",
        "vllm",
        f"vLLM has kernels for {', '.join(map(str, VLLM_CPU_HEADS))}",
    )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
