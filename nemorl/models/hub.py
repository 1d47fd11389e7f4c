"""Which models are supported, and the one error for what can't be loaded. Free of torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from nemorl.checks import require

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose numbers the tests compare with Hugging Face's own, packed and cached."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that are the model's alone. With "dynamic" and "longrope" they follow from the
longest sequence in the batch, so a token's logprob would depend on its neighbors."""


def check_supported(config: Any) -> None:
    """Raise ValueError where a model with this configuration might give other numbers here."""
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if windowed else None
    reason = ""
    if config.model_type in SUPPORTED:
        if not window and types == {"full_attention"}:
            return _check_rope(config)
        reason = f" and it has a sliding attention window of {window} tokens"
    raise ValueError(
        f"the model must be one of {', '.join(SUPPORTED)} with full attention, but it is"
        f" {config.model_type!r}{reason}"
    )


def _check_rope(config: Any) -> None:
    # `transformers` 4 wrote rope_scaling.
    given: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    given = given or {}
    for rope in (given, *given.values()):  # one for all layers, or one for each type of layer
        if isinstance(rope, dict):
            kind = rope.get("rope_type", rope.get("type", "default"))
            requirement = f"must be one of {', '.join(ROPE_TYPES)}"
            remedy = "its numbers depend on the longest sequence in a batch; take another model"
            require(kind in ROPE_TYPES, "the model's rope_type", requirement, kind, remedy)


def cannot_load(
    name: str, reason: object, *, field: str = "model.path", remedy: str = "check it"
) -> ValueError:
    """Return the error that names the model, why it can't be loaded, and what to do."""
    first = next(iter(str(reason).strip().splitlines()), type(reason).__name__)
    return ValueError(
        f"{field} must be a folder with a Hugging Face model or a hub name, but {name!r} could not"
        f" be loaded ({first}): {remedy}"
    )


@contextmanager
def loading(
    name: str, *, field: str = "model.path", files: tuple[str, ...] = ("config.json",)
) -> Iterator[None]:
    """Load the model or tokenizer `name` in the block, with one error for all that goes wrong.

    field: the setting that the error names.
    files: the hub's cache has the model if it has one of these.
    """
    if not name:
        raise ValueError(
            "model.path must name a model folder or a hub model, but it is empty: give --model.path"
            " PATH"
        )
    if not Path(name).exists():
        require_hub(name, *files, field=field)
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise cannot_load(name, error, field=field) from error


def require_hub(name: str, *files: str, field: str = "model.path") -> None:
    """Raise ValueError where the cache has none of the `files` of `name` and there is no network.

    huggingface_hub would try each file for half a minute. Any answer, and HF_HUB_OFFLINE, is left
    to the loading itself.
    """
    import httpx
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            get_hf_file_metadata(hf_hub_url(name, files[0]))
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        reason = (
            f"there is no such folder, the hub's cache does not have it, and {constants.ENDPOINT}"
            f" can't be reached: {str(error) or type(error).__name__}"
        )
        remedy = "check it, or set HF_HUB_OFFLINE=1 with the cache (HF_HOME) of another machine"
        raise cannot_load(name, reason, field=field, remedy=remedy) from error
    except (httpx.HTTPError, OSError, ValueError):
        pass
