"""Bundles and placements on a real Ray cluster; what doesn't fit, and what can't be reached."""

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from nemorl.runtime.cluster.placement import (
    Bundle,
    RayClusterError,
    RayVirtualCluster,
    ResourcesError,
)
from tests.ray_session import NUM_CPUS, NUM_GPUS, ray_cpus
from tests.runtime.cluster.test_lost import driver, told

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(autouse=True)
def session():
    ray_cpus()


def soon_free(cluster: RayVirtualCluster, gpus: float) -> bool:
    """Ray counts a moment later."""
    deadline = time.monotonic() + 10
    while cluster.nodes[0].free.get("GPU", 0) != gpus and time.monotonic() < deadline:
        time.sleep(0.05)
    return cluster.nodes[0].free.get("GPU", 0) == gpus


def test_bundles_are_reserved_by_name_and_given_back():
    with RayVirtualCluster(
        {"trainer": [Bundle(cpus=0, gpus=2)], "generation": [Bundle(cpus=0, gpus=1)] * 3},
        strategy="STRICT_PACK",
    ) as cluster:
        trainer, generation = cluster.placement("trainer"), cluster.placement("generation")
        assert (trainer.indices, generation.indices) == ((0,), (1, 2, 3))
        assert (
            set(trainer.nodes + generation.nodes)
            == {cluster.driver_node}
            == {node.id for node in cluster.nodes}
        )
        assert soon_free(cluster, NUM_GPUS - 5) and cluster.nodes[0].resources["CPU"] == NUM_CPUS
        with pytest.raises(
            ValueError, match="name must be one of trainer, generation, but it is 'critic'"
        ):
            cluster.placement("critic")
    cluster.shutdown()
    with pytest.raises(RayClusterError, match="the bundles have been given back"):
        cluster.check()
    with RayVirtualCluster({"any": [Bundle(cpus=0, gpus=1)]}) as cluster:
        assert soon_free(cluster, NUM_GPUS - 1)


@pytest.mark.parametrize(
    ("bundles", "row"),
    [
        (
            {"trainer": [Bundle()], "generation": [Bundle(cpus=4)] * 20},
            "  asked  generation  *20 x \\(4 CPU\\)\n",
        ),
        (
            {"generation": [Bundle(cpus=1, gpus=20)]},
            "  asked  generation  *1 x \\(1 CPU, 20 GPU\\)\n",
        ),
        (
            {"generation": [Bundle(node="f" * 56)]},
            "  asked  generation  *1 x \\(1 CPU on node ffffffff\\)\n",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_what_there_is(bundles, row: str):
    with pytest.raises(ResourcesError, match="bundles must fit in the Ray cluster") as caught:
        RayVirtualCluster(bundles, timeout_s=30)
    text = str(caught.value) + "\n"
    assert re.search(row, text), text
    assert f"  {NUM_CPUS} CPU (" in text and " free)" in text


def test_a_gpu_can_be_set_aside_for_this_process():
    with driver("set_aside") as process:
        assert told(process) == {"devices": ["1", "2"], "as_before": True}


def test_a_connection_that_this_process_had_before_stays():
    with driver("found") as process:
        lines = process.communicate(timeout=240)[
            0
        ].splitlines()  # Ray prints what it has to say, for it is the user's
    [facts] = [json.loads(line) for line in lines if line.startswith("{")]
    assert facts == {"sum": 3, "gone": True, "value": 7, "as_before": True}


def test_an_address_where_nothing_listens_is_told_at_once():
    with driver("nowhere", RAY_ADDRESS="127.0.0.1:1") as process:
        facts = told(process)
    assert (
        facts["error"].startswith(
            "the Ray cluster at 127.0.0.1:1 can't be reached (Connection refused): is it running"
        )
        and facts["took"] < 6
    )
    assert "RAY_ADDRESS" in facts["error"]


def test_a_token_that_is_missing_is_told(tmp_path: Path):
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with driver(
            "nowhere", RAY_ADDRESS=address, RAY_AUTH_MODE="token", HOME=str(tmp_path)
        ) as process:
            facts = told(process)
    assert (
        "set RAY_AUTH_MODE=token, and have the token of its head in RAY_AUTH_TOKEN or"
        " ~/.ray/auth_token" in facts["error"]
    )


def test_bundles_that_others_hold_are_waited_for_and_then_told():
    with RayVirtualCluster({"held": [Bundle(cpus=0, gpus=NUM_GPUS - 2)]}) as cluster:
        assert soon_free(cluster, 2)
        with pytest.raises(
            ResourcesError,
            match=(
                r"no room for it was found within 1 s(.|\n)*asked +late +1 x \(6 GPU\)\n(.|\n)*8"
                r" GPU \(2 free\)"
            ),
        ):
            RayVirtualCluster({"late": [Bundle(cpus=0, gpus=6)]}, timeout_s=1)
        assert RayVirtualCluster({"small": [Bundle(cpus=0, gpus=0.5)]}).shutdown() is None, (
            "what failed holds nothing"
        )


def test_bad_values():
    with pytest.raises(
        ValueError,
        match="strategy must be one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, but it is 'ANY'",
    ):
        RayVirtualCluster({"a": [Bundle()]}, strategy="ANY")
    with pytest.raises(ValueError, match="bundles must name one bundle at least"):
        RayVirtualCluster({"a": []})
    with pytest.raises(ValueError, match="cpus must be at least 0"):
        Bundle(cpus=-1)
    with pytest.raises(
        ValueError, match="cpus must be positive where a bundle asks for nothing else"
    ):
        Bundle(cpus=0)


def test_the_users_signal_handler_stays():
    """Ray would put its own in the place of the one that saves the last step."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
