"""The one connection to Ray that a process has, and bundles of CPUs and GPUs."""

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
import ray._private.worker
import torch
from ray._private import ray_constants
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemorl.checks import at_least, require
from nemorl.runtime.store.files import OURS, claim, sweep_temporary

STARTED = {
    "RAY_prestart_worker_first_driver": "0",  # or an idle interpreter for each CPU
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # Ray's own would be in a file, for all clusters
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",  # listen on 127.0.0.1, as on macOS
}
"""For a cluster that is started here. Ray caches the token in a process."""
ATTACHED = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # or Ray ends this process, unsaved
    "RAY_BACKEND_LOG_LEVEL": "error",  # why it cannot attach is our error
}
LONGEST_PATH = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Of Ray's folder, in bytes: a Unix socket's has at most 107."""
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
    """The cluster's head is gone."""


_LOCK = threading.RLock()
_STATE = {"users": 0, "ours": False, "local": False}
_SESSION = ExitStack()
"""Gives up the folder of a cluster that was started here, to which Ray's processes may still write:
a later start removes it.
"""
_GUARDS: list[subprocess.Popen] = []


def connect(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    timeout_s: float = 600,
    setting: str = "runtime.start_timeout_s",
) -> None:
    """Connect to Ray until the last user calls `release`.

    To this process's cluster, the one at `address` or RAY_ADDRESS ("auto": the one on this
    machine), or a local one with so many CPUs and GPUs (None: the machine's). timeout_s: longest
    start of a local one, the user's `setting`. Raises RayClusterError.
    """
    with _LOCK:
        if not ray.is_initialized():
            address = address or os.environ.get("RAY_ADDRESS")
            sweep_temporary()
            before = set(psutil.Process().children(recursive=True))
            _STATE["local"] = address is None
            if address is None:
                owner = _start_local(timeout_s, setting, num_cpus=num_cpus, num_gpus=num_gpus)
                begun = set(psutil.Process().children(recursive=True)) - before
                # Ray's agents live on for a minute
                start_guard(*(one.pid for one in begun), owner=owner)
            else:
                _attach(address)
            _STATE["ours"] = True
        _STATE["users"] += 1


def release() -> None:
    """End a connection of `connect`."""
    with _LOCK:
        _STATE["users"] -= 1
        if not _STATE["users"] and _STATE["ours"]:
            _STATE["ours"] = _STATE["local"] = False
            ray.shutdown()
            _SESSION.close()


def is_local() -> bool:
    """Return whether the cluster was started here: it gets no more nodes."""
    return bool(_STATE["local"])


def has_gpus() -> bool:
    """Return whether this machine has GPUs, or the cluster, if it was not started here."""
    return torch.cuda.is_available() or (
        not _STATE["local"] and ray.cluster_resources().get("GPU", 0) > 0
    )


def start_guard(*others: int, group: int = 0, owner: int | None = None) -> None:
    """Start a process that ends the others and a process group when this one ends. It is an
    `owner`, too: see `claim`.
    """
    _GUARDS[:] = [one for one in _GUARDS if one.poll() is None]
    none = subprocess.DEVNULL
    _GUARDS.append(
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, *map(str, (group, os.getpid(), *others))],
            start_new_session=True,
            cwd="/",
            stdin=none,
            stdout=none,
            stderr=none,
            pass_fds=() if owner is None else (owner,),
        )
    )


def check() -> None:
    """Raise ClusterLost if the cluster's head does not answer, or the connection has ended."""
    if not ray.is_initialized():  # to ask for its address would start a cluster
        raise ClusterLost("the Ray cluster is lost: the connection to it has ended")
    address = ray.get_runtime_context().gcs_address
    try:
        _probe(address)
    except OSError as error:
        raise ClusterLost(
            f"the Ray cluster is lost: the cluster's head ({address}) does not answer"
            f" ({error.strerror or error})"
        ) from None


def _start_local(timeout_s: float, setting: str, **resources: int | None) -> int:
    """Start Ray in a folder of this user; return what claims the folder."""
    folder = _private_folder()
    owner = claim(folder)
    begin = time.monotonic()
    limit = {"RAY_gcs_server_port_wait_time_s": str(max(1, int(timeout_s)))}
    options = {**resources, "include_dashboard": False, "_temp_dir": str(folder / "r")}
    while True:
        try:
            _initialize("local", {**STARTED, **limit}, **options)
        except Exception as error:
            late = "timed out" in str(error).lower()
            if late and time.monotonic() - begin < timeout_s:
                continue  # Ray itself gives some parts 30 s
            os.close(owner)
            what = "a local Ray cluster cannot be started"
            if late:
                what = f"a local Ray cluster did not start within {timeout_s:g} s"
            raise RayClusterError(
                f"{what} ({_first_line(error)}): {f'raise {setting}, or ' * late}make room in"
                f" {folder.parent} and /dev/shm, if they are full; its logs are in"
                f" {folder / 'r' / 'session_latest' / 'logs'}"
            ) from error
        _SESSION.callback(os.close, owner)
        return owner


