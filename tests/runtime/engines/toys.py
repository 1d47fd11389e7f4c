"""Replicas whose engines are toys (see toy.py), and how to do them harm."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams, Weights
from nemorl.runtime.engines.replicas import EngineProcesses, Replicas, Request
from nemorl.runtime.engines.spec import EngineSpec
from tests.runtime.engines.toy import ToyActor
from tests.runtime.workers.processes import alive, eventually
from tests.tiny_models import tiny_model

MODEL = tiny_model()


class Toys:
    """Replicas of toy engines, with weights that are all the same number."""

    def __init__(
        self, folder: Path, *, step_s: Sequence[float] = (0.005, 0.005), **config: Any
    ) -> None:
        self.folder = folder
        options = {
            "num_replicas": len(step_s),
            "max_batch_size": 8,
            "log_dir": str(folder / "logs"),
            **config,
        }
        spec = EngineSpec(
            files={"config.json": json.dumps(MODEL.config.to_dict()).encode()},
            vocabulary=None,
            dtype="float32",
            max_num_seqs=8,
            max_model_len=None,
            engine={"step_s": tuple(step_s), "faults": str(folder)},
        )
        self.replicas = ToyReplicas(GenerationConfig(backend="vllm", **options), spec)
        self.update(0)

    def update(self, value: float, version: int = 0) -> None:
        weights = [(name, torch.full_like(p, value)) for name, p in MODEL.named_parameters()]
        self.replicas.supply.update(Weights(version=version, tensors=weights))

    def fault(self, where: str, rank: int, what: str = "") -> None:
        (self.folder / f"{where}-{rank}").write_text(what)

    def repair(self) -> None:
        for path in self.folder.glob("*-*"):
            path.unlink(missing_ok=True)

    def kill(self, rank: int) -> None:
        kill(self.replicas, rank)

    def wait_until_all_are_up(self) -> None:
        """Also those that have just been killed."""
        ranks = range(self.replicas.config.num_replicas)
        assert eventually(lambda: all(alive(process(self.replicas, rank)) for rank in ranks))


class ToyProcesses(EngineProcesses):
    actor = ToyActor


class ToyReplicas(Replicas):
    processes = ToyProcesses


def process(replicas: Replicas, rank: int) -> int:
    """The process id of a replica that is up, or 0."""
    pids = [one.place.pid for one in replicas.running() if one.id.rank == rank]
    return pids[0] if pids else 0


def kill(replicas: Replicas, rank: int) -> None:
    """Kill a replica's process, unless it is being started."""
    if pid := process(replicas, rank):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def toys(folder: Path, **options: Any) -> Iterator[Toys]:
    made = Toys(folder, **options)
    try:
        yield made
    finally:
        made.repair()
        made.replicas.shutdown()


def requests(count: int, *, max_new_tokens: int = 20) -> list[Request]:
    return [
        ((2, 3 + i), SamplingParams(n=2, seed=i, max_new_tokens=max_new_tokens))
        for i in range(count)
    ]
