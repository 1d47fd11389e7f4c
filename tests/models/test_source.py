"""What engines are made from: the weights of a folder are read without its model being built."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

import nemorl
from nemorl.models import source as module
from nemorl.models.adapters import live_tensors, merged_tensors
from nemorl.models.causal_lm import end_tokens, load_causal_lm
from nemorl.models.source import ModelSource
from nemorl.parallel.config import BackendConfig, LoRAConfig, ModelConfig
from tests.tiny_models import KINDS, tiny_model


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded."""

    def load(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(module, "load_causal_lm", load)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)


def require_same(found, expected) -> None:
    found, expected = dict(found), dict(expected)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor), name


@pytest.mark.parametrize("shard_size", ["10GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_from_the_files(kind, tied, dtype, shard_size, tmp_path, request):
    tiny_model(kind, tied=tied).to(dtype).save_pretrained(tmp_path, max_shard_size=shard_size)
    expected = list(merged_tensors(load_causal_lm(str(tmp_path))))
    request.getfixturevalue("unloaded")
    source = ModelSource(tmp_path)
    require_same(source.weights(), expected)
    assert {tensor.dtype for _, tensor in source} == {dtype}  # again, as they are stored


@pytest.mark.parametrize("of_file", [[3, 7], 5, None])
def test_a_folder_has_the_end_tokens_of_the_loaded_model(of_file, tmp_path: Path, unloaded):
    model = tiny_model()
    model.config.eos_token_id = 4
    model.generation_config = GenerationConfig(eos_token_id=of_file)
    model.save_pretrained(tmp_path)
    if of_file is None:
        (tmp_path / "generation_config.json").unlink()
    ends = {3, 7} if of_file == [3, 7] else {of_file or 4}
    assert end_tokens(ModelSource(tmp_path), None) == ends


def test_adapters_are_merged(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path / "base")
    backend = nemorl.get_training_backend("dtensor")
    lora = LoRAConfig(rank=2)
    backend.setup(BackendConfig(model=ModelConfig(path=str(tmp_path / "base")), lora=lora))
    for name, parameter in backend.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data)
    backend.save_checkpoint(tmp_path / "adapters")
    expected = [(name, tensor.clone()) for name, tensor in backend.weights()]
    require_same(ModelSource(backend.model).weights(), expected)
    require_same(ModelSource(tmp_path / "adapters").weights(), expected)
    backend.shutdown()


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    tensors = {name: x for name, x in live_tensors(model).items() if "layers.1.mlp.up" not in name}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj"):
        next(ModelSource(tmp_path).weights())
    with pytest.raises(ValueError, match=r"model.path must be a folder .* could not be loaded"):
        ModelSource(tmp_path / "missing")


def test_names_that_only_transformers_knows_are_read_by_it(tmp_path: Path):
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    short = {name.removeprefix("model."): x for name, x in live_tensors(model).items()}
    save_file(short, tmp_path / "model.safetensors", metadata={"format": "pt"})
    require_same(ModelSource(tmp_path).weights(), live_tensors(model).items())


def test_a_model_on_ranks_has_no_weights_here():
    with torch.device("meta"):
        far = tiny_model()
    source = ModelSource.of(far)
    with pytest.raises(RuntimeError, match=r"trainer's ranks: call update_weights\(\) first"):
        next(source.weights())
    assert ModelSource.of(source) is source
    empty = ModelSource(far, device="cpu").load()
    assert empty.device.type == "cpu" and not empty.training
    assert {each.dtype for each in empty.parameters()} == {torch.float32}


def test_an_empty_model_may_have_another_type():
    """Its rotary angles are computed as those of a float32 model."""
    model = tiny_model()
    with torch.device("meta"):
        far = tiny_model()
    empty = ModelSource(far, device="cpu", dtype=torch.bfloat16).load()
    assert {each.dtype for each in empty.parameters()} == {torch.bfloat16}
    for (name, found), expected in zip(empty.named_buffers(), model.buffers(), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected), name
