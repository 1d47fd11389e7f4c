"""What stands for a model on ranks in tests of what is around it: a backend of this process whose
weights nobody sees, and which dies on demand.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.store.files import WorkerDied

Death = Callable[[], Exception]


def killed() -> Exception:
    return WorkerDied("rank 1 (process 7 on here) died in step 3: it was killed")


def forwarded(method: str) -> Any:
    return lambda self, *args, **options: self._call(method, *args, **options)


class FakeRanks:
    """Keeps the `TrainingBackend` Protocol as `RankedTrainer` does."""

    def __init__(self, deaths: dict[tuple[str, int], Death] | None = None) -> None:
        self.deaths = {} if deaths is None else deaths
        self.inner, self.calls, self.dead, self.ended = DTensorBackend(), {}, False, False
        self.others: dict[str, FakeRanks] = {}

    def beside(self, name: str) -> "FakeRanks":
        self.others[name] = FakeRanks()
        return self.others[name]

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        self.calls[method] = self.calls.get(method, 0) + 1
        death = self.deaths.pop((method, self.calls[method]), None)
        if death is not None:
            self.dead = True
            raise death()
        if self.dead:
            raise RuntimeError("the ranks have been ended")
        return getattr(self.inner, method)(*args, **options)

    def setup(self, config: Any) -> None:
        with torch.random.fork_rng():  # what ranks draw is nothing to their driver
            self._call(
                "setup",
                replace(
                    config, parallel=ParallelPlan(), trainer=replace(config.trainer, device="cpu")
                ),
            )
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(self.inner.model.config)
        self.model.generation_config = GenerationConfig.from_pretrained(config.model.path)

    @property
    def step(self) -> int:
        return self.inner.step

    train_step, get_logprobs = forwarded("train_step"), forwarded("get_logprobs")
    get_reference_logprobs = forwarded("get_reference_logprobs")
    offload, load_checkpoint = forwarded("offload"), forwarded("load_checkpoint")
    save_checkpoint = forwarded("save_checkpoint")
    wait_for_checkpoint = forwarded("wait_for_checkpoint")

    def weights(self) -> Any:
        return ((name, tensor.clone()) for name, tensor in self._call("weights"))

    def shutdown(self) -> None:
        self.ended = True
        self.inner.shutdown()
