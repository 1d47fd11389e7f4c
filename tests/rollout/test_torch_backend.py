"""What only the embedded engine has: memory that it shares with the trainer, and one thread."""

import asyncio
import signal

import pytest
import torch

from nemorl.models.tensor_files import sampled
from nemorl.rollout import torch_backend as module
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.decoding import Decoding
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.rollout.updates import update
from tests.tiny_models import random_prompts, tiny_model, tiny_tokenizer

LONG = SamplingParams(seed=1, max_new_tokens=200)


def made(model, **options):
    backend = TorchGenerationBackend(model=model, tokenizer=tiny_tokenizer())
    backend.setup(GenerationConfig(**options))
    return backend


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """One token each."""
    monkeypatch.setattr(module, "STEP_S", 0.0)


def test_between_two_steps_the_model_is_the_trainers():
    """In training mode and with its own attention; nothing is computed while a script computes."""
    model = tiny_model(scale=2.0).train()
    backend, attention = made(model), model.config._attn_implementation

    async def main():
        task = asyncio.ensure_future(backend.sample([5, 6], LONG))
        for _ in range(20):
            await asyncio.sleep(0)
            assert model.training and model.config._attn_implementation == attention
        assert 5 < len(backend.decoding.active[0].token_ids) < 25
        task.cancel()

    asyncio.run(main())


def test_the_trainers_step_in_the_middle():
    """Its memory is the engine's: the requests go on with what it has written."""
    model = tiny_model(scale=2.0)
    backend = made(model)

    async def main():
        tasks = [asyncio.ensure_future(backend.sample(p, LONG)) for p in random_prompts(4)]
        await asyncio.sleep(0.05)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        with pytest.raises(RuntimeError, match="'wait' needs the old weights, but this engine"):
            update(backend, model.named_parameters(), 1, in_flight="wait")
        update(backend, model.named_parameters(), 1)
        return await asyncio.gather(*tasks)

    for (completion,) in asyncio.run(main()):
        assert set(completion.policy_versions) == {0, 1}
    update(backend, model.named_parameters(), 2, in_flight="wait")  # none is in flight
    assert backend.policy_version == 2


def test_other_tasks_have_their_turn_in_every_step():
    backend = made(tiny_model(scale=2.0))
    ticks = 0

    async def main():
        nonlocal ticks
        task = asyncio.ensure_future(backend.sample([5], LONG))
        while not task.done():
            await asyncio.sleep(0)
            ticks += 1
        return await task

    asyncio.run(main())
    assert ticks >= 200


def test_after_an_interrupt_the_same_event_loop_can_go_on(monkeypatch):
    """As in a notebook, whose loop outlives the interrupt."""
    backend = made(tiny_model(scale=2.0))
    expected = backend.generate([[5, 6]], LONG)
    decode = Decoding._decode

    def interrupted(self, version):
        monkeypatch.setattr(Decoding, "_decode", decode)
        signal.raise_signal(signal.SIGINT)

    loop = asyncio.new_event_loop()
    try:
        monkeypatch.setattr(Decoding, "_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(backend.sample([5, 6], LONG))
        assert loop.run_until_complete(backend.sample([5, 6], LONG)) == expected
    finally:
        loop.close()


def test_a_copy_needs_every_tensor():
    model, other = tiny_model(tied=False), tiny_model(tied=False, seed=1)
    backend = made(model)
    kept = [one for one in other.named_parameters() if one[0] != "model.norm.weight"]
    with pytest.raises(ValueError, match=r"must fit the .*'model.norm.weight' is missing"):
        update(backend, kept, 1)
    assert backend.policy_version is None


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_head_comes_once(name):
    model, other = tiny_model(tied=True), tiny_model(tied=True, seed=1)
    first = "model.embed_tokens.weight"
    weights = {name if key == first else key: one for key, one in other.named_parameters()}
    update(made(model), weights.items(), 1)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_each_version_of_a_copy_is_compared_in_other_places(monkeypatch):
    seen = []

    def recorded(tensor, version):
        seen.append(version)
        return sampled(tensor, version)

    monkeypatch.setattr(module, "sampled", recorded)
    update(made(tiny_model()), tiny_model(seed=1).named_parameters(), 3)
    assert set(seen) == {3}


@pytest.mark.parametrize("cached", [True, False])
def test_the_experts_of_each_token_are_recorded(cached: bool):
    """Of prompt and response, but for the last token, as transformers chooses them; those of tokens
    that are computed again stay.
    """
    model = tiny_model("qwen3_moe", scale=3.0, num_hidden_layers=3)
    backend = TorchGenerationBackend(model=model, cached=cached, records_experts=True)
    backend.setup(GenerationConfig(max_batch_size=4))
    prompts = random_prompts(5)

    async def main():
        params = [SamplingParams(n=2, seed=i, max_new_tokens=3 + i) for i in range(5)]
        tasks = [
            asyncio.ensure_future(backend.sample(*each))
            for each in zip(prompts, params, strict=True)
        ]
        for _ in range(8):
            await asyncio.sleep(0.01)
            backend.decoding.preempt()
        return await asyncio.gather(*tasks)

    for prompt, completions in zip(prompts, asyncio.run(main()), strict=True):
        for completion in completions:
            ids = torch.tensor([[*prompt, *completion.token_ids]])[:, :-1]
            logits = model(ids, output_router_logits=True).router_logits
            expected = torch.stack([each.topk(2, -1).indices for each in logits], 1)
            found = completion.routed_experts
            assert found.dtype == torch.int16
            assert found.sort(-1).values.tolist() == expected.sort(-1).values.tolist()
    backend.shutdown()
    assert not any(part._forward_pre_hooks for part in model.modules())
