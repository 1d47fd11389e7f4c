"""A model's folder, and trainers on ranks that are gone when their module is done."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemorl.parallel.plan import ParallelPlan
from tests.runtime.ranks.backends import Summing

PLAN = ParallelPlan(dp_shard=2)


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
    from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
    from nemorl.runtime.config.base import BaseConfig, RuntimeConfig
    from nemorl.runtime.ranks.trainer import make_trainer
    from tests.ray_session import ray_cpus

    ray_cpus()
    made = []

    def make(
        *,
        seed: int = 0,
        logs: Path | None = None,
        backend: Any = Summing,
        plan: ParallelPlan = PLAN,
        **runtime: Any,
    ) -> Any:
        device = TrainerConfig(device="cpu")
        settings = RuntimeConfig(**{"timeout_s": 120, **runtime})
        config = BaseConfig(trainer=device, runtime=settings)
        trainer = make_trainer(config, backend, plan, logs or tmp_path_factory.mktemp("logs"))
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
