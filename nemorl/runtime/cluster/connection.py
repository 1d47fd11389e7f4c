"""The one connection to Ray that a process has: begun with its first user, ended with its last."""

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.worker  # see `_quiet`
from ray.exceptions import AuthenticationError

from nemorl.runtime.run.temporary import claim, sweep_temporary

STARTED = {
    "RAY_prestart_worker_first_driver": "0",  # or an idle interpreter for each CPU
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # Ray's own would be in a file, for all clusters
}
"""For a cluster that is started here. It listens on all interfaces: Ray makes 127.0.0.1 the node's
address. One token per process, because Ray caches it.
"""
ATTACHED = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # or Ray ends this process, unsaved
    "RAY_BACKEND_LOG_LEVEL": "error",  # why it cannot attach is our error
}
PROBES, PROBE_S = 3, 2.0
GUARD = """
import contextlib, os, select, signal, sys
group, watched, *others = map(int, sys.argv[1:])
gone, handles = contextlib.suppress(ProcessLookupError), []
for pid in others:
    with gone:
        handles.append(os.pidfd_open(pid))
left = {*handles}
with gone:
    watched = os.pidfd_open(watched)
    while left or group:
        ended, _, _ = select.select([watched, *left], [], [])
        if watched in ended:
            break
        left -= {*ended}
for handle in handles:
    with gone:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
if group:
    with gone:
        os.killpg(group, signal.SIGKILL)
"""


class RayClusterError(ConnectionError):
    """Ray cannot be reached, cannot be started, or refuses."""


class ClusterLost(RayClusterError):
    """The head of the cluster is gone."""


_LOCK = threading.RLock()
_STATE = {"users": 0, "ours": False}
_SESSION = ExitStack()
"""Of Ray's folder, where the cluster was started here: it goes with a later start."""
_GUARDS: list[subprocess.Popen] = []


def connect(
    address: str | None = None, *, num_cpus: int | None = None, num_gpus: int | None = None
) -> None:
    """Be connected to Ray until `release` is called.

    To the cluster that this process is in, the one at `address` or RAY_ADDRESS, or a local one with
    so many CPUs and GPUs (None: the machine's), which ends with its last user.
    Raises RayClusterError.
    """
    with _LOCK:
        if not ray.is_initialized():
            address = address or os.environ.get("RAY_ADDRESS")
            sweep_temporary()
            before = set(psutil.Process().children(recursive=True))
            _initialize(address, num_cpus, num_gpus)
            _STATE["ours"] = True
            if address is None:
                begun = set(psutil.Process().children(recursive=True)) - before
                owner = claim(Path(ray._private.worker._global_node.get_session_dir_path()))
                _SESSION.callback(os.close, owner)
                # Ray's agents live on for a minute
                start_guard(*(one.pid for one in begun), owner=owner)
        _STATE["users"] += 1


def release() -> None:
    """End a connection that `connect` began, with its last user."""
    with _LOCK:
        _STATE["users"] -= 1
        if not _STATE["users"] and _STATE["ours"]:
            _STATE["ours"] = False
            ray.shutdown()
            _SESSION.close()


def start_guard(*others: int, group: int = 0, owner: int | None = None) -> None:
    """Start a process that waits for the end of this one, however it comes, and then ends the
    others, and those of a process group. As long as it lives it is an `owner`: see `claim`.
    """
    _GUARDS[:] = [one for one in _GUARDS if one.poll() is None]
    command = [sys.executable, "-I", "-S", "-c", GUARD, *map(str, (group, os.getpid(), *others))]
    none = subprocess.DEVNULL
    _GUARDS.append(
        subprocess.Popen(
            command,
            start_new_session=True,
            cwd="/",
            stdin=none,
            stdout=none,
            stderr=none,
            pass_fds=() if owner is None else (owner,),
        )
    )


def check() -> None:
    """Raise ClusterLost if the cluster's head does not answer."""
    address = ray.get_runtime_context().gcs_address
    for attempt in range(PROBES):
        try:
            socket.create_connection(_endpoint(address), timeout=PROBE_S).close()
            return
        except OSError as error:
            reason = error.strerror or error
            if attempt + 1 < PROBES:
                time.sleep(PROBE_S / 2)
    raise ClusterLost(
        f"the Ray cluster is lost: the cluster's head ({address}) does not answer ({reason})"
    )


def _initialize(address: str | None, num_cpus: int | None, num_gpus: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"num_cpus": num_cpus, "num_gpus": num_gpus, "include_dashboard": False}
    try:
        if address and re.search(r"^[^/]+:\d+$", address):  # Ray itself would try for minutes
            socket.create_connection(_endpoint(address), timeout=2 * PROBE_S).close()
        with _environment(STARTED if address is None else ATTACHED), _handlers(), _quiet():
            ray.init(address=address or "local", **options)
    except Exception as error:
        with suppress(Exception):
            ray.shutdown()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if address is None:
            message = (
                f"a local Ray cluster cannot be started ({reason}): make room in /tmp, /dev/shm"
            )
        else:
            message = f"the Ray cluster at {address} cannot be reached ({reason}): "
            if isinstance(error, AuthenticationError) or "InvalidAuthToken" in str(error.__cause__):
                message += (
                    "it asks for a token: set RAY_AUTH_MODE=token, and have the token of its head"
                    " in RAY_AUTH_TOKEN or ~/.ray/auth_token"
                )
            else:
                message += (
                    "is it running (`ray status`), is RAY_ADDRESS right, and does a firewall let"
                    " this machine through?"
                )
        raise RayClusterError(message) from error


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: os.environ.get(name, value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]


@contextmanager
def _handlers() -> Iterator[None]:
    """Keep the handlers of signals, of which Ray replaces some; they get a SIGTERM that came while
    Ray's own was there.
    """
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    ended: SystemExit | None = None
    try:
        yield
    except SystemExit as error:  # by Ray's handler
        ended = error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if ended is not None:
        if main:
            signal.raise_signal(signal.SIGTERM)
        raise ended  # Ray has not started, whatever the handler did


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray from printing what its daemons say of dead workers: no setting does."""
    module = ray._private.worker
    before = module.listen_error_messages
    module.listen_error_messages = lambda worker, threads_stopped: None
    try:
        yield
    finally:
        module.listen_error_messages = before


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
