"""Programs that begin with torch and transformers imported.

`forked_python` makes a folder with a `python` and a `nemorl` that pass arguments, environment,
folder and standard streams to a server; a fork of that runs the module or script, and its exit
status is passed back. Signals are not passed on, and all forks have one seed of hashing.
`FORKED_FOR` is the process that was started, which a fork ends with.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIBRARIES = [
    *("torch.distributed.tensor", "torch.distributed.fsdp", "datasets"),
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
]
PRELOADED = [
    *LIBRARIES,
    "matplotlib.pyplot",
    "nemorl.runtime.cli.main",
    "nemorl.runtime.algorithms.sft",
    "nemorl.parallel.dtensor.backend",
]
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    environment = dict(os.environ, FORKED_FOR=str(os.getpid()))
    request = dict(arguments={first} + sys.argv[1:], folder=os.getcwd())
    request = json.dumps(dict(request, environment=environment)).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    code = int(server.makefile().read() or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def succeeded(
    *command: str | Path, cwd: Path = ROOT, timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with these variables besides; its exit code must be 0."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@contextmanager
def forked_python() -> Iterator[Path]:
    """A folder for PATH; its `python` knows `-m MODULE ARGUMENTS` and `SCRIPT ARGUMENTS`."""
    # Not below pytest's own, as the name of a socket may not be long.
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    address = str(folder / "socket")
    for name, first in {"python": [], "nemorl": ["-m", "nemorl"]}.items():
        client = CLIENT.format(python=sys.executable, address=address, first=first)
        (folder / name).write_text(client)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.forked", address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        try:
            yield folder
        finally:
            server.stdin.close()  # by which it knows, too, that this process has been killed
    shutil.rmtree(folder)


def reap() -> None:
    """Wait for the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def next_program(address: str) -> dict[str, Any]:
    """Returns in the process that is to run a program; the server ends with its standard input."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    # Waited for, so that their CPU time counts as that of the test.
    signal.signal(signal.SIGCHLD, lambda *_: reap())
    print("ready", flush=True)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return kept(client)
        client.close()


def kept(client: socket.socket) -> dict[str, Any]:
    """Fork the program, which returns, and say how it ended; it dies with its client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, _, _ = socket.recv_fds(client, 8, 3)
    request = b""
    while len(request) < int.from_bytes(length, "big"):
        request += client.recv(1 << 20)
    program = os.fork()
    if program == 0:
        client.close()
        for standard, stream in enumerate(streams):
            os.dup2(stream, standard)
            os.close(stream)
        return json.loads(request)
    for standard, stream in enumerate(streams):
        os.close(stream)
        os.close(standard)  # or whoever reads the server's own would wait for this process
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, client], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    client.sendall(str(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])).encode())
    os._exit(0)


def run(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """As `python ARGUMENTS`, but free nothing at the end, as memory would be copied for it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code: object = 0
    if arguments[0] == "-u":  # as torchrun has it
        del arguments[0]
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], folder
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collecting garbage would copy the memory that forks share
    run(**next_program(sys.argv[1]))
