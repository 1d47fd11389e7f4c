"""Ranks as Ray actors, on one machine or many."""

import faulthandler
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from nemorl.checks import require
from nemorl.openmp import spinning_variables
from nemorl.parallel.world import RanksLost
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.engines.weights import Place
from nemorl.runtime.ranks.rank import BACKGROUND, Coordinates, Rank, RankAnswer, dumps, loads
from nemorl.runtime.store.files import raised
from nemorl.runtime.workers import cluster
from nemorl.runtime.workers.worker import RayWorkerGroup

GRACE_S = 5.0
"""For a rank that takes too long to write its stack into its log."""


class RankActor:
    """Hosts a `Rank` in a process of Ray."""

    def __init__(self, make: list[Any]) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._rank = Rank(lambda: loads(make)(), int(os.environ["RANK"]))

    def perform(
        self, method: str, payload: list[Any], limit_s: float, parts: Mapping[Coordinates, Any] = {}
    ) -> list[Any]:
        """Call a method of the rank, and return the pickled `RankAnswer`.

        limit_s: until the stack goes into the log. parts: of the routes, in Ray's memory.
        """
        watched = method not in BACKGROUND
        if watched:
            faulthandler.dump_traceback_later(limit_s)
        try:
            args, kwargs = loads(payload)
            fetch = (lambda where: loads(ray.get(parts[where]))) if parts else None
            return dumps(self._rank.perform(method, args, kwargs, fetch))
        except Exception as error:  # something can't be sent
            return dumps(self._rank.refuse(error))
        finally:
            if watched:
                faulthandler.cancel_dump_traceback_later()


class RayRanks:
    """A worker for each rank, in `rank_bundles`. Raises ResourcesError where the cluster has too
    little.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        size: int,
        config: BaseConfig,
        log_dir: Path,
        engines: GenerationConfig | None = None,
    ) -> None:
        self.size, self._lock, self._runtime = size, threading.Lock(), config.runtime
        cpus = config.runtime.cpus_per_rank
        cluster.connect(
            num_cpus=(os.cpu_count() or 1) + size * cpus,  # of a local one, with engines
            timeout_s=config.runtime.start_timeout_s,
        )
        try:
            self._cluster = cluster.RayVirtualCluster({"rank": rank_bundles(config, size, engines)})
        except cluster.ResourcesError as error:
            raise cluster.ResourcesError(f"parallel asks for {size} ranks: {error}") from None
        finally:
            cluster.release()
        try:
            self.workers = RayWorkerGroup(
                self._cluster.placement("rank"),
                f"{__name__}:RankActor",
                args=(dumps(make),),
                env={"OMP_NUM_THREADS": str(cpus), **spinning_variables()},
                log_dir=log_dir,
                name="rank",
                start_timeout_s=config.runtime.start_timeout_s,
            )
        except BaseException:
            self._cluster.shutdown()
            raise

    @property
    def places(self) -> list[Place]:
        found = map(self.workers.info, range(self.size))
        return [Place(one.node, one.host, one.pid, one.gpus) for one in found]

    def call(
        self,
        method: str,
        payload: list[Any],
        phase: str,
        parts: Mapping[Coordinates, list[Any]] = {},
    ) -> RankAnswer:
        """Have all ranks do a call, and return rank 0's answer, or an error if all have answered.

        parts: of the batch's routes. Raises WorkerDied, WorkerTimeout, and what a rank raised while
        others hang: then no rank is usable.
        """
        limit = "start_timeout_s" if method == "setup" else "timeout_s"
        limit_s = getattr(self._runtime, limit)
        # Each node fetches them once.
        call = method, ray.put(payload), limit_s, {at: ray.put(part) for at, part in parts.items()}
        background = method in BACKGROUND
        with self._lock:  # all ranks get the calls in the same order
            calls = {
                rank: self.workers.call(rank, "perform", *call, background=background)
                for rank in range(self.size)
            }
        answers = self.workers.gather(
            calls,
            limit_s,
            phase,
            setting=f"runtime.{limit}; the logs say where in the code they were",
            grace_s=GRACE_S,
            read=loads,
            failed=lambda answer: answer.error,
        )

        errors = {rank: one.error for rank, one in sorted(answers.items()) if one.error}
        steps = {answer.step for answer in answers.values()}
        # In the background some ranks answer before an optimizer step and others after it.
        alike = len(answers) == self.size and (background or len(steps) == 1)
        if not errors:
            if alike:
                return answers[0]
            raise RuntimeError(
                f"ranks must agree on the optimizer step, but after {phase} they are at {steps}:"
                " resume the run"
            )
        cause = min(errors, key=lambda rank: is_consequence(errors[rank]))
        if alike and RanksLost.__name__ not in {error["kind"] for error in errors.values()}:
            return answers[cause]
        alone = "" if len(errors) == self.size else ", but not by the other ranks"
        error = raised(errors[cause], cause)
        error.add_note(f"raised by {self.workers.named(errors)} in {phase}{alone}: all were ended")
        raise error

    def shutdown(self, timeout_s: float, result: Any = None) -> None:
        """Let the ranks end in order within this time (0: at once)."""
        self.workers.shutdown(timeout_s, "perform", "shutdown", dumps(((), {})), timeout_s)
        self._cluster.shutdown()


def rank_bundles(
    config: BaseConfig, size: int, engines: GenerationConfig | None = None
) -> list[cluster.Bundle]:
    """Return what ranks take of the connected cluster: a bundle, and so a node, for each group of
    parallel.tp.
    """
    found, device = ray.cluster_resources().get("GPU"), config.trainer.device
    require(device != "cuda" or bool(found), "trainer.device",
            "must be cpu on a Ray cluster without GPUs", device,
            "remove it, or tell Ray of the GPUs (ray start --num-gpus)")  # fmt: skip
    gpus = 1 if found and device != "cpu" else 0
    rank = cluster.Bundle(cpus=config.runtime.cpus_per_rank, gpus=gpus)
    most = {name: cluster.most_on_a_node(name) / amount for name, amount in rank.amounts.items()}
    per_bundle = 1 if config.runtime.tp_across_nodes else config.parallel.tp
    for name, room in most.items():
        must = f"must be at most {int(room)}, the ranks for which the largest node has {name}s"
        remedy = "lower it, or allow more nodes (--runtime.tp-across-nodes)"
        require(per_bundle <= max(room, 1), "parallel.tp", must, per_bundle, remedy)
    if gpus and engines is not None and engines.traits.engines and engines.colocated:
        # An engine's GPUs are on one node, too.
        both = math.lcm(per_bundle, engines.tensor_parallel_size)
        if size % both == 0 and both <= min(most.values()):
            per_bundle = both
    return [replace(rank, workers=per_bundle)] * (size // per_bundle)


def is_consequence(error: Mapping[str, str]) -> bool:
    """Return whether an error is of a rank whose peer left a collective.

    >>> is_consequence({"kind": "RuntimeError", "message": "[gloo/pair.cc:547] Connection closed"})
    True
    """
    return error["kind"].startswith("Dist") or bool(
        re.search(r"gloo|NCCL|closed by peer|reset by peer|ProcessGroup", error["message"])
    )
