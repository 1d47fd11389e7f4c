"""Ranks that torchrun has started: rank 0 runs the loop and computes, the others obey it.

An error in any of them ends its process. torchrun then ends the others, says which one failed
first, and starts all again if it may; the run resumes from its last checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist

from nemorl.checks import require
from nemorl.parallel.world import start_process_group
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.ranks.rank import BACKGROUND, Answer, Coordinates, Rank, dumps, loads

PATIENCE = timedelta(days=7)
"""Followers wait for as long as rank 0 generates or loads data."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TorchrunRanks:
    def __init__(self, make: Callable[[], Any], size: int, config: BaseConfig) -> None:
        self._calls, self._done, self._background = _groups(config)
        require(size == dist.get_world_size(), "parallel",
                f"must ask for the {dist.get_world_size()} processes that torchrun has started",
                size, "change a degree, or --nproc-per-node")  # fmt: skip
        self._rank, self._lock, self._usable = Rank(make, 0), threading.Lock(), True

    def call(
        self,
        method: str,
        payload: list[Any],
        phase: str,
        parts: Mapping[Coordinates, list[Any]] = {},
    ) -> Answer:
        """As `RayRanks.call`. Any error ends the ranks' use."""
        args, kwargs = loads(payload)
        if method in BACKGROUND:
            with self._lock:
                _broadcast(self._calls, (method, payload, False))
            return _together(self._background, self._rank, method, args, kwargs)
        with signals_held(), self._lock:
            try:
                _broadcast(self._calls, (method, payload, bool(parts)))
                fetch = partial(_own_part, self._calls, parts) if parts else None
                value = self._rank.do(method, args, kwargs, fetch)
                dist.barrier(self._done)
            except Exception:
                self._usable = False
                raise
        return Answer(value, None, self._rank.step)

    def shutdown(self, timeout_s: float, result: Any = None) -> None:
        """End the others in order, with the run's result, unless there was an error."""
        with self._lock:  # the call of another thread ends first
            if self._usable:
                _broadcast(self._calls, ("shutdown", dumps(((), {"result": result})), False))
            self._usable = False
            self._rank.do("shutdown", (), {})


def follow(make: Callable[[], Any], config: BaseConfig) -> Any:
    """Do what rank 0's trainer does until it shuts down, and return the result of rank 0's run.

    Where that failed the process ends quietly: rank 0 says why. SIGINT and SIGTERM are left to rank
    0, which finishes its step and saves.
    """
    calls, done, background = _groups(config)
    rank = Rank(make, dist.get_rank())
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        while True:
            method, payload, has_parts = _broadcast(calls)
            args, kwargs = loads(payload)
            if method == "shutdown":
                rank.do("shutdown", (), {})
                if kwargs["result"] is None:
                    raise SystemExit(0)
                return kwargs["result"]
            if method in BACKGROUND:
                work = (background, rank, method, args, kwargs)
                threading.Thread(target=_together, args=work, daemon=True).start()
                continue
            rank.do(method, args, kwargs, partial(_own_part, calls, None) if has_parts else None)
            dist.barrier(done)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _together(group: dist.ProcessGroup, rank: Rank, method: str, args: Any, kwargs: Any) -> Answer:
    """Do a call in the background; the answer has an error if any rank has one."""
    own = rank.perform(method, args, kwargs)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own.error, group=group)
    return replace(own, error=next(filter(None, errors), None))


def _groups(config: BaseConfig) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of calls, of ranks that are done, and of what runs in the background."""
    seconds = max(config.runtime.timeout_s, config.runtime.start_timeout_s)
    limit = timedelta(seconds=seconds)  # a rank that hangs ends the others' collectives
    start_process_group(config.trainer.device, timeout=limit)
    times = (PATIENCE, limit, PATIENCE)
    return tuple(dist.new_group(backend="gloo", timeout=time) for time in times)


def _broadcast(group: dist.ProcessGroup, message: Any = None) -> Any:
    found = [message]
    dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


def _own_part(
    group: dist.ProcessGroup, parts: Mapping[Coordinates, list[Any]] | None, where: Coordinates
) -> Any:
    """Rank 0 has the parts, and sends them. A collective call."""
    ranks, found = list[Any]([None] * dist.get_world_size()), list[Any]([None])
    dist.gather_object(where, None if parts is None else ranks, dst=0, group=group)
    sent = None if parts is None else [parts[other] for other in ranks]
    dist.scatter_object_list(found, sent, src=0, group=group)
    return loads(found[0])


@contextmanager
def signals_held() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM after the block: the others are inside the same call."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: dict[int, None] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        held[number] = None

    before = {number: signal.signal(number, hold) for number in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for late in held:
            signal.raise_signal(late)
