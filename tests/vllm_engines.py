"""vLLM engines in the tests' process, each started once for all that ask for the like of it."""

import atexit
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.engines.backend import LocalEngine, VLLMGenerationBackend
from nemorl.runtime.engines.spec import EngineSpec
from tests import tiny_models as models

CACHE = {"kv_cache_memory_bytes": 2**25}
_ENGINES: dict[Any, LocalEngine] = {}


def running_engine(spec: EngineSpec, expected: Mapping[str, tuple[int, ...]]) -> LocalEngine:
    """With whatever weights it had last."""
    if (
        not torch.distributed.is_initialized()
    ):  # a test has shut an engine down, and with it what all engines of a process share
        for engine in _ENGINES.values():
            engine.engine._llm.engine_core._finalizer.detach()
        _ENGINES.clear()
    key = repr(
        (
            spec.files["config.json"],
            spec.vocabulary,
            spec.dtype,
            spec.max_num_seqs,
            spec.max_model_len,
            spec.engine,
        )
    )
    if key not in _ENGINES:
        _ENGINES[key] = LocalEngine(spec, expected)
        atexit.register(
            mock.patch("gc.collect").start
        )  # a second for each engine, to tidy a process that ends
    return _ENGINES[key]


def vllm_backend(
    model: nn.Module, max_batch_size: int = 64, *, precision: str = "float32", **settings: Any
) -> VLLMGenerationBackend:
    """The backend of a model, with an engine that may have served another one: it takes the weights
    by itself.
    """
    backend = VLLMGenerationBackend(
        model=model,
        tokenizer=settings.pop("tokenizer", models.tiny_tokenizer()),
        precision=precision,
    )
    with mock.patch("nemorl.runtime.engines.backend.LocalEngine", running_engine):
        backend.setup(
            GenerationConfig(
                backend="vllm", max_batch_size=max_batch_size, **{"engine": CACHE, **settings}
            )
        )
    return backend


def small_model(kind: str = "qwen2", **options: Any) -> nn.Module:
    """With attention heads of a size that vLLM computes on CPUs."""
    return models.tiny_model(kind, **{"hidden_size": 128, "head_dim": 32, **options})
