"""The program of a rank that `LocalRankGroup` starts; its argument is the number of the descriptor
through which it talks to its driver.
"""

import os
import pickle
import queue
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any


def main(descriptor: int) -> None:
    """Do what comes through the pipe, one call after another on this thread, until the shutdown or
    the driver's end.
    """
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    hello = pickle.loads(connection.recv_bytes())
    sys.path[:] = hello["path"]  # what the driver can import this process can, too

    import torch

    from nemorl.runtime.cluster.worker_host import MARKER, start_guard
    from nemorl.runtime.ranks.processes import STATUS
    from nemorl.runtime.ranks.rank import BESIDE, TrainingRank
    from nemorl.runtime.ranks.wire import dumps, loads

    print(
        f"--- rank {hello['rank']} of {hello['size']}, process {os.getpid()} on"
        f" {socket.gethostname()}",
        flush=True,
    )
    start_guard(os.environ[MARKER])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = TrainingRank(lambda: loads(hello["backend"])(), hello["rank"], transport="shared_memory")
    calls: queue.SimpleQueue[tuple[int, str, bytes]] = queue.SimpleQueue()
    lock = threading.Lock()

    def answer(ticket: int, value: Any) -> None:
        try:
            data = dumps((ticket, value))
        except Exception as error:  # a result that can't be sent
            data = dumps((ticket, rank.refuse(error)))
        with lock:
            connection.send_bytes(data)

    def perform(ticket: int, method: str, payload: bytes, how: Any) -> None:
        try:
            args, kwargs = loads(payload)
        except Exception as error:
            answer(ticket, rank.refuse(error))
        else:
            answer(ticket, how(method, args, kwargs))

    def receive() -> None:
        try:
            while True:
                (ticket, method), payload = (
                    pickle.loads(connection.recv_bytes()),
                    connection.recv_bytes(),
                )
                if method == STATUS:
                    answer(ticket, rank.status())
                elif method in BESIDE:
                    threading.Thread(
                        target=perform, args=(ticket, method, payload, rank.beside), daemon=True
                    ).start()
                else:
                    calls.put((ticket, method, payload))
        finally:  # the driver is gone
            os._exit(1)

    threading.Thread(target=receive, name="receive", daemon=True).start()
    while True:
        ticket, method, payload = calls.get()
        perform(ticket, method, payload, rank.perform)
        if method == "shutdown":
            sys.stdout.flush()
            os._exit(0)  # nothing that a library does at exit may keep the others waiting


if __name__ == "__main__":
    main(int(sys.argv[1]))
