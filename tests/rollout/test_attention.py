"""Attention of decoding, and the model as it is found again after it."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nemorl.models.attention import Rule
from nemorl.rollout.attention import ATTENTION_NAME, cached_attention, decoding
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.tiny_models import random_prompts, tiny_model, tiny_tokenizer


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


def test_a_cache_is_used_again_by_shorter_and_longer_requests():
    """What an earlier request left in the slots is never seen by a later one."""
    model, params = tiny_model(scale=2.0), SamplingParams(max_new_tokens=6, seed=3)
    prompts = random_prompts(9, seed=4)
    engine = TorchGenerationBackend(model=model, tokenizer=tiny_tokenizer())
    engine.setup(GenerationConfig(max_batch_size=4))
    alone = []
    for prompt in prompts:
        fresh = TorchGenerationBackend(model=model, tokenizer=tiny_tokenizer())
        fresh.setup(GenerationConfig(max_batch_size=4))
        alone.append(fresh.generate([prompt], params)[0].token_ids)
    engine.generate(prompts, SamplingParams(max_new_tokens=20, seed=1))
    assert [engine.generate([prompt], params)[0].token_ids for prompt in prompts] == alone