def _private_folder() -> Path:
    """Make a folder that others can't enter, as they can Ray's own."""
    chosen = os.environ.get("RAY_TMPDIR")
    places = [chosen] if chosen else [tempfile.gettempdir(), "/tmp"]
    longest = LONGEST_PATH - len(f"/{OURS.replace('*', '12345678')}/r")
    fitting = [each for each in places if len(os.fsencode(each)) <= longest]
    try:
        return Path(tempfile.mkdtemp(prefix=OURS.rstrip("*"), dir=fitting[0]))
    except (IndexError, OSError) as error:
        raise RayClusterError(
            f"RAY_TMPDIR must be a writable folder with a path of at most {longest} bytes, for the"
            f" sockets below it, but it is {places[0]!r} ({error}): name another one"
        ) from error


def _attach(address: str) -> None:
    try:
        if re.search(r"^[^/]+:\d+$", address):  # Ray itself would try for minutes
            _probe(address)
        _initialize(address, ATTACHED)
    except Exception as error:
        if isinstance(error, AuthenticationError) or "InvalidAuthToken" in str(error.__cause__):
            remedy = (
                "it asks for a token: set RAY_AUTH_MODE=token, and give the head's token in"
                " RAY_AUTH_TOKEN or ~/.ray/auth_token"
            )
        else:
            remedy = (
                "is it running (`ray status`), is RAY_ADDRESS right, and does a firewall let"
                " this machine through?"
            )
        raise RayClusterError(
            f"the Ray cluster at {address} cannot be reached ({_first_line(error)}): {remedy}"
        ) from error


def _initialize(address: str, variables: Mapping[str, str], **options: Any) -> None:
    ray_constants.ENABLE_RAY_CLUSTER = address != "local"  # as read from the environment before
    # Daemons' messages on dead workers, which no setting turns off.
    quiet = patch.object(ray._private.worker, "listen_error_messages", lambda *_: None)
    try:
        with _environment(variables), _handlers(), quiet:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception:
        with suppress(Exception):
            ray.shutdown()
        raise


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    # Ray sets the mode where it finds a token, which programs started later do not have.
    added = {*values, "RAY_AUTH_MODE"} - {*os.environ}
    os.environ.update({name: values[name] for name in added & values.keys()})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _handlers() -> Iterator[None]:
    """Keep the signal handlers that Ray replaces; they get a SIGTERM that came then."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    ended = False
    try:
        yield
    except SystemExit:  # by Ray's handler: it has not started
        ended = main
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if ended:
            signal.raise_signal(signal.SIGTERM)


def _probe(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=4.0).close()


DRIVER = "driver"
"""A bundle's node: this process's."""
TOO_LITTLE = "the cluster has too little"


class ResourcesError(ValueError):
    """The cluster has too little."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a worker needs, on any node or on `node`, a Ray node's id or DRIVER.

    >>> Bundle(cpus=2, gpus=1, workers=4).amounts
    {'CPU': 8, 'GPU': 4}
    """

    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    node: str | None = None
    workers: int = 1
    """So many need this, on one node together."""

    def __post_init__(self) -> None:
        named = {f"resources__{name}": amount for name, amount in self.resources.items()}
        at_least(0, cpus=self.cpus, gpus=self.gpus, **named)
        at_least(1, workers=self.workers)
        require(bool(self.amounts), "cpus", "must be positive where a bundle asks for nothing else",
                self.cpus, "use 1")  # fmt: skip

    @property
    def amounts(self) -> dict[str, float]:
        """Return all workers' amounts together by Ray's names, without zeros."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: self.workers * amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where bundles of a name are, by node: this process's first, then by address."""

    bundles: tuple[Bundle, ...]
    group: PlacementGroup
    indices: tuple[int, ...]
    nodes: tuple[str, ...]

    def options(self, number: int) -> dict[str, Any]:
        bundle = self.bundles[number]
        return {
            "num_cpus": bundle.cpus,
            "num_gpus": bundle.gpus,
            "resources": dict(bundle.resources),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.indices[number]
            ),
        }


