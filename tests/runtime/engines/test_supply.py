"""When replicas get weights: a source that records, in the place of a sender and its engines."""

import json

import pytest

from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import WeightSource
from nemorl.runtime.engines.replicas import EngineProcess, EngineProcesses, Supply
from nemorl.runtime.engines.routing import ProcessId, RequestRouter, Started, routing
from nemorl.runtime.engines.spec import EngineSpec
from nemorl.runtime.engines.weights import UpdateReceipt
from nemorl.runtime.workers.worker import Worker
from tests.tiny_models import tiny_model

FIRST, SECOND = ProcessId(0, 0), ProcessId(1, 0)


class Source(WeightSource):
    """Of version 1; `sends` happens in the place of sending."""

    def __init__(self, sends):
        self.sends = sends

    def newest(self):
        return 1, iter(())

    def send(self, use, *, dtype=None):
        self.sends()
        return UpdateReceipt(version=1, failed={})


def bare(kind, **attributes):
    """An object that has nothing but these attributes."""
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


@pytest.fixture
def supply():
    running = {id: EngineProcess(id, Worker(None)) for id in (FIRST, SECOND)}
    files = {"config.json": json.dumps(tiny_model().config.to_dict()).encode()}
    router = RequestRouter(routing(2, window=1, max_restarts=0), lambda action: None, lambda: None)
    spec, processes = bare(EngineSpec, files=files, dtype="float32"), bare(EngineProcesses)
    processes.running = running
    yield Supply(GenerationConfig(backend="vllm"), spec, processes, router)
    if not router.loop.is_closed():
        router.close()


def test_one_that_came_back_and_gets_no_weights_ends_nothing_while_others_have_theirs(
    supply, monkeypatch
):
    """The user is told once."""

    def fails():
        raise ConnectionError("the line is cut")

    told = []
    monkeypatch.setattr("nemorl.runtime.engines.replicas.warn_softly", told.append)
    router = supply._router
    router.send(Started(FIRST))
    supply.update(Source(lambda: None))
    supply._source = Source(fails)
    router.send(Started(SECOND))
    supply.others()
    supply.others()
    (message,) = told
    assert message.endswith("weights to a replica that came back: the line is cut")
    assert router.state.lacking == (SECOND,)
