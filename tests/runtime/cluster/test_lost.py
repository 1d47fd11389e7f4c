"""A cluster's head or a node goes: each in a process and on a cluster of its own."""

import time
from pathlib import Path

import pytest

from nemorl.runtime.store.temporary import sweep_temporary
from tests.runtime.cluster.processes import driver, facts_of

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.slow
def test_a_lost_cluster_is_an_error_and_its_files_go_with_the_next_start(forked: Path):
    with driver(forked, "lost") as process:
        facts = facts_of(process)
    assert facts["error"].startswith("the Ray cluster is lost: the cluster's head (")
    assert facts["alive"]
    assert facts["mode"] == 0o700, "nobody else may enter the folder of the sockets"
    deadline = time.monotonic() + 120
    while Path(facts["session"]).exists() and time.monotonic() < deadline:
        time.sleep(0.2)  # until its guard has ended what was left of it
        sweep_temporary()
    assert not Path(facts["session"]).exists()
