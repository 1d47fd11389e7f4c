"""A group of workers on the session's cluster, ended with its test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray_session import ray_cpus

TARGET = "tests.runtime.workers.targets:Target"


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`workers(2, **options)`: a group of two."""
    from nemorl.runtime.workers.cluster import Bundle, RayVirtualCluster
    from nemorl.runtime.workers.worker import RayWorkerGroup

    ray_cpus()
    made: list[Any] = []

    def make(size: int, target: str = TARGET, **options: Any) -> RayWorkerGroup:
        made.append(RayVirtualCluster({"some": [Bundle()] * size}))
        placement = made[-1].placement("some")
        made.append(RayWorkerGroup(placement, target, **{"log_dir": tmp_path / "logs", **options}))
        return made[-1]

    yield make
    for one in reversed(made):
        one.shutdown()
