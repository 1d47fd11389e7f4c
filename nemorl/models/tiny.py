"""A tiny model with every kind of layer that a configuration's full one has."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nemorl.checks import require
from nemorl.models.causal_lm import decoder_of, from_config, layers_of
from nemorl.models.hub import has_own_code

SIZES = {
    **{"vocab_size": 160, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4},
    **{"intermediate_size": 96, "intermediate_size_mlp": 96, "moe_intermediate_size": 48},
    **{"shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 2, "topk_group": 1, "sliding_window": 8, "attention_chunk_size": 8},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_num_heads": 4},
    **{"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
    **{"floor_scale": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Sizes of a tiny model, where the full one's are larger."""
MOST_LAYERS = 16


def tiny_config(config: Any, sizes: Mapping[str, int] = SIZES) -> Any:
    """Return a configuration with sizes of at most these, and layers of every kind."""
    make, values = type(config).from_dict, _smaller(config.to_dict(), sizes)
    kinds = _kinds(make({**values}))
    count = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    if count > MOST_LAYERS:  # the first of each kind, where lists say of which kind a layer is
        first = sorted({kinds.index(kind) for kind in kinds})
        tiny = make(_with_layers(values, first, len(kinds)))
        require(
            _kinds(tiny) == [kinds[index] for index in first],
            "the model's layers",
            f"must show all kinds in the first {MOST_LAYERS}, or list the kind of each",
            f"{count} to show them",
            "report the model",
        )
        return tiny
    return make(_with_layers(values, [*range(min(count, len(kinds)))], len(kinds)))


def tiny_model(config: Any, *, seed: int = 0) -> Any:
    """Return a model of a `tiny_config` in float32, which attends in transformers' plain way.

    Its weights are random and large enough that what is wrong anywhere shows: also biases, norms,
    sinks and balances of experts, which transformers initializes as 0 or 1.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = from_config(config, trust_remote_code=has_own_code(config))
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            elif tensor.is_floating_point():
                tensor.add_(0.3 * noise)
    return model.eval()


def _kinds(config: Any) -> list[tuple[Any, ...]]:
    with torch.device("meta"):
        model = from_config(config, trust_remote_code=has_own_code(config))
    return [_kind(layer) for layer in layers_of(decoder_of(model))]


def _with_layers(values: Mapping[str, Any], chosen: list[int], depth: int) -> dict[str, Any]:
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == depth:
            found[name] = [value[index] for index in chosen]
    if "num_hidden_layers" in values:
        found["num_hidden_layers"] = len(chosen)
    return found


def _smaller(values: dict[str, Any], most: Mapping[str, int]) -> dict[str, Any]:
    heads, kv_heads = (values.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    sizes = {
        name: size
        for name, size in most.items()
        if isinstance(values.get(name), int) and values[name] > size
    }
    found = {**values, **sizes, "dtype": None}
    if kv_heads is not None:
        found["num_key_value_heads"] = 4 if kv_heads == heads else min(kv_heads, 2)
    for name, value in values.items():
        if name.endswith(("dropout", "pdrop", "_drop")) and isinstance(value, float):
            found[name] = 0.0
        elif name.endswith("_token_id") and isinstance(value, list):
            found[name] = SIZES["eos_token_id"]
        elif name.endswith("_token_id") and isinstance(value, int) and value >= 160:
            found[name] = SIZES.get(name, 3)
    if found.get("qk_rope_head_dim"):  # multi-head latent attention
        found["head_dim"] = found["qk_rope_head_dim"]
    for ropes in (found.get("rope_parameters"), found.get("rope_scaling")):
        if isinstance(ropes, dict):
            found["rope_parameters"] = _smaller_rope(ropes, found)
    return found


def _smaller_rope(rope: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor")) or 1.0
    count = int(size * partial) // 2
    found = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):  # of a kind of layer
            found[name] = _smaller_rope(value, values)
        elif name in ("long_factor", "short_factor"):
            found[name] = value[:count]
        elif name == "mrope_section":
            found[name] = [count - 2 * (count // 3), count // 3, count // 3]
    return found


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    plain = (bool, int, float, str, type(None))
    parts = []
    for name, part in layer.named_modules():
        own = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, plain) and key != "layer_idx"
        }
        parts.append((name, type(part), tuple(sorted(own.items(), key=str))))
    return (*parts, *((name, tensor.shape) for name, tensor in layer.state_dict().items()))
