"""Engines in processes of their own, which Ray places: they share the work, take new weights
together, and are replaced when they die or hang.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait as wait_for_starts
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemorl.checks import require
from nemorl.runtime.cluster.placement import (
    DRIVER,
    Bundle,
    ClusterLost,
    RayVirtualCluster,
    ResourcesError,
)
from nemorl.runtime.cluster.workers import Pending, RayWorkerGroup, WorkerTimeout, wait
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.engines.balance import Balance, Group, Theft
from nemorl.runtime.engines.replica import Replica
from nemorl.runtime.engines.spec import EngineSpec, Request, Sample
from nemorl.runtime.engines.weight_buckets import expected_weights
from nemorl.runtime.engines.weight_transport import WeightSender, choose_transport
from nemorl.runtime.engines.weights import HUGE_PAGES
from nemorl.runtime.engines.worker import Progress

TICK_S = 0.25
"""How often the driver looks after the replicas while nothing is finished."""
ABORT_S = 10.0
VERSIONS = ">=0.32,<0.34"
"""Of vLLM, where the replicas' interpreter is not the trainer's; the same as in pyproject.toml."""
WORKER = "nemorl.runtime.engines.worker:VLLMWorker"

Weights = Iterable[tuple[str, Tensor]]


class Replicas:
    """What generates for the backend where `config.num_replicas` is positive.

    What a replica had not finished when it died or hung is done by the others, with the same
    results, for seeds belong to requests. It starts again in the background, and gets the weights
    of the last update, which should therefore be iterable more than once. All of this is told in
    warnings.
    """

    def __init__(self, config: GenerationConfig, spec: EngineSpec) -> None:
        self.config, self.cuda = config, torch.cuda.is_available()
        self.spec = spec
        self.version: int | None = None
        self._weights: Weights = ()
        self._again, self._asleep = False, False
        self._round, self._seconds, self._looked = 0, 0.0, 0.0
        self._calls: dict[Pending, tuple[Replica, str, Callable[[Any], None]]] = {}
        self._replicas: list[Replica] = []
        self._group: RayWorkerGroup | None = None
        self._sender: WeightSender | None = None
        python = None
        if config.python is not None:
            from nemorl.runtime.cluster.worker_python import check_python, resolve_python

            python = resolve_python(config.python, field="generation.python")
            assert python is not None
            check_python(
                python,
                {"torch": None, "transformers": None, "vllm": VERSIONS},
                field="generation.python",
            )
        gpus = config.tensor_parallel_size if self.cuda else 0
        cpus = config.cpus_per_replica * (1 if gpus else config.tensor_parallel_size)
        # Ray gives GPUs away in their order: the first ones, which the trainer computes on, are set
        # aside where the engines are to have others.
        taken = (
            (1 if config.trainer_gpus is None else config.trainer_gpus)
            if self.cuda and not config.colocated
            else 0
        )
        apart = {"trainer": [Bundle(cpus=0, gpus=1, node=DRIVER)] * taken} if taken else {}
        try:
            self._cluster = RayVirtualCluster(
                {**apart, "generation": [Bundle(cpus=cpus, gpus=gpus)] * config.num_replicas}
            )
        except ResourcesError as error:
            raise ResourcesError(
                f"generation.num_replicas is {config.num_replicas}, of {cpus} CPUs and {gpus} GPUs"
                f" each: {error}"
            ) from None
        try:
            self._start(python)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, python: str | None) -> None:
        config = self.config
        self._group = RayWorkerGroup(
            self._cluster.placement("generation"),
            WORKER,
            env={
                "OMP_NUM_THREADS": str(config.cpus_per_replica),
                **({} if self.cuda else HUGE_PAGES),
            },
            python=python,
            max_concurrency=8,
            log_dir=None if config.log_dir is None else Path(config.log_dir),
            name="replica",
            start_timeout_s=config.start_timeout_s,
        )
        transport = choose_transport(config.weight_transport, cuda=self.cuda, **self._places())
        self._sender = WeightSender(
            expected_weights(self.spec.files["config.json"]),
            dtype=getattr(torch, self.spec.dtype),
            transport=transport,
            processes=config.tensor_parallel_size,
            timeout_s=config.timeout_s,
        )
        self.spec = replace(
            self.spec, weight_transport={"cuda_ipc": "ipc", "nccl": "nccl"}.get(transport)
        )
        self._replicas = [Replica(self._group, rank) for rank in range(config.num_replicas)]
        for one in self._replicas:
            one.begin(self.spec, config.start_timeout_s)
        for one in self._replicas:
            while one.starting is not None and not one.starting.done():
                self._cluster.check()
                wait_for_starts([one.starting], timeout=TICK_S)
            one.joined()

    def _places(self) -> dict[str, bool]:
        """Where the replicas are, seen from the trainer: on its machine, on its GPU, or all on
        other GPUs.
        """
        assert self._group is not None
        nodes = [self._group.info(rank).node for rank in range(len(self._group))]
        here, own, theirs = self._cluster.driver_node, "", [""] * len(nodes)
        if self.cuda:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            own = (
                visible.split(",")[torch.cuda.current_device()]
                if visible
                else str(torch.cuda.current_device())
            )
            theirs = self._group.run_all("devices", timeout_s=self.config.start_timeout_s)
        on_ours = self.cuda and any(
            node == here and own in devices.split(",")
            for node, devices in zip(nodes, theirs, strict=True)
        )
        check_apart(self.config, on_ours=on_ours)
        same = all(node == here for node in nodes)
        return {
            "same_machine": same,
            "one_gpu": same and theirs == [own] * len(nodes),
            "separate_gpus": not on_ours,
        }

    def generate(self, requests: Sequence[Request]) -> Mapping[int, tuple[Sample, ...]]:
        start = self._looked = time.monotonic()
        self._round += 1
        work = {request.id: request for request in requests}
        groups = [
            Group(
                id=r.id,
                samples=r.params.n,
                tokens=len(r.prompt) + r.params.n * r.params.max_new_tokens,
            )
            for r in requests
        ]
        balance = Balance(groups, replicas=[], max_batch_size=self.config.max_batch_size)
        samples: dict[int, tuple[Sample, ...]] = {}
        try:
            while balance.unfinished:
                self._tend(balance)
                self._give(balance, work)
                self._take(balance, work, samples)
        except BaseException:
            self._abort()
            raise
        self._seconds += time.monotonic() - start
        return samples

    def _tend(self, balance: Balance) -> None:
        """Look after the replicas: who has come back gets the weights and joins in, who does
        nothing any more is replaced.
        """
        self._cluster.check()
        now = time.monotonic()
        away, self._looked = max(0.0, now - self._looked - 2 * TICK_S), now
        for replica in self._replicas:
            replica.seen += away  # of the driver, which was stopped, or busy with another replica
            self._welcome(replica, balance)
            if replica.life is not None and replica.version is None and self._again:
                for error in self._send([replica]).values():
                    self._ended(replica, error, balance)
            if (
                replica.life is not None
                and replica.version is not None
                and replica.rank not in balance.shares
            ):
                balance.joined(replica.rank)
                replica.seen = time.monotonic()
            if replica.rank in balance.shares and not balance.shares[replica.rank].groups:
                replica.seen = time.monotonic()
            elif replica.rank in balance.shares and now - replica.seen > self.config.timeout_s:
                self._ended(replica, _hung(replica, self.config.timeout_s), balance)
        if not balance.shares and not any(replica.starting for replica in self._replicas):
            raise RuntimeError(
                f"no replica has the weights of version {self.version} any more, and they could be"
                " read only once: give update_weights() weights that can be iterated again, as"
                " sync_weights() does"
            )

    def _give(self, balance: Balance, work: Mapping[int, Request]) -> None:
        for rank, groups in balance.assign().items():
            self._submit(self._replicas[rank], groups, work)
        while theft := balance.steal():
            ids = [group.id for group in theft.groups]
            self._call(
                self._replicas[theft.victim],
                "recall",
                partial(self._recalled, balance, work, theft),
                ids,
            )
        for rank, share in balance.shares.items():
            if share.groups and not any(
                of.rank == rank and method != "recall" for of, method, _ in self._calls.values()
            ):
                self._call(self._replicas[rank], "poll", lambda progress: None, 4 * TICK_S)

    def _take(
        self, balance: Balance, work: Mapping[int, Request], samples: dict[int, tuple[Sample, ...]]
    ) -> None:
        """Wait for answers, and for replicas that start."""
        if not self._calls:
            wait_for_starts(
                [replica.starting for replica in self._replicas if replica.starting is not None],
                timeout=TICK_S,
            )
            return
        for pending in wait(list(self._calls), TICK_S)[0]:
            if pending not in self._calls:
                continue  # of a replica that has died meanwhile
            replica, _, then = self._calls.pop(pending)
            try:
                answer = pending.result(timeout_s=self.config.timeout_s)
            except (ValueError, FloatingPointError, ClusterLost):
                raise
            except Exception as error:
                self._ended(replica, error, balance)
                continue
            then(answer)
            if isinstance(answer, Progress):
                replica.advanced(answer)
                samples.update(
                    {
                        done.id: done.samples
                        for done in answer.finished
                        if balance.finished(replica.rank, done.id)
                    }
                )

    def _submit(
        self, replica: Replica, groups: Sequence[Group], work: Mapping[int, Request]
    ) -> None:
        self._call(replica, "submit", lambda nothing: None, [work[group.id] for group in groups])

    def _recalled(
        self, balance: Balance, work: Mapping[int, Request], theft: Theft, dropped: list[int]
    ) -> None:
        if groups := balance.recalled(theft, dropped):
            self._submit(self._replicas[theft.thief], groups, work)

    def _call(self, replica: Replica, method: str, then: Callable[[Any], None], *args: Any) -> None:
        assert replica.life is not None
        self._calls[replica.life.start(method, self._round, *args)] = (replica, method, then)

    def _abort(self) -> None:
        """End what is under way, in bounded time.

        A replica that doesn't answer is found out when it is used next.
        """
        self._round += 1
        self._calls.clear()
        deadline, calls = time.monotonic() + ABORT_S, []
        with suppress(Exception):
            for life in [replica.life for replica in self._replicas if replica.life is not None]:
                calls.append(life.start("abort", self._round))
        for call in calls:
            with suppress(Exception):
                call.result(timeout_s=max(0.0, deadline - time.monotonic()))

    def update_weights(self, weights: Weights, version: int) -> None:
        """Those that are up have the weights afterwards, and those that start get them before they
        are used. Raises what was wrong with them.
        """
        self._weights, self.version, self._again = weights, version, iter(weights) is not weights
        for one in self._replicas:
            one.version = None
        while not any(one.version == version for one in self._replicas):
            self._wait_until(lambda: any(one.life is not None for one in self._replicas))
            failed = self._send([one for one in self._replicas if one.life is not None])
            for rank, error in failed.items():
                if isinstance(error, ValueError | ClusterLost):
                    raise error
                self._ended(self._replicas[rank], error)
            if (
                failed
                and not self._again
                and not any(one.version == version for one in self._replicas)
            ):
                raise next(iter(failed.values()))

    def _send(self, replicas: Sequence[Replica]) -> dict[int, Exception]:
        """Give these the present weights; by rank, what went wrong with whom."""
        assert self._sender is not None
        failed = self._sender.send(
            self._weights, [one.life for one in replicas if one.life is not None]
        )
        self._cluster.check()
        for index, one in enumerate(replicas):
            one.version = None if index in failed else self.version
        return {replicas[index].rank: error for index, error in failed.items()}

    def _wait_until(self, enough: Callable[[], bool]) -> None:
        """Take back those that start again until there are enough."""
        while True:
            self._cluster.check()
            for one in self._replicas:
                self._welcome(one)
            if enough():
                return
            wait_for_starts(
                [one.starting for one in self._replicas if one.starting is not None], timeout=TICK_S
            )

    def _welcome(self, replica: Replica, balance: Balance | None = None) -> None:
        """Take back one that has started again."""
        if replica.starting is None or not replica.starting.done():
            return
        try:
            replica.joined()
        except Exception as error:
            self._ended(replica, error, balance)
        else:
            warnings.warn(
                f"replica {replica.rank} is back after {time.monotonic() - replica.began:.1f} s",
                stacklevel=4,
            )

    def _ended(self, replica: Replica, error: Exception, balance: Balance | None = None) -> None:
        """Replace one that has died, hangs or can't go on; where that has happened too often in a
        row, go on without it.

        Raises ChildProcessError if it was the last one.
        """
        self._cluster.check()
        lost = [] if balance is None else balance.lost(replica.rank)
        self._calls = {
            pending: call for pending, call in self._calls.items() if call[0] is not replica
        }
        replica.ended()
        if replica.deaths > self.config.max_restarts:
            times = (
                f"{replica.deaths} times in a row without finishing a prompt"
                f" (generation.max_restarts is {self.config.max_restarts})"
            )
            told = f"replica {replica.rank} has ended {times}, the last time because {error}"
            if not any(one.life is not None for one in self._replicas):
                raise ChildProcessError(told) from error
            replica.given_up = True
            warnings.warn(f"the run goes on without it: {told}", stacklevel=4)
            return
        who = "the others" if any(one.life is not None for one in self._replicas) else "it"
        prompts = f", and {who} will do the {len(lost)} prompts that it had" if lost else ""
        warnings.warn(f"replica {replica.rank} is started again{prompts}: {error}", stacklevel=4)
        if not self._asleep:
            replica.begin(self.spec, self.config.start_timeout_s)

    def sleep(self) -> None:
        """Give memory back.

        Where that is asked for, all are up first: none may start, and take memory, while the
        trainer needs it.
        """
        if not self.spec.sleep_level:
            return
        self._wait_until(lambda: all(one.starting is None for one in self._replicas))
        self._asleep = True
        self._everywhere("sleep")
        if self.spec.sleep_level == 2:
            for one in self._replicas:
                one.version = None

    def wake(self) -> None:
        if not self.spec.sleep_level:
            return
        self._asleep = False
        self._everywhere("wake")
        for one in self._replicas:
            if one.life is None and one.starting is None and not one.given_up:
                one.begin(self.spec, self.config.start_timeout_s)

    def _everywhere(self, method: str) -> None:
        calls = [(one, one.life.start(method)) for one in self._replicas if one.life is not None]
        for one, call in calls:
            try:
                call.result(timeout_s=self.config.timeout_s)
            except Exception as error:
                self._ended(one, error)

    def metrics(self) -> dict[str, float]:
        """Of each replica, since this was last asked: its share of the time of generating, its
        tokens, and how often it was started again.
        """
        seconds, self._seconds = self._seconds, 0.0
        measured: dict[str, float] = {}
        for one in self._replicas:
            name, (tokens, busy_s, restarts) = f"replica_{one.rank}", one.measured()
            measured |= {f"{name}/tokens": float(tokens), f"{name}/restarts": float(restarts)}
            if seconds:
                measured |= {
                    f"{name}/busy": min(1.0, busy_s / seconds),
                    f"{name}/tokens_per_second": tokens / seconds,
                }
        return measured

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        self._cluster.shutdown()
        if self._sender is not None:
            self._sender.close()


def check_apart(config: GenerationConfig, *, on_ours: bool) -> None:
    """Raise a ValueError where engines that never make room are on the GPU of this process, and it
    may be one that trains: see trainer_gpus.
    """
    fits = config.colocated or not on_ours or config.trainer_gpus == 0
    require(fits, "generation.colocated", "must be true where a replica is on the trainer's GPU", False,
            "let trainer.device be the first GPU that Ray has here")  # fmt: skip


def _hung(replica: Replica, timeout_s: float) -> WorkerTimeout:
    info = replica.group.info(replica.rank)
    process = f"replica-{replica.rank} (process {info.pid} on {info.host})"
    return WorkerTimeout(
        f"{process} made no progress for {timeout_s:g} s (generation.timeout_s); its log is"
        f" {info.log}"
    )
