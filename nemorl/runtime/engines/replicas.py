"""The driver's side of engines in Ray actors: a window of prompts for each, weights, restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from nemorl.checks import require
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.cluster.placement import DRIVER, Bundle, RayVirtualCluster, ResourcesError
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.engines.actor import EngineActor
from nemorl.runtime.engines.engine import CPU_VARIABLES, EAGER_VARIABLES, VARIABLES
from nemorl.runtime.engines.spec import Answer, EngineSpec, Place, Sample
from nemorl.runtime.engines.weights import WeightSender, expected_weights, own_place
from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout, last_lines, reason_of

TICK_S = 1.0
"""How often a driver that waits looks whether the cluster is still there."""
SHUTDOWN_S = 10.0

Weights = Iterable[tuple[str, Tensor]]
Request = tuple[tuple[int, ...], SamplingParams]


@dataclass(eq=False)
class Life:
    """One process of a replica, from its start to its end."""

    actor: Any
    place: Place
    broken: asyncio.Future[Exception]
    open: int = 0
    """Samples of prompts that it was given and has not answered."""
    partial: int = 0
    """How many of these are finished, as it said last."""
    busy_s: float = 0.0

    @property
    def unfinished(self) -> int:
        return self.open - self.partial if self.open else 0

    def breaks(self, error: Exception) -> None:
        """Have it replaced."""
        if not self.broken.done():
            self.broken.set_result(error)


@dataclass(eq=False)
class Replica:
    """One of the engines, through all its lives."""

    rank: int
    log: Path
    actor: Any = None
    life: Life | None = None
    """None: it is not up."""
    version: int | None = None
    """Of its weights. None: it has none, or not all."""
    deaths: int = 0
    """In a row, without an answer."""
    given_up: bool = False
    restarts: int = 0
    reported: int = 0
    """Restarts that `metrics` has returned."""
    tokens: int = 0
    busy_s: float = 0.0

    @property
    def name(self) -> str:
        place = None if self.life is None else self.life.place
        where = f" (process {place.pid} on {place.host})" if place else ""
        return f"replica-{self.rank}{where}"

    def died(self, said: str) -> WorkerDied:
        place = None if self.life is None else self.life.place
        lines = "\n  | ".join([" and ends:", *last_lines(self.log)])
        return WorkerDied(
            f"{self.name} died: {reason_of(said)}; its log is {self.log}{lines}",
            rank=self.rank,
            host=place.host if place else "?",
            pid=place.pid if place else 0,
            reason=reason_of(said),
        )


class Replicas:
    """Engines that share the prompts, follow the trainer's weights and outlive their processes.

    All state belongs to an event loop on a thread of its own; weights are sent from the thread that
    calls `generate` or `update_weights`, which is the trainer's. What a replica had not answered
    when it died or hung is done by the others, with the same results, for seeds belong to requests.
    Deaths and restarts are warnings.
    """

    actor: type[EngineActor] = EngineActor

    def __init__(self, config: GenerationConfig, spec: EngineSpec) -> None:
        self.config, self.spec, self.cuda = config, spec, torch.cuda.is_available()
        self.version: int | None = None
        self._weights: Weights = ()
        self._over: ChildProcessError | None = None
        """All replicas have been given up."""
        self._keepers: list[asyncio.Future[None]] = []
        self._seconds = 0.0
        self._queue: deque[tuple[int, asyncio.Future[tuple[Replica, Life]]]] = deque()
        self._changed = threading.Condition()
        python = config.python
        found = python is None or shutil.which(python) is not None
        require(found, "generation.python", "must be an interpreter", python, "name one")
        transport = config.weight_transport
        works = self.cuda or transport not in ("cuda_ipc", "nccl")
        require(works, "generation.weight_transport", "needs GPUs", transport, "remove it")
        self._expected = expected_weights(spec.files["config.json"])
        self._cluster, self._placement = self._reserved()
        self._own_logs = config.log_dir is None
        self._log_dir = Path(config.log_dir or tempfile.mkdtemp(prefix="nemorl-")).absolute()
        self._replicas = [
            Replica(rank, self._log_dir / f"replica-{rank}.log")
            for rank in range(config.num_replicas)
        ]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True)
        self._thread.start()
        try:
            self._do(self._start_all())
        except BaseException:
            self.shutdown()
            raise

    def generate(self, requests: Sequence[Request]) -> list[tuple[Sample, ...]]:
        """Return the samples of each request, in order.

        Whatever goes wrong, nothing goes on in the background.
        """
        begin = time.monotonic()
        self._supply()
        job = asyncio.run_coroutine_threadsafe(self._sample_all(requests), self._loop)
        job.add_done_callback(lambda _: self._notify())
        try:
            while not job.done():
                self._wait(lambda: job.done() or self._stale())
                self._supply()
            return job.result()
        except BaseException:
            job.cancel()
            raise
        finally:
            self._seconds += time.monotonic() - begin

    async def sample(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[Sample, ...]:
        """Return the samples of one prompt, by whichever replica has room. On the event loop."""
        first = False
        while True:
            replica, life = await self._room(params.n, first=first)
            call = life.actor.sample.remote(prompt, params)
            try:
                answer = await call
            except asyncio.CancelledError:
                ray.cancel(call)
                raise
            except RayTaskError as error:
                if isinstance(error.cause, ValueError | FloatingPointError):
                    raise error.cause from None
                life.breaks(error.cause)
            except RayError as error:
                life.breaks(replica.died(str(error)))
            else:
                self._took(replica, life, answer)
                return answer.samples
            finally:
                life.open -= params.n
                self._dispatch()
            first = True

    async def _sample_all(self, requests: Sequence[Request]) -> list[tuple[Sample, ...]]:
        tasks = [asyncio.ensure_future(self.sample(*request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _room(self, n: int, *, first: bool) -> tuple[Replica, Life]:
        """Wait for a replica that decodes less than it could, and take it for `n` samples."""
        future = self._loop.create_future()
        (self._queue.appendleft if first else self._queue.append)((n, future))
        self._dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result()[1].open -= n
            raise

    def _dispatch(self) -> None:
        """Give replicas to those that wait for room."""
        while self._queue:
            able = [
                (life.unfinished, replica.rank, life)
                for replica in self._replicas
                if (life := replica.life) is not None
                and replica.version is not None
                and not life.broken.done()
                and life.unfinished < self.config.max_batch_size
            ]
            if not able and not self._over:
                return
            n, future = self._queue.popleft()
            if future.done():
                continue
            if self._over:
                future.set_exception(self._over)
            else:
                _, rank, life = min(able, key=lambda one: one[:2])
                life.open += n
                future.set_result((self._replicas[rank], life))

    def _took(self, replica: Replica, life: Life, answer: Answer) -> None:
        replica.deaths = 0
        replica.tokens += sum(len(sample.token_ids) for sample in answer.samples)
        replica.busy_s += max(0.0, answer.busy_s - life.busy_s)
        life.partial, life.busy_s = answer.partial, max(life.busy_s, answer.busy_s)

    def _reserved(self) -> tuple[Any, Any]:
        """The cluster, and a bundle in it for each replica."""
        config, cuda = self.config, self.cuda
        gpus = config.tensor_parallel_size if cuda else 0
        cpus = config.cpus_per_replica * (1 if gpus else config.tensor_parallel_size)
        bundles = {"generation": [Bundle(cpus=cpus, gpus=gpus)] * config.num_replicas}
        if cuda and not config.colocated:
            # Ray hands GPUs out in order: the first ones are those that the trainer computes on.
            taken = 1 if config.trainer_gpus is None else config.trainer_gpus
            trainer = {"trainer": [Bundle(cpus=0, gpus=1, node=DRIVER)] * taken} if taken else {}
            bundles = {**trainer, **bundles}
        try:
            cluster = RayVirtualCluster(bundles)
        except ResourcesError as error:
            raise ResourcesError(
                f"generation.num_replicas is {config.num_replicas}, of {cpus} CPUs and {gpus} GPUs"
                f" each: {error}"
            ) from None
        return cluster, cluster.placement("generation")

    async def _start_all(self) -> None:
        """Start all, or raise what was wrong with the first that failed."""
        self._awake = asyncio.Event()
        self._awake.set()
        await asyncio.gather(*(self._start(replica) for replica in self._replicas))
        check_apart(self.config, [one.life.place for one in self._replicas if one.life])
        self._keepers = [asyncio.ensure_future(self._keep(replica)) for replica in self._replicas]

    async def _start(self, replica: Replica) -> None:
        """Start a new process with an engine."""
        timeout_s = self.config.start_timeout_s
        title = f"replica-{replica.rank}, start {replica.restarts}"
        replica.actor = self._launch(replica, title)
        try:
            async with asyncio.timeout(timeout_s):
                place = await replica.actor.start.remote(self.spec)
        except TimeoutError:
            late = f"was not up within {timeout_s:g} s (generation.start_timeout_s)"
            raise WorkerTimeout(f"{replica.name} {late}; its log is {replica.log}") from None
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise replica.died(str(error)) from None
        replica.life = Life(replica.actor, place, self._loop.create_future())
        self._notify()

    def _launch(self, replica: Replica, title: str) -> Any:
        """An actor in the replica's bundle."""
        placement, config = self._placement, self.config
        bundle = placement.bundles[replica.rank]
        variables = self.variables(config, self.spec.engine, cuda=self.cuda)
        environment: dict[str, Any] = {"env_vars": variables}
        if config.python is not None:
            environment["py_executable"] = config.python
        where = PlacementGroupSchedulingStrategy(
            placement.group, placement_group_bundle_index=placement.indices[replica.rank]
        )
        actor = ray.remote(self.actor).options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            max_concurrency=2 * config.max_batch_size + 100,
            scheduling_strategy=where,
            runtime_env=environment,
        )
        return actor.remote(str(replica.log), title)

    @staticmethod
    def variables(
        config: GenerationConfig, engine: Mapping[str, Any], *, cuda: bool
    ) -> dict[str, str]:
        """The environment of an engine's process."""
        level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
        threads = {"OMP_NUM_THREADS": str(config.cpus_per_replica)}
        eager = EAGER_VARIABLES if engine.get("enforce_eager", True) else {}
        own = {} if cuda else {**CPU_VARIABLES, **eager}
        return {**VARIABLES, "VLLM_LOGGING_LEVEL": level, **threads, **own}

    async def _keep(self, replica: Replica) -> None:
        """Replace the replica when it dies or hangs, until that has happened too often in a row."""
        while not replica.given_up:
            try:
                if replica.life is None:
                    await self._awake.wait()  # or it would take memory while the trainer needs it
                    begin = time.monotonic()
                    await self._start(replica)
                    seconds = time.monotonic() - begin
                    warnings.warn(
                        f"replica {replica.rank} is back after {seconds:.1f} s", stacklevel=1
                    )
                await self._watch(replica)
            except Exception as error:
                self._ended(replica, error)

    async def _watch(self, replica: Replica) -> None:
        """Raise what ends the replica: an error of its calls, or no progress for timeout_s."""
        life, before, idle = replica.life, -1, 0
        assert life is not None
        period = self.config.timeout_s / 4  # counted: the driver itself may be stopped for a while
        while True:
            await asyncio.wait([life.broken], timeout=period)
            if life.broken.done():
                raise life.broken.result()
            try:
                async with asyncio.timeout(period):
                    now = await life.actor.progress.remote()
                late = 0
            except TimeoutError:
                now, late = before, 1
            except RayError as error:
                raise replica.died(str(error)) from None
            idle = idle + 1 + late if now == before and life.open else 0
            before = now
            if idle >= 4:
                hangs = f"made no progress for {self.config.timeout_s:g} s (generation.timeout_s)"
                raise WorkerTimeout(f"{replica.name} {hangs}; its log is {replica.log}")

    def _ended(self, replica: Replica, error: Exception) -> None:
        """End what is left of the process; its prompts are sent to others."""
        place = replica.life.place if replica.life else None
        self._kill(replica)
        if isinstance(error, WorkerTimeout) and place and place.host == socket.gethostname():
            with suppress(ProcessLookupError):  # stopped, it can't do what Ray asks of it
                os.kill(place.pid, signal.SIGKILL)
        replica.deaths, replica.restarts = replica.deaths + 1, replica.restarts + 1
        replica.given_up = replica.deaths > self.config.max_restarts
        if not replica.given_up:
            warnings.warn(f"replica {replica.rank} is started again: {error}", stacklevel=1)
        else:
            told = (
                f"replica {replica.rank} has ended {replica.deaths} times in a row without"
                f" finishing a prompt (generation.max_restarts is {self.config.max_restarts}), the"
                f" last time because {error}"
            )
            if all(one.given_up for one in self._replicas):
                self._over = ChildProcessError(told)
            else:
                warnings.warn(f"the run goes on without it: {told}", stacklevel=1)
        self._dispatch()
        self._notify()

    def _kill(self, replica: Replica) -> None:
        replica.life = replica.version = None
        if replica.actor is not None:
            with suppress(Exception):  # Ray may be gone
                ray.kill(replica.actor)
        replica.actor = None

    def update_weights(self, weights: Weights, version: int) -> None:
        """Give all that are up these weights; the others get them before they are used.

        Raises what was wrong with them; then nothing can be generated until an update succeeds.
        """
        self._weights = list(weights) if iter(weights) is weights else weights
        self.version = version
        for one in self._replicas:
            one.version = None
        while not any(one.version == version for one in self._replicas):
            self._wait(lambda: self._stale() or self._over)
            if self._over:
                raise self._over
            self._supply()

    def _stale(self) -> list[Replica]:
        """The replicas that are up and lack the present weights."""
        return [
            one
            for one in self._replicas
            if (life := one.life) and not life.broken.done() and one.version != self.version
        ]

    def _supply(self) -> None:
        """Send the present weights to those that lack them. On the thread of the trainer."""
        while stale := {one.rank: one for one in self._stale()}:
            lives = {rank: one.life for rank, one in stale.items() if one.life}
            sender = WeightSender(
                actors={rank: life.actor for rank, life in lives.items()},
                places={rank: life.place for rank, life in lives.items()},
                expected=self._expected,
                dtype=getattr(torch, self.spec.dtype),
                transport=self.config.weight_transport,
                processes=self.config.tensor_parallel_size,
                timeout_s=self.config.timeout_s,
            )
            send = getattr(self._weights, "send", None)
            failed = sender(self._weights) if send is None else send(sender, dtype=sender.dtype)
            self._cluster.check()
            self._do(self._supplied(lives, failed))

    async def _supplied(self, lives: Mapping[int, Life], failed: Mapping[int, str]) -> None:
        """Note which replicas have new weights: all that were sent them, or none."""
        for rank, said in failed.items():
            lives[rank].breaks(self._replicas[rank].died(said))
        for rank, life in {} if failed else lives.items():
            if self._replicas[rank].life is life:
                self._replicas[rank].version = self.version
        self._dispatch()

    def sleep(self) -> None:
        """Give memory back, once all replicas are up: none may start and take memory while the
        trainer needs it.
        """
        if self.spec.sleep_level:
            self._wait(lambda: all(one.life or one.given_up for one in self._replicas))
            self._loop.call_soon_threadsafe(self._awake.clear)
            self._do(self._everywhere("sleep"))
            if self.spec.sleep_level == 2:
                for one in self._replicas:
                    one.version = None

    def wake(self) -> None:
        if self.spec.sleep_level:
            self._loop.call_soon_threadsafe(self._awake.set)
            self._do(self._everywhere("wake"))

    async def _everywhere(self, method: str) -> None:
        async def call(life: Life) -> None:
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    await getattr(life.actor, method).remote()
            except Exception as error:
                life.breaks(error)

        await asyncio.gather(*(call(one.life) for one in self._replicas if one.life))

    def metrics(self) -> dict[str, float]:
        """Return each replica's tokens, restarts and share of the time of generating in which it
        computed, since the last call.
        """
        measured: dict[str, float] = {}
        for one in self._replicas:
            name = f"replica_{one.rank}"
            measured[f"{name}/tokens"] = float(one.tokens)
            measured[f"{name}/restarts"] = float(one.restarts - one.reported)
            if self._seconds:
                measured[f"{name}/busy"] = min(1.0, one.busy_s / self._seconds)
                measured[f"{name}/tokens_per_second"] = one.tokens / self._seconds
            one.reported, one.tokens, one.busy_s = one.restarts, 0, 0.0
        self._seconds = 0.0
        return measured

    def shutdown(self) -> None:
        """End the engines and their processes. May be called again."""
        if self._loop.is_closed():
            return
        try:
            with suppress(Exception):  # the cluster may be gone
                self._do(self._end_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        finally:
            self._cluster.shutdown()
            if self._own_logs:
                shutil.rmtree(self._log_dir, ignore_errors=True)

    async def _end_all(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        ends = [one.life.actor.shutdown.remote() for one in self._replicas if one.life]
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await asyncio.gather(*ends, return_exceptions=True)
        for one in self._replicas:
            self._kill(one)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Have this done on the event loop, and wait for it."""
        job = asyncio.run_coroutine_threadsafe(work, self._loop)
        job.add_done_callback(lambda _: self._notify())
        try:
            self._wait(job.done)
            job.result()
        except BaseException:
            job.cancel()
            raise

    def _wait(self, condition: Callable[[], Any]) -> None:
        """Wait until it holds. Raises ClusterLost."""
        with self._changed:
            while not self._changed.wait_for(condition, TICK_S):
                self._cluster.check()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def check_apart(
    config: GenerationConfig, engines: Sequence[Place], own: Place | None = None
) -> None:
    """Raise a ValueError where engines that never sleep are on the GPU of this process, unless no
    GPU of this machine trains (`trainer_gpus` is 0).
    """
    if config.colocated or config.trainer_gpus == 0:
        return
    own = own or own_place()
    ours = any(one.node == own.node and set(one.gpus) & set(own.gpus) for one in engines)
    require(
        not ours,
        "generation.colocated",
        "must be true where a replica is on the trainer's GPU",
        False,
        "let trainer.device be the first GPU that Ray has here",
    )
