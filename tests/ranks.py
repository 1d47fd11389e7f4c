"""Functions run on several ranks: real processes with a real gloo process group, forked from a
server, and kept for the next functions.
"""

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = [
    "peft",
    "nemorl.parallel.dtensor.backend",
    "nemorl.parallel.dtensor.tensor_parallel",
    "megatron.core.optimizer",
    "megatron.core.models.gpt",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "mistral", "qwen2")),
    "transformers.models.qwen3.modeling_qwen3",
]


def held_port() -> socket.socket:
    """Bind a free port that rank 0 alone can listen on."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


PR_SET_PDEATHSIG = 1
USES = 4
"""Functions that the same processes run: each leaves groups behind, whose threads poll."""


class Ranks:
    """Processes that run one function after the other, in the same process group.

    Between two functions they are stopped: threads of gloo would poll.
    """

    def __init__(self, size: int, process_group: bool) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.held, self.uses = held_port(), 0
        port = self.held.getsockname()[1]
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # what each rank prints to stderr
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, port, process_group, theirs, self.folder)
            process = context.Process(target=_serve, args=args, daemon=False)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple, timeout_s: float) -> list[Any]:
        self.signal(signal.SIGCONT)
        for pipe in self.pipes:
            with suppress(OSError):  # of a dead one, about which `death` tells more
                pipe.send((Path.cwd(), function, args))
        deadline, left = time.monotonic() + timeout_s, dict(enumerate(self.pipes))
        results: dict[int, Any] = {}
        while left:
            ready = wait(list(left.values()), max(0.0, deadline - time.monotonic()))
            late = f"ranks {sorted(left)} were not done within {timeout_s:g} s"
            assert ready, f"{late}:\n" + "\n".join(map(self.stuck, sorted(left)))
            for rank in [rank for rank, pipe in left.items() if pipe in ready]:
                try:
                    kind, value = pickle.loads(left.pop(rank).recv_bytes())
                except (EOFError, OSError):
                    raise AssertionError(self.death(rank)) from None
                assert kind == "value", f"rank {rank}:\n{value}"
                results[rank] = value
        self.signal(signal.SIGSTOP)
        return [results[rank] for rank in sorted(results)]

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def stuck(self, rank: int) -> str:
        """End a rank, which writes where its threads are."""
        os.kill(self.processes[rank].pid, signal.SIGABRT)
        return self.death(rank)

    def death(self, rank: int) -> str:
        self.processes[rank].join(10)
        log, said = self.folder / str(rank), "nothing, before it opened its log: see stderr"
        if log.exists():
            said = log.read_text(errors="replace")[-8000:]
        return f"rank {rank} died with exit code {self.processes[rank].exitcode}: {said}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.held.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_KEPT: dict[int, Ranks] = {}


def _end() -> None:
    while _KEPT:
        _KEPT.popitem()[1].kill()


atexit.register(_end)


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300,
    process_group: bool = True,
    fresh: bool = False,
) -> list[Any]:
    """`function(*args)` on ranks 0 … size − 1, each a process with torchrun's variables and, with
    `process_group`, torch.distributed on gloo; the results in the order of ranks.

    The processes are kept for the next calls, unless `fresh`. Raises AssertionError with the
    traceback of a rank that fails or is late.
    """
    fresh = fresh or not process_group
    ranks = (None if fresh else _KEPT.pop(size, None)) or Ranks(size, process_group)
    try:
        found = ranks.run(function, args, timeout_s)
    except BaseException:
        ranks.kill()
        raise
    ranks.uses += 1
    if fresh or ranks.uses == USES:
        ranks.kill()
    else:
        _KEPT[size] = ranks
    return found


def _serve(
    rank: int, size: int, port: int, process_group: bool, pipe: Connection, folder: Path
) -> None:
    # The server and its ranks end with the tests' process.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with (folder / str(rank)).open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    faulthandler.enable(2)
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        while True:
            request = pipe.recv_bytes()
            try:
                folder, function, args = pickle.loads(request)
                os.chdir(folder)
                if process_group and not dist.is_initialized():
                    on_gpu = os.environ.get("NEMORL_TEST_DEVICE") == "cuda"
                    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
                torch.manual_seed(0)
                # Not send(): it would only pass on where tensors lie.
                pipe.send_bytes(pickle.dumps(("value", function(*args))))
            except BaseException:
                pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
            gc.collect()
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # whatever libraries do at exit
