"""The process of a worker: it keeps its own log, takes its children along when it dies, and hosts
an object of any class.

Runs in the worker's own environment, so it needs nothing but Python.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

MARKER = "NEMORL_WORKER"
"""Variable that every process of a worker is born with, by which they are found again, whatever has
become of their parents.
"""


class Host:
    """One object of the class `target`, made by `start`, whose methods `call` calls."""

    def __init__(self, log: str, title: str) -> None:
        if os.getpgrp() != os.getpid():  # Ray does it, but not in every version
            os.setpgid(0, 0)
        _redirect_output(Path(log))
        print(f"--- {title}, process {os.getpid()} on {socket.gethostname()}", flush=True)
        start_guard(os.environ[MARKER])
        self.target: Any = None

    def place(self) -> tuple[str, Any]:
        """Process id and when it began, host, the id of Ray's node, and a port that is free here."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return "value", (
                os.getpid(),
                began(os.getpid()),
                socket.gethostname(),
                node,
                probe.getsockname()[1],
            )

    def start(
        self, env: Mapping[str, str], target: str, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[str, Any]:
        """Make the target, with the variables of the rendezvous set."""

        def make() -> None:
            module, _, name = target.partition(":")
            self.target = getattr(import_module(module), name)(*args, **kwargs)

        os.environ.update(env)
        return guarded(make)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        """("value", what the method returns), or ("error", what it raised in words: its class may not exist where it is read)."""
        return guarded(lambda: getattr(self.target, method)(*args, **kwargs))

    def stop(self) -> tuple[str, Any]:
        """Let the target end in its own way, if it has one."""
        return guarded(getattr(self.target, "shutdown", lambda: None))


def guarded(function: Callable[[], Any]) -> tuple[str, Any]:
    """("value", what the function returns), or ("error", what it raised in words), which goes into the log, too."""
    try:
        return "value", function()
    except BaseException as error:
        words = in_words(error)
        print(words["traceback"], file=sys.stderr, flush=True)
        return "error", words


def in_words(error: BaseException) -> dict[str, str]:
    """An exception for a process in which its class may not exist."""
    builtin = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    text = "".join(traceback.format_exception(error))
    return {
        "kind": type(error).__name__,
        "builtin": builtin,
        "message": str(error),
        "traceback": text,
    }


def began(pid: int) -> int:
    """When a process of this machine began, in the kernel's ticks; 0 if there is none.

    Ids are used again, both together are not.
    """
    with contextlib.suppress(OSError):
        return int(
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[19]
        )
    return 0


def family(pid: int, marker: str) -> list[int]:
    """The live processes on this machine that belong to the worker `pid`, itself included, but for
    the one that asks.

    They are of its process group or were born with its marker: a child can leave the group, and one
    that renames itself can lose its environment. With 0 for `pid`, for a worker that is long gone,
    whose id may be another's by now, the marker alone counts.
    """
    wanted, found = f"{MARKER}={marker}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            state, _, group = (
                (folder / "stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()[:3]
            )
            ours = (pid > 0 and int(group) == pid) or wanted in (
                folder / "environ"
            ).read_bytes().split(b"\0")
            if ours and state != "Z" and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def kill_family(pid: int, marker: str, *, timeout_s: float = 10) -> None:
    """End them all, also those that are born while others die."""
    deadline = time.monotonic() + timeout_s
    while (found := family(pid, marker)) and time.monotonic() < deadline:
        for member in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.02)


def _redirect_output(log: Path) -> None:
    """All that this process and its children write goes into the log, what C++ writes too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def start_guard(marker: str = "", others: Iterable[int] = ()) -> subprocess.Popen:
    """A process apart that waits for the end of this one, however it comes, and then ends its
    family (where it has a marker) and the others.
    """
    env = {name: value for name, value in os.environ.items() if name != MARKER}
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), marker, *map(str, others)]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        command,
        env=env,
        cwd="/",
        start_new_session=True,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
    )


def _guard(pid: int, marker: str, others: Iterable[int]) -> None:
    handles = []
    for other in others:
        with contextlib.suppress(ProcessLookupError):
            handles.append(
                os.pidfd_open(other)
            )  # a handle, and no number that may be another's by then
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    for handle in handles:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    if marker:
        kill_family(pid, marker)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:]))
