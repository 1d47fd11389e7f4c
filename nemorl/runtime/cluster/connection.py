"""The one connection to Ray that a process has: attach or start, notice when the cluster is gone,
end it again. Nothing here knows what it is for.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.auto_init_hook
import ray._private.services
import ray._private.worker
from ray.exceptions import AuthenticationError

from nemorl.runtime.cluster.worker_host import start_guard

PROBE_PERIOD_S, PROBE_TIMEOUT_S, PROBES_TO_LOSE = 1.0, 2.0, 3
"""A cluster counts as lost when three probes in a row fail: within 4 s where connections are
refused, 9 s where nothing answers at all.
"""
HEAD_TIMEOUT_S = 5.0
"""For a head that is to be attached to: Ray itself would try for minutes."""

_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""A process of Ray ends itself, without a word to its caller, when the cluster's head has been away
for so long.
"""
_CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": (
        "0"
    ),  # else as many idle interpreters as there are CPUs, none of which can be used
    "RAY_enable_worker_prestart": "0",
    _RECONNECT: "10",  # Ray's agents outlive a driver that is killed by so long
}
_ATTACHED = {"RAY_BACKEND_LOG_LEVEL": "error"}
"""Why it can't attach is said once, by us."""
_DRIVER = {_RECONNECT: "3600"}
"""A run has to save its state first: the watcher tells it within seconds."""

logger = logging.getLogger(__name__)


class RayClusterError(ConnectionError):
    """Ray can't be reached, can't be started, or refuses."""


class ClusterLost(RayClusterError):
    """The cluster's control plane or this node's part of it has gone away."""


class Connection:
    """This process's connection to a Ray cluster; `owned` if the cluster was started for it,
    `begun` if this process wasn't connected before.
    """

    current: "Connection | None" = None

    def __init__(self, address: str | None, num_cpus: int | None, num_gpus: int | None) -> None:
        self.users, self.lost = 0, ""
        self.begun = not ray.is_initialized()
        self.owned = self.begun and address is None
        self._connects_itself = ray._private.auto_init_hook.enable_auto_connect
        if self.begun:
            _initialize(address, num_cpus, num_gpus)
            ray._private.auto_init_hook.enable_auto_connect = (
                False  # a call while this ends must not start a cluster of its own
            )
        self._processes = _processes() if self.owned else []
        self._guard = (
            start_guard(others=[process.pid for process in self._processes]) if self.owned else None
        )
        context = ray.get_runtime_context()
        self.node: str = context.get_node_id()
        own = next(node for node in ray.nodes() if node["NodeID"] == self.node)
        self._probed = {
            f"the cluster's head ({context.gcs_address})": _endpoint(context.gcs_address),
            f"this node's Ray daemon ({own['NodeManagerAddress']}:{own['NodeManagerPort']})": (
                own["NodeManagerAddress"],
                own["NodeManagerPort"],
            ),
        }
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="nemorl-ray-watcher", daemon=True)
        self._watcher.start()

    @classmethod
    def use(cls, address: str | None, num_cpus: int | None, num_gpus: int | None) -> "Connection":
        """The connection that there is already, or a new one. Each use has to be released."""
        with _LOCK:
            if cls.current is None:
                cls.current = cls(
                    address or os.environ.get("RAY_ADDRESS") or None, num_cpus, num_gpus
                )
            cls.current.users += 1
            return cls.current

    def release(self) -> None:
        """The last user's release ends a cluster that was started here, leaves one that was
        attached to, and keeps a connection that it found.
        """
        with _LOCK:
            self.users -= 1
            if self.users == 0 and not self._ended.is_set():
                Connection.current = None
                self._ended.set()
                self._end()

    def _end(self) -> None:
        if not self.begun:
            return
        session = _session() if self.owned else None
        ray.shutdown()
        ray._private.auto_init_hook.enable_auto_connect = self._connects_itself
        if session is None or self._guard is None:
            return
        self._guard.kill()
        self._guard.wait()
        for process in self._processes:  # agents wait a minute for a head that is gone
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(session, ignore_errors=True)
        latest = session.parent / "session_latest"
        with contextlib.suppress(OSError):
            if latest.is_symlink() and not latest.exists():
                latest.unlink()  # Ray doesn't renew a link that leads nowhere

    def check(self) -> None:
        """Raise ClusterLost if the cluster is gone, as far as the watcher knows."""
        if self._ended.is_set():
            raise RayClusterError(
                "the connection to Ray has been shut down: make a new RayVirtualCluster"
            )
        if self.lost:
            raise ClusterLost(self.lost)

    def look(self) -> None:
        """As `check`, by looking now: for when something has gone wrong."""
        self.check()
        for probe in range(PROBES_TO_LOSE):
            if probe:
                self._ended.wait(PROBE_PERIOD_S)
            if not (told := self._probe()):
                return
        self.lost = told
        self.check()

    def _probe(self) -> str:
        """What doesn't answer; "" if all is well."""
        for name, address in self._probed.items():
            try:
                socket.create_connection(address, timeout=PROBE_TIMEOUT_S).close()
            except OSError as error:
                return f"the Ray cluster is lost: {name} doesn't answer ({error.strerror or error})"
        return ""

    def _watch(self) -> None:
        failures = 0
        while not self._ended.wait(PROBE_PERIOD_S):
            told = self._probe()
            failures = failures + 1 if told else 0
            if failures in (0, PROBES_TO_LOSE):
                self.lost = told


