"""The driver's side of engines in Ray actors: a window of prompts for each, weights, restarts."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from nemorl.checks import require
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.cluster.connection import connect, release
from nemorl.runtime.cluster.placement import DRIVER, Bundle, RayVirtualCluster, ResourcesError
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.engines.actor import EngineActor
from nemorl.runtime.engines.engine import environment
from nemorl.runtime.engines.spec import EngineSpec, Place, Sample
from nemorl.runtime.engines.weights import WeightSender, expected_weights, own_place
from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout, death
from nemorl.runtime.run.temporary import temporary_folder
from nemorl.warn import warn

TICK_S = 0.5
"""How often a driver that waits looks for replicas without weights, and whether Ray is there."""
SHUTDOWN_S = 10.0
SHUT_DOWN = "the generation backend was shut down before it answered"

Weights = Iterable[tuple[str, Tensor]]
Request = tuple[tuple[int, ...], SamplingParams]
T = TypeVar("T")


@dataclass(eq=False)
class Life:
    """One process of a replica, from its start to its end."""

    replica: Replica
    actor: Any
    place: Place
    broken: asyncio.Future[Exception]
    """Why it has to be replaced."""
    version: int | None = None
    """Of its weights. None: it has none, or not all."""
    open: int = 0
    """Samples of prompts that it was given and has not answered."""
    partial: int = 0
    """How many of these are finished, as it said last."""
    busy_s: float = 0.0

    @property
    def unfinished(self) -> int:
        return self.open - self.partial if self.open else 0

    def breaks(self, error: Exception) -> None:
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
    deaths: int = 0
    """In a row, without an answer."""
    given_up: bool = False
    usage: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Tokens, restarts and busy seconds since the last metrics."""

    @property
    def name(self) -> str:
        where = f"process {self.life.place.pid} on {self.life.place.host}, " if self.life else ""
        return f"replica-{self.rank} ({where}log {self.log})"

    def died(self, said: str) -> WorkerDied:
        return death(self.name, said, self.log)


def engine_bundles(config: GenerationConfig, *, cuda: bool) -> dict[str, list[Bundle]]:
    """Return what engines, and the GPUs kept from them, take of a cluster."""
    gpus = config.tensor_parallel_size if cuda else 0
    cpus = config.cpus_per_replica * (1 if gpus else config.tensor_parallel_size)
    bundles = {"generation": [Bundle(cpus=cpus, gpus=gpus)] * config.num_replicas}
    if not cuda or config.colocated:
        return bundles
    # Ray hands GPUs out in order: the first ones are those that the trainer computes on.
    taken = 1 if config.trainer_gpus is None else config.trainer_gpus
    return {"trainer": [Bundle(cpus=0, gpus=1, node=DRIVER)] * taken, **bundles}


