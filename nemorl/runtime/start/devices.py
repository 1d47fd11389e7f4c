"""On which devices a run trains and whose processes have them: worked out, and checked against
model and machine, before anything starts.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nemorl.checks import require
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.make import launcher, torchrun_size


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run.

    >>> Devices.of(BaseConfig(parallel=ParallelPlan(tp=2)), {}).plan.dp_shard
    1
    """

    plan: ParallelPlan
    """Without an open degree."""
    ranked: bool
    """Whether the model is spread over ranks, and this process has no whole one; a single rank
    counts, if it was asked for.
    """
    torchrun: bool = False
    """Whether the ranks are processes that torchrun has started, of which this is one."""
    restarted: bool = False
    """Whether torchrun has started them again after a failure."""
    on_gpus: bool = False
    through_ray: bool = False

    @classmethod
    def of(
        cls,
        config: BaseConfig,
        environ: Mapping[str, str] = os.environ,
        *,
        num_gpus: int | None = None,
    ) -> "Devices":
        """What `config` asks for where `environ` is the environment; `num_gpus` are those of this
        machine (found out unless given).

        Under torchrun the plan has all of its processes; otherwise as many as its degrees say.
        Raises ValueError for what can't be.
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
        gpus = _num_gpus() if num_gpus is None else num_gpus
        check_device(config.trainer.device, ranked=ranked, gpus=None if through_ray else gpus)
        on_gpus = config.trainer.device != "cpu" and gpus > 0
        if ranked and not torchrun and not through_ray:
            check_size(num_ranks, config.runtime.cpus_per_rank, gpus=gpus if on_gpus else 0)
        found = cls(plan=plan, ranked=ranked, torchrun=torchrun, on_gpus=on_gpus, through_ray=through_ray,
                    restarted=torchrun and int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0)  # fmt: skip
        if torchrun:
            _check_torchrun(config, environ, num_ranks)
        return found

    @property
    def local_gpus(self) -> int:
        """GPUs of this machine that train and that Ray doesn't know to be taken."""
        return (
            0
            if self.through_ray or not self.on_gpus
            else (
                int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self.torchrun else self.plan.num_ranks
            )
        )

    def check_model(self, config: Any) -> None:
        """Raise a ValueError where a model of this Hugging Face configuration can't be spread so;
        None: it is not known yet.
        """
        if config is not None and all(
            hasattr(config, name)
            for name in ("num_attention_heads", "intermediate_size", "vocab_size")
        ):
            self.plan.check(config)

    def check_weights(self, path: str, *, from_scratch: bool = False) -> None:
        """Raise a ValueError where a model's folder on this machine lacks a file of weights that
        ranks would read, or has a broken one.
        """
        folder = Path(path)
        if from_scratch or not self.ranked or not folder.is_dir():
            return
        from safetensors import SafetensorError

        from nemorl.models.pretrained import weight_files
        from nemorl.models.tensor_files import TensorFiles

        try:
            with TensorFiles(weight_files(folder)):
                pass  # their beginnings say how long they have to be
        except (OSError, SafetensorError) as error:
            told = (
                f"must hold all weights of its model, but {str(folder)!r} does not ({error}): fetch"
                " the model anew"
            )
            raise ValueError(f"model.path {told}") from error

    def check_given(self, model: Any) -> None:
        """Raise a ValueError for a model that was handed over in memory, where ranks have to load
        their parts of it.
        """
        why = (
            "torchrun's processes"
            if self.torchrun
            else f"the {self.plan.num_ranks} processes of parallel and runtime.launcher"
        )
        require(model is None or not self.ranked, "model", f"must be a folder or a hub name, from which each of {why} loads its own part",
                type(model).__name__, "save_pretrained() it, with its tokenizer, and name that folder")  # fmt: skip


