"""On which nodes and GPUs ranks are, on a cluster of four nodes with eight GPUs each."""

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.workers.processes import driver, facts_of

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]


@pytest.fixture(scope="module")
def found(forked: Path) -> dict[str, Any]:
    with driver(forked, module="tests.runtime.ranks.four_nodes", RAY_AUTH_MODE="disabled") as one:
        return facts_of(one)


@pytest.mark.parametrize("size", ["24", "32"])
def test_ranks_are_sorted_by_node(found, size: str):
    """Ray's own order mixes nodes for more than 16 bundles."""
    for order in (found["alone"][size], found["grouped"][size]):
        assert len(order) == int(size)
        groups = [order[first : first + 8] for first in range(0, len(order), 8)]
        assert groups == [node * 8 for node in "ABCD"[: len(groups)]] or size == "24"
        assert all(len(set(group)) == 1 for group in groups), order
        assert sorted(order) == [*order]


def test_a_group_is_on_one_node_where_others_have_taken_some_of_its_gpus(found):
    """Or, in the second case, a group that an engine shares."""
    for order in (found["partly"], found["shared"]):
        assert len(order) == 24
        assert all(len(set(order[first : first + 4])) == 1 for first in range(0, 24, 4)), order
    assert found["own"] == 2, "ranks that no engine meets"


def test_a_group_that_no_node_has_room_for_is_refused(found):
    assert found["error"] == (
        "parallel.tp must be at most 8, the ranks for which the largest node has CPUs, but it is"
        " 16:"
        " lower it, or allow more nodes (--runtime.tp-across-nodes)"
    )


def test_workers_are_ranked_by_node_and_gpu(found):
    ranks = found["ranks"]
    assert [each["node"] for each in ranks] == ["A", "C", "C", "C"]
    assert [each["RANK"] for each in ranks] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in ranks] == ["0", "0", "1", "2"]
    assert [each["LOCAL_WORLD_SIZE"] for each in ranks] == ["1", "3", "3", "3"]
    gpus = [each["gpus"] for each in ranks]
    assert gpus[1:] == sorted(gpus[1:]) and len({*map(str, gpus[1:])}) == 3
