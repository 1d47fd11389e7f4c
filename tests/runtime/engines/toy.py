"""An actor whose engine starts at once and fails on demand.

`spec.engine` holds `step_s` (seconds per token, by rank) and `faults`, a folder of files.
"""

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from nemorl.models.tensor_files import tensor_checksum
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.engines.engine import EngineActor
from nemorl.runtime.engines.spec import EngineSpec, Sample
from nemorl.runtime.engines.weights import unpacked

RANK = 0


def answer(
    prompt: tuple[int, ...], params: SamplingParams, weights: float, version: int, j: int
) -> Sample:
    """A response that depends on all of these."""
    digest = hashlib.sha256(repr((prompt, params.seed, weights, j)).encode()).digest()
    length = 1 + digest[0] * digest[1] % params.max_new_tokens
    tokens = tuple(digest[i % 32] % 42 for i in range(length))
    logprobs = tuple(-float(token) for token in tokens)
    versions = (version,) * length
    return Sample(
        token_ids=tokens, logprobs=logprobs, policy_versions=versions, finish_reason="length"
    )


class ToyEngine:
    partial, version = 0, 0
    uuids = ()

    def __init__(self, spec: EngineSpec) -> None:
        self.step_s, self.faults = spec.engine["step_s"][RANK], Path(spec.engine["faults"])
        self.requests: dict[int, tuple[tuple[Sample, ...], int]] = {}
        self.weights, self.usable = float("nan"), False
        self.arrived: list[tuple[str, int]] = []

    def fault(self) -> None:
        """Do once what `step-RANK` in the folder says: die, stop, or raise a text."""
        path = self.faults / f"step-{RANK}"
        try:
            what = path.read_text()
        except FileNotFoundError:
            return
        path.unlink(missing_ok=True)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise RuntimeError(what)

    @property
    def busy(self) -> bool:
        return self.usable and bool(self.requests)

    def add(self, id: int, prompt: tuple[int, ...], params: SamplingParams) -> None:
        samples = tuple(
            answer(prompt, params, self.weights, self.version, j) for j in range(params.n)
        )
        self.requests[id] = samples, 0

    def step(self) -> dict[int, tuple[Sample, ...]]:
        self.fault()
        time.sleep(self.step_s)
        done = {}
        for id, (samples, length) in list(self.requests.items()):
            self.requests[id] = samples, length + 1
            if length + 1 == max(len(sample.token_ids) for sample in samples):
                done[id] = self.requests.pop(id)[0]
        return done

    def abort(self, id: int) -> None:
        self.requests.pop(id, None)

    def abort_all(self) -> None:
        self.requests.clear()

    def begin_weights(self) -> None:
        self.usable, self.arrived = False, []

    def load_weights(self, info: dict[str, Any]) -> None:
        if (self.faults / f"behind-{RANK}").exists():  # it keeps the old ones, and says nothing
            return
        for name, tensor in unpacked(info["bucket"]):
            self.arrived.append((name, int(tensor_checksum(tensor))))
            self.weights = float(tensor.flatten()[0])

    def finish_weights(self, version: int) -> list[list[tuple[str, int]]]:
        self.usable, self.version = True, version
        return [self.arrived]

    def shutdown(self) -> None:
        pass

    def unfinished(self) -> int:
        return len(self.requests)


class ToyActor(EngineActor):
    make = ToyEngine

    def __init__(self, name: str, log: str) -> None:
        super().__init__(name, log)
        global RANK
        RANK = int(name.partition("-")[2])