class RayVirtualCluster:
    """Named groups of bundles, reserved together or not at all, on the cluster of `connect`.

    Raises ResourcesError where the bundles find no room within `timeout_s`, and RayClusterError.
    """

    def __init__(
        self,
        bundles: Mapping[str, Sequence[Bundle]],
        *,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        strategy: str = "PACK",
        timeout_s: float = 60,
    ) -> None:
        require(any(bundles.values()), "bundles", "must name one bundle at least", dict(bundles),
                "add a Bundle()")  # fmt: skip
        connect(num_cpus=num_cpus, num_gpus=num_gpus)
        self._release = ExitStack()
        self._release.callback(release)
        try:
            self.driver_node: str = ray.get_runtime_context().get_node_id()
            self._bundles = {
                name: tuple(
                    replace(one, node=self.driver_node) if one.node == DRIVER else one
                    for one in of_name
                )
                for name, of_name in bundles.items()
            }
            self._group = self._reserve(strategy, timeout_s)
        except BaseException:
            self._release.close()
            raise

    def _reserve(self, strategy: str, timeout_s: float) -> PlacementGroup:
        flat = [bundle for of_name in self._bundles.values() for bundle in of_name]
        if not could_fit(flat):
            raise ResourcesError(table(self._bundles, TOO_LITTLE))
        group = placement_group(
            [bundle.amounts for bundle in flat],
            strategy=strategy,
            bundle_label_selector=[{"ray.io/node-id": b.node} if b.node else {} for b in flat],
        )
        self._release.callback(_remove, group)
        deadline = time.monotonic() + timeout_s
        while not group.wait(1.0):
            check()
            if time.monotonic() >= deadline:
                reason = f"no room was found within {timeout_s:g} s"
                raise ResourcesError(table(self._bundles, reason))
        return group

    def placement(self, name: str) -> Placement:
        require(name in self._bundles, "name", f"must be one of {', '.join(self._bundles)}", name,
                "use a name that the cluster was made with")  # fmt: skip
        names = [one for one, of_name in self._bundles.items() for _ in of_name]
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

        def place(index: int) -> tuple[bool, list[str | int], str]:
            node = nodes[index]
            return node != self.driver_node, natural(addresses[node]), node

        own = [index for index, one in enumerate(names) if one == name]
        indices = sorted(own, key=place)
        return Placement(
            bundles=tuple(self._bundles[name][own.index(index)] for index in indices),
            group=self._group,
            indices=tuple(indices),
            nodes=tuple(nodes[index] for index in indices),
        )

    check = staticmethod(check)

    def shutdown(self) -> None:
        """Give the bundles back, and end Ray if it was started here. May be called again."""
        self._release.close()

    def __enter__(self) -> "RayVirtualCluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def natural(text: str) -> list[str | int]:
    """Return a key that sorts numbers in a text as numbers.

    >>> sorted(["10.0.0.10", "10.0.0.9"], key=natural)
    ['10.0.0.9', '10.0.0.10']
    """
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def table(bundles: Mapping[str, Sequence[Bundle]], reason: str) -> str:
    """Return why bundles do not fit, what was asked for, and what there is."""
    rows = [("asked", name, _in_words(of_name)) for name, of_name in bundles.items()]
    for node in _nodes():
        name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        rows.append(("node", name, _has(node["Resources"])))
    rows.append(("free", "in all", _has(ray.available_resources())))
    width = max(len(name) for _, name, _ in rows)
    first = f"bundles must fit in the Ray cluster, but {reason}: ask for less, or add nodes"
    return "\n".join([first, *(f"  {kind:5}  {name:{width}}  {text}" for kind, name, text in rows)])


def _remove(group: PlacementGroup) -> None:
    with suppress(Exception):  # the cluster may be gone, and Ray would wait for it
        check()
        remove_placement_group(group)


def _in_words(bundles: Sequence[Bundle]) -> str:
    counts = Counter(
        ", ".join(f"{amount:g} {name}" for name, amount in bundle.amounts.items())
        + (f" on node {bundle.node[:8]}" if bundle.node else "")
        for bundle in bundles
    )
    return " + ".join(f"{count} x ({text})" for text, count in counts.items()) or "nothing"


def _has(resources: Mapping[str, float]) -> str:
    hidden = re.compile(r"node:|(object_store_)?memory|accelerator_type:|bundle_group|[CG]PU_")
    shown = sorted(name for name in resources if not hidden.match(name))
    return ", ".join(f"{resources[name]:g} {name}" for name in shown) or "nothing"


def most_on_a_node(resource: str) -> float:
    """Return the most that a node has of a resource."""
    return max((node["Resources"].get(resource, 0) for node in _nodes()), default=0)


def could_fit(bundles: Sequence[Bundle]) -> bool:
    """Return whether each bundle fits on a node, and all in the nodes' sum."""
    nodes = {node["NodeID"]: Counter[str](node["Resources"]) for node in _nodes()}
    asked = [(bundle.node, Counter(bundle.amounts)) for bundle in bundles]
    return all(
        any(amounts <= has for id, has in nodes.items() if node in (None, id))
        for node, amounts in asked
    ) and sum((amounts for _, amounts in asked), Counter()) <= sum(nodes.values(), Counter())


def _nodes() -> list[Any]:
    return [node for node in ray.nodes() if node["Alive"]]


def smallest_of_cluster(bundles: Sequence[Bundle]) -> int | None:
    """Return the memory in bytes of the smallest GPU, of one on each node that bundles take; None
    where it is not known.
    """
    with (
        suppress(ResourcesError, RayError),  # such as a node without nemorl
        RayVirtualCluster({"asked": bundles}) as cluster,
    ):
        placement = cluster.placement("asked")
        of_nodes = {node: number for number, node in enumerate(placement.nodes)}
        memory = ray.remote(_gpu_memory).options
        asked = [memory(**placement.options(number)).remote() for number in of_nodes.values()]
        return min(ray.get(asked, timeout=60)) or None
    return None


def _gpu_memory() -> int:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
