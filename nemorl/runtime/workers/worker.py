"""The one worker: a process that Ray places, with an object whose methods are called."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from nemorl.checks import require
from nemorl.runtime.store.files import WorkerDied, WorkerTimeout, reason_of, with_log
from nemorl.runtime.workers.cluster import Placement, check, natural, start_guard

TICK_S = 0.5
ALONE_S = 10.0
"""Seconds to wait for the others once one has failed: where all fail, all stay usable."""


def host() -> type:
    """Return the class of actors that host an object, in processes without nemorl, too."""

    class Host:
        def run(self, function: Callable[..., Any], *args: Any) -> Any:
            return function(*args)

        def make(self, make: bytes, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            import pickle

            self.target = pickle.loads(make)(*args, **named)

        def call(self, method: str, /, *args: Any, **named: Any) -> Any:
            import asyncio
            import inspect

            found = getattr(self.target, method)(*args, **named)
            if not inspect.isawaitable(found):
                return found
            if not hasattr(self, "runner"):
                self.runner = asyncio.Runner()

            async def awaited() -> Any:
                return await found

            return self.runner.run(awaited())

        def attribute(self, name: str) -> Any:
            return getattr(self.target, name)

    return Host


@dataclass
class Worker:
    """An actor, and its process."""

    actor: Any
    name: str = "worker"
    log: Path | None = None
    """A file on its node."""
    host: str = ""
    pid: int = 0
    """0: it is not up."""

    def __str__(self) -> str:
        known = [f"process {self.pid} on {self.host}"] * (self.pid > 0)
        known += [f"log {self.log}"] * (self.log is not None)
        return f"{self.name} ({', '.join(known)})" if known else self.name

    def died(self, said: str, doing: str = "") -> WorkerDied:
        return WorkerDied(with_log(f"{self} died{doing}: {reason_of(said)}", self.log))

    @contextmanager
    def failures(self, doing: str = "") -> Iterator[None]:
        """Raise a method's own error, or WorkerDied, for Ray's errors."""
        try:
            yield
        except RayError as error:
            if isinstance(error, RayTaskError) and not isinstance(error, OutOfMemoryError):
                raise error.cause from error
            raise self.died(str(error), doing) from None

    async def answer(
        self,
        call: Awaitable[Any],
        doing: str = "",
        *,
        timeout_s: float | None = None,
        setting: str = "",
    ) -> Any:
        """Return the result of a call, or raise what it raised, WorkerDied, or WorkerTimeout after
        `timeout_s`, the user's `setting`.
        """
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                with self.failures():
                    return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise late(doing, timeout_s or 0, setting, str(self)) from None

    def kill(self) -> None:
        with suppress(Exception):  # Ray may be gone
            ray.kill(self.actor)


def late(doing: str, timeout_s: float, setting: str, who: str) -> WorkerTimeout:
    """Return the error for workers that do not answer."""
    limit = f" ({setting})" if setting else ""
    return WorkerTimeout(f"no answer to {doing} within {timeout_s:g} s{limit} from {who}")


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Where a worker is."""

    node: str
    address: str
    host: str
    pid: int
    port: int
    """Free when the worker started."""
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""


def _place() -> WorkerInfo:
    context = ray.get_runtime_context()
    return WorkerInfo(
        node=context.get_node_id(),
        address=ray.util.get_node_ip_address(),
        host=socket.gethostname(),
        pid=os.getpid(),
        port=free_port(),
        gpus=tuple(context.get_accelerator_ids()["GPU"]),
    )


