"""A service in this process, and clients of it."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nemorl.parallel.config import TrainerConfig
from tests.runtime.serve.tinker.wire import KEYS, Client, serving
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("service")
    with serving(folder, tiny_model(scale=2.0), trainer=TrainerConfig(device="cpu")) as url:
        yield SimpleNamespace(folder=folder, url=url)


@pytest.fixture(scope="module")
def me(service: SimpleNamespace) -> Client:
    return Client(service.url, KEYS["me"])


@pytest.fixture(scope="module")
def you(service: SimpleNamespace) -> Client:
    return Client(service.url, KEYS["you"])
