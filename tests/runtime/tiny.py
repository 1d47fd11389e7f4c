"""A trainer of three numbers with everything that a real one has to save.

Run as a script, it dies on purpose: see `die_while_saving`.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import nemorl
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.state import POLICY, LoopState
from nemorl.runtime.watch.callbacks import notify
from nemorl.runtime.watch.loggers import JsonlLogger, LoggedRun, Recorder


class TinyTrainer:
    """A vector with momentum; its steps draw from all three random generators."""

    def __init__(self) -> None:
        self.tensors = {"weight": torch.zeros(3), "momentum": torch.zeros(3)}
        self.step = 0
        self.may_write = threading.Event()  # what keeps a checkpoint waiting
        self.may_write.set()

    def setup(self, config) -> None: ...

    def train_step(self, batch=None, loss_fn=None) -> dict[str, float]:
        noise = torch.randn(3) + random.gauss(0, 1) + float(np.random.standard_normal())
        self.step += 1
        self.tensors["momentum"] = 0.9 * self.tensors["momentum"] + noise
        self.tensors["weight"] = self.tensors["weight"] - 0.1 * self.tensors["momentum"]
        return {"loss": float(self.tensors["weight"].square().sum()), "reward": float(noise.sum())}

    def get_logprobs(self, batch): ...

    def get_reference_logprobs(self, batch): ...

    def weights(self): ...

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        tensors = dict(self.tensors)  # a step makes new ones
        if background:
            self.writing = ThreadPoolExecutor(1).submit(self._write, path, tensors)
        else:
            self._write(path, tensors)

    def wait_for_checkpoint(self) -> None:
        self.writing.result()

    def _write(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.may_write.wait()
        half_written = path / "optimizer.safetensors"
        with half_written.open("wb") as file:
            file.write(b"half of ")
            os.fsync(file.fileno())  # one of the places where `die_at` strikes
        save_file({"momentum": tensors["momentum"]}, half_written)
        save_file({"weight": tensors["weight"]}, path / "model.safetensors")

    def load_checkpoint(self, path: Path) -> None:
        torch.rand(7)  # a loader that draws random numbers must do no harm
        self.tensors = load_file(path / "model.safetensors") | load_file(
            path / "optimizer.safetensors"
        )

    def shutdown(self) -> None: ...


def save(directory: Path, run: "TinyRun", *, keep: int = 2, background: bool = False) -> Path:
    return checkpoint.begin(directory, run, keep=keep, background=background)()


@dataclass(frozen=True)
class TinyRun:
    """What callbacks read of a run of a TinyTrainer."""

    trainer: Any
    state: LoopState
    config: Any = field(default_factory=nemorl.BaseConfig)
    tokenizer: Any = None
    directory: Any = None

    @property
    def backends(self) -> dict[str, Any]:
        return {POLICY: self.trainer}

    @property
    def updates(self) -> int:
        return self.trainer.step


def tiny_run(*, step: int = 0, value: float = 0.0) -> TinyRun:
    trainer = TinyTrainer()
    trainer.tensors["weight"] += value
    return TinyRun(trainer, LoopState(seed=0, step=step, cursors={"train": 4 * step}))


def recorder(directory: RunDirectory, **factories) -> Recorder:
    """The record in the run's directory, and whatever other loggers are to have."""
    return Recorder(
        {"jsonl": JsonlLogger, **factories}, LoggedRun(directory=directory, run_id="3f9a01bc")
    )


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def walk(callback, steps, *, end: bool = True) -> None:
    """A run that does nothing but notify."""
    notify([callback], "on_train_begin", tiny_run(step=steps.start - 1))
    samples = [{"prompt": str(index)} for index in range(12)]
    for step in steps:
        run = tiny_run(step=step)
        notify([callback], "on_samples", run, step, samples)
        notify([callback], "on_step_end", run, step, {"loss": 1 / step})
        notify([callback], "on_validation_end", run, step, {"loss": 2 / step})
    if end:
        notify([callback], "on_train_end", tiny_run(step=steps.stop - 1), {})


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def die_at(place: int, report: Path) -> None:
    """Kill this process with SIGKILL at the `place`-th of these: just before or after something is
    flushed to the disk, renamed or removed.
    """
    places = itertools.count(1)

    def watched(name, function):
        def call(*arguments, **keywords):
            for when in ("before", "after"):
                if when == "after":
                    result = function(*arguments, **keywords)
                if next(places) == place:
                    report.write_text(f"{when} {name} {arguments[0]}")
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree")):
        setattr(module, name, watched(name, getattr(module, name)))


def in_a_process(work) -> bool:
    """Do it in a process of its own; whether that was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, (
        "the process failed without being killed"
    )
    return os.WIFSIGNALED(status)


def die_while_saving(root: Path, scenario: str) -> None:
    """root/1, root/2, …: in each a process died a bit later while it wrote a checkpoint of step 2
    with value 2 after one of step 1 with value 1, and in the scenario replace one of step 2.
    """
    for place in itertools.count(1):
        folder = root / str(place)
        for step in (1, 2) if scenario == "replace" else (1,):
            save(folder, tiny_run(step=step, value=1.0))

        def die(place=place, folder=folder):
            die_at(place, folder / "died.txt")
            save(folder, tiny_run(step=2, value=2.0), background=scenario == "background")

        if not in_a_process(die):
            print(json.dumps(place))
            return


if __name__ == "__main__":
    die_while_saving(Path(sys.argv[2]), sys.argv[1])
