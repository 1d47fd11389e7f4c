"""Routes on their way to ranks: each gets its own, and computes what it did with all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemorl.parallel.config import BackendConfig, OptimizerConfig, TrainerConfig
from nemorl.runtime.ranks.trainer import RankedTrainer
from tests.parallel.balance import sampled
from tests.parallel.batches import nll_loss, random_batch
from tests.runtime.ranks import shared_ranks
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.xdist_group("ray")
BATCH = random_batch([40, 7, 33, 1, 40, 12])
REAL = int(BATCH.lengths.sum())


def size(data: list[Any]) -> int:
    return sum(memoryview(each).nbytes for each in data)


def learned(trainer: RankedTrainer, batch: Any) -> list[Any]:
    """What two steps say and leave behind."""
    steps = [trainer.train_step(batch, nll_loss) for _ in range(2)]
    found = [trainer.get_logprobs(batch).values, *(step["grad_norm"].total for step in steps)]
    return [*found, *(tensor for _, tensor in trainer.weights())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "plan"),
    [("dtensor", {"dp_shard": 2}), ("megatron", {"pp": 2}), ("megatron", {"pp": 2, "vpp": 2})],
)
def test_ranks_compute_the_same_of_a_part_of_the_bytes(
    backend: str, plan: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    layers = 4
    model = tiny_model("qwen3_moe", scale=2.0, num_hidden_layers=layers)
    batch = sampled(model, BATCH)
    config = BackendConfig(
        trainer=TrainerConfig(device="cpu", router_replay=True, sequence_packing=True),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    received: list[tuple[int, list[int]]] = []
    call = shared_ranks.View.call

    def counted(self: Any, method: str, payload: Any, phase: str, parts: Any = ()) -> Any:
        received.append((size(payload), [size(part) for part in (parts or {}).values()]))
        return call(self, method, payload, phase, parts)

    monkeypatch.setattr(shared_ranks.View, "call", counted)
    apart, whole = (shared_ranks.ranked(model, config, backend, **plan) for _ in range(2))
    monkeypatch.setattr(whole, "_routes_apart", lambda method, args: (args, {}))
    received.clear()
    found = learned(apart, batch)
    assert received.pop(0)[1] == [], "the ranks say how they cut, once"
    (rest, parts), *_ = received
    received.clear()
    expected = learned(whole, batch)
    assert received[0][1] == [] and len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    routes = layers * 2 * 2  # two experts, in int16
    padded = batch.input_ids.numel()
    assert received[0][0] - rest > 0.9 * padded * routes, "to every rank"
    ids = 4 * (backend == "megatron")  # by which stages know what experts they may share
    assert len(parts) == 2 and sum(parts) < REAL * (routes + 2 * ids) + 2 * 1000
    for trainer in (apart, whole):
        trainer.shutdown()
