"""The little that we ask of a Hugging Face causal language model, and the models that can't give
it, refused by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from nemorl.models.adapters import CONFIG, base_of, has_adapters, merge_adapters, merge_folder


def load_causal_lm(
    path: str, *, from_scratch: bool = False, seed: int = 0, device: torch.device | str = "cpu"
) -> nn.Module:
    """A causal language model in float32 from a folder or the hub, or with fresh weights from its
    configuration.

    A PEFT folder gives the base model that it names with its adapters merged.

    Raises ValueError where there is no such model or it is of a kind that is not supported
    (`check_supported`).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not path:
        raise ValueError(
            "model.path must name a model folder or a hub model, but it is empty: give --model.path"
            " PATH"
        )
    if (Path(path) / CONFIG).is_file():
        base = base_of(Path(path))
        if not base:
            raise ValueError(
                f"the adapters in {path} must name their base model, but they don't: nemorl export"
                " --lora merged --base-model …"
            )
        try:
            model = load_causal_lm(base)
        except ValueError as error:
            raise ValueError(
                f"the adapters in {path} need their base model, but it can't be loaded ({error}):"
                " put it in its place"
            ) from error
        return merge_folder(model, Path(path)).to(device)
    try:
        if from_scratch:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path), dtype=torch.float32
            )
        else:
            with _progress_bar(path):
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32, output_loading_info=True
                )
                model, report = loaded
                if missing := sorted(
                    report["missing_keys"]
                ):  # else they would be random numbers, with a warning that nobody reads
                    raise ValueError(
                        f"its weights lack {', '.join(missing[:3])}, {len(missing)} in all"
                    )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.path must be a folder with a Hugging Face model or a hub name, but {path!r}"
            f" could not be loaded ({reason}): check it"
        ) from error
    check_supported(model)
    return (merge_adapters(model) if has_adapters(model) else model).to(device)


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


SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose numbers the tests compare with Hugging Face's own, packed and cached."""


def check_supported(model: nn.Module) -> None:
    """Raise a ValueError that names the reason for a model whose numbers would not, or might not,
    be its own here.
    """
    config: Any = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )
    reasons = [
        ("it is none of those", config.model_type not in SUPPORTED),
        (
            f"it has a sliding attention window of {window} tokens",
            bool(window) or layer_types != {"full_attention"},
        ),
        (
            "its output layer has a bias",
            getattr(model.get_output_embeddings(), "bias", None) is not None,
        ),  # type: ignore[operator]
    ]
    for reason, applies in reasons:
        if applies:
            raise ValueError(
                f"the model must be one of {', '.join(SUPPORTED)} with full attention, but it is"
                f" {config.model_type!r} and {reason}"
            )


def usable_device(name: str | None) -> torch.device:
    """The device of this name; None: the first GPU if there is one. Raises ValueError where there
    is no such device.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(
            f"device must be one that torch can use here, but it is {name!r} ({reason}): leave it"
            " out for the best there is"
        ) from error
    return device


def decoder_of(model: nn.Module) -> nn.Module:
    """The part that turns token ids into hidden states."""
    return model.get_decoder()  # type: ignore[operator]


def head_weight(model: nn.Module) -> torch.Tensor:
    """The LM head, `[vocab, hidden]`."""
    return model.get_output_embeddings().weight  # type: ignore[operator]


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a response: the tokenizer's, and those that the model's generation
    configuration names, as instruction models' do.
    """
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return {
        getattr(tokenizer, "eos_token_id", None),
        *(ends if isinstance(ends, list) else [ends]),
    } - {None}
