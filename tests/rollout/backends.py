"""Every GenerationBackend, for the tests of what all must do. A new one joins BACKENDS."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.ranks.generator import RankedGenerator
from tests.runtime.engines.shared import small_model as tiny_model
from tests.runtime.engines.shared import vllm_backend
from tests.runtime.ranks.shared_ranks import ranked
from tests.tiny_models import KINDS, tiny_tokenizer


def torch_backend(model: nn.Module, max_batch_size: int) -> GenerationBackend:
    backend = TorchGenerationBackend(model=model, tokenizer=tiny_tokenizer())
    backend.setup(GenerationConfig(max_batch_size=max_batch_size))
    return backend


def megatron_backend(model: nn.Module, max_batch_size: int) -> GenerationBackend:
    """On the two ranks of a pipeline."""
    trainer = BackendConfig(trainer=TrainerConfig(device="cpu"))
    backend = RankedGenerator(
        trainer=ranked(model, trainer, backend="megatron", pp=2), tokenizer=tiny_tokenizer()
    )
    backend.setup(GenerationConfig(backend="megatron", max_batch_size=max_batch_size))
    return backend


BACKENDS: dict[str, Callable[[nn.Module, int], GenerationBackend]] = {
    "megatron": megatron_backend,
    "torch": torch_backend,
    "vllm": vllm_backend,
}


QUICK = (
    "test_greedy_tokens_equal_transformers_generate",
    "test_logprobs_are_those_of_the_sampling_distribution",
    "test_a_seeded_request_does_not_depend_on_the_batch",
)
"""Of vLLM's, with the kind qwen2; the others are slow."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    if "make" not in names:
        return
    cases = []
    for name, kind in product(sorted(BACKENDS), sorted(KINDS) if "kind" in names else [""]):
        quick = metafunc.function.__name__ in QUICK and kind in ("", "qwen2")
        marks = [pytest.mark.xdist_group("ray")] if name != "torch" else []
        if name == "megatron" or (name == "vllm" and not quick):
            marks.append(pytest.mark.slow)
        cases.append(pytest.param(name, *[kind] * bool(kind), marks=marks))
    metafunc.parametrize(("make", "kind") if "kind" in names else "make", cases, indirect=["make"])


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[..., GenerationBackend]:
    return lambda model=None, max_batch_size=64: BACKENDS[request.param](
        model or tiny_model(scale=3.0), max_batch_size
    )


def reference_logprobs(
    model: nn.Module, prompt: list[int], response: tuple[int, ...], temperature: float
) -> torch.Tensor:
    with torch.no_grad():
        logits = (
            model(torch.tensor([[*prompt, *response]]), use_cache=False)
            .logits[0, len(prompt) - 1 : -1]
            .float()
        )
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def logprob_bound(temperature: float) -> float:
    """Logits z that rounding moves by ε each move z_i / T - log Σ exp(z_j / T) by up to 2 ε / T."""
    return 1e-5 / (temperature or 1.0)


def of_transformers(model: nn.Module, prompt: list[int], length: int) -> list[int]:
    """Its greedy response."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": length, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return found[0, len(prompt) :].tolist()


def greedy(length: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=length, **options)