class RayWorkerGroup:
    """Workers in bundles, each a process with an object of the class `target` ("module:Class").

    They are ranked by node, in the placement's order, and on a node by GPU. A worker has RANK,
    WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and `env` in its environment,
    and writes to `log_dir`/`name`-`rank`.log (None: Ray's logs).
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
        actor = ray.remote(concurrency_groups={"background": 1})(host())
        self._workers = [
            Worker(actor.options(**placement.options(index)).remote(), name)
            for index, bundle in enumerate(placement.bundles)
            for _ in range(bundle.workers)
        ]
        self._infos: list[WorkerInfo] = []
        try:
            infos = self._all(
                [worker.actor.run.remote(_place) for worker in self._workers],
                start_timeout_s,
                "its start",
            )
            order = by_node_and_gpu([(info.node, info.gpus) for info in infos])
            self._workers = [self._workers[index] for index in order]
            self._infos = [infos[index] for index in order]
            path = [str(Path(entry).absolute()) for entry in sys.path]
            made = []
            for rank, (worker, info) in enumerate(zip(self._workers, self._infos, strict=True)):
                worker.name, worker.host, worker.pid = f"{name} {rank}", info.host, info.pid
                worker.log = log_dir and log_dir.absolute() / f"{name}-{rank}.log"
                make = partial(
                    _make, target, worker.name, worker.log, path, {**env, **self._rendezvous(rank)}
                )
                made.append(worker.actor.make.remote(cloudpickle.dumps(make), args, kwargs))
            self._all(made, start_timeout_s, "its start")
        except BaseException:
            self.shutdown()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    def info(self, rank: int) -> WorkerInfo:
        return self._infos[rank]

    def named(self, ranks: Iterable[int]) -> str:
        return " and ".join(str(self._workers[rank]) for rank in ranks)

    def call(
        self, rank: int, method: str, /, *args: Any, background: bool = False, **kwargs: Any
    ) -> ray.ObjectRef:
        """Start a method of a worker, after its calls before, or beside them in the background."""
        start = self._workers[rank].actor.call
        if background:
            start = start.options(concurrency_group="background")
        return start.remote(method, *args, **kwargs)

    def run_all(
        self, method: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of every worker, and return the results by rank. Raises as `gather`."""
        return self._all(
            [self.call(rank, method, *args, **kwargs) for rank in range(len(self))],
            timeout_s,
            method,
        )

    def gather(
        self,
        calls: Mapping[int, ray.ObjectRef],
        timeout_s: float,
        doing: str,
        *,
        setting: str = "",
        grace_s: float = 0.0,
        read: Callable[[Any], Any] = lambda result: result,
        failed: Callable[[Any], object] = lambda result: False,
    ) -> dict[int, Any]:
        """Return what `read` makes of calls' results, by rank. Once one has `failed`, the others
        have ALONE_S.

        Raises what `Worker.answer` does, WorkerTimeout after `timeout_s` and `grace_s`.
        """
        left, found = dict(calls), dict[int, Any]()
        left_s, alone_s = timeout_s + grace_s, ALONE_S
        while left and alone_s > 0:
            if left_s <= 0:
                raise late(doing, timeout_s, setting, self.named(left))
            before = time.monotonic()
            pending = [*left.values()]  # once a tick, not once for each rank that ends
            done = {*ray.wait(pending, num_returns=len(left), timeout=min(TICK_S, left_s))[0]}
            if not done:
                check()
            for rank in [rank for rank, call in left.items() if call in done]:
                with self._workers[rank].failures(f" in {doing}"):
                    found[rank] = read(ray.get(left.pop(rank)))
            passed = min(time.monotonic() - before, 4 * TICK_S)  # unless this process was stopped
            left_s -= passed
            alone_s -= passed * any(map(failed, found.values()))
        return found

    def shutdown(self, timeout_s: float = 0, method: str = "", /, *args: Any) -> None:
        """Call `method`, if one is named, for so long, and end the processes."""
        with suppress(Exception):  # a worker that fails or is gone
            if timeout_s > 0 and method:
                self.run_all(method, *args, timeout_s=timeout_s)
        with suppress(Exception):  # the cluster may be gone, and Ray would wait for it
            check()
            for worker in self._workers:
                worker.kill()
        here = []
        for info in self._infos:
            with suppress(psutil.Error):
                if info.host == socket.gethostname():
                    here.append(psutil.Process(info.pid))
        psutil.wait_procs(here, timeout=10)

    def _all(self, calls: list[ray.ObjectRef], timeout_s: float | None, doing: str) -> list[Any]:
        found = self.gather(
            dict(enumerate(calls)), float("inf") if timeout_s is None else timeout_s, doing
        )
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


def _make(
    target: str,
    title: str,
    log: Path | None,
    path: list[str],
    variables: Mapping[str, str],
    /,
    *args: Any,
    **named: Any,
) -> Any:
    begin_worker(title, log)
    sys.path += [entry for entry in path if entry not in sys.path]
    os.environ.update(variables)
    return resolve_name(target)(*args, **named)


def free_port() -> int:
    """Return a port at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def by_node_and_gpu(places: Sequence[tuple[str, Sequence[str]]]) -> list[int]:
    """Return the order of workers by node, in the order of appearance, and by GPU.

    >>> by_node_and_gpu([("b", ["1"]), ("a", ["10"]), ("b", ["0"]), ("a", ["9"])])
    [2, 0, 3, 1]
    """
    nodes = [node for node, _ in places]
    keys = [(nodes.index(node), [natural(gpu) for gpu in gpus]) for node, gpus in places]
    return sorted(range(len(places)), key=lambda index: keys[index])


def begin_worker(title: str, log: Path | None) -> None:
    """End this process's children with it, and write all output into the log, C++'s too."""
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