class Replicas:
    """Engines that share the prompts, follow the trainer's weights and outlive their processes.

    All state belongs to an event loop on a thread of its own; weights are sent from the threads of
    `generate`, `sample` and `update_weights`, the trainer's. What a replica had not answered when
    it died or hung is done by the others, with the same results: seeds belong to requests.
    """

    actor: type[EngineActor] = EngineActor

    def __init__(self, config: GenerationConfig, spec: EngineSpec) -> None:
        self.config, self.spec, self.cuda = config, spec, torch.cuda.is_available()
        self.version: int | None = None
        self._weights: Weights = ()
        self._over: ChildProcessError | None = None
        """All replicas have been given up."""
        self._keepers: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        """Requests in flight."""
        self._stopped: Exception | None = None
        """Why they are cancelled, if not by who made them."""
        self._asked: set[Future[Any]] = set()
        """Those that came by `sample`."""
        self._tended: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        """Callers' event loops that look after replicas."""
        self._seconds, self._since = 0.0, 0.0
        """With requests in flight; the last time that there were none."""
        self._turn, self._freed, self._awake = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._sending, self._admitting = threading.RLock(), asyncio.Event()
        self._awake.set()
        self._admitting.set()
        python = config.python
        found = python is None or shutil.which(python) is not None
        require(found, "generation.python", "must be an interpreter", python, "name one")
        transport = config.weight_transport
        works = self.cuda or transport not in ("cuda_ipc", "nccl")
        require(works, "generation.weight_transport", "needs GPUs", transport, "remove it")
        self._expected = expected_weights(spec.files["config.json"])
        self._cluster, self._placement = self._reserved()
        self._own_logs = ExitStack()
        log_dir = config.log_dir or self._own_logs.enter_context(temporary_folder())
        self._log_dir = Path(log_dir).absolute()
        ranks = range(config.num_replicas)
        self._replicas = [Replica(rank, self._log_dir / f"replica-{rank}.log") for rank in ranks]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True)
        self._thread.start()
        try:
            self._do(self._start_all())
            # On the trainer's thread: each thread has a current device of its own.
            check_apart(config, [life.place for life in self._lives()])
        except BaseException:
            self.shutdown()
            raise

    def generate(self, requests: Sequence[Request]) -> list[tuple[Sample, ...]]:
        """Return the samples of each request, in order. After an error nothing goes on."""
        self._supply()
        return self._do(self._sample_all(requests), meanwhile=self._supply)

    async def sample(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[Sample, ...]:
        """Return the samples of one prompt, for a task of any event loop."""
        future = asyncio.run_coroutine_threadsafe(self._sample(prompt, params), self._loop)
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        loop = asyncio.get_running_loop()
        if loop not in self._tended:
            self._tended.add(loop)
            loop.call_soon(self._tend, loop)
        return await asyncio.wrap_future(future)

    def _tend(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do on a caller's event loop now and then what `generate` does while it waits."""
        if not self._asked or self._loop.is_closed():
            self._tended.discard(loop)
            return
        try:
            self._cluster.check()
            self._supply_others()
        except Exception as error:
            asyncio.run_coroutine_threadsafe(self._stop(error), self._loop)
        loop.call_later(TICK_S, self._tend, loop)

    async def _sample(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[Sample, ...]:
        """Return the samples of one prompt, by whichever replica has room. On the event loop."""
        task = asyncio.current_task()
        assert task is not None
        if not self._tasks:
            self._since = time.monotonic()
        self._tasks.add(task)
        try:
            await self._admitting.wait()
            return await self._answer(prompt, params)
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            raise self._stopped from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._seconds += time.monotonic() - self._since
            self._freed.set()

    async def _answer(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[Sample, ...]:
        while True:
            life = await self._room(params.n)
            replica, call = life.replica, life.actor.sample.remote(prompt, params)
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
                replica.deaths = 0
                replica.usage["tokens"] += sum(len(one.token_ids) for one in answer.samples)
                replica.usage["busy_s"] += max(0.0, answer.busy_s - life.busy_s)
                life.partial, life.busy_s = answer.partial, max(life.busy_s, answer.busy_s)
                return answer.samples
            finally:
                life.open -= params.n
                self._freed.set()

    async def _sample_all(self, requests: Sequence[Request]) -> list[tuple[Sample, ...]]:
        tasks = [asyncio.ensure_future(self._sample(*request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _room(self, n: int) -> Life:
        """Wait in turn for a replica that decodes less than it could; take it for `n` samples."""
        async with self._turn:
            while not (able := list(filter(self._has_room, self._lives()))):
                if self._over:
                    raise self._over
                self._freed.clear()
                await self._freed.wait()
            life = min(able, key=lambda one: one.unfinished)
            life.open += n
            return life

    def _has_room(self, life: Life) -> bool:
        return life.version is not None and life.unfinished < self.config.max_batch_size

    def _lives(self) -> list[Life]:
        """Of the replicas that are up."""
        lives = [one.life for one in self._replicas if one.life]
        return [life for life in lives if not life.broken.done()]

    def _reserved(self) -> tuple[Any, Any]:
        """The cluster, and a bundle in it for each replica."""
        timeout_s = self.config.start_timeout_s
        connect(timeout_s=timeout_s, setting="generation.start_timeout_s")
        try:
            cluster = RayVirtualCluster(engine_bundles(self.config, cuda=self.cuda))
        except ResourcesError as error:
            text = f"generation.num_replicas is {self.config.num_replicas}: {error}"
            raise ResourcesError(text) from None
        finally:
            release()
        return cluster, cluster.placement("generation")

    async def _start_all(self) -> None:
        """Start all, or raise what was wrong with the first that failed."""
        await asyncio.gather(*(self._start(replica) for replica in self._replicas))
        self._keepers = [asyncio.ensure_future(self._keep(replica)) for replica in self._replicas]

    async def _start(self, replica: Replica) -> None:
        """Start a new process with an engine."""
        timeout_s = self.config.start_timeout_s
        actor = replica.actor = self._launch(replica)
        try:
            async with asyncio.timeout(timeout_s):
                place = await actor.start.remote(self.spec)
        except TimeoutError:
            late = f"was not up within {timeout_s:g} s (generation.start_timeout_s)"
            raise WorkerTimeout(f"{replica.name} {late}") from None
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise replica.died(str(error)) from None
        replica.life = Life(replica, actor, place, self._loop.create_future())

    def _launch(self, replica: Replica) -> Any:
        """An actor in the replica's bundle."""
        placement, config = self._placement, self.config
        bundle = placement.bundles[replica.rank]
        eager = self.spec.engine.get("enforce_eager", True)
        variables = environment(config.cpus_per_replica, eager=eager, cuda=self.cuda)
        runtime: dict[str, Any] = {"env_vars": variables}
        if config.python is not None:
            runtime["py_executable"] = config.python
        where = PlacementGroupSchedulingStrategy(
            placement.group, placement_group_bundle_index=placement.indices[replica.rank]
        )
        actor = ray.remote(self.actor).options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            max_concurrency=2 * config.max_batch_size + 100,
            scheduling_strategy=where,
            runtime_env=runtime,
        )
        return actor.remote(f"replica-{replica.rank}", str(replica.log))

    async def _keep(self, replica: Replica) -> None:
        """Replace the replica when it dies or hangs, until that has happened too often in a row."""
        while not replica.given_up:
            try:
                if replica.life is None:
                    await self._awake.wait()
                    begin = time.monotonic()
                    await self._start(replica)
                    seconds = time.monotonic() - begin
                    _tell(f"replica {replica.rank} is back after {seconds:.1f} s")
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
            works = life.open and life.version is not None and self._awake.is_set()
            idle = idle + 1 + late if now == before and works else 0
            before = now
            if idle >= 4:
                hangs = f"made no progress for {self.config.timeout_s:g} s (generation.timeout_s)"
                raise WorkerTimeout(f"{replica.name} {hangs}")

    def _ended(self, replica: Replica, error: Exception) -> None:
        """End what is left of the process; its prompts are sent to others."""
        self._kill(replica)
        reason = str(error) or repr(error)
        replica.deaths += 1
        replica.usage["restarts"] += 1
        replica.given_up = replica.deaths > self.config.max_restarts
        if not replica.given_up:
            _tell(f"replica {replica.rank} is started again: {reason}")
            return
        told = (
            f"replica {replica.rank} has ended {replica.deaths} times in a row without finishing a"
            f" prompt (generation.max_restarts is {self.config.max_restarts}), the last time"
            f" because {reason}"
        )
        if all(one.given_up for one in self._replicas):
            self._over = ChildProcessError(told)
            self._freed.set()
        else:
            _tell(f"the run goes on without it: {told}")

    def _kill(self, replica: Replica) -> None:
        replica.life = None
        if replica.actor is not None:
            with suppress(Exception):  # Ray may be gone
                ray.kill(replica.actor)
        replica.actor = None

    def update_weights(self, weights: Weights, version: int, in_flight: str = "keep") -> None:
        """Give all that are up these weights; the others get them before they are used.

        Raises what was wrong with them; then nothing can be generated until an update succeeds, and
        requests in flight fail.
        """
        try:
            if in_flight == "wait":
                self._do(self._drained(), meanwhile=self._supply_others)
            with self._sending:
                self._weights = list(weights) if iter(weights) is weights else weights
                self.version = version
                for life in self._lives():
                    life.version = None
            while not any(life.version == version for life in self._lives()):
                if self._over:
                    raise self._over
                if not self._supply():
                    self._pause()
        except BaseException as error:
            failed = f"an update of the weights failed while the request was in flight: {error}"
            with suppress(Exception):
                self._do(self._stop(RuntimeError(failed)))
            raise
        finally:
            self._loop.call_soon_threadsafe(self._admitting.set)

    async def _drained(self) -> None:
        """Wait for the requests in flight; new ones wait for the update."""
        self._admitting.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _stop(self, error: Exception) -> None:
        """End all requests in flight with an error."""
        self._stopped, tasks = error, list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stopped = None

    def _supply_others(self) -> None:
        """Send weights to replicas that came back. It may fail while others have them: where the
        trainer has gone on since, the next update is for all.
        """
        try:
            if self._awake.is_set():
                self._supply()
        except Exception:
            if not any(life.version == self.version for life in self._lives()):
                raise

    def _supply(self) -> bool:
        """Send the present weights to replicas that lack them; return whether there were any."""
        with self._sending:
            lives = {one.replica.rank: one for one in self._lives() if one.version != self.version}
            if lives:
                self._send(lives)
            return bool(lives)

    def _send(self, lives: Mapping[int, Life]) -> None:
        sender = WeightSender(
            actors={rank: life.actor for rank, life in lives.items()},
            places={rank: life.place for rank, life in lives.items()},
            expected=self._expected,
            dtype=getattr(torch, self.spec.dtype),
            transport=self.config.weight_transport,
            processes=self.config.tensor_parallel_size,
            timeout_s=self.config.timeout_s,
            version=self.version or 0,
        )
        send = getattr(self._weights, "send", None)
        failed = sender(self._weights) if send is None else send(sender, dtype=sender.dtype)
        self._cluster.check()
        self._do(self._supplied(lives, failed))

    async def _supplied(self, lives: Mapping[int, Life], failed: Mapping[int, str]) -> None:
        """Note which replicas have new weights: all that were sent them, or none."""
        for rank, said in failed.items():
            lives[rank].breaks(self._replicas[rank].died(said))
        for life in () if failed else lives.values():
            life.version = self.version
        self._freed.set()

    def sleep(self) -> None:
        """Give memory back; no replica may start and take memory meanwhile. Requests pause."""
        if self.spec.sleep_level:
            while not all(one.life or one.given_up for one in self._replicas):
                self._pause()
            self._loop.call_soon_threadsafe(self._awake.clear)
            self._do(self._everywhere("sleep"))
            if self.spec.sleep_level == 2:
                for life in self._lives():
                    life.version = None

    def wake(self) -> None:
        if self.spec.sleep_level:
            self._loop.call_soon_threadsafe(self._awake.set)
            self._do(self._everywhere("wake"))

    async def _everywhere(self, method: str) -> None:
        async def call(life: Life) -> None:
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    await life.actor.call.remote(method)
            except TimeoutError:
                late = f"{method} took more than {self.config.timeout_s:g} s (generation.timeout_s)"
                life.breaks(WorkerTimeout(f"{life.replica.name}: {late}"))
            except Exception as error:
                life.breaks(error)

        await asyncio.gather(*map(call, self._lives()))

    def metrics(self) -> dict[str, float]:
        """Return each replica's tokens, restarts and busy share of the time since the last call."""
        measured: dict[str, float] = {}
        now = time.monotonic()
        seconds = self._seconds + (now - self._since if self._tasks else 0.0)
        for one in self._replicas:
            name = f"replica_{one.rank}"
            measured[f"{name}/tokens"] = one.usage["tokens"]
            measured[f"{name}/restarts"] = one.usage["restarts"]
            if seconds:
                measured[f"{name}/busy"] = min(1.0, one.usage["busy_s"] / seconds)
                measured[f"{name}/tokens_per_second"] = one.usage["tokens"] / seconds
            one.usage.clear()
        self._seconds, self._since = 0.0, now
        return measured

    def shutdown(self) -> None:
        """End the engines and their processes. May be called again."""
        if self._loop.is_closed():
            return
        try:
            with suppress(Exception):  # the cluster may be gone
                self._do(self._stop(RuntimeError(SHUT_DOWN)))
                self._do(self._end_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        finally:
            self._cluster.shutdown()
            self._own_logs.close()

    async def _end_all(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        ends = [life.actor.call.remote("shutdown") for life in self._lives()]
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await asyncio.gather(*ends, return_exceptions=True)
        for one in self._replicas:
            self._kill(one)

    def _do(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], Any] | None = None) -> T:
        """Have this done on the event loop, and return its result. Raises ClusterLost."""
        job = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not wait([job], TICK_S).done:
                self._cluster.check()
                if meanwhile is not None:
                    meanwhile()
            return job.result()
        except BaseException:
            job.cancel()
            raise

    def _pause(self) -> None:
        time.sleep(TICK_S)
        self._cluster.check()


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


def _tell(message: str) -> None:
    """Warn, also where warnings are errors: these would end the keeper of a replica."""
    with suppress(Warning):
        warn(message)
