"""Models of families that vLLM computes on CPUs, and short runs of them."""

from pathlib import Path
from typing import Any
from zlib import crc32

from transformers import CONFIG_MAPPING

import nemorl
from nemorl.models.tiny import tiny_config, tiny_model
from nemorl.runtime.engines.backend import ENGINE_SIZES
from tests.runtime.engines.shared import CACHE
from tests.runtime.runs import lines
from tests.tiny_models import tiny_tokenizer


def model_of(kind: str, *, seed: int = 0, **settings: Any) -> Any:
    """A tiny model that vLLM's kernels for CPUs take."""
    config = tiny_config(CONFIG_MAPPING[kind](**settings), ENGINE_SIZES)
    config.update({"vocab_size": len(tiny_tokenizer()), "max_position_embeddings": 256})
    config.update({"eos_token_id": 1, "pad_token_id": 0})
    return tiny_model(config, seed=seed)


def folder_of(kind: str, path: Path) -> str:
    model_of(kind).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
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
    return [line for line in lines(path, "metrics.jsonl") if line["phase"] == "train"]
