"""Run pytest in a process that has torch and transformers imported: `make t T=tests/losses`.

The first call starts a server, which ends by itself after four hours; every call is a fork of it
that imports nemorl and the tests as they are now.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.forked import CLIENT, LIBRARIES, ROOT, next_program, run

SOCKET = Path(sys.prefix) / ".warm"
PRELOADED = ["pytest", "pydantic", "tyro", "rich.console", *LIBRARIES]
SERVER_S = 4 * 3600


def serve() -> None:
    """Import what tests share, then run a program for each client until the time is over."""
    SOCKET.unlink(missing_ok=True)
    os.dup2(os.pipe()[0], 0)  # the end of the standard input would be the server's end
    for name in PRELOADED:
        __import__(name)
    signal.alarm(SERVER_S)
    run(**next_program(str(SOCKET)))


def start() -> None:
    """Start the server where none answers, and wait until it does."""
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(SOCKET)) == 0:
            return
    command = [sys.executable, "-m", "tests.warm", "--serve"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        sys.exit("the server of warm processes did not start: python -m tests.warm --serve")


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    start()
    first = ["-m", "pytest", "-n", "0", "--rootdir", str(ROOT)]
    program = CLIENT.format(python=sys.executable, address=str(SOCKET), first=first)
    # Torch is there before nemorl can say how its threads wait (nemorl/openmp.py).
    environment = os.environ | {"GOMP_SPINCOUNT": "1000"}
    code = program.partition("\n")[2]
    os.execve(sys.executable, [sys.executable, "-c", code, *sys.argv[1:]], environment)
