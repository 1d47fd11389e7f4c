"""The one error for a model or tokenizer that can't be loaded. Free of torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


def cannot_load(
    name: str, reason: object, *, field: str = "model.path", remedy: str = "check it"
) -> ValueError:
    """Return the error that names what was to be loaded, why it can't be, and what to do."""
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

    name: a folder or a hub name.
    field: the setting that the error names.
    files: the hub's cache has the model if it has one of these.

    Raises: ValueError for an empty name, a hub name that is not in the cache where there is no
    network, and whatever the loading itself raises.
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

    huggingface_hub tries for half a minute for each file, even without a network. One request
    before that finds out at once. Any answer, and HF_HUB_OFFLINE, is left to the loading itself.
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
        remedy = (
            "check it, or set HF_HUB_OFFLINE=1 with the cache (HF_HOME) of a machine that has it"
        )
        raise cannot_load(name, reason, field=field, remedy=remedy) from error
    except (httpx.HTTPError, OSError, ValueError):
        pass
