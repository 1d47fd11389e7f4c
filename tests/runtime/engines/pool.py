"""Two replicas of real engines, which tests share because they take seconds to start: a new model
of the same shape only sends its weights.
"""

import atexit
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from torch import nn

from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.engines.replicas import Replicas
from nemorl.runtime.engines.spec import EngineSpec
from tests.ray_session import ray_cpus
from tests.tiny_models import tiny_tokenizer

_RUNNING: dict[bytes, Replicas] = {}
_SHUTDOWN = Replicas.shutdown


class Shared(Replicas):
    """Those that run already, if the model is of the same shape.

    They go on when a test shuts them down.
    """

    def __new__(cls, config: GenerationConfig, spec: EngineSpec) -> "Shared":
        key = spec.files["config.json"]
        if key not in _RUNNING:
            end()
            _RUNNING[key] = super().__new__(cls)
        return _RUNNING[key]  # type: ignore[return-value]

    def __init__(self, config: GenerationConfig, spec: EngineSpec) -> None:
        if not hasattr(self, "config"):
            folder = tempfile.mkdtemp(prefix="nemorl-pool-")
            engine = {"kv_cache_memory_bytes": 2**26}
            super().__init__(
                replace(config, log_dir=folder, max_restarts=100),
                replace(spec, max_num_seqs=64, max_model_len=256, engine=engine),
            )
        self.config = replace(self.config, max_batch_size=config.max_batch_size)
        for one in self._replicas:
            one.version = None

    def shutdown(self) -> None:
        pass


@contextmanager
def shared_replicas() -> Iterator[None]:
    """Backends that are set up in here share two replicas."""
    ray_cpus()
    with mock.patch("nemorl.runtime.engines.replicas.Replicas", Shared):
        yield


def vllm_ray_backend(model: nn.Module, max_batch_size: int = 64) -> VLLMGenerationBackend:
    """The backend of a model, with the replicas that all share."""
    backend = VLLMGenerationBackend(model=model, tokenizer=tiny_tokenizer())
    with shared_replicas():
        backend.setup(
            GenerationConfig(backend="vllm", num_replicas=2, max_batch_size=max_batch_size)
        )
    return backend


@atexit.register
def end() -> None:
    while _RUNNING:
        _SHUTDOWN(_RUNNING.popitem()[1])


def running() -> Replicas:
    """Those that were asked for last."""
    return next(iter(_RUNNING.values()))
