"""Runs whose model is at a service: the same numbers as on this machine."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nemorl
from nemorl.data.batch import TokenBatch, collate
from nemorl.data.packing import pack, unpack
from nemorl.losses import masks, policy
from nemorl.losses.supervised import nll
from nemorl.losses.types import finalize
from nemorl.parallel.config import BackendConfig
from nemorl.runtime.cli.service import trained
from nemorl.runtime.cli.settings import ServeConfig
from nemorl.runtime.run import registry
from nemorl.runtime.serve.endpoint import Key
from tests.runtime.runs import (
    TRAINER,
    addition_rows,
    digits,
    grpo_config,
    numbers,
    of_phase,
    saved_model,
)

KEY = "tml-0123456789abcdef"
OPTIMIZER = nemorl.OptimizerConfig(
    lr=1e-2, schedule="cosine", warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5
)
KL = nemorl.KLConfig(coef=0.1)


@contextmanager
def served(folder: Path, model: Path, *, port: int = 0) -> Iterator[str]:
    config = ServeConfig(
        model=nemorl.ModelConfig(path=str(model)), trainer=TRAINER, tinker=True, dir=str(folder)
    )
    with trained(config, {"port": port}) as endpoint:
        endpoint.keys[KEY] = Key(name="me", role="train")
        yield endpoint.url


@pytest.fixture(autouse=True)
def at_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    for name in ("TRAINING_BACKENDS", "GENERATION_BACKENDS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def setup_of(model: Path, rank: int) -> dict[str, Any]:
    return {
        "model": nemorl.ModelConfig(path=str(model)),
        "lora": nemorl.LoRAConfig(rank=rank),
        "optimizer": OPTIMIZER,
        "seed": 3,
        "total_steps": 5,
    }


def there(url: str, setup: dict[str, Any]) -> Any:
    backend = registry.get_training_backend(url)  # a URL is the name of a service's
    backend.setup(BackendConfig(**setup))
    return backend


def batch_of(seed: int) -> TokenBatch:
    """Responses of which the last token is not trained on."""
    draw, examples = torch.Generator().manual_seed(seed), []
    names = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")
    for length in (9, 14, 5, 14):
        mask = [False] * 3 + [True] * (length - 3)
        arrays = {name: torch.randn(length, generator=draw).tolist() for name in names}
        ids = torch.randint(2, 40, (length,), generator=draw).tolist()
        trained = [*mask[:-1], False]
        examples.append(
            {"input_ids": ids, "loss_mask": trained, "response_mask": mask, **arrays},
        )
    batch = collate(examples)
    return replace(batch, loss_weights=masks.token_mean_weights(batch.loss_mask))


LOSSES = {
    "sft": lambda output, batch: nll(output.token_logprobs, batch.loss_weights),
    "grpo": nemorl.policy_loss(policy.clipped, clip_low=0.2, clip_high=0.28, kl=asdict(KL)),
}


@pytest.mark.slow_cases(but=["grpo-4"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("loss", [*LOSSES])
def test_steps_have_the_same_bits(rank: int, loss: str, tmp_path: Path):
    def steps(backend: Any) -> Iterator[Any]:
        for seed in range(4):
            parts = [batch_of(2 * seed + i) for i in range(2)]
            for part in parts:
                output = backend.forward_backward(part, LOSSES[loss], token_logprobs=True)
                yield output.token_logprobs
                yield {k: x for k, x in finalize(output.metrics).items() if k != "entropy"}
            taken = finalize(backend.optim_step())
            yield {name: taken[name] for name in ("loss", "grad_norm", "lr", "num_tokens")}
            yield backend.get_logprobs(parts[0]).values

    model = saved_model(tmp_path / "model")
    setup = setup_of(model, rank)
    here = registry.get_training_backend("dtensor")
    here.setup(BackendConfig(**setup, trainer=TRAINER))
    wanted = [*steps(here)]
    here.shutdown()
    with served(tmp_path / "service", model) as url:
        got = [*steps(there(url, setup))]
    for ours, theirs in zip(wanted, got, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


UNLIKE = {
    "entropy": 10.0,  # of the sampled tokens alone
    # Merged adapters, or another batch, change the last bit of what a sampler computes.
    **dict.fromkeys(("gen_kl_error", "gen_kl_error_max", "token_mult_prob_error"), 1e-6),
    **dict.fromkeys(("receipts/kl_from_1", "receipts/kl_from_4"), 1e-6),
}
"""What differs, and at most how much."""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_has_the_same_numbers_and_is_resumed(rank: int, tmp_path: Path):
    model = saved_model(tmp_path / "model")
    options: dict[str, Any] = {
        "model": nemorl.ModelConfig(path=str(model)),
        "lora": nemorl.LoRAConfig(rank=rank),
        "kl": KL,
    }

    def run(folder: str, url: str | None = None, **more: Any) -> list[dict[str, Any]]:
        config = grpo_config(tmp_path / folder, **options, **more)
        if url is not None:
            config = nemorl.connect(config, url)
        found = nemorl.run(config, train=addition_rows(), reward=digits)
        return [numbers(line) for line in of_phase(found, "train")]

    wanted = run("here", steps=3)
    with served(tmp_path / "service", model) as url:
        first = run("there", url, steps=2)
        got = run("there", url, steps=3, run={"resume": True})
    assert got[:2] == first
    for ours, theirs in zip(wanted, got, strict=True):
        assert {k for k in ours if ours[k] != theirs.get(k)} <= UNLIKE.keys()
        assert all(abs(ours[k] - theirs[k]) < most for k, most in UNLIKE.items())


@pytest.mark.slow
def test_a_service_that_starts_again_is_awaited(tmp_path: Path):
    """The batch is packed the second time."""
    model, batch, plan = saved_model(tmp_path / "model"), batch_of(0), ((0, 2), (1, 3))
    with served(tmp_path / "service", model) as url:
        backend = there(url, setup_of(model, 4))
        backend.train_step(batch, LOSSES["sft"])
        before = backend.get_logprobs(batch).values
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(backend.get_logprobs, pack(batch, plan))
        time.sleep(0.5)
        with served(tmp_path / "service", model, port=int(url.rpartition(":")[2])):
            after = waiting.result(60).values
    assert torch.equal(unpack(after, plan, batch.lengths.tolist()), before)


def test_errors_name_what_is_wrong(tmp_path: Path):
    model = saved_model(tmp_path / "model")
    config = nemorl.GRPOConfig(model=nemorl.ModelConfig(path=str(model)))
    with pytest.raises(ConnectionError, match="must be a URL that nemorl serve"):
        nemorl.connect(config, "http://127.0.0.1:9")
    lora = nemorl.LoRAConfig(rank=4, alpha=8.0)
    with pytest.raises(ValueError, match=r"lora.alpha can't be set here .* but it is 8.0"):
        nemorl.connect(replace(config, lora=lora), "http://127.0.0.1:9")
    with served(tmp_path / "service", model) as url:
        with pytest.raises(ValueError, match="key must be"):
            nemorl.connect(config, url, api_key="tml-wrong")
        with pytest.raises(ValueError, match=f"model.path must be served at {url}, as {model} is"):
            nemorl.connect(nemorl.GRPOConfig(), url)
        backend, clips = there(url, setup_of(model, 4)), {"clip_low": 0.2, "clip_high": 0.2}
        bonus = nemorl.policy_loss(policy.clipped, entropy_coef=0.1, **clips)
        for loss, what in ((bonus, "entropy"), (nemorl.needs(top_k=2)(LOSSES["sft"]), "top_k=2")):
            with pytest.raises(ValueError, match=f"must be log-probabilities alone.*{what}"):
                backend.train_step(batch_of(0), loss)
