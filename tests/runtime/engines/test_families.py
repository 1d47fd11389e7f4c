"""vLLM samples from families of the tested table, and follows the trainer's weights."""

import json
import re
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from transformers import CONFIG_MAPPING

import nemorl
from nemorl.models.capabilities import ASSUMED
from nemorl.models.tiny import tiny_config, tiny_model
from nemorl.parallel import proving
from nemorl.runtime.cli.main import main
from nemorl.runtime.engines.proving import ENGINE_SIZES
from tests.runtime.engines.shared import CACHE
from tests.tiny_models import tiny_tokenizer

FAMILIES = [
    *("llama", "llama4_text", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2"),
    *("gemma3_text", "phi3", "glm4", "olmo2", "smollm3", "granite", "cohere2", "starcoder2"),
    "gpt_oss",
]


def folder_of(kind: str, path: Path) -> str:
    """Write a tiny model that vLLM's kernels for CPUs take."""
    tokenizer, config = tiny_tokenizer(), tiny_config(CONFIG_MAPPING[kind](), ENGINE_SIZES)
    config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 256})
    config.update({"eos_token_id": 1, "pad_token_id": 0})
    tiny_model(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def steps(folder: str, path: Path, **options: Any) -> list[dict[str, float]]:
    """Train for some steps, sampling with vLLM, and return their metrics."""
    nemorl.train(
        folder,
        [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)],
        lambda prompt, response: crc32(response.encode()) % 7,  # responses differ in it
        **{"max_num_steps": 3, "num_prompts_per_step": 4, "num_generations_per_prompt": 4},
        **{"optimizer.lr": 1e-3, "generation.backend": "vllm", "generation.engine": CACHE},
        **{"generation.max_new_tokens": 12, "data.max_total_sequence_length": 64},
        **{"run.dir": str(path), "run.display": "none", **options},
    )
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == "train"]


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
