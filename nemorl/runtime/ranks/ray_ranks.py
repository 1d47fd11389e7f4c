"""Ranks as workers on a Ray cluster, one bundle each, on as many machines as it takes."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from nemorl.checks import require
from nemorl.runtime.cluster.connection import Connection
from nemorl.runtime.cluster.placement import Bundle, RayVirtualCluster, ResourcesError
from nemorl.runtime.cluster.workers import Pending, RayWorkerGroup, wait
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.group import Answer, Place, Status
from nemorl.runtime.ranks.rank import BESIDE, TrainingRank
from nemorl.runtime.ranks.wire import dumps, loads
from nemorl.runtime.start.registry import get_training_backend

TARGET = "nemorl.runtime.ranks.ray_ranks:RayRank"
CONCURRENT = 16
"""Calls that a rank may hold at a time: it performs one after another, and answers questions
beside.
"""


class RayRank:
    """What a worker hosts.

    Ray may begin calls in any order and on any thread: they are performed by their numbers, on one.
    """

    def __init__(self, backend: bytes, transport: str) -> None:
        self._rank = TrainingRank(
            lambda: loads(backend)(), int(os.environ["RANK"]), transport=transport
        )
        self._calls: queue.PriorityQueue[tuple[int, str, bytes, Future]] = queue.PriorityQueue()
        threading.Thread(target=self._work, name="training", daemon=True).start()

    def perform(self, ticket: int, method: str, payload: bytes) -> Any:
        """The answer; as bytes unless it refers to Ray's memory, which Ray must know of."""
        if method in BESIDE:
            return self._answer(self._rank.beside, method, payload)
        done: Future[Any] = Future()
        self._calls.put((ticket, method, payload, done))
        return done.result()

    def status(self) -> bytes:
        return dumps(self._rank.status())

    def _work(self) -> None:
        expected = 0
        while True:
            call = self._calls.get()
            if call[0] != expected:
                self._calls.put(call)  # one before it is on its way
                time.sleep(0.001)
                continue
            _, method, payload, done = call
            done.set_result(self._answer(self._rank.perform, method, payload))
            expected += 1

    def _answer(self, how: Any, method: str, payload: bytes) -> Any:
        try:
            args, kwargs = loads(payload)
            answer = how(method, args, kwargs)
            return answer if method == "export_next" else dumps(answer)
        except Exception as error:
            return dumps(self._rank.refuse(error))


class RayCall:
    """A call on its way to all ranks."""

    def __init__(self, pending: list[Pending]) -> None:
        self._pending, self._answers = pending, dict[int, Answer]()

    def poll(self, wait_s: float) -> Mapping[int, Answer]:
        done, self._pending = wait(self._pending, wait_s)
        for one in done:
            answer = one.result()
            self._answers[one.rank] = loads(answer) if isinstance(answer, bytes) else answer
        return self._answers


class RayRankGroup:
    """One worker per rank, with `runtime.cpus_per_rank` CPUs and, where the cluster has any and
    `device` is not "cpu", a GPU of its own.

    What a rank writes goes into `log_dir`/rank-N.log, on its node. Raises ResourcesError where
    there is not so much.
    """

    def __init__(
        self, backend: str, size: int, *, device: str | None, log_dir: Path, runtime: RuntimeConfig
    ) -> None:
        self.size = size
        self._lock, self._tickets = threading.Lock(), 0
        connection = Connection.use(None, None, None)
        try:
            found = ray.cluster_resources().get("GPU")
            require(device != "cuda" or bool(found), "trainer.device", "must be cpu on a Ray cluster without GPUs", device,
                    "leave it out, or let Ray know of the GPUs (ray start --num-gpus)")  # fmt: skip
            gpus = 1 if found and device != "cpu" else 0
            try:
                self._cluster = RayVirtualCluster(
                    {"rank": [Bundle(cpus=runtime.cpus_per_rank, gpus=gpus)] * size}
                )
            except ResourcesError as error:
                raise ResourcesError(
                    f"parallel asks for {size} ranks of {runtime.cpus_per_rank} CPUs and {gpus}"
                    f" GPUs each: {error}"
                ) from None
        finally:
            connection.release()
        placement = self._cluster.placement("rank")
        self._nodes, here = placement.nodes, self._cluster.driver_node
        try:
            self._group = RayWorkerGroup(
                placement,
                TARGET,
                args=(
                    dumps(get_training_backend(backend)),
                    "shared_memory" if self._nodes[0] == here else "object_store",
                ),
                env={"OMP_NUM_THREADS": str(runtime.cpus_per_rank)},
                max_concurrency=CONCURRENT,
                log_dir=log_dir,
                name="rank",
                start_timeout_s=runtime.start_timeout_s,
            )
        except BaseException:
            self._cluster.shutdown()
            raise

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> RayCall:
        payload = ray.put(dumps((args, kwargs)))  # each node fetches it once
        with self._lock:
            ticket = -1 if method in BESIDE else self._tickets
            self._tickets += method not in BESIDE
            return RayCall(
                [
                    self._group.call(rank, "perform", ticket, method, payload)
                    for rank in range(self.size)
                ]
            )

    def place(self, rank: int) -> Place:
        info = self._group.info(rank)
        return Place(
            rank=rank,
            host=info.host,
            pid=info.pid,
            log=info.log,
            here=info.node == self._cluster.driver_node,
        )

    def statuses(self, timeout_s: float) -> dict[int, Status]:
        pending, deadline, found = (
            [self._group.call(rank, "status") for rank in range(self.size)],
            time.monotonic() + timeout_s,
            {},
        )
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = wait(pending, left)
            for one in done:
                with suppress(Exception):  # it is dead: nothing to be heard
                    found[one.rank] = loads(one.result())
        return dict(sorted(found.items()))

    def note(self, rank: int) -> str:
        return "it does not even say what it is doing: it is stopped, or its node doesn't answer"

    def shutdown(self, timeout_s: float, farewell: Any = None) -> None:
        if timeout_s > 0:
            with suppress(Exception):  # whatever keeps them from it: they are ended
                call, deadline = self.start("shutdown"), time.monotonic() + timeout_s
                while len(call.poll(0.1)) < self.size and time.monotonic() < deadline:
                    pass
        self._group.shutdown(timeout_s=0)
        self._cluster.shutdown()
