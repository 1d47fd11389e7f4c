"""What a rank of megatron-core moves to main memory while engines generate: parameters, AdamW's
spans and moments, and the reference model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.megatron.engine import Order
from nemorl.rollout.generation import SamplingParams
from tests.parallel.batches import nll_loss
from tests.parallel.offloaded import FIRST, SECOND, generations
from tests.parallel.offloaded import held_by_megatron as held
from tests.parallel.ways import set_up
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

PLANS = {
    "dp 2": {"dp_shard": 2, "param_dtype": "float32"},
    "dp 2 in bfloat16": {"dp_shard": 2, "param_dtype": "bfloat16"},
    "pp 2": {"dp_shard": 1, "pp": 2, "param_dtype": "float32"},
    "pp 2, interleaved": {"dp_shard": 1, "pp": 2, "vpp": 2, "param_dtype": "float32"},
    "ep 2": {"dp_shard": 2, "ep": 2, "param_dtype": "bfloat16"},
    "dp 2, overlapped": {"dp_shard": 2, "param_dtype": "float32", "overlap_grad_reduce": True},
}


def start(folder: Path, way: str, *, device: str = "cpu", **options: Any) -> MegatronBackend:
    return set_up(
        None,
        folder,
        trainer={"device": device},
        optimizer={"eps": 1e-4},
        plan=PLANS[way],
        make=MegatronBackend,
        **{"keep_reference": True, **options},
    )


def trained(backend: MegatronBackend, path: Path, *, offloads: bool, keep: bool) -> dict[str, Any]:
    found, sizes, generate = generations(backend, held, offloads=offloads, keep=keep)
    backend.forward_backward(FIRST, nll_loss)
    generate()
    backend.train_step(SECOND, nll_loss)  # which drops that gradient
    generate()
    backend.save_checkpoint(path, background=True)  # numpy would hold on to a CPU's memory
    backend.wait_for_checkpoint()
    backend.train_step(SECOND, nll_loss)
    generate()
    backend.load_checkpoint(path)
    backend.train_step(FIRST, nll_loss)
    generate()
    backend.take_weights({name: 1.01 * x for name, x in found["weights"].items()}, version=1)
    backend.train_step(FIRST, nll_loss)
    found["last"] = generate()
    if offloads:
        _, trains, *_ = sizes
        assert trains["moments"] and trains["gradients"]
        shared = backend.world.plan.precision == "float32"  # spans are views of parameters
        kept = {"parameters": keep * trains["parameters"], "spans": keep * shared * trains["spans"]}
        for size in sizes[:1] + sizes[2:]:
            assert size == {name: kept.get(name, 0) for name in trains}
        backend.train_step(FIRST, nll_loss)
        assert held(backend) == trains
    return found


def same_bits(folder: Path, path: Path, way: str, keep: bool) -> dict[str, Tensor]:
    found = []
    for offloads in (True, False):
        backend = start(folder, way)
        found.append(trained(backend, path / str(offloads), offloads=offloads, keep=keep))
        backend.shutdown()
    torch.testing.assert_close(*found, rtol=0, atol=0)
    return found[0]["last"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "keep"),
    [*((way, False) for way in PLANS), ("dp 2 in bfloat16", True), ("pp 2", True)],
)
def test_ranks_have_the_same_bits(way: str, keep: bool, tmp_path: Path):
    kind = "qwen3_moe" if way == "ep 2" else "qwen3"
    made = tiny_model(kind, scale=2.0, tied=way == "pp 2", num_hidden_layers=4)
    made.save_pretrained(tmp_path / "model")
    one, other = run_ranks(2, same_bits, tmp_path / "model", tmp_path, way, keep)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def answers(backend: MegatronBackend) -> list[Any]:
    new = [(n, [2 + n] * 3, SamplingParams(seed=n, max_new_tokens=6)) for n in range(4)]
    found, _ = backend.decode(Order(new=new, passes=100))
    return [found[n] for n in sorted(found)]


def decoded(folder: Path, way: str) -> None:
    backend = start(folder, way)
    backend.train_step(FIRST, nll_loss)
    backend.open_engine(max_batch_size=4, max_positions=64, end_tokens=[1])
    expected = answers(backend)
    backend.offload(keep_weights=True)
    before = held(backend)
    assert before["parameters"] and not before["moments"] and not before["reference"]
    backend.decode(Order(anew=True, asleep=True))
    assert answers(backend) == expected and held(backend) == before, "nothing came back"
    backend.offload()
    assert not held(backend)["parameters"]
    assert answers(backend) == expected and held(backend)["parameters"]
    backend.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dp 2 in bfloat16", "pp 2"])
def test_ranks_generate_while_the_rest_is_away(way: str, tmp_path: Path):
    tiny_model("qwen3", scale=2.0).save_pretrained(tmp_path)
    run_ranks(2, decoded, tmp_path, way)
