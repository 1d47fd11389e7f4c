"""What a test of this room registers is gone after it."""

from collections.abc import Iterator

import pytest

from nemorl.parallel import backends
from nemorl.rollout import config as generation
from nemorl.runtime.run import registry

TABLES = (
    *(registry.ALGORITHMS, registry.TRAINING_BACKENDS, backends.LIMITS),
    *(registry.GENERATION_BACKENDS, registry.GENERATION_CHECKS, generation.TRAITS),
)


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    before = [dict(table) for table in TABLES]
    yield
    for table, known in zip(TABLES, before, strict=True):
        table.clear()
        table.update(known)
