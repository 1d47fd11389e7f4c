"""What files have besides the model's weights is said where ranks read their pieces of them, too,
in the words of a whole load.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemorl.models.capabilities import ASSUMED
from nemorl.models.causal_lm import load_causal_lm
from nemorl.models.source import ModelSource
from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.plan import ParallelPlan
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

UNUSED = ("model.layers.7.mlp.up_proj.weight", "model.visual.weight")
BESIDE = {
    "llama": ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    "deepseek_v3": (
        "model.layers.61.mlp.experts.0.up_proj.weight",
        "model.layers.61.eh_proj.weight",
    ),
}
"""What files may have besides: a copy of tied weights, frequencies, layers that guess ahead."""


def add(folder: Path, *names: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    copied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    more = {name: copied.get(name, torch.zeros(3)).clone() for name in names}
    save_file({**tensors, **more}, file, {"format": "pt"})


def said(load: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        load()
    return [str(each.message) for each in found if "does not use" in str(each.message)]


def set_up(make: Any, folder: Path) -> list[str]:
    """What a rank says that loads a model and its reference."""
    backend = make()
    config = BackendConfig(
        model=ModelConfig(path=str(folder)),
        trainer=TrainerConfig(device="cpu"),
        parallel=ParallelPlan(dp_shard=1, tp=2),
        keep_reference=True,
        proofs=ASSUMED,
    )
    found = said(lambda: backend.setup(config))
    backend.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [DTensorBackend, MegatronBackend])
def test_the_first_rank_says_it_once(make: Any, tmp_path: Path):
    tiny_model("llama").save_pretrained(tmp_path)
    add(tmp_path, *BESIDE["llama"])
    assert said(lambda: load_causal_lm(str(tmp_path))) == []
    assert run_ranks(2, set_up, make, tmp_path) == [[], []]
    add(tmp_path, *UNUSED)
    whole = said(lambda: load_causal_lm(str(tmp_path)))
    assert whole == [f"the model does not use {', '.join(UNUSED)} of its files (2 in all)"]
    assert run_ranks(2, set_up, make, tmp_path) == [whole, []]
    assert said(lambda: dict(ModelSource(str(tmp_path)).weights())) == whole