def check_device(device: str | None, *, ranked: bool, gpus: int | None) -> None:
    """Raise a ValueError for a trainer.device that is not there; `gpus` are those of this machine,
    None where the ranks are on others.
    """
    require(not ranked or device in (None, "cpu", "cuda"), "trainer.device", "must be cpu or cuda where the ranks have one each", device,
            "name no other and no number; CUDA_VISIBLE_DEVICES says which GPUs are used")  # fmt: skip
    if device is not None and device.startswith("cuda"):
        there = gpus is None or device in [f"cuda:{index}" for index in range(gpus)] + ["cuda"] * (
            gpus > 0
        )
        require(
            there,
            "trainer.device",
            f"must be one that torch can use here, where it finds {gpus} GPUs",
            device,
            "leave it out for the best there is",
        )
    elif device is not None:
        from nemorl.models.causal_lm import usable_device

        try:
            usable_device(device)
        except ValueError as error:
            raise ValueError(f"trainer.{error}") from error


def check_size(num_ranks: int, cpus_per_rank: int, *, gpus: int) -> None:
    """Raise a ValueError for more ranks than this machine has GPUs (0: they compute on its cores),
    or more cores for each than there are.

    Ranks that have to share cores are a warning.
    """
    cores = os.cpu_count() or 1
    require(
        cpus_per_rank <= cores,
        "runtime.cpus_per_rank",
        f"must be at most the {cores} CPU cores that this machine has",
        cpus_per_rank,
        "lower it",
    )
    if gpus:
        require(num_ranks <= gpus, "parallel", f"must ask for at most the {gpus} GPUs that this machine has", num_ranks,
                "lower a degree, use more machines (torchrun, or --runtime.launcher ray), or --trainer.device cpu")  # fmt: skip
    elif num_ranks > cores:
        warnings.warn(
            f"parallel asks for {num_ranks} ranks, which share the {cores} CPU cores of this"
            " machine: a lower degree is faster",
            stacklevel=4,
        )


def check_heeded(plan: ParallelPlan, *, ranked: bool) -> None:
    """Raise a ValueError for settings of the plan that nothing would heed."""
    require(
        plan.cp > 1 or plan.cp_method == "ulysses",
        "parallel.cp_method",
        "is for parallel.cp above 1",
        plan.cp_method,
        "leave it out",
    )
    require(
        plan.tp > 1 or plan.sequence_parallel,
        "parallel.sequence_parallel",
        "is for parallel.tp above 1",
        False,
        "leave it out",
    )
    alone = ranked or plan.reduce_dtype == "float32"
    require(
        alone,
        "parallel.reduce_dtype",
        "is for gradients that several devices sum",
        plan.reduce_dtype,
        "leave it out",
    )


def check_runtime(runtime: RuntimeConfig, *, torchrun: bool, ranked: bool) -> None:
    """Raise a ValueError for settings that nothing would heed."""
    for item in fields(runtime):
        value = getattr(runtime, item.name)
        if torchrun and item.name in ("launcher", "max_restarts", "cpus_per_rank"):
            remedy = (
                "leave it out; torchrun has options of its own (--nproc-per-node, --max-restarts)"
            )
            require(
                value == item.default,
                f"runtime.{item.name}",
                "is not for runs under torchrun, which starts the processes",
                value,
                remedy,
            )
        if not ranked:
            remedy = "add a degree of parallel or --runtime.launcher processes, or leave it out"
            require(
                value == item.default,
                f"runtime.{item.name}",
                "is for ranks in processes of their own",
                value,
                remedy,
            )


def _check_torchrun(config: BaseConfig, environ: Mapping[str, str], num_ranks: int) -> None:
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    require(config.run.dir is not None or restarts == "0", "run.dir", "must be given where torchrun may start the run again", None,
            "add --run.dir, in which the run goes on")  # fmt: skip
    alone = (
        config.generation.backend != "vllm" or config.generation.num_replicas > 0 or num_ranks == 1
    )
    require(alone, "generation.num_replicas", "must be at least 1 under torchrun: vLLM takes the processes for its own", 0,
            "add --generation.num-replicas 1, or start without torchrun")  # fmt: skip


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
