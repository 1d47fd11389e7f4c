"""Models of known sizes, and what `nemorl plan` finds and prints for them."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemorl.parallel.planner import command
from nemorl.parallel.planner.command import Candidate, Planned, find_plans, print_plans
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.model_shape import read_shape
from nemorl.runtime.cli.api import from_keywords

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "num_key_value_heads"),
)
MODELS = {
    "1.5b": ("qwen2", (1536, 8960, 28, 12, 151936, 2)),
    "7b": ("qwen2", (3584, 18944, 28, 28, 152064, 4)),
    "70b": ("llama", (8192, 28672, 80, 64, 128256, 8)),
    "30b-a3b": ("qwen3_moe", (2048, 6144, 48, 32, 151936, 4)),
    "8x7b": ("mixtral", (4096, 14336, 32, 32, 32000, 8)),
}
read_once = cache(read_shape)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, sizes) in MODELS.items():
        config: dict[str, Any] = {"model_type": kind, **dict(zip(SIZES, sizes, strict=True))}
        config |= {"tie_word_embeddings": name == "1.5b"}
        config |= {"head_dim": 128, "num_experts": 128} if kind == "qwen3_moe" else {}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def config_of(models: Path, name: str = "70b", **options: Any) -> PlanConfig:
    """Settings by the last part of their names, as `nemorl.train` takes them."""
    return from_keywords(PlanConfig, "plan", {"model__path": str(models / name), **options})


def find(models: Path, name: str = "70b", **options: Any) -> Planned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "read_shape", read_once)
        return find_plans(config_of(models, name, **options))


def best(models: Path, name: str = "70b", **options: Any) -> Candidate:
    return find(models, name, **options).fitting[0]


def shown(models: Path, name: str, *, width: int = 80, **options: Any) -> str:
    output = io.StringIO()
    print_plans(find(models, name, **options), Console(file=output, width=width))
    return output.getvalue()
