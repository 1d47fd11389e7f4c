"""A training backend for ranks of the tests, and losses that say what a rank does."""

import math
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from nemorl.losses.types import Sum
from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
from nemorl.parallel.layout import Cutting
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config.base import BaseConfig, RuntimeConfig

PLAN, CPU = ParallelPlan(dp_shard=2), TrainerConfig(device="cpu")


class Summing:
    """Its "loss" is the sum of `loss_fn(rank, batch)` over the ranks, and its weights hold that."""

    def __init__(self, model=None):
        self.step = 0
        self.total = torch.zeros(3)
        self.written = threading.Event()

    def setup(self, config):
        if config.seed == 13:
            raise ValueError("seed must be a lucky number, but it is 13: take another")
        if config.seed == 666 and os.environ["RANK"] == "1":
            print("what killed it", flush=True)
            os._exit(3)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank = dist.get_rank()

    @property
    def place(self):
        return self.rank, 0

    @property
    def cutting(self):
        trainer = TrainerConfig(router_replay=True)
        model = SimpleNamespace(num_experts_per_tok=2, num_local_experts=8)
        return Cutting(trainer=trainer, plan=PLAN, model=model, layers=3)

    def train_step(self, batch, loss_fn):
        value = torch.tensor(float(loss_fn(self.rank, batch)))
        dist.all_reduce(value)
        self.step += 1
        self.total += value
        return {"loss": Sum(value)}

    def get_logprobs(self, batch):
        return batch

    def get_reference_logprobs(self, batch):
        raise RuntimeError("no reference")

    def environment(self):
        return {
            **os.environ,
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "group": os.getpgrp(),
        }

    def spawn(self):
        """A child of this process."""
        return subprocess.Popen(["sleep", "600"]).pid

    def weights(self, dtype=None):
        for index in range(8):
            tensor = torch.full((5_000_000,), float(index), dtype=dtype or torch.float32)
            dist.all_reduce(tensor)  # whoever does not come along stops all others
            yield f"large.{index}", tensor
        yield "total", self.total

    def save_checkpoint(self, path, *, background=False):
        if background:  # written on rank 0, and on rank 1 with the next checkpoint
            self.written.clear()
            self.background = path
        else:
            path.mkdir(parents=True, exist_ok=True)
            (path / f"rank-{self.rank}").write_text(str(self.step), encoding="utf-8")
            self.written.set()

    def wait_for_checkpoint(self):
        if self.rank == 0:
            self.background.touch()
        else:
            assert self.written.wait(20)

    def load_checkpoint(self, path):
        self.step = int((path / f"rank-{self.rank}").read_text(encoding="utf-8"))

    def shutdown(self):
        print("shut down in order", flush=True)


def config(**runtime):
    return BaseConfig(trainer=CPU, runtime=RuntimeConfig(**runtime))


def trainer(config, logs):
    """Two ranks with `Summing`, before `setup`."""
    from nemorl.runtime.ranks.trainer import make_trainer

    return make_trainer(config, Summing, PLAN, logs)


def settings(folder, *, seed=0):
    """What it is set up with."""
    model = ModelConfig(path=str(folder))
    return BackendConfig(model=model, trainer=CPU, parallel=PLAN, seed=seed)


def rank_number(rank, batch):
    return rank + 1


def routed(batch):
    """A batch with experts, in which no two tokens' are alike."""
    shape = *batch.input_ids.shape, 3, 2
    experts = torch.arange(math.prod(shape)).view(shape) % 8
    return replace(batch, routed_experts=experts.to(torch.int16))


def sum_of_experts(rank, batch):
    """Of those that a rank was sent, which are its own rows'."""
    found = batch.routed_experts.experts
    assert found.shape == (int(batch.lengths[[rank]].sum()), 3, 2)
    return found.sum()


def killed(rank, batch):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def asleep(rank, batch):
    if rank == 1:
        time.sleep(600)
    return 0


def raising(rank, batch):
    raise FloatingPointError(f"the loss must be finite, but it is nan on rank {rank}")


def raising_alone(rank, batch):
    if rank == 1:
        raise ZeroDivisionError("only here")
    return 0


class Own(Exception):
    """Of a class that may be unknown elsewhere."""


def raising_own(rank, batch):
    raise Own("mine")
