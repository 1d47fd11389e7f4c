"""A group of workers on the session's cluster, ended with its test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray_session import ray_cpus

TARGET = "tests.runtime.cluster.targets:Target"


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`workers(2, **options)`: a group of two."""
    from nemorl.runtime.cluster.placement import Bundle, RayVirtualCluster
    from nemorl.runtime.cluster.workers import RayWorkerGroup

    ray_cpus()
    clusters = []

    def make(size: int, target: str = TARGET, **options: Any) -> RayWorkerGroup:
        clusters.append(RayVirtualCluster({"some": [Bundle()] * size}))
        return RayWorkerGroup(
            clusters[-1].placement("some"), target, **{"log_dir": tmp_path / "logs", **options}
        )

    yield make
    for cluster in clusters:
        cluster.shutdown()
