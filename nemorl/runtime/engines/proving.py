"""Proof that vLLM samples from a family of models with right logprobs, and follows its updates."""

from __future__ import annotations

import tempfile
from typing import Any

from nemorl.models.adapters import merged_tensors
from nemorl.models.capabilities import Proof
from nemorl.models.tiny import SIZES, tiny_config, tiny_model
from nemorl.parallel.proving import proof_of, sampled_differ, samples
from nemorl.rollout.calls import blocking
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import Weights
from nemorl.runtime.engines.backend import VLLMGenerationBackend

ENGINE_SIZES = {
    **SIZES,
    **{"hidden_size": 128, "head_dim": 32, "attention_chunk_size": 32},
    **{"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128},
}
"""Sizes of a tiny model that vLLM's kernels for CPUs take."""


def prove_engine(config: Any) -> Proof:
    """Start vLLM with a tiny model of a configuration, in about a minute, and compare its logprobs
    with those of transformers' plain code: with the first weights, and with others after an update.
    """
    return proof_of(lambda: _sampled(tiny_config(config, ENGINE_SIZES)))


def _sampled(config: Any) -> float:
    rows = samples(config.vocab_size)
    first, second = tiny_model(config), tiny_model(config, seed=1)
    backend = VLLMGenerationBackend(model=first)
    settings: dict[str, Any] = {"engine": {"kv_cache_memory_bytes": 2**25}, "max_restarts": 0}
    settings |= {"backend": "vllm", "max_batch_size": 4, "max_model_len": 128}
    with tempfile.TemporaryDirectory() as logs:
        try:
            backend.setup(GenerationConfig(**settings, log_dir=logs))
            worst = sampled_differ(backend, first, rows)
            update = Weights(version=1, tensors=merged_tensors(second))
            blocking(backend.update_weights(update))
            return max(worst, sampled_differ(backend, second, rows))
        finally:
            backend.shutdown()
