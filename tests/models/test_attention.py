"""What models ask of attention: it is done, or refused, and never dropped."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemorl.models import attention
from nemorl.models.attention import Rule, attend, use_attention, without_cudnn_attention
from nemorl.parallel.attention import segment_attention, segments_of
from nemorl.rollout.decoding import cached_attention
from tests.tiny_models import KINDS, tiny_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
IDS = torch.arange(1, 13)[None]


def of_type(model_type: str, **options):
    config = AutoConfig.for_model(model_type, **SIZES, **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_keyword_that_is_not_known_is_an_error():
    model = tiny_model()
    use_attention(model, "tests_segments", segment_attention)
    with pytest.raises(TypeError, match="has a keyword 'surprise' that is not supported"):
        model(IDS, use_cache=False, surprise=3)
    query = torch.zeros(1, 2, 3, 4)
    for function in (segment_attention, cached_attention):
        with pytest.raises(TypeError, match="softcap"):
            function(query, query, query, None, softcap=3.0)
    with pytest.raises(ValueError, match="output_attentions must be None or False, but it is True"):
        model(IDS, use_cache=False, output_attentions=True)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_models_that_are_supported_give_transformers_numbers(kind):
    ids = torch.cat((IDS, IDS), 1)
    segments = torch.tensor([[1] * 12 + [2] * 12])
    positions = torch.arange(12).repeat(2)[None]
    model = tiny_model(kind, scale=2.0)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        use_attention(model, "tests_segments", segment_attention)
        found = model(
            ids,
            position_ids=positions,
            use_cache=False,
            segments=segments_of(segments, "buckets"),
            output_hidden_states=True,
        ).logits
    torch.testing.assert_close(found[:, :12], expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(found[:, 12:], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_is_off_in_the_block(before: bool):
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(before)
    restore = without_cudnn_attention.change()  # the block itself may be in use
    assert not cuda.cudnn_sdp_enabled()
    restore()
    assert cuda.cudnn_sdp_enabled() is before
    cuda.enable_cudnn_sdp(True)


def test_heads_in_groups_with_a_mask_are_repeated_on_an_accelerator(monkeypatch):
    """Without cuDNN, groups and a mask leave torch no kernel that needs little memory."""
    given = []

    def recorded(query, key, value, **options):
        given.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return whole(query, key, value, **options)

    whole = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = attend(query, key, value, mask)
    monkeypatch.setattr(attention, "is_accelerator", lambda device: True)
    torch.testing.assert_close(attend(query, key, value, mask), expected)
    attend(query, key, value, causal=True)
    assert given == [(2, 2, True), (6, 6, False), (2, 2, True)]


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
UNUSUAL = {
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": 5, **EXPERTS},
    "llama4_text": {
        "attention_chunk_size": 5,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "intermediate_size_mlp": 64,
        **EXPERTS,
    },
}
"""Windows, caps of scores, sinks, and chunks, which are in the mask and the configuration alone."""


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_layers_ask_of_attention_is_done(kind: str):
    """Packed rows and new tokens after cached ones against transformers' own, without a cache."""
    model = of_type(kind, **UNUSUAL[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=1.0 if name.endswith("sinks") else 0.2)
    model.set_attn_implementation("eager")  # sdpa drops caps and sinks
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        short = model(IDS[:, :4], use_cache=False).logits
        use_attention(model, "tests_segments", segment_attention)
        segments = segments_of(torch.tensor([[1] * 12 + [2] * 4]), "buckets")
        found = model(
            torch.cat((IDS, IDS[:, :4]), 1),
            position_ids=torch.cat((torch.arange(12), torch.arange(4)))[None],
            use_cache=False,
            segments=segments,
        ).logits
    torch.testing.assert_close(found[:, :12], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:, 12:], short, atol=1e-5, rtol=0)


def test_new_tokens_see_the_window_of_cached_ones():
    rule = Rule(window=3, scaling=0.3, softcap=2.0, sinks=torch.randn(4))
    query, key, value = (torch.randn(1, heads, 7, 8) for heads in (4, 2, 2))
    visible = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    for one in (rule, replace(rule, softcap=None, sinks=None), replace(rule, window=None)):
        expected = attend(query, key, value, rule=one, causal=True)
        found = cached_attention(query[:, :, 6:], key, value, visible[:, :, 6:], rule=one)
        torch.testing.assert_close(found, expected[:, 6:])
        found = cached_attention(query, key, value, visible, rule=one)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_become_weights_as_the_rule_says(cap: float | None, sinks: bool):
    """Value and gradient, against the formula, head by head and query by query."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 6, size, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, 8), (2, 8), (2, 5))
    )
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    rule = Rule(window=3, scaling=0.7, softcap=cap, sinks=sink if sinks else None)
    rows = []
    for head in range(4):
        for q in range(6):
            seen = range(max(0, q - 2), q + 1)
            scores = 0.7 * (query[:, head, q, None] * key[:, head // 2, seen]).sum(-1)
            scores = scores if cap is None else cap * (scores / cap).tanh()
            top = scores.exp()
            total = top.sum(-1) + (sink[head].exp() if sinks else 0)
            rows.append((top / total[:, None])[..., None].mul(value[:, head // 2, seen]).sum(1))
    expected = torch.stack(rows, 1).view(2, 4, 6, 5).transpose(1, 2)
    found = attend(query, key, value, rule=rule, causal=True)
    tolerance = {"atol": 1e-6, "rtol": 0}  # weights are in float32
    torch.testing.assert_close(found, expected, **tolerance)
    inputs = (query, key, value, *[sink] * sinks)
    probe = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((found * probe).sum(), inputs),
        torch.autograd.grad((expected * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **tolerance)
