"""Training backends of both kinds in tests: set up on CPUs, and trained a little."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nemorl.losses.types import finalize
from nemorl.parallel.config import (
    BackendConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.generation import Completion, SamplingParams
from tests.parallel import batches
from tests.parallel.batches import nll_loss, random_batch

LENGTHS = [9, 2, 30, 17, 1, 12]
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, eps=1e-4)


WAYS = {
    "tp 2": ("megatron", ParallelPlan(dp_shard=1, tp=2)),
    "pp 2": ("megatron", ParallelPlan(dp_shard=1, pp=2)),
    "dp 2": ("megatron", ParallelPlan(dp_shard=2)),
    "pp 2, interleaved": ("megatron", ParallelPlan(dp_shard=1, pp=2, vpp=2)),
    "pp 2, 1 layer first": (
        "megatron",
        ParallelPlan(dp_shard=1, pp=2, num_layers_in_first_pipeline_stage=1),
    ),
    "pp 2 in bfloat16": ("megatron", ParallelPlan(dp_shard=1, pp=2, param_dtype="bfloat16")),
    "dp 2 in bfloat16": ("megatron", ParallelPlan(dp_shard=2, param_dtype="bfloat16")),
    "ep 2": ("megatron", ParallelPlan(dp_shard=2, ep=2)),
    "ep 2 of tp": ("megatron", ParallelPlan(dp_shard=1, tp=2, ep=2)),
    "FSDP2 2": ("dtensor", ParallelPlan(dp_shard=2)),
}


def start(way: str, folder: Path, **options: Any) -> Any:
    from nemorl.parallel.megatron.backend import MegatronBackend

    name, plan = WAYS[way]
    backend = MegatronBackend() if name == "megatron" else DTensorBackend()
    config = BackendConfig(
        model=ModelConfig(path=str(folder)),
        trainer=TrainerConfig(device="cpu"),
        optimizer=OPTIMIZER,
        parallel=plan,
        total_steps=4,
    )
    backend.setup(replace(config, **options))
    return backend


def weights(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def train(backend: Any, *seeds: int) -> list[float]:
    steps = (backend.train_step(random_batch(LENGTHS, seed=seed), nll_loss) for seed in seeds)
    return [finalize(metrics)["loss"] for metrics in steps]


def step(backend: Any) -> float:
    """Take the next step; return its loss."""
    batch = random_batch(batches.LENGTHS, seed=backend.step)
    return finalize(backend.train_step(batch, nll_loss))["loss"]


def set_up(
    model: nn.Module | None = None,
    path: Path | str = "",
    *,
    trainer: Any = None,
    optimizer: Any = None,
    lora: Any = None,
    plan: Any = None,
    make: Any = None,
    **options: Any,
) -> Any:
    """A backend for a model or its folder; sections as dicts."""
    backend = (make or DTensorBackend)(model)
    config = BackendConfig(
        model=ModelConfig(path=str(path), from_scratch=options.pop("from_scratch", False)),
        trainer=TrainerConfig(**{"device": "cpu", **(trainer or {})}),
        optimizer=OptimizerConfig(**{"lr": 1e-2, **(optimizer or {})}),
        lora=LoRAConfig(**(lora or {})),
        parallel=ParallelPlan(**(plan or {})),
        **options,
    )
    backend.setup(config)
    return backend


def answers(
    backend: Any,
    prompts: list[list[int]],
    params: list[SamplingParams],
    *,
    anew: bool = False,
) -> list[Completion]:
    """By three passes at a time, as rank 0 has them; anew: with a new cache each time."""
    from nemorl.parallel.megatron.engine import Order

    order, found = Order(new=[*zip(range(100), prompts, params, strict=False)], passes=3), {}
    while len(found) < len(prompts):
        found |= backend.world.merge_objects(backend.decode(order)[0], lambda first, _: first)
        order = Order(passes=3, anew=anew)
    return [completion for _, answer in sorted(found.items()) for completion in answer]
