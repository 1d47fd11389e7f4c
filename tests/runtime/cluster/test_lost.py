"""What is left, and what is told, when a driver is killed, a cluster's head or a node goes: each in
a process and on a cluster of its own.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.cluster.processes import alive, soon_gone

NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.xdist_group("ray")


@contextmanager
def driver(*arguments: str, **variables: str) -> Iterator[subprocess.Popen]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "tests.runtime.cluster.drivers", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env={**environment, **variables}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen) -> dict[str, Any]:
    line = process.stdout.readline()
    assert line.startswith("{"), f"{line!r}, exit code {process.wait()}"
    return json.loads(line)


def test_nothing_is_left_of_a_driver_that_is_killed():
    before = set(Path("/dev/shm").iterdir())
    with driver("busy") as process:
        facts = told(process)
        assert len(alive(*facts["pids"])) == len(facts["pids"]) > 10 and facts["size"] == 5_000_000
        process.kill()
        assert soon_gone(*facts["pids"])
    assert not {
        name
        for name in set(Path("/dev/shm").iterdir()) - before
        if name.name.startswith(("plasma", "ray"))
    }


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_the_cluster_that_it_was_attached_to():
    with running_cluster() as (address, daemons), driver("busy", address, **NO_TOKEN) as process:
        facts = told(process)
        process.kill()
        assert soon_gone(*facts["pids"]) and alive(*daemons) == daemons


@contextmanager
def running_cluster() -> Iterator[tuple[str, list[int]]]:
    """A cluster that another program has started."""
    import psutil

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=2",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    with subprocess.Popen(
        command,
        env={**os.environ, **NO_TOKEN},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(3)  # until the node has joined
        yield (
            f"127.0.0.1:{port}",
            [
                child.pid
                for child in psutil.Process(process.pid).children()
                if child.name() in ("gcs_server", "raylet")
            ],
        )
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("victim", ["gcs_server", pytest.param("raylet", marks=pytest.mark.slow)])
def test_a_lost_cluster_is_told_everywhere_and_the_driver_goes_on(victim: str):
    with driver("lost", victim) as process:
        facts = told(process)
        assert set(facts["seen"]) == {"result", "wait", "call", "restart", "nodes"}
        assert all(text.startswith("the Ray cluster is lost: ") for text in facts["seen"].values())
        assert facts["noticed"] < 10 and facts["took"] < 25 and soon_gone(*facts["pids"])
        assert process.wait(30) == 0


def test_two_nodes():
    with driver("two_nodes", **NO_TOKEN) as process:
        facts = told(process)
        here, there = facts["here"], facts["there"]
        assert here != there and facts["driver"] == here
        assert facts["nodes"] == [[here], [there, there], [here, there]]
        assert (
            facts["local_ranks"] == [{"LOCAL_RANK": "0"}] * 2
            and facts["sums"] == [3.0, 3.0]
            and facts["size"] == 2_000_000
        )
        assert (
            soon_gone(*facts["children"])
            and "worker-0 (process" in facts["died"]
            and facts["gone"]
            and facts["trainer"] == [1]
        )
        assert facts["moved"] == [here, str(facts["moved"][2]), facts["moved"][2]], (
            "Ray has moved the bundle"
        )
        assert facts["of_moved"].endswith("from a child"), "its log is here"
        assert process.wait(60) == 0
