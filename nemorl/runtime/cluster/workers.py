"""Ranked workers on a placement: processes that host an object each, called by name, restarted by
rank, gone at the end with all their children.
"""

import contextlib
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemorl.checks import require
from nemorl.runtime.cluster.placement import Placement, RayClusterError
from nemorl.runtime.cluster.worker_host import MARKER, Host, began, kill_family
from nemorl.runtime.cluster.worker_python import worker_variables
from nemorl.runtime.run.errors import (
    WorkerDied,
    WorkerError,
    WorkerTimeout,
    last_lines,
    raised,
    reason_of,
)

CHECK_PERIOD_S = 0.5
"""How often those who wait look whether the cluster is still there."""
FETCH_TIMEOUT_S = 300
"""For the bytes of a result that is there, on another node."""


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Where a worker is; `incarnation` counts its processes from 0, `log` is a file on its node."""

    rank: int
    node: str
    host: str
    pid: int
    log: Path
    incarnation: int


@dataclass(kw_only=True)
class _Worker:
    """One process of a rank.

    Host, pid and when it began are known once it is there, and whether Ray has moved its bundle to
    another node.
    """

    rank: int
    incarnation: int
    node: str
    log: Path
    marker: str
    actor: Any
    host: str = "?"
    pid: int = 0
    began: int = 0
    up: bool = False
    """It has its object."""


class Pending:
    """A call that has been started."""

    def __init__(
        self, group: "RayWorkerGroup", worker: _Worker, method: str, reference: "ray.ObjectRef"
    ) -> None:
        self._group, self._worker, self.method, self.reference = group, worker, method, reference

    @property
    def rank(self) -> int:
        return self._worker.rank

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return bool(wait([self], 0)[0])

    def result(self, timeout_s: float | None = None) -> Any:
        """What the method returns. Arrays in it may be read-only: they lie in memory that is shared
        with the worker.

        Raises what the method raised (a subclass of ValueError or another built-in type as that
        type, any other as WorkerError), WorkerDied, WorkerTimeout or ClusterLost.
        """
        if not wait([self], timeout_s)[0]:
            raise _timeout([self], timeout_s)
        try:
            kind, value = ray.get(self.reference, timeout=FETCH_TIMEOUT_S)
        except (
            RayTaskError
        ) as error:  # outside of the method: an argument or a result that can't be sent
            raise WorkerError(
                f"{self.method}: {error.cause}",
                rank=self.rank,
                kind=type(error.cause).__name__,
                traceback=str(error),
            ) from None
        except GetTimeoutError:
            raise _timeout([self], FETCH_TIMEOUT_S) from None
        except RayError as error:
            raise self._group._died(self._worker, str(error)) from None
        if kind == "value":
            return value
        raise raised(value, self.rank)

    def _check(self) -> None:
        """Raise what makes waiting vain."""
        self._group.cluster.check()
        if not self._worker.up:
            self._group._check()


def wait(
    pending: Sequence[Pending], timeout_s: float | None
) -> tuple[list[Pending], list[Pending]]:
    """Those that are done and those that are not, as soon as one is done or the time is over.

    Raises ClusterLost.
    """
    if not pending:
        return [], []
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    references = [one.reference for one in pending]
    while True:
        for one in pending:
            one._check()
        left = (
            CHECK_PERIOD_S
            if deadline is None
            else max(0.0, min(CHECK_PERIOD_S, deadline - time.monotonic()))
        )
        ready = set(ray.wait(references, num_returns=1, timeout=left, fetch_local=False)[0])
        if ready and len(pending) > 1:
            ready = set(
                ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)[0]
            )
        if ready or (deadline is not None and time.monotonic() >= deadline):
            return [one for one in pending if one.reference in ready], [
                one for one in pending if one.reference not in ready
            ]


class RayWorkerGroup:
    """One worker per bundle of a placement. Each is a process of its own that hosts an object of
    the class `target` ("module:Class"), imported there.

    A worker finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment,
    beside `env` and its entry of `env_per_worker`, and writes to `log_dir`/`name`-`rank`.log. With
    `python` it runs under that interpreter (see `worker_python`). `max_concurrency` of its calls
    may run at a time, in threads. Every method may be called from several threads.
    """

    def __init__(
        self,
        placement: Placement,
        target: str,
        *,
        args: tuple = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str] = {},
        env_per_worker: Sequence[Mapping[str, str]] | None = None,
        python: str | None = None,
        max_concurrency: int = 1,
        log_dir: Path | None = None,
        name: str = "worker",
        start_timeout_s: float = 120,
    ) -> None:
        size = len(placement.bundles)
        require(
            bool(re.fullmatch(r"[\w.]+:\w+", target)),
            "target",
            'must be "module:Class"',
            target,
            "name a class by its module",
        )
        require(env_per_worker is None or len(env_per_worker) == size, "env_per_worker", f"must have one entry for each of {size} workers",
                len(env_per_worker or ()), "add or drop some")  # fmt: skip
        self.cluster, self.name = placement.cluster, name
        self._placement, self._target, self._args, self._kwargs = (
            placement,
            target,
            args,
            dict(kwargs),
        )
        self._envs = [
            {**env, **(env_per_worker[rank] if env_per_worker else {})} for rank in range(size)
        ]
        self._python, self._max_concurrency, self._start_timeout_s = (
            python,
            max_concurrency,
            start_timeout_s,
        )
        self._own_logs = log_dir is None
        self._log_dir = (
            Path(tempfile.mkdtemp(prefix="nemorl-")) if log_dir is None else log_dir.absolute()
        )
        self._port = ""
        self._lock, self._ended = threading.Lock(), False
        self._restarts = [threading.Lock() for _ in range(size)]
        self._workers: dict[int, _Worker] = {}
        try:
            self._start(range(size))
        except BaseException:
            self.shutdown(timeout_s=0)
            raise

    def __len__(self) -> int:
        return len(self._placement.bundles)

    def info(self, rank: int) -> WorkerInfo:
        worker = self._workers[rank]
        return WorkerInfo(
            rank=rank,
            node=worker.node,
            host=worker.host,
            pid=worker.pid,
            log=worker.log,
            incarnation=worker.incarnation,
        )

    def call(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Pending:
        """Start a method of one worker."""
        self._check()
        return self._remote(self._workers[rank], "call", method, *args, **kwargs)

    def run_all(
        self, method: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of every worker with the same arguments; the results in the order of ranks."""
        return self._gather(
            [self.call(rank, method, *args, **kwargs) for rank in range(len(self))], timeout_s
        )

    def run_rank_zero(
        self, method: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        return self.call(0, method, *args, **kwargs).result(timeout_s)

    def run_sharded(
        self, method: str, shards: Sequence[tuple], timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method with the i-th tuple of arguments on worker i; the results in the order of
        ranks.
        """
        require(
            len(shards) == len(self),
            "shards",
            f"must be one tuple of arguments for each of {len(self)} workers",
            len(shards),
            "split the data anew",
        )
        return self._gather(
            [self.call(rank, method, *shard) for rank, shard in enumerate(shards)], timeout_s
        )

    def kill(self, rank: int) -> None:
        """End a worker at once. What it is doing is lost; its calls raise WorkerDied."""
        self._end(self._workers[rank])

    def restart(self, rank: int) -> None:
        """A new process for this rank, in the same bundle, with a new object made as the first was."""
        with self._restarts[rank]:
            self._check()
            self.kill(rank)
            self._start([rank])

    def shutdown(self, timeout_s: float = 20) -> None:
        """Let every object end in its own way (its method `shutdown`, if it has one), within this
        time, and then end the processes.

        Those that are being started are ended at once; `restart` raises what comes of it.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            up = [worker for worker in self._workers.values() if worker.up]
        for worker in self._workers.values():
            if not worker.up:
                self._end(worker)
        stops = [self._remote(worker, "stop") for worker in up] if timeout_s > 0 else []
        deadline, failed = time.monotonic() + timeout_s, timeout_s <= 0
        for stop in stops:
            try:
                stop.result(max(0.0, deadline - time.monotonic()))
            except Exception:  # whatever a target's end may raise: the log has it
                failed = True
        for worker in up:
            self._end(worker)
        if self._own_logs and not failed:
            shutil.rmtree(self._log_dir, ignore_errors=True)

    def _start(self, ranks: Sequence[int]) -> None:
        """Processes for these ranks, and in each the target."""
        with self._lock:  # whoever ends the group finds them
            self._check()
            new = [self._launch(rank) for rank in ranks]
            self._workers.update({worker.rank: worker for worker in new})
        places = self._gather(
            [self._remote(worker, "place") for worker in new], self._start_timeout_s
        )
        for worker, (pid, start, host, node, _) in zip(new, places, strict=True):
            worker.pid, worker.began, worker.host, worker.node = pid, start, host, node
        self._port = self._port or str(places[0][-1])
        starts = [
            self._remote(
                worker,
                "start",
                self._rendezvous(worker.rank),
                self._target,
                self._args,
                self._kwargs,
            )
            for worker in new
        ]
        self._gather(starts, self._start_timeout_s)
        with self._lock:
            self._check()
            for worker in new:
                worker.up = True

    def _launch(self, rank: int) -> _Worker:
        """A new process in the rank's bundle. Ray has heard of it, no more."""
        bundle, before = self._placement.bundles[rank], self._workers.get(rank)
        incarnation = 0 if before is None else before.incarnation + 1
        marker, log = uuid.uuid4().hex, self._log_dir / f"{self.name}-{rank}.log"
        environment: dict[str, Any] = {
            "env_vars": {
                **(worker_variables() if self._python else {}),
                **self._envs[rank],
                MARKER: marker,
            }
        }
        if self._python:
            environment["py_executable"] = self._python
        where = PlacementGroupSchedulingStrategy(
            self._placement.group, placement_group_bundle_index=self._placement.indices[rank]
        )
        options: dict[str, Any] = {
            "num_cpus": bundle.cpus,
            "num_gpus": bundle.gpus,
            "resources": dict(bundle.resources),
            "max_concurrency": self._max_concurrency,
        }
        actor = ray.remote(Host).options(
            **options, scheduling_strategy=where, runtime_env=environment
        )
        handle = actor.remote(str(log), f"{self.name}-{rank}, incarnation {incarnation}")
        node = self._placement.nodes[rank] if before is None else before.node
        return _Worker(
            rank=rank, incarnation=incarnation, node=node, log=log, marker=marker, actor=handle
        )

    def _rendezvous(self, rank: int) -> dict[str, str]:
        nodes = [self._workers[other].node for other in range(len(self))]
        address = "127.0.0.1" if len(set(nodes)) == 1 else self._host_of(nodes[0])
        local = nodes[:rank].count(nodes[rank])
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self)),
            "LOCAL_RANK": str(local),
            "MASTER_ADDR": address,
            "MASTER_PORT": self._port,
        }

    def _remote(self, worker: _Worker, method: str, /, *args: Any, **kwargs: Any) -> Pending:
        name = args[0] if method == "call" else method
        return Pending(self, worker, name, getattr(worker.actor, method).remote(*args, **kwargs))

    def _gather(self, pending: Sequence[Pending], timeout_s: float | None) -> list[Any]:
        """The results in order.

        The first error that there is goes out at once: others may wait for the worker that has
        failed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results, left = {}, list(pending)
        while left:
            done, left = wait(
                left, None if deadline is None else max(0.0, deadline - time.monotonic())
            )
            if not done:
                raise _timeout(left, timeout_s)
            results.update({one.rank: one.result() for one in done})
        return [results[one.rank] for one in pending]

    def _check(self) -> None:
        self.cluster.check()
        if self._ended:
            raise RayClusterError(
                f"the workers {self.name!r} have been shut down: make a new RayWorkerGroup"
            )

    def _end(self, worker: _Worker) -> None:
        """End its processes, and wait until they are gone (on this node; on another one its guard
        does it).
        """
        leader = (
            worker.pid if worker.pid and began(worker.pid) == worker.began else 0
        )  # seen before it dies: its id may be a stranger's soon
        with contextlib.suppress(
            RayClusterError, ValueError
        ):  # Ray is gone, or doesn't know it any more
            self.cluster.check()
            ray.kill(worker.actor, no_restart=True)
        if worker.node == self.cluster.driver_node or not worker.pid:
            kill_family(leader, worker.marker)

    def _host_of(self, node: str) -> str:
        return next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)

    def _died(self, worker: _Worker, told: str) -> WorkerDied:
        self.cluster.check()
        reason = reason_of(told)
        lines = last_lines(worker.log) if worker.node == self.cluster.driver_node else []
        log = "\n  | ".join([" and ends:" if lines else "", *lines])
        message = (
            f"{self.name}-{worker.rank} (process {worker.pid} on {worker.host}) died: {reason}; its"
            f" log is {worker.log}{log}"
        )
        return WorkerDied(
            message, rank=worker.rank, host=worker.host, pid=worker.pid, reason=reason
        )


def _timeout(pending: Sequence[Pending], timeout_s: float | None) -> WorkerTimeout:
    who = ", ".join(
        f"{one._group.name}-{one.rank} (process {one._worker.pid} on {one._worker.host}, log"
        f" {one._worker.log})"
        for one in pending
    )
    return WorkerTimeout(f"no answer to {pending[0].method} within {timeout_s:g} s from {who}")
