"""vLLM samples from families of the tested table, and follows the trainer's weights."""

import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from nemorl.models.capabilities import ASSUMED
from nemorl.parallel import proving
from nemorl.runtime.cli.main import main
from tests.runtime.engines.families import folder_of, steps

FAMILIES = [
    *("llama", "llama4_text", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2"),
    *("gemma3_text", "phi3", "glm4", "olmo2", "smollm3", "granite", "cohere2", "starcoder2"),
    "gpt_oss",
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_token_has_the_trainers_logprob(kind: str, tmp_path: Path):
    """Windows, caps, scaled logits, fused projections, other norms, experts: after each update."""
    lines = steps(folder_of(kind, tmp_path / "model"), tmp_path / "run")
    assert sum(line["grad_norm"] for line in lines[:2]) > 0  # the weights are others by then
    for line in lines:
        assert line["token_mult_prob_error_max"] < 1 + 1e-4
    for line in lines[1:]:  # the first step is sampled with what the engine began with
        assert line["generation/weights/proved"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mixtral", r"also after an update +│ yes │ \de-0[67]"),
        ("qwen3_next", r"│ no +│ Assertion failed, Chunked prefill is required"),
    ],
)
def test_the_check_of_a_model_starts_vllm_too(kind, said, tmp_path: Path, capsys, monkeypatch):
    """It has linear attention for CPUs, but without nemorl's settings there."""
    monkeypatch.setattr(proving, "prove", lambda config: ASSUMED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    assert main(["models", "check", str(tmp_path), "--vllm"]) == 0
    assert re.search(said, capsys.readouterr().out)
