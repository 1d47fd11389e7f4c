"""Families besides those of the parity table: their numbers are plain PyTorch's over the Hugging
Face model, and their folders transformers'.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.megatron.model import transformer_config
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import World
from tests.parallel.batches import random_batch
from tests.parallel.parity.cases import Case
from tests.parallel.parity.compare import verdict
from tests.parallel.parity.golden import Problem
from tests.parallel.parity.run import run_chunk
from tests.parallel.ways import LENGTHS, set_up, start
from tests.ranks import run_ranks
from tests.tiny_models import OTHERS, tiny_model


def cases(kind: str) -> list[Case]:
    deep = Problem(model=kind, layers=4, tied=False)
    return [
        Case(plan="megatron TP 2 + SP", layout="packed", problem=Problem(model=kind)),
        Case(plan="megatron TP 2", layout="padded", problem=Problem(model=kind, tied=False)),
        Case(plan="megatron PP 2", layout="microbatched", problem=deep),
        Case(plan="megatron PP 2 × VPP 2", layout="token budget", problem=deep),
        Case(plan="megatron CP 2 ulysses", layout="packed", problem=Problem(model=kind)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_values_gradients_and_weights_are_plain_pytorchs(kind: str):
    chunk = cases(kind)
    for case, found in zip(chunk, run_chunk(chunk), strict=True):
        assert verdict(case, found) == (True, ""), case


def scored(folder: Path) -> Tensor:
    backend = start("tp 2", folder)
    found = backend.get_logprobs(random_batch(LENGTHS)).values
    backend.shutdown()
    return found


@pytest.mark.slow
def test_layers_that_do_not_rotate_have_no_factor_of_the_rotation(tmp_path: Path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
    rope |= {"original_max_position_embeddings": 32}
    tiny_model("smollm3", scale=3.0, rope_parameters=rope).save_pretrained(tmp_path)
    alone = set_up(load_causal_lm(str(tmp_path)))
    expected = alone.get_logprobs(random_batch(LENGTHS)).values
    for found in run_ranks(2, scored, tmp_path):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_a_gpu_is_not_waited_for_after_each_hop_between_stages():
    world = World(plan=ParallelPlan(pp=2, param_dtype="bfloat16"), device=torch.device("cuda"))
    config = transformer_config(tiny_model().config, world)
    assert config.batch_p2p_comm and not config.batch_p2p_sync
