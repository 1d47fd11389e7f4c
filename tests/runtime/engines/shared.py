"""Real engines that all tests of a session share: an actor for each replica, in which an engine
of each kind is started once.
"""

import asyncio
import functools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import ray
import torch
from torch import nn

from nemorl.models.adapters import merged_tensors
from nemorl.models.source import ModelSource
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.engines.engine import EngineActor, VLLMEngine, environment
from nemorl.runtime.engines.replicas import EngineProcesses, Replicas
from nemorl.runtime.engines.routing import ProcessId
from nemorl.runtime.engines.spec import EngineSpec, Sample, engine_spec
from nemorl.runtime.engines.weights import Place, WeightSender, expected_weights
from nemorl.runtime.workers.worker import Worker
from tests import tiny_models as models
from tests.ray_session import ENDS, ray_cpus

CACHE = {"kv_cache_memory_bytes": 2**25}
LONG = [2 + i % 39 for i in range(100)]
"""A prompt of several blocks of the cache."""


class Engines:
    """An engine for each spec; calls go to the last one."""

    dropped = 0

    def __init__(self, spec: EngineSpec) -> None:
        self.found: dict[str, VLLMEngine] = {}
        self.most = math.inf
        """Once a sample has so many tokens, nothing is computed."""
        self.lost: list[Any] = []
        self.use(spec)

    def use(self, spec: EngineSpec) -> None:
        key = repr(spec)
        if not torch.distributed.is_initialized():  # one has been shut down, and so what all share
            self.lost.append(self.found)
            self.found = {}
        if key not in self.found:
            self.found[key] = VLLMEngine(spec)
        self.engine = self.found[key]
        self.engine.abort_all()
        self.engine.usable, self.most = False, math.inf

    @property
    def busy(self) -> bool:
        return self.engine.busy and max(lengths(self), default=0) < self.most

    def hold(self, most: float) -> None:
        self.most = most

    def apply(self, function: Callable[["Engines"], Any]) -> Any:
        return function(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def lengths(engines: Engines) -> list[int]:
    """The reported tokens of each unfinished sample: the first, and then every so many."""
    requests = engines.engine._requests.values()
    return [len(sample.token_ids) for samples in requests for sample in samples]


def hold(actors: Sequence[Any], most: float = 0) -> None:
    """Have engines compute nothing once a sample has so many tokens."""
    ray.get([actor.call.remote("hold", most) for actor in actors])


def begin_all(actors: Sequence[Any], count: int) -> None:
    """Wait until each engine, which is held, has so many samples, and all have begun."""

    for actor in actors:
        while len(found := ray.get(actor.call.remote("apply", lengths))) < count:
            time.sleep(0.01)
        hold([actor], max(found) + 2)
    for actor in actors:
        while not all(ray.get(actor.call.remote("apply", lengths))):
            time.sleep(0.01)


class SharedActor(EngineActor):
    make = Engines
    place: Place | None = None
    starts: asyncio.Lock | None = None

    async def start(self, spec: EngineSpec) -> Place:
        """Use an engine for this spec; one start after the other, also those of a test before."""
        self.starts = self.starts or asyncio.Lock()
        async with self.starts:
            if self.place is None:
                self.place = await super().start(spec)
            else:
                await self.call("use", spec)
        return self.place


_ACTORS: dict[int, Any] = {}


def _forget() -> None:
    """Their cluster ends."""
    if (last := SharedReplicas._last) is not None:
        last.shutdown()
    SharedReplicas._last = None
    _ACTORS.clear()


@functools.cache
def log_folder() -> str:
    return tempfile.mkdtemp(prefix="nemorl-shared-")


def shared_actor(rank: int = 0) -> Any:
    if rank not in _ACTORS:
        ray_cpus()
        if not _ACTORS:
            ENDS.callback(_forget)
        variables = environment(1, eager=True, cuda=False)
        actor = ray.remote(SharedActor).options(
            num_cpus=0, max_concurrency=10_000, runtime_env={"env_vars": variables}
        )
        _ACTORS[rank] = actor.remote("shared", f"{log_folder()}/replica-{rank}.log")
    return _ACTORS[rank]


class Session:
    """In the place of a cluster of their own."""

    def check(self) -> None: ...

    def shutdown(self) -> None: ...


class SharedProcesses(EngineProcesses):
    """Processes that go on when a test shuts them down."""

    first = 0
    """Number of the actor of replica 0."""

    def reserved(self) -> tuple[Any, Any]:
        return Session(), None

    def launched(self, rank: int, stage: int = 0) -> Worker:
        return Worker(shared_actor(self.first + rank), f"replica-{rank}")

    def end(self, id: ProcessId) -> None:
        number = self.first + id.rank
        if id in self.running and self.running[id].actor is _ACTORS.get(number):
            del _ACTORS[number]
        super().end(id)

    async def end_all(self) -> None:
        self.running.clear()
        await super().end_all()


class SharedReplicas(Replicas):
    """Replicas on shared processes. The last ones made are in use."""

    processes = SharedProcesses
    _last: "SharedReplicas | None" = None

    def __init__(self, *args: Any) -> None:
        if (last := SharedReplicas._last) is not None:
            last.shutdown()
        super().__init__(*args)
        SharedReplicas._last = self


class MixtureProcesses(SharedProcesses):
    """Of mixtures of experts: vLLM makes their group only with a process's first model."""

    first = 100


class MixtureReplicas(SharedReplicas):
    processes = MixtureProcesses


shared_replicas = functools.partial(
    mock.patch, "nemorl.runtime.engines.replicas.Replicas", SharedReplicas
)
"""A context in which backends that are set up share their engines."""
shared_mixtures = functools.partial(
    mock.patch, "nemorl.runtime.engines.replicas.Replicas", MixtureReplicas
)
"""The same for mixtures of experts."""


def has_experts(model: nn.Module) -> bool:
    return any("experts" in name for name, _ in model.named_modules())


def vllm_backend(
    model: nn.Module, max_batch_size: int = 64, *, precision: str = "float32", **settings: Any
) -> VLLMGenerationBackend:
    """The backend of a model, on engines that may have served another one."""
    tokenizer = settings.pop("tokenizer", models.tiny_tokenizer())
    options = {"records_experts": settings.pop("records_experts", False), "precision": precision}
    backend = VLLMGenerationBackend(model=model, tokenizer=tokenizer, **options)
    ray_cpus()
    with shared_mixtures() if has_experts(model) else shared_replicas():
        config = {"engine": CACHE, "max_batch_size": max_batch_size, "log_dir": log_folder()}
        backend.setup(GenerationConfig(backend="vllm", **{**config, **settings}))
    return backend


def small_model(kind: str = "qwen2", **options: Any) -> nn.Module:
    """With attention heads of a size that vLLM computes on CPUs."""
    return models.tiny_model(kind, **{"hidden_size": 128, "head_dim": 32, **options})


def spec_of(
    model: Any, *, precision: str = "float32", records_experts: bool = False, **settings: Any
) -> EngineSpec:
    config = GenerationConfig(backend="vllm", **{"engine": CACHE, "max_batch_size": 64, **settings})
    options: dict[str, Any] = {"precision": precision, "records_experts": records_experts}
    return engine_spec(ModelSource.of(model), models.tiny_tokenizer(), config, **options)


class SharedEngine:
    """An engine of a model in a shared actor, called directly."""

    def __init__(self, model: nn.Module, *, weights: bool = True, **settings: Any) -> None:
        processes = MixtureProcesses if has_experts(model) else SharedProcesses
        self.actor = shared_actor(processes.first)
        self.spec = spec_of(model, **settings)
        self.place = ray.get(self.actor.start.remote(self.spec))
        if weights:
            self.give(model)

    def sender(self) -> WeightSender:
        expected, stored = expected_weights(self.spec.files["config.json"])
        return WeightSender(
            actors={0: self.actor},
            places={0: self.place},
            expected=expected,
            stored=stored,
            dtype=getattr(torch, self.spec.dtype),
        )

    def give(self, model: nn.Module, value: float | None = None) -> None:
        """The engine has the model's weights, or this number everywhere."""
        weights = [
            (name, tensor if value is None else torch.full_like(tensor, value))
            for name, tensor in merged_tensors(model)
        ]
        receipt = self.sender()(0, weights)
        receipt.check()
        assert not receipt.failed

    def do(self, function: Callable[[VLLMEngine], Any]) -> Any:
        """Call the function with the engine where that is."""
        return ray.get(self.actor.call.remote("apply", function))

    def begin(self, prompt: Any = (5, 6, 7), **params: Any) -> Any:
        own = SamplingParams(**{"seed": 0, "max_new_tokens": 8, **params})
        return self.actor.sample.remote(tuple(prompt), own)

    def sample(self, prompt: Any = (5, 6, 7), **params: Any) -> tuple[Sample, ...]:
        return ray.get(self.begin(prompt, **params)).samples


def model_of(kind: str = "qwen2", *, seed: int = 0, tied: bool = True) -> nn.Module:
    """With sharp predictions, and norms and biases that are not all ones and zeros."""
    model = small_model(kind, seed=seed, tied=tied, scale=3.0, intermediate_size=96)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) * 0.5)
    return model


def weights_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def gap(engine: SharedEngine, model: Any, precision: str = "float32") -> float:
    """The largest difference between the engine's logprobs of what it samples and the model's."""
    prompts = models.random_prompts(4, seed=3)
    answers = ray.get([engine.begin(prompt, max_new_tokens=8, seed=5) for prompt in prompts])
    worst, model = 0.0, model.to(getattr(torch, precision))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.samples[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
        expected = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        difference = expected - torch.tensor(answer.samples[0].logprobs)
        worst = max(worst, difference.abs().max().item())
    model.float()
    return worst


def count_preemptions(engines: Engines) -> None:
    """In the engine's process: count requests that lose their blocks."""
    scheduler = engines.engine._llm.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    drop, engines.dropped = scheduler._preempt_request, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        engines.dropped += 1
        return drop(*args, **kwargs)

    scheduler._preempt_request = counted


def raised(call: Any) -> Exception:
    """The actor's own exception of a call that fails."""
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return error.cause
    raise AssertionError("nothing was raised")
