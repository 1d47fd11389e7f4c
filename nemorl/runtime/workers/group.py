"""Ranked workers on a placement: processes that host an object each, called by name."""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemorl.checks import require
from nemorl.runtime.store.files import WorkerTimeout, death
from nemorl.runtime.workers.cluster import Placement, check, natural, start_guard

TICK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Where a worker is; `log` is a file on its node."""

    name: str
    rank: int
    node: str
    address: str
    host: str
    pid: int
    port: int
    """One that was free when the worker started."""
    gpus: tuple[str, ...]
    """The GPUs of its node that it has, as CUDA_VISIBLE_DEVICES names them."""
    log: Path | None

    def __str__(self) -> str:
        log = f", log {self.log}" if self.log else ""
        return f"{self.name} {self.rank} (process {self.pid} on {self.host}{log})"


class Host:
    def place(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "port": free_port(),
            "gpus": tuple(context.get_accelerator_ids()["GPU"]),
        }

    def begin(self, info: WorkerInfo) -> None:
        begin_worker(f"{info.name} {info.rank}", info.log)

    def make(
        self,
        path: list[str],
        env: Mapping[str, str],
        target: str,
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        os.environ.update(env)
        self._target = resolve_name(target)(*args, **kwargs)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._target, method)(*args, **kwargs)


class RayWorkerGroup:
    """Workers in bundles: each is a process with an object of the class `target` ("module:Class").

    They are ranked by node, in the placement's order, and on a node by GPU. A worker has RANK,
    WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and `env` in its environment,
    and writes to `log_dir`/`name`-`rank`.log (None: among Ray's logs).
    """

    def __init__(
        self,
        placement: Placement,
        target: str,
        *,
        args: tuple = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str] = {},
        log_dir: Path | None = None,
        name: str = "worker",
        start_timeout_s: float = 120,
    ) -> None:
        require(bool(re.fullmatch(r"[\w.]+:\w+", target)), "target", 'must be "module:Class"',
                target, "name a class by its module")  # fmt: skip
        self._infos: list[WorkerInfo] = []
        self._actors = [
            ray.remote(concurrency_groups={"background": 1})(Host)
            .options(
                num_cpus=bundle.cpus,
                num_gpus=bundle.gpus,
                resources=dict(bundle.resources),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement.group, placement_group_bundle_index=index
                ),
            )
            .remote()
            for bundle, index in zip(placement.bundles, placement.indices, strict=True)
            for _ in range(bundle.workers)
        ]
        try:
            places = self._all(
                [actor.place.remote() for actor in self._actors], start_timeout_s, "its start"
            )
            order = by_node_and_gpu(places)
            self._actors = [self._actors[index] for index in order]
            logs = log_dir and log_dir.absolute()
            self._infos = [
                WorkerInfo(
                    name=name,
                    rank=rank,
                    log=logs and logs / f"{name}-{rank}.log",
                    **places[index],
                )
                for rank, index in enumerate(order)
            ]
            begun = [
                actor.begin.remote(info)
                for actor, info in zip(self._actors, self._infos, strict=True)
            ]
            self._all(begun, start_timeout_s, "its start")
            path = [str(Path(entry).absolute()) for entry in sys.path]
            made = [
                actor.make.remote(path, {**env, **self._rendezvous(rank)}, target, args, kwargs)
                for rank, actor in enumerate(self._actors)
            ]
            self._all(made, start_timeout_s, "its start")
        except BaseException:
            self.shutdown()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def info(self, rank: int) -> WorkerInfo:
        return self._infos[rank]

    def call(
        self, rank: int, method: str, /, *args: Any, background: bool = False, **kwargs: Any
    ) -> "ray.ObjectRef":
        """Start a method of one worker; its calls are done in order, those in the background beside
        the others.
        """
        start = self._actors[rank].call
        if background:
            start = start.options(concurrency_group="background")
        return start.remote(method, *args, **kwargs)

    def run_all(
        self, method: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of every worker, and return the results in the order of ranks.

        Raises what the first one raises, WorkerDied, and WorkerTimeout.
        """
        calls = [self.call(rank, method, *args, **kwargs) for rank in range(len(self))]
        return self._all(calls, timeout_s, method)

    def ready(
        self, calls: Mapping[int, "ray.ObjectRef"], timeout_s: float, *, doing: str = ""
    ) -> dict[int, Any]:
        """Return the results of calls by rank, once all are there, or those after `timeout_s`.

        Raises what a call raised, and WorkerDied.
        """
        pending = list(calls.values())  # looked at once a tick, not once for each rank that ends
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=timeout_s)
        if not ready:
            check()
        found, done = dict[int, Any](), set(ready)
        for rank, call in calls.items():
            if call in done:
                try:
                    found[rank] = ray.get(call)
                except (RayActorError, OutOfMemoryError) as error:
                    info = self._infos[rank] if self._infos else None
                    log = info.log if info else None
                    raise death(str(info or f"worker {rank}"), str(error), log, doing) from None
        return found

    def shutdown(self, timeout_s: float = 0, method: str = "", /, *args: Any) -> None:
        """End the processes; before, call `method`, if one is named, and wait so long for it."""
        with contextlib.suppress(Exception):  # a worker that fails or is gone
            if timeout_s > 0 and method:
                self.run_all(method, *args, timeout_s=timeout_s)
        with contextlib.suppress(Exception):  # the cluster may be gone, and Ray would wait for it
            check()
            for actor in self._actors:
                ray.kill(actor)
        here = []
        for info in self._infos:
            with contextlib.suppress(psutil.Error):
                if info.host == socket.gethostname():
                    here.append(psutil.Process(info.pid))
        psutil.wait_procs(here, timeout=10)

    def _all(self, calls: list["ray.ObjectRef"], timeout_s: float | None, doing: str) -> list[Any]:
        left, found = dict(enumerate(calls)), dict[int, Any]()
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while left:
            if (wait_s := min(TICK_S, deadline - time.monotonic())) < 0:
                who = " and ".join(str(self._infos[rank]) for rank in left if self._infos)
                raise WorkerTimeout(
                    f"no answer to {doing} within {timeout_s:g} s from {who or 'workers'}"
                )
            for rank, value in self.ready(left, wait_s, doing=f" in {doing}").items():
                found[rank] = value
                del left[rank]
        return [found[rank] for rank in range(len(calls))]

    def _rendezvous(self, rank: int) -> dict[str, str]:
        nodes, first = [info.node for info in self._infos], self._infos[0]
        alone = len(set(nodes)) == 1
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
            "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
            "MASTER_ADDR": "127.0.0.1" if alone else first.address,
            "MASTER_PORT": str(first.port),
        }


def free_port() -> int:
    """Return a port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def by_node_and_gpu(places: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the order of workers in which each node's are together, in the order of their GPUs.
    Nodes come in the order of their first workers.

    >>> where = [("b", "1"), ("a", "10"), ("b", "0"), ("a", "9")]
    >>> by_node_and_gpu([{"node": node, "gpus": (gpu,)} for node, gpu in where])
    [2, 0, 3, 1]
    """
    nodes = [place["node"] for place in places]

    def key(index: int) -> tuple[int, list[list[str | int]]]:
        return nodes.index(nodes[index]), [natural(gpu) for gpu in places[index]["gpus"]]

    return sorted(range(len(places)), key=key)


def begin_worker(title: str, log: Path | None) -> None:
    """Have children of this process end with it, and write all output into the log, C++'s too."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.setpgid(0, 0)
    start_guard(group=os.getpid())
    print(f"--- {title}, process {os.getpid()} on {socket.gethostname()}", flush=True)
