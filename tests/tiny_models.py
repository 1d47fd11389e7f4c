"""Tiny models and a character tokenizer, made from configuration."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from nemorl.models.causal_lm import fresh_head, from_config

ALPHABET = "0123456789+=abcdefghijklmnopqrstuvwxyz é"
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


EXPERTS = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


OTHERS = {
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM),
}
"""Further families that megatron-core's specs build."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<pad>", eos_token="<eos>"
    )


def tiny_model(
    kind: str = "qwen2", *, seed: int = 0, tied: bool = True, scale: float = 1.0, **overrides
) -> nn.Module:
    """Two layers with grouped queries.

    `scale` sharpens its predictions, so that they differ from each other as a trained model's do.
    """
    config_class, model_class = {**KINDS, **EXPERTS, **OTHERS}[kind]
    torch.manual_seed(seed)
    options = {
        "vocab_size": len(ALPHABET) + 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **({"sliding_window": None} if kind == "mistral" else {}),
        **({"num_experts_per_tok": 2, "num_local_experts": 4} if kind in EXPERTS else {}),
        **({"moe_intermediate_size": 24, "norm_topk_prob": True} if kind == "qwen3_moe" else {}),
        **({"no_rope_layer_interval": 2} if kind == "smollm3" else {}),
    }
    model = model_class(config_class(**{**options, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model.eval()


def random_prompts(count: int, *, seed: int = 0, longest: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [
        torch.randint(2, len(ALPHABET) + 2, (length,), generator=generator).tolist()
        for length in lengths
    ]


def tiny_critic(kind: str = "qwen2", *, seed: int = 0, **options) -> nn.Module:
    """`tiny_model` with a scalar head in place of its output layer."""
    body = tiny_model(kind, seed=seed, **options)
    model = from_config(body.config, "scalar")
    fresh = fresh_head(body.config, seed=seed)
    model.load_state_dict({**body.state_dict(), **fresh}, strict=False)
    with torch.no_grad():
        model.score.weight.mul_(20)
    return model.eval()