_LOCK = threading.RLock()


def _initialize(address: str | None, num_cpus: int | None, num_gpus: int | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        _find(address)
    try:
        with (
            _environment(_CLUSTER if address is None else _ATTACHED),
            _signal_handlers(),
            _own_ways(),
        ):
            if address is None:
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    **quiet,
                )
            else:
                ray.init(address=address, **quiet)
    except Exception as error:
        ray.shutdown()
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if address is None:
            raise RayClusterError(
                f"a local Ray cluster can't be started ({reason}): is there room in /tmp and"
                " /dev/shm?"
            ) from error
        remedy = _CHECK
        if isinstance(error, AuthenticationError) or "InvalidAuthToken" in str(error.__cause__):
            remedy = (
                "it asks for a token: set RAY_AUTH_MODE=token, and have the token of its head in"
                " RAY_AUTH_TOKEN or ~/.ray/auth_token"
            )
        raise RayClusterError(
            f"the Ray cluster at {address} can't be reached ({reason}): {remedy}"
        ) from error


_CHECK = (
    "is it running (`ray status`), is RAY_ADDRESS right, and does a firewall let this machine"
    " through?"
)


def _find(address: str) -> None:
    """Raise RayClusterError unless something listens there."""
    try:
        found = ray._private.services.canonicalize_bootstrap_address(address)  # "auto" has its own
        if found and re.search(r":\d+$", found):
            socket.create_connection(_endpoint(found), timeout=HEAD_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RayClusterError(
            f"the Ray cluster at {address} can't be reached ({reason}): {_CHECK}"
        ) from error


def _session() -> Path:
    return Path(ray._private.worker._global_node.get_session_dir_path())


def _processes() -> list[psutil.Process]:
    """Those of the cluster that this process has just started."""
    session = str(_session())
    ours = [
        child
        for child in psutil.Process().children()
        if any(session in part for part in child.cmdline())
    ]
    return [*ours, *(below for child in ours for below in child.children(recursive=True))]


def _silence(worker: Any, threads_stopped: threading.Event) -> None:
    """In the place of Ray's own listener, which prints what the daemons have to say about dead
    workers over the user's screen.
    """


@contextlib.contextmanager
def _own_ways() -> Iterator[None]:
    """Two functions of Ray's replaced, while it connects."""
    worker = ray._private.worker
    before = worker.listen_error_messages, worker.connect
    worker.listen_error_messages, worker.connect = _silence, _connect
    try:
        yield
    finally:
        worker.listen_error_messages, worker.connect = before


_ray_connect = ray._private.worker.connect


def _connect(*args: Any, **kwargs: Any) -> None:
    """Ray's own, which reads this process's settings; those of the daemons have been read by then."""
    with _environment(_DRIVER):
        _ray_connect(*args, **kwargs)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that Ray reads and the processes started within inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM: the one that was there comes back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
