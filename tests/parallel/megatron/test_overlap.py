"""Communication of data parallelism during computation: the same numbers, begun earlier."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nemorl.losses.types import LossOutput, finalize
from nemorl.parallel.backend import ForwardOutput
from nemorl.parallel.config import OptimizerConfig, TrainerConfig
from nemorl.parallel.megatron import core
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import RanksLost
from nemorl.rollout.generation import SamplingParams
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.ways import answers, start, weights
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

LENGTHS = ([9, 2, 30, 17, 1, 12], [5, 3, 8], [7, 7, 21, 4, 9, 2, 11, 6, 3], [12], [4, 8, 2, 6, 9])
"""Of the sequences of each step, so that each has another number of microbatches."""
ADAMW = OptimizerConfig(lr=1e-3, weight_decay=0.1, eps=1e-4, max_grad_norm=None)
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True}
GATHER: dict[str, Any] = {**OVERLAP, "overlap_param_gather": True}


class Late:
    """Other ranks' parameters of a bucket group: no numbers until they are waited for."""

    def __init__(self, group: Any) -> None:
        group.param_gather_handle.wait()
        group.param_gather_handle = self
        rank = group.intra_distributed_optimizer_instance_group.rank()
        size = group.intra_distributed_optimizer_instance_size
        self.others = [
            part
            for bucket in group.buckets
            for other, part in enumerate(bucket.param_data.chunk(size))
            if other != rank
        ]
        self.values = [part.clone() for part in self.others]
        for part in self.others:
            part.fill_(torch.nan)

    def wait(self) -> None:
        for part, values in zip(self.others, self.values, strict=True):
            part.copy_(values)


@contextmanager
def small_buckets(size: int = 1500) -> Iterator[list[Any]]:
    """Divide parameters into buckets of so many numbers, which are gathered late; yield the
    reductions that have begun.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    begun, begin, gather = list[Any](), Group.start_grad_sync, Group.start_param_sync

    def recording(group: Any, *args: Any, **options: Any) -> None:
        begun.append(group)
        begin(group, *args, **options)

    def late(group: Any, *args: Any, **options: Any) -> None:
        gather(group, *args, **options)
        if group.param_gather_handle is not None:
            Late(group)

    small = partial(core.DistributedDataParallelConfig, bucket_size=size)
    with (
        patch.object(core, "DistributedDataParallelConfig", small),
        patch.object(Group, "start_grad_sync", recording),
        patch.object(Group, "start_param_sync", late),
    ):
        yield begun


def set_up(folder: Path, plan: ParallelPlan, **options: Any) -> MegatronBackend:
    trainer = TrainerConfig(device="cpu", train_micro_batch_size=1)
    settings: Any = {"trainer": trainer, "optimizer": ADAMW, "parallel": plan, **options}
    backend = start("dp 2", folder, **settings)
    assert isinstance(backend, MegatronBackend)
    return backend


def trained(folder: Path, plan: ParallelPlan) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    with small_buckets():
        backend = set_up(folder, plan)
        for step, lengths in enumerate(LENGTHS):
            batch = random_batch(lengths, seed=step)
            if step == 2:
                backend.forward_backward(batch, nll_loss)
                backend.forward_backward(random_batch(lengths[:5], seed=9), nll_loss)
                metrics = backend.optim_step()
            else:
                metrics = backend.train_step(batch, nll_loss)
            losses.append(finalize(metrics)["loss"])
        found = losses, weights(backend)
    backend.shutdown()
    return found


def ways(folder: Path, plan: ParallelPlan) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [trained(folder, replace(plan, **how)) for how in ({}, OVERLAP, GATHER)]


Case = tuple[int, str, bool, ParallelPlan]
PLANS: dict[str, Case] = {
    "dp 2": (2, "qwen2", True, ParallelPlan(dp_shard=2)),
    "recomputed": (2, "qwen2", False, ParallelPlan(dp_shard=2, activation_checkpointing="full")),
    "bfloat16": (2, "qwen2", True, ParallelPlan(dp_shard=2, param_dtype="bfloat16")),
    "ep 2": (2, "qwen3_moe", True, ParallelPlan(dp_shard=2, ep=2)),
    "experts": (2, "mixtral", False, ParallelPlan(dp_shard=2)),
    "dp 2 x pp 2 x vpp 2": (4, "qwen2", True, ParallelPlan(dp_shard=2, pp=2, vpp=2)),
    "dp 2 x tp 2": (4, "qwen3", False, ParallelPlan(dp_shard=2, tp=2)),
    "dp 4, ep 2": (4, "qwen3_moe", False, ParallelPlan(dp_shard=4, ep=2)),
}
"""Ranks, the model's type, whether its head is tied, and a plan."""


@pytest.mark.parametrize(
    "name", [n if n == "dp 2" else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]
)
def test_overlap_changes_no_number(name: str, tmp_path: Path):
    size, kind, tied, plan = PLANS[name]
    tiny_model(kind, scale=2.0, tied=tied, num_hidden_layers=4).save_pretrained(tmp_path)
    for (losses, expected), *of_ways in run_ranks(size, ways, tmp_path, plan):
        for others, found in of_ways:
            if plan.dp_shard == 4:  # in other buckets, gloo adds four numbers in another order
                assert others == pytest.approx(losses, abs=1e-6)
                torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
            else:
                assert others == losses
                assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def lost(folder: Path, plan: ParallelPlan) -> tuple[int, str]:
    batch, rank = random_batch(LENGTHS[0]), torch.distributed.get_rank()
    with small_buckets() as reductions:
        backend = set_up(folder, replace(plan, **OVERLAP))

        def fail(_: Tensor) -> None:
            if reductions:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        layer = backend._stages[0].decoder.layers[rank]
        layer.self_attention.linear_qkv.weight.register_hook(fail)
        with pytest.raises(RanksLost) as caught:
            backend.train_step(batch, nll_loss)
        begun = len(reductions)
        with pytest.raises(RanksLost):
            backend.train_step(batch, nll_loss)
    return begun, str(caught.value)


@pytest.mark.slow
def test_an_error_while_gradients_are_summed_is_the_end(tmp_path: Path):
    tiny_model(scale=2.0, num_hidden_layers=4).save_pretrained(tmp_path)
    found = run_ranks(2, lost, tmp_path, ParallelPlan(dp_shard=2), fresh=True)
    for _, said in found:
        assert said.startswith("the step failed while gradients were summed over ranks (parallel.")
        assert "out of memory" in said
    assert found[0][0] > found[1][0] > 0


def read(folder: Path, plan: ParallelPlan) -> list[Any]:
    batch, found = random_batch(LENGTHS[0]), list[Any]()

    def failing(output: ForwardOutput, part: Any) -> LossOutput:
        loss = nll_loss(output, part)
        return replace(loss, loss=loss.loss * torch.nan)

    with small_buckets(1):  # so that the head has one of its own
        backend = set_up(folder, plan)
        backend.open_engine(max_batch_size=8, max_positions=64, end_tokens=[1])
        for reader in [
            "weights",
            "logprobs",
            "decode",
            "take_weights",
            "offload",
            "load",
            "failed",
        ]:
            backend.train_step(batch, nll_loss)
            if reader == "logprobs":
                found.append(backend.get_logprobs(batch).values)
            elif reader == "take_weights":
                found.append(backend.take_weights(found[0], 1))
            elif reader == "offload":
                backend.offload()
            elif reader == "load":
                path = folder / f"saved {plan.overlap_param_gather}"
                backend.save_checkpoint(path)
                backend.train_step(batch, nll_loss)
                backend.load_checkpoint(path)
            elif reader == "failed":  # before the step that would gather
                with pytest.raises(FloatingPointError):
                    backend.train_step(batch, failing)
            if reader in ("decode", "failed"):  # one of the two replicas alone
                prompt, params = [5, 3, 8, 2], SamplingParams(seed=0, max_new_tokens=6)
                found += [each.token_ids for each in answers(backend, [prompt], [params])]
            found.append(weights(backend))
    backend.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_whoever_reads_parameters_waits_for_them(tied: bool, tmp_path: Path):
    tiny_model(scale=2.0, tied=tied).save_pretrained(tmp_path)
    plan = ParallelPlan(dp_shard=2)
    expected, _ = run_ranks(2, read, tmp_path, plan)
    for found in run_ranks(2, read, tmp_path, replace(plan, **GATHER)):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
