"""A model's folder, and trainers on ranks that are gone when their test is over."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.runtime.ranks.backends  # noqa: F401  (registered by its import)


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
    """`trainers(launcher, 2, timeout_s=5)`: a trainer on two ranks, set up unless `seed` keeps it
    from that.
    """
    from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
    from nemorl.parallel.plan import ParallelPlan
    from nemorl.runtime.config.base import BaseConfig
    from nemorl.runtime.config.runtime import RuntimeConfig
    from nemorl.runtime.ranks.make import make_trainer

    made = []

    def make(
        launcher: str = "processes",
        size: int = 2,
        *,
        seed: int = 0,
        logs: Path | None = None,
        **runtime: Any,
    ) -> Any:
        plan, device = ParallelPlan(dp_shard=size), TrainerConfig(device="cpu")
        settings = RuntimeConfig(launcher=launcher, **{"timeout_s": 120, **runtime})
        trainer = make_trainer(
            BaseConfig(trainer=device),
            "summing",
            plan,
            settings,
            logs or tmp_path_factory.mktemp("logs"),
        )
        made.append(trainer)
        trainer.setup(
            BackendConfig(
                model=ModelConfig(path=str(model_folder)), trainer=device, parallel=plan, seed=seed
            )
        )
        return trainer

    yield make
    for trainer in made:
        trainer.shutdown()
