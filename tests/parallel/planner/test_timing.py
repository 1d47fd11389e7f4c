"""Rooflines behind `nemorl plan`, against arithmetic by hand and counted kernels."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.cost import Traffic
from nemorl.parallel.planner.hardware import CALL, LAUNCH, LINKS, SUSTAINED, Hardware
from nemorl.parallel.planner.megatron import Stage
from nemorl.parallel.planner.memory import Step
from nemorl.parallel.planner.model_shape import model_shape
from nemorl.parallel.planner.timing import (
    HEAD_PASSES,
    OF_EXPERT,
    OF_MLP,
    OF_ROUTING,
    Product,
    head_seconds,
    layer_seconds,
    modules_seconds,
    products,
    step_times,
    waits,
)
from tests.parallel.planner.test_memory import LLAMA_70B, workload

H100 = workload(gpus=64).hardware
QWEN_MOE: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48},
    **{"num_attention_heads": 32, "vocab_size": 151936},
}
BFLOAT16 = ParallelPlan(param_dtype="bfloat16", dp_shard=1)


def seconds_of(rows: float, inner: float, columns: float, **options: Any) -> float:
    return H100.product(rows, inner, columns, size=2, **options)


def test_large_products_reach_the_peak_and_small_ones_wait_for_memory_or_a_launch():
    large = seconds_of(8192, 8192, 8192)
    assert large == pytest.approx(2 * 8192**3 / (SUSTAINED * 989e12))
    row = seconds_of(1, 8192, 8192 * 16)
    assert row == pytest.approx(2 * 8192**2 * 16 / 3.35e12, rel=0.01)
    assert seconds_of(1, 8, 8) == LAUNCH
    assert H100.product(8192, 8192, 8192, size=4) == pytest.approx(989 / 67 * large)


SIZES = st.integers(1, 20000)


@given(rows=SIZES, inner=SIZES, columns=SIZES, parts=st.integers(1, 64))
def test_parts_of_a_product_take_no_less_time_than_the_whole(rows, inner, columns, parts):
    assert parts * seconds_of(rows / parts, inner, columns) >= 0.999 * seconds_of(
        rows, inner, columns
    )


def test_groups_of_ranks_lie_on_machines_in_order():
    """Checked against every group of all ranks."""
    for gpus, stride, size in ((64, 1, 8), (64, 8, 8), (64, 2, 16), (64, 1, 64), (8, 1, 8)):
        hardware = replace(H100, gpus=gpus)
        counts = set()
        for first in range(0, gpus, stride * size):
            for offset in range(stride):
                ranks = [first + offset + stride * index for index in range(size)]
                nodes = [rank // 8 for rank in ranks]
                counts |= {nodes.count(node) for node in nodes}
        assert counts == {hardware.together(stride, size)}
    assert replace(H100, gpus=12).together(1, 6) == 2, "ranks 6 and 7 of 6 to 11"


def test_machines_share_their_network_cards():
    sent = 1e9
    near, all_ranks, one_each = (
        H100.ring(sent, 0, stride=stride, size=size) for stride, size in ((1, 8), (1, 64), (8, 8))
    )
    assert near == pytest.approx(sent / (LINKS * 450e9))
    assert all_ranks == pytest.approx(sent / (LINKS * 8 * 50e9))
    assert one_each == pytest.approx(sent / (LINKS * 50e9))
    assert H100.ring(sent, 5, stride=1, size=1) == 0
    # All-to-all: 56 of 63 parts go to other machines, each by its rank's own card.
    assert H100.exchange(sent, 0, stride=1, size=64) == pytest.approx(
        sent * 56 / 63 / (LINKS * 50e9)
    )
    assert H100.exchange(0, 3, stride=1, size=8) == pytest.approx(3 * CALL)


def test_the_products_of_a_layer_are_all_its_operations():
    """Two for each number that a token is multiplied with, whatever divides it."""
    dense, experts = model_shape(LLAMA_70B), model_shape(QWEN_MOE)
    megatron = workload(trainer__backend="megatron", seq_len=4096)
    for shape, work, plan in (
        (dense, workload(seq_len=4096), BFLOAT16),
        (dense, megatron, replace(BFLOAT16, tp=8)),
        (experts, megatron, replace(BFLOAT16, dp_shard=8, ep=8)),
        (experts, megatron, replace(BFLOAT16, tp=2)),
        (experts, megatron, replace(BFLOAT16, tp=2, dp_shard=4, ep=4)),
    ):
        found = sum(
            each.count * each.rows * each.inner * each.columns
            for each in products(Step(shape, plan, work))
        )
        outer = sum(matrix.size for matrix in shape.ends())
        norms = sum(matrix.size for matrix in shape.layer() if len(matrix.shape) == 1)
        layers = shape.num_hidden_layers
        active = (shape.active_parameters() - outer) / layers - norms
        assert found * plan.tp == pytest.approx(4096 * active)


def test_experts_come_one_by_one():
    work = workload(trainer__backend="megatron", seq_len=4096)
    plan = replace(BFLOAT16, dp_shard=8, ep=8)
    _, *_, up, down = products(Step(model_shape(QWEN_MOE), plan, work))
    assert up == Product(rows=4096 * 8 / 16, inner=2048, columns=2 * 768, count=16)
    assert down == Product(rows=4096 * 8 / 16, inner=768, columns=2048, count=16)


def test_adapters_add_small_products():
    frozen, adapted = (
        Product(rows=4096, inner=4096, columns=4096, rank=rank).seconds(H100, 2, frozen=True)
        for rank in (0, 16)
    )
    trained = Product(rows=4096, inner=4096, columns=4096).seconds(H100, 2, frozen=False)
    assert frozen == pytest.approx((trained[0], trained[0])) and trained[1] > 1.99 * trained[0]
    assert adapted[0] - frozen[0] == pytest.approx((adapted[1] - frozen[1]) / 2)
    assert LAUNCH <= adapted[0] - frozen[0] < 0.3 * frozen[0]


@pytest.mark.parametrize(
    "plan",
    [
        replace(BFLOAT16, dp_shard=8),
        replace(BFLOAT16, dp_replicate=2, dp_shard=4),
        replace(BFLOAT16, tp=2, cp=4),
        replace(BFLOAT16, cp=8, cp_method="allgather"),
    ],
)
def test_times_are_finite_and_faster_hardware_takes_less(plan: ParallelPlan):
    slow, fast = (
        step_times(Step(model_shape(LLAMA_70B), plan, workload(gpus=8, **rates))).total
        for rates in (
            {},
            {
                **{"gpu_tflops": 2000.0, "gpu_bandwidth": 8000.0},
                **{"node_bandwidth": 900.0, "network_bandwidth": 100.0},
            },
        )
    )
    assert 0 < fast < slow < math.inf


def test_the_head_computes_its_logits_again():
    step = Step(model_shape(LLAMA_70B), BFLOAT16, workload(seq_len=8192))
    columns, hidden = step.model.vocab_size, step.model.hidden_size
    operations = 4 * 2 * 8192 * hidden * columns / (SUSTAINED * 989e12)
    moved = HEAD_PASSES * 4 * 8192 * columns / 3.35e12
    assert head_seconds(step, H100) == pytest.approx(operations + moved, rel=0.02)


RECOMPUTED = {
    "none": {"activation_checkpointing": "none"},
    "core": {"activation_checkpointing": "selective"},
    "mlp": {"activation_checkpointing": "selective", "recompute_modules": ("mlp",)},
    "moe": {"activation_checkpointing": "selective", "recompute_modules": ("moe",)},
    "full": {"activation_checkpointing": "full"},
}
COUNTED: dict[tuple[str, str], dict[str, int]] = {
    ("dtensor", "tp"): {"none": 32, "core": 40, "full": 48},
    ("dtensor", "cp"): {"none": 32, "core": 48, "full": 48},
    ("megatron", "tp"): {"none": 40, "core": 40, "mlp": 48, "full": 56},
    ("megatron", "cp"): {"none": 32, "core": 48, "mlp": 32, "full": 48},
    ("megatron", "ep"): {"none": 28, "core": 28, "moe": 44, "full": 44},
    ("megatron", "tp of experts"): {"none": 28, "moe": 44, "full": 44},
}
"""Collectives of a microbatch in four layers of tiny models, on two ranks of one machine."""


@pytest.mark.parametrize(("backend", "axis"), COUNTED)
def test_collectives_are_as_many_as_were_counted(backend: str, axis: str):
    of_experts = axis in ("ep", "tp of experts")
    shape = model_shape(QWEN_MOE if of_experts else LLAMA_70B)
    degrees: dict[str, Any] = {"dp_shard": 2, "ep": 2} if axis == "ep" else {axis[:2]: 2}
    name = {"tp": "tensor", "cp": "context"}.get(axis, "experts")
    work = workload(gpus=2, batch_rows=degrees.get("dp_shard", 1), trainer__backend=backend)
    for how, count in COUNTED[backend, axis].items():
        step = Step(shape, replace(BFLOAT16, **degrees, **RECOMPUTED[how]), work)
        assert step.micro_batches == 1
        found = waits(step, work.hardware, 4, Traffic())[name]
        assert found == pytest.approx(count * CALL), how


def test_what_is_recomputed_has_kernels_to_launch():
    work = workload(trainer__backend="megatron", seq_len=64)
    for sizes, plan, how, count in (
        (LLAMA_70B, BFLOAT16, "mlp", OF_MLP),
        (QWEN_MOE, replace(BFLOAT16, dp_shard=8, ep=8), "moe", OF_ROUTING + OF_EXPERT * 16 / 3),
    ):
        step = Step(model_shape(sizes), replace(plan, **RECOMPUTED[how]), work)
        parts = products(step, block="mlp")
        again = sum(part.seconds(H100, 2, frozen=True)[0] for part in parts)
        assert modules_seconds(step, H100) - again == pytest.approx(count * LAUNCH)


def test_adamw_moves_as_much_where_a_cast_of_the_parameter_is_trained():
    """Its numbers, the parameter in float32, and the gradient: 28 bytes with either backend."""
    plan = replace(BFLOAT16, dp_shard=8)
    for backend in ("megatron", "dtensor"):
        work = workload(gpus=8, trainer__backend=backend)
        step, hardware = Step(model_shape(LLAMA_70B), plan, work), work.hardware
        own = Stage(step, 0).updated if backend == "megatron" else step.trained()
        layers = step.model.num_hidden_layers * layer_seconds(step, hardware)
        passes = step.micro_batches * (layers + head_seconds(step, hardware))
        expected = 28 * own / hardware.memory
        assert step_times(step).compute - passes == pytest.approx(expected, rel=1e-6)


def test_adamw_in_main_memory_takes_the_machines_time():
    shape = model_shape(LLAMA_70B)
    for gpus, devices in ((4, 4), (16, 8)):
        plan = replace(BFLOAT16, dp_shard=gpus, cpu_offload=True)
        step = Step(shape, plan, workload(gpus=gpus))
        expected = 28 * shape.num_parameters() / gpus * devices / 2e11
        assert step_times(step).host == pytest.approx(expected, rel=1e-3)


def test_hardware_is_that_of_the_settings():
    expected = Hardware(flops=989e12, memory=3.35e12, near=450e9, far=50e9, gpus=64, per_machine=8)
    assert expected == H100
    with pytest.raises(ValueError, match="network_bandwidth must be positive"):
        workload(network_bandwidth=0)
