"""Fused tensors as files have them: transformers' own conversion, and back."""

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import revert_weight_conversion

from nemorl.models.adapters import live_tensors
from nemorl.models.tensor_files import as_live, as_stored, shapes_of, stored_names
from nemorl.models.tiny import tiny_config, tiny_model

KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "nemotron_h", "gpt_oss", "llama4_text", "llama")


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_are_transformers_own(kind: str):
    model = tiny_model(tiny_config(CONFIG_MAPPING[kind]()))
    live, stored = live_tensors(model), stored_names(model)
    expected = revert_weight_conversion(model, dict(live))
    found = dict(as_stored(live.items(), stored))
    assert found.keys() == expected.keys() == shapes_of(live, stored).keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and shapes_of(live, stored)[name] == tensor.shape
    for name, groups in stored.items():
        if len(groups[0]) > 1:
            assert torch.equal(as_live(groups, found.__getitem__), live[name])
            part = as_live(groups, found.__getitem__, first=1, count=2)
            assert torch.equal(part, live[name][1:3])
    assert bool(stored) == (kind not in ("gpt_oss", "llama4_text", "llama"))
    assert getattr(model, "_weight_conversions", None) is None
