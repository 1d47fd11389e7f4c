"""Functions run on several ranks: real processes with a real gloo process group, forked from a
server that has the imports behind it.
"""

import contextlib
import multiprocessing as mp
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOADED = [
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "nemorl.parallel.dtensor.backend",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300,
    process_group: bool = True,
) -> list[Any]:
    """`function(*args)` on ranks 0 … size − 1, each a process with RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT and, with `process_group`, torch.distributed initialised with gloo;
    the results in the order of ranks.

    `function` must be importable (defined at the top of a module). Raises AssertionError with the
    tracebacks of the ranks that fail, or that are not done within the time; all of them are ended
    then.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, pipes, processes = free_port(), [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank,
            args=(rank, size, port, process_group, theirs, function, args),
            daemon=False,
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _results(pipes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(pipes: list[Connection], timeout_s: float) -> list[Any]:
    deadline, results, left = time.monotonic() + timeout_s, {}, dict(enumerate(pipes))
    while left:
        ready = wait(list(left.values()), max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(left)} were not done within {timeout_s:g} s"
        for rank in [rank for rank, pipe in left.items() if pipe in ready]:
            try:
                kind, value = pickle.loads(left.pop(rank).recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert kind == "value", f"rank {rank}:\n{value}"
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _rank(
    rank: int,
    size: int,
    port: int,
    process_group: bool,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), OMP_NUM_THREADS="1")  # fmt: skip
    torch.set_num_threads(1)
    try:
        if process_group:
            dist.init_process_group("gloo")
        pipe.send_bytes(
            pickle.dumps(("value", function(*args)))
        )  # not send(): it would only pass on where tensors lie
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    finally:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()  # until all are done: rank 0 has the store through which the others may still be finding each other
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing that a library does at exit may keep the others waiting
