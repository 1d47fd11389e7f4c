"""Bundles and placements on a real Ray cluster; what does not fit, and what cannot be reached."""

import re
import subprocess
from pathlib import Path

import pytest
import ray

from nemorl.runtime.store.files import sweep_temporary
from nemorl.runtime.workers import cluster
from nemorl.runtime.workers.cluster import Bundle, RayVirtualCluster, ResourcesError
from tests.ray_session import NUM_CPUS, NUM_GPUS, ray_cpus
from tests.runtime.workers.processes import driver, eventually, facts_of

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(autouse=True)
def session():
    ray_cpus()


def soon_free(gpus: float) -> bool:
    """Ray counts a moment later."""
    return eventually(lambda: ray.available_resources().get("GPU", 0) == gpus)


def test_bundles_are_reserved_by_name_and_returned():
    bundles = {"trainer": [Bundle(cpus=0, gpus=2)], "generation": [Bundle(cpus=0, gpus=1)] * 3}
    with RayVirtualCluster(bundles, strategy="STRICT_PACK") as cluster:
        trainer, generation = cluster.placement("trainer"), cluster.placement("generation")
        assert (trainer.indices, generation.indices) == ((0,), (1, 2, 3))
        assert set(trainer.nodes + generation.nodes) == {cluster.driver_node}
        assert soon_free(NUM_GPUS - 5)
        message = "name must be one of trainer, generation, but it is 'critic'"
        with pytest.raises(ValueError, match=message):
            cluster.placement("critic")
        cluster.check()
    cluster.shutdown()
    assert soon_free(NUM_GPUS)


@pytest.mark.parametrize(
    ("bundles", "row"),
    [
        ({"trainer": [Bundle()], "generation": [Bundle(cpus=40)] * 2}, "2 x \\(40 CPU\\)"),
        ({"generation": [Bundle(node="f" * 56)]}, "1 x \\(1 CPU on node ffffffff\\)"),
    ],
)
def test_what_does_not_fit_is_shown_with_what_there_is(bundles, row: str):
    with pytest.raises(ResourcesError, match="bundles must fit in the Ray cluster") as caught:
        RayVirtualCluster(bundles, timeout_s=30)
    text = str(caught.value) + "\n"
    assert re.search(f"  asked  generation  *{row}\n", text), text
    assert re.search(rf"\n  node   .*  {NUM_CPUS} CPU, {NUM_GPUS} GPU\n  free   in all  ", text), (
        text
    )


@pytest.mark.slow
def test_bundles_that_others_hold_are_waited_for():
    with RayVirtualCluster({"held": [Bundle(cpus=0, gpus=NUM_GPUS - 2)]}):
        assert soon_free(2)
        message = r"no room was found within 1 s(.|\n)*asked +late +1 x \(6 GPU\)\n(.|\n)* 2 GPU"
        with pytest.raises(ResourcesError, match=message):
            RayVirtualCluster({"late": [Bundle(cpus=0, gpus=6)]}, timeout_s=1)
        RayVirtualCluster({"small": [Bundle(cpus=0, gpus=0.5)]}).shutdown()  # nothing else is held


@pytest.mark.slow
def test_a_gpu_can_be_set_aside_in_a_cluster_that_serves_nobody_without_its_token(
    forked: Path, tmp_path: Path
):
    with driver(forked, "set_aside", HOME=str(tmp_path)) as process:
        facts = facts_of(process)
    answers = [set(each) for each in facts.pop("answers")]
    mode = facts.pop("mode")
    assert mode is None, "programs that this one starts lack the token, and could start no Ray"
    assert facts == {"devices": ["1", "2"], "same_handlers": True, "hosts": ["127.0.0.1"]}
    # Ray's agent speaks HTTP.
    known = [{"UNAUTHENTICATED", "UNIMPLEMENTED"}, {"UNAVAILABLE"}]
    assert len(answers) >= 5 and all(each in known for each in answers), answers
    assert not (tmp_path / ".ray").exists()  # where Ray keeps a token for all clusters


@pytest.mark.slow
def test_an_address_where_nothing_listens_is_an_error_at_once(forked: Path):
    with driver(forked, "nowhere", RAY_ADDRESS="127.0.0.1:1") as process:
        facts = facts_of(process)
    start = "the Ray cluster at 127.0.0.1:1 cannot be reached ([Errno 111] Connection refused)"
    assert facts["error"].startswith(start)
    assert "is it running" in facts["error"] and "RAY_ADDRESS" in facts["error"]


def test_a_guard_ends_with_the_last_that_it_guards():
    with subprocess.Popen(["sleep", "600"]) as child:
        cluster.start_guard(child.pid)
        child.kill()
    assert cluster._GUARDS[-1].wait(20) == 0


@pytest.mark.slow
def test_a_lost_cluster_is_an_error_and_its_files_go_with_the_next_start(forked: Path):
    with driver(forked, "lost") as process:
        facts = facts_of(process)
    assert facts["error"].startswith("the Ray cluster is lost: the cluster's head (")
    assert facts["alive"]
    assert facts["mode"] == 0o700, "nobody else may enter the folder of the sockets"
    session = Path(facts["session"])  # until its guard has ended what was left of it
    assert eventually(lambda: sweep_temporary() or not session.exists())
