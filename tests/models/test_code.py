"""Code that comes with a model: run only where the settings allow it, and then everywhere."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import nemorl
from nemorl.models.capabilities import keep, known
from nemorl.models.causal_lm import load_causal_lm, on_meta
from nemorl.models.hub import load_tokenizer, read_config
from nemorl.models.source import ModelSource
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.cli.main import main
from nemorl.runtime.engines.spec import check_arguments, engine_spec
from nemorl.runtime.ranks.trainer import structure
from nemorl.runtime.store.export import write_pretrained
from tests.tiny_models import tiny_model, tiny_tokenizer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("run")
class OwnConfig(LlamaConfig):
    pass
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that the code of `folder` writes as soon as it is imported."""
    return tmp_path / "written by the model"


@pytest.fixture(params=["llama", "own"])
def folder(request, tmp_path: Path, marker: Path) -> Path:
    """A model with code, of a type that transformers knows or of one that it doesn't."""
    folder = tmp_path / f"model_{request.param}"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "own_code.py").write_text(CODE.format(marker=str(marker)))
    for name, changes in {
        "config.json": {
            "model_type": request.param,
            "auto_map": {
                "AutoConfig": "own_code.OwnConfig",
                "AutoModelForCausalLM": "own_code.OwnModel",
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]},
        },
    }.items():
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | changes))
    return folder


def backend(folder: Path, **options: Any) -> DTensorBackend:
    made = DTensorBackend()
    model = nemorl.ModelConfig(path=str(folder), **options)
    made.setup(BackendConfig(model=model, trainer=nemorl.TrainerConfig(device="cpu")))
    return made


LOADERS = {
    "the model": lambda folder, **trust: load_causal_lm(str(folder), **trust),
    "random weights": lambda folder, **trust: load_causal_lm(
        str(folder), from_scratch=True, **trust
    ),
    "its tokenizer": lambda folder, **trust: load_tokenizer(str(folder), **trust),
    "its structure": lambda folder, **trust: structure(str(folder), **trust),
    "on meta": lambda folder, **trust: on_meta(str(folder), **trust),
    "the trainer": lambda folder, **trust: backend(folder, **trust).model,
}


@pytest.mark.parametrize("name", LOADERS)
def test_code_is_run_where_it_is_allowed_and_nowhere_else(name, folder, marker, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "yes")  # transformers would ask
    known = folder.name == "model_llama"
    if known and name != "its tokenizer":
        assert type(LOADERS[name](folder)).__module__.startswith("transformers.")
    else:
        with pytest.raises(ValueError, match="code"):
            LOADERS[name](folder)
    assert not marker.exists()
    if known or name != "the trainer":
        found = LOADERS[name](folder, trust_remote_code=True)
        assert "transformers_modules" in type(found).__module__ and marker.read_text() == "run"
    else:
        with pytest.raises(ValueError, match=r"checked before, but 'own' is neither"):
            LOADERS[name](folder, trust_remote_code=True)


@pytest.mark.parametrize("name", ["eval", "generate", "data inspect", "plan"])
def test_the_commands_run_no_code(name, folder, marker, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n')
    rows, model = str(tmp_path / "rows.jsonl"), str(folder)
    arguments = {
        "eval": ["--model", model, "--validation", rows, "--max-new-tokens", "2"],
        "generate": ["--model", model, "--prompt", "1+1=", "--max-new-tokens", "2"],
        "data inspect": ["--model.path", model, "--data.train", rows],
        "plan": ["--model", model, "--gpus", "1"],
    }[name]
    code = main([*name.split(), *arguments])
    assert not marker.exists()
    if name != "plan":
        assert code and "add --model.trust-remote-code" in capsys.readouterr().err


def test_a_setting_allows_it_to_commands(folder, marker, capsys):
    if folder.name == "model_llama":
        main(["generate", "--model", str(folder), "--prompt", "1+1=", "--trust-remote-code",
              "--max-new-tokens", "2", "--seed", "1"])  # fmt: skip
        assert marker.exists()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_engines_and_exports_get_the_code_that_was_allowed(folder, tmp_path):
    config = nemorl.GenerationConfig(backend="vllm")
    spec = engine_spec(ModelSource(folder), tiny_tokenizer(), config, precision="float32")
    assert not spec.trust_remote_code and not [name for name in spec.files if name.endswith("py")]
    trust = {"trust_remote_code": True}
    model, tokenizer = load_causal_lm(str(folder), **trust), load_tokenizer(str(folder), **trust)
    for source in (ModelSource(model), ModelSource(folder, **trust)):
        spec = engine_spec(source, tokenizer, config, precision="float32")
        assert spec.trust_remote_code and "own_code.py" in spec.files
    write_pretrained(tmp_path / "hf", model.state_dict().items(), model, tokenizer)
    again = load_causal_lm(str(tmp_path / "hf"), **trust)
    assert type(again).__name__ == "OwnModel"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor)
    with pytest.raises(ValueError, match=r"trust_remote_code.*set model\.trust_remote_code"):
        check_arguments({"trust_remote_code": True})


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_training_runs_code_where_it_is_allowed(
    folder, marker, tmp_path, monkeypatch, allowed, loaded
):
    """The model's, or of one that is loaded already the tokenizer's."""
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    model: Any = str(folder)
    if loaded:
        model = tiny_model("llama")
        model.config.name_or_path = str(folder)
    options: dict[str, Any] = {"trust_remote_code": allowed, "device": "cpu", "max_num_steps": 1}
    options |= {"run": {"dir": str(tmp_path / "run"), "display": "none", "export": not loaded}}
    refused = pytest.raises(ValueError, match=r"add --model\.trust-remote-code")
    with nullcontext() if allowed else refused:
        nemorl.train(model, [{"prompt": "1+1=", "response": "2"}], algorithm="sft", **options)
    assert marker.exists() == allowed
    if allowed and not loaded:
        assert (tmp_path / "run" / "hf" / "own_code.py").exists()


@pytest.mark.parametrize("folder", ["own"], indirect=True)
def test_a_check_runs_the_code_and_is_for_it(folder: Path, tmp_path: Path, monkeypatch):
    """On ranks, too; with other code it is checked again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = read_config(str(folder), trust_remote_code=True)
    found = nemorl.prove(config)
    assert all(proof.holds for proof in found.values()), found
    keep(config, found)
    assert known(config) == found
    code = folder / "own_code.py"
    code.write_text(code.read_text() + "\nOTHER = 1\n")
    assert known(config) is None
