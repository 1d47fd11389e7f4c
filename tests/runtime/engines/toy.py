"""A worker whose engine starts at once and does as it is told: for faults that need many starts, or
that no real engine has on demand.

`spec.engine` holds `step_s` (seconds per token, by rank) and `faults`, a folder: what is in there
happens (see `fault`).
"""

import hashlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nemorl.runtime.engines.worker as worker
from nemorl.runtime.engines.spec import EngineSpec, Finished, Request, Sample

RANK = int(os.environ.get("RANK", 0))


def answer(request: Request, weights: float, j: int) -> Sample:
    """A response that depends on the prompt, the seed, the weights and the number of the sample: up
    to max_new_tokens, more often short.
    """
    digest = hashlib.sha256(
        repr((request.prompt, request.params.seed, weights, j)).encode()
    ).digest()
    length = 1 + digest[0] * digest[1] % request.params.max_new_tokens
    tokens = tuple(digest[i % 32] % 42 for i in range(length))
    return Sample(
        token_ids=tokens, logprobs=tuple(-float(token) for token in tokens), finish_reason="length"
    )


class ToyEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.step_s, self.faults = spec.engine["step_s"][RANK], Path(spec.engine["faults"])
        self.places = spec.max_num_seqs
        self.waiting: list[Request] = []
        self.running: dict[int, tuple[Request, int]] = {}
        self.num_tokens, self.weights, self.usable = 0, float("nan"), False
        self.fault("start")

    def fault(self, where: str) -> None:
        """`WHERE-RANK` in the folder says what to do here: die, hang, an error's text, or a number
        of seconds to wait.
        """
        try:
            what = (self.faults / f"{where}-{RANK}").read_text()
        except FileNotFoundError:
            return
        (self.faults / f"{where}-{RANK}-happened").touch()
        if what == "die":
            print(f"last words in {where}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            time.sleep(1000)
        elif what.replace(".", "").isdigit():
            time.sleep(float(what))
        else:
            raise ValueError(what) if where == "start" else RuntimeError(what)

    def add(self, requests: Sequence[Request]) -> None:
        assert self.usable
        self.waiting += requests

    def step(self) -> list[Finished]:
        self.fault("step")
        time.sleep(self.step_s)
        while (
            self.waiting
            and sum(request.params.n for request, _ in self.running.values()) < self.places
        ):
            request = self.waiting.pop(0)
            self.running[request.id] = request, 0
        done = []
        for request, length in list(self.running.values()):
            samples = tuple(answer(request, self.weights, j) for j in range(request.params.n))
            self.running[request.id] = request, length + 1
            self.num_tokens += request.params.n
            if length + 1 == max(len(sample.token_ids) for sample in samples):
                del self.running[request.id]
                done.append(Finished(id=request.id, samples=samples))
        return done

    def abort(self, ids: Iterable[int]) -> None:
        ids = set(ids)
        self.waiting = [request for request in self.waiting if request.id not in ids]
        self.running = {i: state for i, state in self.running.items() if i not in ids}

    def give_up(self) -> None:
        self.abort([*self.running, *(request.id for request in self.waiting)])

    def recall(self, ids: Iterable[int]) -> list[int]:
        dropped = [i for i in ids if any(request.id == i for request in self.waiting)]
        self.abort(dropped)
        return dropped

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def begin_weights(self) -> None:
        self.usable = False
        self.abort([*self.running, *(request.id for request in self.waiting)])
        self.fault("begin")

    def load_weights(self, payload: Any) -> None:
        self.weights = float(payload.tensors()[0][1].flatten()[0])

    def finish_weights(self) -> None:
        self.usable = True

    def sleep(self) -> None:
        self.fault("sleep")

    def wake(self) -> None:
        self.fault("wake")

    def shutdown(self) -> None:
        self.fault("shutdown")


class ToyWorker(worker.VLLMWorker):
    def __init__(self) -> None:
        super().__init__()
        worker.Engine = ToyEngine  # type: ignore[misc,assignment]
