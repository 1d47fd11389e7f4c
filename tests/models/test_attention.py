"""Keywords that models give to attention: what would change numbers is refused, not dropped."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemorl.models import attention
from nemorl.models.attention import attend, use_attention, without_cudnn_attention
from nemorl.parallel.attention import segment_attention, segments_of
from nemorl.rollout.attention import cached_attention
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
FUNCTIONS = {"segments": segment_attention, "cached": cached_attention}


def of_type(model_type: str, **options):
    config = AutoConfig.for_model(model_type, **SIZES, **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (("gemma2", {"sliding_window": 64}), "softcap must be None or False, but it is 50"),
        (("gpt_oss", {"num_local_experts": 2, "sliding_window": 64}), "attention's s_aux must be"),
        (("mistral", {"sliding_window": 11}), "sliding_window must be None or at least 12, .* 11"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_is_not_supported_is_an_error(model, message, function):
    made = of_type(model[0], **model[1])
    use_attention(made, f"tests_{function}", FUNCTIONS[function])
    with pytest.raises(ValueError, match=message), torch.no_grad():
        made(IDS, use_cache=False)


def test_a_keyword_that_is_not_known_is_an_error():
    model = tiny_model()
    use_attention(model, "tests_segments", segment_attention)
    with pytest.raises(TypeError, match="has a keyword 'surprise' that is not supported"):
        model(IDS, use_cache=False, surprise=3)
    query = torch.zeros(1, 2, 3, 4)
    for function in (segment_attention, cached_attention):
        with pytest.raises(TypeError, match="softcap"):
            function(query, query, query, None, softcap=3.0)


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


def test_a_window_as_wide_as_the_row_hides_nothing():
    model = of_type("mistral", sliding_window=12)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        use_attention(model, "tests_segments", segment_attention)
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)


def test_chunks_that_are_in_the_mask_alone_are_an_error():
    model = of_type(
        "llama4_text",
        attention_chunk_size=8,
        intermediate_size_mlp=64,
        num_local_experts=2,
        no_rope_layers=[1, 0],
    )
    with pytest.raises(ValueError, match=r"layer_types must be .*, but it is 'chunked_attention'"):
        use_attention(model, "tests_segments", segment_attention)
