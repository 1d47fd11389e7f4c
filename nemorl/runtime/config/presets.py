"""Presets of GRPO: what each of its named relatives changes, and its source."""

import json
from collections.abc import Mapping
from typing import Any

from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.config.spellings import algorithm_hint
from nemorl.runtime.config.tree import construct, flat, layer, to_dict

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": {"coef": 0.04}},
    "dr_grpo": {
        "advantage": {"name": "group", "baseline": "group_mean", "scale": "none"},
        "reduction": "constant",
    },
    "rloo": {
        "advantage": {"name": "group", "baseline": "leave_one_out", "scale": "none"},
        "loss": {"name": "reinforce"},
        "reduction": "constant",
    },
    # examples/configs/grpo_math_1B.yaml (its newest versions differentiate the penalty as
    # kl.gradient "score" does)
    "nemo_grpo": {
        "advantage": {"name": "group", "baseline": "leave_one_out", "scale": "leave_one_out_std"},
        "reduction": "token_mean",
        "kl": {"coef": 0.01},
    },
    # The buffer of 4,096 tokens is a fifth of the longest response, 20,480.
    "dapo": {
        "loss": {"name": "clipped", "clip_low": 0.2, "clip_high": 0.28},
        "reduction": "token_mean",
        "overlong": {"buffer": 0.2, "penalty": 1.0, "filter": True},
        "dynamic_sampling": True,
        "kl": {"coef": 0.0},
    },
    "gspo": {
        "loss": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        "reduction": "sequence_mean",
    },
    # The paper gives no number; the bound of 5 on the ratio is ScaleRL's (arXiv 2510.13786).
    "cispo": {"loss": {"name": "cispo", "clip_high": 4.0}, "reduction": "token_mean"},
    # The coefficient is OpenRLHF's default.
    "reinforce_plus_plus": {
        "advantage": {"name": "reinforce_plus_plus", "kl_coef": 0.01},
        "reduction": "token_mean",
    },
}

DESCRIPTIONS = {
    "grpo": "group mean and deviation, KL penalty (DeepSeekMath, arXiv 2402.03300)",
    "dr_grpo": "no division by deviation or length (R1-Zero-like training, arXiv 2503.20783)",
    "rloo": "leave-one-out baseline, REINFORCE (Back to Basics, arXiv 2402.14740)",
    "nemo_grpo": "leave-one-out mean and deviation, token mean, KL penalty (NeMo RL)",
    "dapo": "clip-higher, token mean, overlong shaping, dynamic sampling (arXiv 2503.14476)",
    "gspo": "sequence-level ratio (Qwen's GSPO, arXiv 2507.18071)",
    "cispo": "REINFORCE with a clipped importance weight (MiniMax-M1, arXiv 2506.13585)",
    "reinforce_plus_plus": "KL in the reward, whitened over the batch (arXiv 2501.03262)",
}


def preset_overrides(name: str) -> dict[str, Any]:
    """Return what a preset changes. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(
            f"unknown preset {name!r}{algorithm_hint(name, PRESETS) or '.'} Valid names:"
            f" {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def preset(name: str, overrides: Mapping[str, Any] | None = None) -> GRPOConfig:
    """Return a GRPO config from a preset and nested overrides.

    >>> config = preset("dapo", {"optimizer": {"lr": 1e-6}})
    >>> config.loss.clip_high, config.dynamic_sampling, config.optimizer.lr
    (0.28, True, 1e-06)
    """
    tree = layer(GRPOConfig, {}, preset_overrides(name))
    return construct(GRPOConfig, layer(GRPOConfig, tree, overrides or {}))


def nearest_preset(config: GRPOConfig) -> str:
    """Return a line about the preset that has the most in common with a config: loss and advantage
    first, then single settings.

    >>> nearest_preset(GRPOConfig())
    'settings nearest to preset grpo, with kl.coef 0 instead of 0.04'
    >>> nearest_preset(preset("dapo", {"optimizer": {"lr": 1e-6}}))
    'settings of preset dapo'
    """
    found = {name: _differences(config, preset(name)) for name in PRESETS}
    variants = ("loss", "advantage")
    name = min(found, key=lambda each: (len(found[each].keys() & variants), len(found[each])))
    changed = [
        f"{key} {_written(ours)} instead of {_written(theirs)}"
        for key, (ours, theirs) in found[name].items()
    ]
    if not changed:
        return f"settings of preset {name}"
    return f"settings nearest to preset {name}, with {', '.join(changed)}"


def _differences(config: GRPOConfig, other: GRPOConfig) -> dict[str, tuple[Any, Any]]:
    """Return both values of the settings that differ, of another variant its name alone."""
    changeable = {key for changes in PRESETS.values() for key in changes}
    ours, theirs = flat(to_dict(config)), flat(to_dict(other))
    other_variant = {key.removesuffix(".name") for key in ours if ours[key] != theirs.get(key)}
    found = {}
    for key, value in ours.items():
        section, _, name = key.partition(".")
        if section not in changeable or value == theirs.get(key):
            continue
        if name == "name" or section not in other_variant:
            found[key.removesuffix(".name")] = (value, theirs[key])
    return found


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')
