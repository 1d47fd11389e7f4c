"""What a step moves, as `step_moves` says, against bytes that small runs really moved."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemorl.data.batch import TokenBatch, collate
from nemorl.data.example import Example
from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
from nemorl.parallel.layout import Cutting
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.hardware import CALL, LINKS, MACHINE
from nemorl.parallel.planner.memory import Step
from nemorl.parallel.planner.moves import MESSAGE, STORE, Move, step_moves
from nemorl.parallel.world import DTYPES
from nemorl.runtime.ranks.rank import Answer
from nemorl.runtime.ranks.wire import dumps
from tests.parallel.batches import nll_loss
from tests.parallel.measured_steps import BACKENDS, SentBytes, _batch
from tests.parallel.planner.test_memory import (
    HSDP,
    LORA,
    OFFLOAD,
    SHARDED,
    TP,
    WORK,
    Plan,
    on_megatron,
    small_folder,
    workload,
)
from tests.ranks import run_ranks

BFLOAT16 = replace(SHARDED, param_dtype="bfloat16")
EXCHANGES = ("parameters and gradients", "activations of", "tokens to experts")
CASES: dict[str, tuple[str, ParallelPlan, PlanConfig]] = {
    "FSDP2": ("llama", SHARDED, WORK),
    "TP": ("llama", TP, WORK),
    "LoRA": ("llama", SHARDED, LORA),
    "LoRA, TP in bfloat16": ("llama", replace(TP, param_dtype="bfloat16"), LORA),
    "LoRA, copies": ("llama", HSDP, LORA),
    "offload": ("llama", OFFLOAD, WORK),
    "megatron, DP": ("llama", SHARDED, on_megatron(WORK)),
    "megatron, PP": ("llama", Plan(dp_shard=1, pp=2), on_megatron(WORK)),
    "megatron, EP": ("qwen3_moe", replace(SHARDED, ep=2), on_megatron(WORK)),
    "megatron, TP": ("llama", TP, on_megatron(WORK)),
    "megatron, DP in bfloat16": ("qwen3_moe", BFLOAT16, on_megatron(WORK)),
}


def moved(folder: Path, plan: ParallelPlan, work: PlanConfig, saved: Path) -> dict[str, float]:
    """Count what this rank sends in a step, hands to engines and writes."""
    trainer = replace(work.trainer, device="cpu", train_micro_batch_size=work.micro_batch_rows)
    lora = work.lora
    # Adapters are for a trained model, which is handed over.
    live = load_causal_lm(str(folder), from_scratch=True) if lora.rank else None
    backend = BACKENDS[work.trainer.backend](live)
    model = ModelConfig(path=str(folder), from_scratch=not lora.rank)
    backend.setup(BackendConfig(model=model, trainer=trainer, parallel=plan, lora=lora))
    batch = _batch(2 * work.micro_batch_rows * plan.data_ranks, work)
    backend.train_step(batch, nll_loss)
    with SentBytes() as sent:
        metrics = backend.train_step(batch, nll_loss)
    backend.save_checkpoint(saved)
    with SentBytes() as gathered:
        weights = sum(tensor.nbytes for _, tensor in backend.weights(DTYPES[plan.precision]))
    rank, dtype = backend.world.rank, DTYPES[plan.precision]
    alone = backend.weights(dtype, adapters="alone") if lora.rank else ()
    files = [*saved.glob(f"*-0000{rank + 1}-of-*.safetensors")]
    files += saved.glob("adapter_model.safetensors") if rank == 0 else ()
    found = {
        "exchanges": sent.total,
        "weights": weights,
        "gathered": gathered.total,
        "adapters": sum(tensor.nbytes for _, tensor in alone),
        "checkpoint": sum(file.stat().st_size for file in files),
        "metrics": len(dumps(metrics)[0]),
        "answer": len(dumps(Answer(value=metrics, error=None, step=1))[0]),
    }
    backend.shutdown()
    return found


def on_ranks(cases: list[tuple[Any, ...]]) -> list[dict[str, float]]:
    return [moved(*case) for case in cases]


def by_name(moves: tuple[Move, ...]) -> dict[str, Move]:
    return {move.what: move for move in moves}


def test_what_two_ranks_move(tmp_path: Path):
    folders = {name: small_folder(tmp_path / name, kind) for name, (kind, *_) in CASES.items()}
    with tempfile.TemporaryDirectory() as saved:
        work = [
            (folders[name][0], plan, task, Path(saved) / str(number))
            for number, (name, (_, plan, task)) in enumerate(CASES.items())
        ]
        measured = run_ranks(2, on_ranks, work)
    for number, (name, (_, plan, task)) in enumerate(CASES.items()):
        rows = 2 * task.micro_batch_rows * plan.data_ranks
        shape = folders[name][1]
        moves = step_moves(Step(shape, plan, replace(task, batch_rows=rows)))
        found, of = [each[number] for each in measured], by_name(moves)
        exchanged = [move for move in moves if move.what.startswith(EXCHANGES)]
        total = sum(each["exchanges"] for each in found)
        assert sum(move.total for move in exchanged) == pytest.approx(total, rel=0.1), name
        written = [each["checkpoint"] for each in found]
        assert of["checkpoint"].of_rank == pytest.approx(max(written), rel=0.05), name
        assert of["checkpoint"].total == pytest.approx(sum(written), rel=0.05), name
        gathered = [each["gathered"] for each in found]
        assert of["weights, gathered"].of_rank == pytest.approx(max(gathered), rel=0.02), name
        assert of["weights, gathered"].total == pytest.approx(sum(gathered), rel=0.02), name
        for each in found:
            assert of["weights by nccl"].of_rank == each["weights"], name
            adapters = of.get("adapters by object_store")
            assert (adapters.of_rank if adapters else 0) == each["adapters"], name
            assert max(each["metrics"], each["answer"]) <= MESSAGE, name


def sampled(tokens: int, rows: int, *, layers: int = 0, chosen: int = 0) -> TokenBatch:
    """A batch of GRPO, as the controller has it."""
    mask = [False] + [True] * (tokens - 1)
    routes = torch.zeros(tokens, layers, chosen, dtype=torch.int16) if layers else None
    example = Example(
        input_ids=[5] * tokens, loss_mask=mask, response_mask=mask, routed_experts=routes
    )
    names = ("loss_weights", "advantages", "prev_logprobs", "generation_logprobs")
    arrays: dict[str, Any] = {name: torch.zeros(rows, tokens) for name in names}
    arrays["policy_versions"] = torch.zeros(rows, tokens, dtype=torch.int64)
    return replace(collate([example] * rows), **arrays)


def payload(value: Any) -> int:
    return sum(map(len, dumps(value)))


def test_the_batch_is_as_large_as_what_the_controller_sends():
    work = workload(gpus=16, seq_len=512, batch_rows=64)
    step = Step(small_shape(), Plan(dp_shard=16), work)
    batch = by_name(step_moves(step))["batch"]
    assert batch.of_rank == pytest.approx(payload(((sampled(512, 64),), {})), rel=0.01)
    assert batch.total == 2 * batch.of_rank, "two machines"


@pytest.mark.parametrize("pp", [1, 2])
def test_routes_are_as_large_as_what_the_controller_cuts_for_a_rank(pp: int):
    work = on_megatron(workload(seq_len=512, batch_rows=32))
    plan, shape = Plan(dp_shard=4, pp=pp, ep=4), small_shape("qwen3_moe")
    routes = by_name(step_moves(Step(shape, plan, work)))["routes"]
    layers, chosen = shape.num_hidden_layers, shape.num_experts_per_tok
    trainer = TrainerConfig(router_replay=True, train_micro_batch_size=1)
    cutting = Cutting(trainer=trainer, plan=plan, model=shape, layers=layers)
    parts = cutting.routes(sampled(512, 32, layers=layers, chosen=chosen))
    sizes = list(map(payload, parts.values()))
    assert len(sizes) == 4 * pp and routes.of_rank == pytest.approx(max(sizes), rel=0.02)
    assert routes.total == pytest.approx(sum(sizes), rel=0.02)
    assert "routes" not in by_name(step_moves(Step(small_shape(), SHARDED, work)))


def test_an_object_goes_once_to_each_machine_of_the_ranks_that_read_it():
    shape, work = small_shape("qwen3_moe"), on_megatron(workload(gpus=16, seq_len=256))
    work = replace(work, batch_rows=32)
    near, far = (
        by_name(step_moves(Step(shape, plan, work)))["routes"]
        for plan in (Plan(dp_shard=8, cp=2), Plan(dp_shard=1, cp=16))
    )
    assert far.total == 2 * near.total and far.of_rank == 8 * near.of_rank
    assert near.total == 8 * near.of_rank
    assert near.seconds == pytest.approx((near.total + near.total / 2) / STORE), "two machines"
    assert far.seconds == pytest.approx((near.total + far.total / 2) / STORE)


def test_weights_take_turns_through_the_slowest_links():
    """Stages are on different machines, and ranks of ep on one."""
    shape, work = small_shape("qwen3_moe"), on_megatron(workload(gpus=64))
    size = 4 * shape.num_parameters()
    pipeline = Plan(dp_shard=8, pp=8, ep=8)
    by_stage, alone, shards = (
        by_name(step_moves(Step(shape, plan, task)))
        for plan, task in (
            (pipeline, work),
            (replace(pipeline, ep=1), work),
            (Plan(dp_shard=64), workload(gpus=64)),
        )
    )
    # Without what calls take.
    of_experts = 4 * 8 * 3
    tensors = of_experts + 4 * 9 + 2
    calls = tensors * (CALL + 7 * MACHINE)
    seconds = alone["weights, gathered"].seconds - calls
    assert seconds == pytest.approx(size * 7 / 8 / (LINKS * 50e9))
    experts = 4 * sum(4 * each.size for each in shape.layer() if each.of_experts)
    more = by_stage["weights, gathered"].seconds - alone["weights, gathered"].seconds
    assert more == pytest.approx(experts * 7 / 8 / (LINKS * 450e9) + of_experts * CALL)
    tensors = 4 * (9 + 2) + 2  # FSDP2 has all experts of a layer in two
    seconds = shards["weights, gathered"].seconds - tensors * (CALL + 7 * MACHINE)
    assert seconds == pytest.approx(size * 63 / 64 / (LINKS * 8 * 50e9))
    for name, extra in {
        "cuda_ipc": 0,
        "nccl": size / (LINKS * 50e9),
        "object_store": 2 * size / STORE,
    }.items():
        after = by_stage[f"weights by {name}"].seconds - by_stage["weights, gathered"].seconds
        assert after == pytest.approx(extra, rel=1e-6, abs=1e-12)


def small_shape(kind: str = "llama") -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return small_folder(Path(folder), kind)[1]
