"""What the trainer makes of ranks that fail, whoever notices it first. The ranks are stand-ins."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from nemorl.parallel.config import BackendConfig, ModelConfig
from nemorl.runtime.ranks import trainer as module
from nemorl.runtime.ranks.rank import RankAnswer
from nemorl.runtime.ranks.trainer import RankedTrainer
from nemorl.runtime.run.open_run import failed_ranks
from nemorl.runtime.store.files import WorkerDied
from tests.parallel.batches import random_batch

BATCH = random_batch([3])


@dataclass
class Group:
    """Ranks that answer as `answers` says of their methods: with an error, or by what is called."""

    answers: dict[str, Any] = field(default_factory=dict)
    steps: int = 0

    def call(self, method, payload, phase, parts):
        self.steps += method == "train_step"
        found = self.answers.get(method)
        found = found() if callable(found) else found
        if isinstance(found, BaseException):
            raise found
        return RankAnswer(found or {}, None, self.steps)

    def shutdown(self, timeout_s, result=None): ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "structure", lambda path, **_: None)

    def make(group: Group, **options: Any) -> RankedTrainer:
        trainer = RankedTrainer(lambda: group)
        trainer.setup(BackendConfig(model=ModelConfig(path="none"), **options))
        return trainer

    return make


def test_a_death_that_another_call_found_is_why_the_next_one_fails(made):
    trainer = made(Group({"wait_for_checkpoint": WorkerDied("rank 1 died")}))
    with pytest.raises(WorkerDied) as first:
        trainer.wait_for_checkpoint()
    with pytest.raises(RuntimeError, match="its ranks were ended: rank 1 died") as caught:
        trainer.train_step(BATCH, len)
    assert failed_ranks(caught.value) is first.value


def test_a_step_that_could_not_be_sent_has_not_begun(made):
    group, lock = Group(), threading.Lock()
    trainer, begun = made(group), []
    trainer.train_step(BATCH, len)
    assert trainer.step == 1
    with pytest.raises(TypeError, match="pickle"):
        trainer.train_step(BATCH, lambda rank, batch: lock.locked())
    assert trainer.step == 1
    group.answers["train_step"] = lambda: begun.append(trainer.step)
    trainer.train_step(BATCH, len)
    assert begun == [2] and trainer.step == 2


def test_a_step_that_may_have_been_sent_has_begun(made):
    trainer = made(Group({"train_step": KeyboardInterrupt()}))
    with pytest.raises(KeyboardInterrupt):
        trainer.train_step(BATCH, len)
    assert trainer.step == 1
