"""Where the ranks of a plan come from: processes of this machine, workers on a Ray cluster, or
those that torchrun has started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.cluster.worker_host import MARKER
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.group import RankGroup
from nemorl.runtime.ranks.trainer import RankedTrainer

Launcher = Literal["processes", "ray", "torchrun"]


def make_trainer(
    config: BaseConfig, backend: str, plan: ParallelPlan, runtime: RuntimeConfig, log_dir: Path
) -> RankedTrainer:
    """The training backend of this name on as many ranks as `plan` (resolved, see
    `ParallelPlan.on`) has, as one `TrainingBackend`.

    Nothing is started before its `setup`. Where torchrun started this process, it must be rank 0,
    and the others must call `serve_as_follower`. The ranks write to `log_dir`/rank-0.log and so on
    (under torchrun: where torchrun has them write).
    """
    size, device = plan.num_ranks, config.trainer.device

    def start() -> RankGroup:
        match launcher(runtime):
            case "torchrun":
                from nemorl.runtime.ranks.torchrun import TorchrunGroup

                return TorchrunGroup(backend, size, device=device, runtime=runtime)
            case "ray":
                from nemorl.runtime.ranks.ray_ranks import RayRankGroup

                return RayRankGroup(backend, size, device=device, log_dir=log_dir, runtime=runtime)
            case "processes":
                from nemorl.runtime.ranks.processes import LocalRankGroup

                return LocalRankGroup(backend, size, log_dir=log_dir, runtime=runtime)

    return RankedTrainer(
        start, timeout_s=runtime.timeout_s, start_timeout_s=runtime.start_timeout_s
    )


def launcher(runtime: RuntimeConfig, environment: Mapping[str, str] = os.environ) -> Launcher:
    """What `runtime.launcher` means here: torchrun's processes where it started this one, whatever
    it says.

    >>> launcher(RuntimeConfig(), {}), launcher(RuntimeConfig(), {"RAY_ADDRESS": "auto"}), launcher(RuntimeConfig(), {"RANK": "0", "WORLD_SIZE": "2"})
    ('processes', 'ray', 'torchrun')
    """
    if torchrun_size(environment) is not None:
        return "torchrun"
    if runtime.launcher == "auto":
        return "ray" if environment.get("RAY_ADDRESS") else "processes"
    return runtime.launcher


def torchrun_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many processes torchrun (or another launcher that sets RANK and WORLD_SIZE) has started;
    None where this is not one of them.

    >>> torchrun_size({"RANK": "1", "WORLD_SIZE": "2"}), torchrun_size({"RANK": "1", "WORLD_SIZE": "2", "NEMORL_WORKER": "one of our own"})
    (2, None)
    """
    ours = MARKER in environment or "RANK" not in environment
    return None if ours or "WORLD_SIZE" not in environment else int(environment["WORLD_SIZE"])


def is_follower(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of torchrun's that is not rank 0: it has to call
    `serve_as_follower` where rank 0 calls `make_trainer`.

    >>> is_follower({"RANK": "1", "WORLD_SIZE": "2"}), is_follower({"RANK": "0", "WORLD_SIZE": "2"}), is_follower({})
    (True, False, False)
    """
    return torchrun_size(environment) is not None and environment["RANK"] != "0"


def serve_as_follower(backend: str, timeout_s: float, device: str | None = None) -> Any:
    """Do what rank 0's trainer does, on this rank's part of the model, until rank 0 shuts it down;
    returns the `farewell` of rank 0's trainer.

    Where a call fails on this rank alone, or takes longer than `timeout_s` (runtime.timeout_s;
    setup has rank 0's start_timeout_s), the process ends with word of it on standard error, and
    torchrun ends the job. `device` is trainer.device, as on rank 0. SIGINT and SIGTERM are left to
    rank 0.
    """
    from nemorl.runtime.ranks.torchrun import follow

    return follow(backend, timeout_s=timeout_s, device=device)
