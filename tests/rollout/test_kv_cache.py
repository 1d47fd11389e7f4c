"""The embedded engine's attention and its cache: how large it is, and of which type."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nemorl.models.attention import Rule
from nemorl.rollout import decoding as module
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.decoding import (
    ATTENTION_NAME,
    LEAST_LENGTH,
    Decoding,
    cached_attention,
    decoding,
)
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.rollout.counting import tokens
from tests.tiny_models import random_prompts, tiny_model

RESPONSES = range(40, 300, 13)


def made(model, max_batch_size=64, **options):
    backend = TorchGenerationBackend(model=model, **options)
    backend.setup(GenerationConfig(max_batch_size=max_batch_size))
    return backend


def watch_passes(monkeypatch, seen):
    """Call `seen(decoding)` after each decoding pass, before finished sequences leave."""
    decode = Decoding._decode

    def watched(self, version):
        decode(self, version)
        seen(self)

    monkeypatch.setattr(Decoding, "_decode", watched)


def held_bytes(cache):
    return sum(each.untyped_storage().nbytes() for each in (*cache.keys, *cache.values))


def requests(lengths=RESPONSES):
    prompts = random_prompts(len(lengths), seed=2)
    prompts = [(prompt * 10)[:10] for prompt in prompts]
    return prompts, [
        SamplingParams(seed=i, max_new_tokens=length, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_memory_is_in_proportion_to_the_tokens_in_use(precision, monkeypatch):
    """Also after most sequences are finished, and those that go on are long."""
    model = tiny_model(scale=2.0, max_position_embeddings=2048)
    config, size = model.config, {"float32": 4, "bfloat16": 2}[precision]
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    backend, shares = made(model, precision=precision), []

    def seen(decoding):
        in_use = sum(slot.length - 1 for slot in decoding.active)  # not the drawn ones
        shares.append(held_bytes(decoding.cache) / (in_use * per_token))

    watch_passes(monkeypatch, seen)
    for lengths in (RESPONSES, [60] * 8):  # a short batch after a long one
        shares.clear()
        backend.generate(*requests(lengths))
        assert len(shares) > 50 and max(shares[30:]) <= 2 and min(shares) >= 1
    assert held_bytes(backend.decoding.cache) == 0


def test_passes_have_few_shapes(monkeypatch):
    """A new one is for a sequence that is finished, or for a longer step of all."""
    model, shapes = tiny_model(scale=2.0, max_position_embeddings=2048), []
    attend = module.scaled_dot_product_attention

    def watched(query, key, *args, **options):
        shapes.append((query.shape, key.shape))
        return attend(query, key, *args, **options)

    monkeypatch.setattr(module, "scaled_dot_product_attention", watched)
    made(model).generate(*requests())
    passes = len(shapes) // model.config.num_hidden_layers
    assert passes == max(RESPONSES) - 1
    assert len(set(shapes)) <= len(RESPONSES) + max(RESPONSES) // LEAST_LENGTH + 1


def test_requests_with_the_same_prompt_share_its_computation(monkeypatch):
    backend, rows = made(tiny_model(scale=2.0)), []
    draw = backend.decoding.draw

    def watched(work):
        rows.append(work.input_ids.shape)
        return draw(work)

    monkeypatch.setattr(backend.decoding, "draw", watched)
    one, two = [5, 6], [7, 8, 9]
    params = [SamplingParams(seed=i, n=2, max_new_tokens=4, ignore_eos=True) for i in range(5)]
    prompts = [one, two, one, one, two]
    together = backend.generate(prompts, params)
    assert rows == [(2, 8), (10, 1), (10, 1), (10, 1)]
    alone = [
        each
        for prompt, request in zip(prompts, params, strict=True)
        for each in backend.generate([prompt], request)
    ]
    assert tokens(together) == tokens(alone)


def test_a_cache_that_grows_and_shrinks_keeps_its_contents():
    """Each answer is the one of a cache that is made for it alone."""
    model = tiny_model(scale=2.0, max_position_embeddings=2048)
    prompts, params = requests()
    together = made(model).generate(prompts, params)
    for prompt, one, found in [*zip(prompts, params, together, strict=True)][::6]:
        (alone,) = made(model).generate([prompt], one)
        assert found.token_ids == alone.token_ids
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_positions_that_the_model_lacks_are_not_computed():
    """A model of 21 positions, of which neither prompts nor keys are padded to more."""
    model = tiny_model(scale=2.0, max_position_embeddings=21)
    widths = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _, __, given: widths.append(int(given["position_ids"].max())), with_kwargs=True
    )
    (found,) = made(model).generate([[5] * 19], SamplingParams(seed=1, max_new_tokens=9))
    handle.remove()
    assert len(found.token_ids) == 2 and max(widths) < 21


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("new", [1, 3])
def test_it_is_attention_with_repeated_keys_and_values(key_heads: int, new: int):
    torch.manual_seed(0)
    query = torch.randn(5, 4, new, 8, dtype=torch.float64)
    key, value = (torch.randn(5, key_heads, 7, dim, dtype=torch.float64) for dim in (8, 6))
    mask = torch.rand(5, 1, new, 7) < 0.6
    mask[..., 0] = True
    out = cached_attention(query, key, value, mask, rule=Rule(scaling=0.3))
    key, value = (x.repeat_interleave(4 // key_heads, dim=1) for x in (key, value))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3).transpose(
        1, 2
    )
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_gets_its_own_attention_and_mode_back_also_after_an_error(training: bool):
    model = tiny_model().train(training)
    before, cudnn = model.config._attn_implementation, torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(KeyError), decoding(model):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert model.config._attn_implementation == ATTENTION_NAME and not model.training
        raise KeyError
    assert model.config._attn_implementation == before and model.training is training
    assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn
