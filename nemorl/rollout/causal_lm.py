"""The little that we ask of a Hugging Face causal language model, and the models that can't give it, refused by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


def load_causal_lm(path: str, *, from_scratch: bool = False, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """A causal language model in float32 from a folder or the hub, or with fresh weights from its configuration.

    Raises ValueError where there is no such model or it is of a kind that is not supported (`check_supported`).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not path:
        raise ValueError("model.path must name a model folder or a hub model, but it is empty: give --model.path PATH")
    try:
        if from_scratch:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        else:
            with _progress_bar(path):
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.path must be a folder with a Hugging Face model or a hub name, but {path!r} could not be loaded ({reason})"
        ) from error
    check_supported(model)
    return model.to(device)


@contextmanager
def _progress_bar(path: str) -> Iterator[None]:
    """Without transformers' own progress bar where a local model loads in no time."""
    from transformers.utils import logging

    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    quiet = 0 < size < 1e9 and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            logging.enable_progress_bar()


def check_supported(model: nn.Module) -> None:
    """Raise a ValueError that names the feature if full causal attention over restarted positions would not give this model's own numbers."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    reasons = [
        ("layers of the kinds " + ", ".join(sorted(layer_types)), bool(layer_types - {"full_attention"})),
        ("a sliding attention window", bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)),
        ("soft-capped logits", bool(getattr(text, "final_logit_softcapping", None) or getattr(text, "attn_logit_softcapping", None))),
        ("scaled logits", getattr(text, "logits_scaling", 1.0) not in (None, 1, 1.0) or getattr(text, "logit_scale", 1.0) not in (None, 1, 1.0)),
        ("an encoder", bool(getattr(config, "is_encoder_decoder", False))),
        ("a bias in the output layer", getattr(model.get_output_embeddings(), "bias", None) is not None),  # type: ignore[operator]
    ]
    for reason, applies in reasons:
        if applies:
            raise ValueError(
                f"model type {config.model_type!r} is not supported yet: it has {reason}. "
                "Llama, Qwen2, Qwen3 and Mistral (without a sliding window) are"
            )


def decoder_of(model: nn.Module) -> nn.Module:
    """The part that turns token ids into hidden states."""
    return model.get_decoder()  # type: ignore[operator]


def head_weight(model: nn.Module) -> torch.Tensor:
    """The LM head, `[vocab, hidden]`."""
    return model.get_output_embeddings().weight  # type: ignore[operator]
