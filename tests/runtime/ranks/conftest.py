"""A model's folder, and trainers on ranks that are gone when their module is done."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_models import tiny_model

    folder = tmp_path_factory.mktemp("model")
    tiny_model(scale=2.0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trainers(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """`trainers(timeout_s=5)`: a trainer on two ranks, set up unless `seed` keeps it from that."""
    from tests.ray_session import ray_cpus
    from tests.runtime.ranks import backends

    ray_cpus()
    made = []

    def make(*, seed: int = 0, logs: Path | None = None, **runtime: Any) -> Any:
        config = backends.config(**{"timeout_s": 120, **runtime})
        made.append(backends.trainer(config, logs or tmp_path_factory.mktemp("logs")))
        made[-1].setup(backends.settings(model_folder, seed=seed))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown()
