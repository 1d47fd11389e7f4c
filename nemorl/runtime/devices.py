"""On which devices a run trains and whose processes have them: worked out, and checked against model and machine, before anything starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nemorl.checks import require
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config import BaseConfig
from nemorl.runtime.runtime_config import RuntimeConfig
from nemorl.runtime.training.make import launcher, torchrun_size


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run.

    >>> Devices.of(BaseConfig(parallel=ParallelPlan(tp=2)), {}).plan.dp_shard
    1
    """

    plan: ParallelPlan
    """Without an open degree."""
    ranked: bool
    """Whether the model is spread over ranks, and this process has no whole one; a single rank counts, if it was asked for."""
    torchrun: bool = False
    """Whether the ranks are processes that torchrun has started, of which this is one."""
    restarted: bool = False
    """Whether torchrun has started them again after a failure."""
    on_gpus: bool = False
    through_ray: bool = False

    @classmethod
    def of(cls, config: BaseConfig, environ: Mapping[str, str] = os.environ, *, num_gpus: int | None = None) -> "Devices":
        """What `config` asks for where `environ` is the environment; `num_gpus` are those of this machine (found out unless given).

        Under torchrun the plan has all of its processes; otherwise as many as its degrees say. Raises ValueError for what can't be.
        """
        started = torchrun_size(environ)
        torchrun, num_ranks = started is not None, started or config.parallel.num_ranks
        plan = config.parallel.on(num_ranks)
        ranked = torchrun or plan.needs_ranks or config.runtime.launcher != "auto"
        through_ray = ranked and launcher(config.runtime, environ) == "ray"
        check_runtime(config.runtime, torchrun=torchrun, ranked=ranked)
        check_heeded(plan, ranked=ranked)
        require(not (config.lora.rank and plan.tp > 1), "lora.rank", "must be 0 with parallel.tp above 1", config.lora.rank,
                "spread adapters by parallel.dp_shard and cp")  # fmt: skip
        device = config.trainer.device
        require(not ranked or device in (None, "cpu", "cuda"), "trainer.device", "must be cpu or cuda where the ranks have one each", device,
                "leave the number out; CUDA_VISIBLE_DEVICES says which GPUs are used")  # fmt: skip
        gpus = _num_gpus() if num_gpus is None else num_gpus
        on_gpus = device != "cpu" and gpus > 0
        if ranked and on_gpus and not torchrun and not through_ray:
            require(num_ranks <= gpus, "parallel", f"must ask for at most the {gpus} GPUs that this machine has", num_ranks,
                    "lower a degree, use more machines (torchrun, or --runtime.launcher ray), or --trainer.device cpu")  # fmt: skip
        found = cls(plan=plan, ranked=ranked, torchrun=torchrun, on_gpus=on_gpus, through_ray=through_ray,
                    restarted=torchrun and int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0)  # fmt: skip
        if torchrun:
            _check_torchrun(config, environ, num_ranks)
        return found

    @property
    def local_gpus(self) -> int:
        """GPUs of this machine that train and that Ray doesn't know to be taken."""
        return 0 if self.through_ray or not self.on_gpus else int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self.torchrun else self.plan.num_ranks

    def check_model(self, config: Any) -> None:
        """Raise a ValueError where a model of this Hugging Face configuration can't be spread so; None: it is not known yet."""
        if config is not None and all(hasattr(config, name) for name in ("num_attention_heads", "intermediate_size", "vocab_size")):
            self.plan.check(config)

    def check_given(self, model: Any) -> None:
        """Raise a ValueError for a model that was handed over in memory, where ranks have to load their parts of it."""
        why = "torchrun's processes" if self.torchrun else f"the {self.plan.num_ranks} processes of parallel and runtime.launcher"
        require(model is None or not self.ranked, "model", f"must be a folder or a hub name, from which each of {why} loads its own part",
                type(model).__name__, "save_pretrained() it, with its tokenizer, and name that folder")  # fmt: skip


def check_heeded(plan: ParallelPlan, *, ranked: bool) -> None:
    """Raise a ValueError for settings of the plan that nothing would heed."""
    require(plan.cp > 1 or plan.cp_method == "ulysses", "parallel.cp_method", "is for parallel.cp above 1", plan.cp_method, "leave it out")
    require(plan.tp > 1 or plan.sequence_parallel, "parallel.sequence_parallel", "is for parallel.tp above 1", False, "leave it out")
    alone = ranked or plan.reduce_dtype == "float32"
    require(alone, "parallel.reduce_dtype", "is for gradients that several devices sum", plan.reduce_dtype, "leave it out")


def check_runtime(runtime: RuntimeConfig, *, torchrun: bool, ranked: bool) -> None:
    """Raise a ValueError for settings that nothing would heed."""
    for item in fields(runtime):
        value = getattr(runtime, item.name)
        if torchrun and item.name in ("launcher", "max_restarts", "cpus_per_rank"):
            remedy = "leave it out; torchrun has options of its own (--nproc-per-node, --max-restarts)"
            require(value == item.default, f"runtime.{item.name}", "is not for runs under torchrun, which starts the processes", value, remedy)
        if not ranked:
            remedy = "add a degree of parallel or --runtime.launcher processes, or leave it out"
            require(value == item.default, f"runtime.{item.name}", "is for ranks in processes of their own", value, remedy)


def _check_torchrun(config: BaseConfig, environ: Mapping[str, str], num_ranks: int) -> None:
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    require(config.run.dir is not None or restarts == "0", "run.dir", "must be given where torchrun may start the run again", None,
            "add --run.dir, in which the run goes on")  # fmt: skip
    alone = config.generation.backend != "vllm" or config.generation.num_replicas > 0 or num_ranks == 1
    require(alone, "generation.num_replicas", "must be at least 1 under torchrun: vLLM takes the processes for its own", 0,
            "add --generation.num-replicas 1, or start without torchrun")  # fmt: skip


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
