"""Backends by name."""

import importlib.util
import sys

import pytest

from nemorl.runtime.registry import GENERATION_BACKENDS, TRAINING_BACKENDS, get_generation_backend, get_training_backend


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown training backend 'dtenosr'; did you mean dtensor\? Valid names: dtensor"):
        get_training_backend("dtenosr")
    with pytest.raises(ValueError, match=r"unknown generation backend 'warp'\. Valid names: torch"):
        get_generation_backend("warp")


@pytest.mark.parametrize("target", [*TRAINING_BACKENDS.values(), *GENERATION_BACKENDS.values()])
def test_each_name_leads_to_a_module(target: str) -> None:
    module, _, attribute = target.partition(":")
    assert importlib.util.find_spec(module) is not None and attribute.endswith("Backend")


def test_classes_are_returned() -> None:
    assert get_training_backend("dtensor").__name__ == "DTensorBackend"
    assert get_generation_backend("torch").__name__ == "TorchGenerationBackend"
    assert "nemorl.rollout.torch_backend" in sys.modules
