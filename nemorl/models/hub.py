"""Whether a name on the hub can be followed, found out before anything is fetched. Free of torch."""


def require_hub(name: str, *files: str, field: str = "model") -> None:
    """Raise ValueError where none of the `files` of `name` is in the cache, and the hub can't be
    asked for them.

    For each file that is not in its cache huggingface_hub asks six times, for half a minute, also
    where there is no network at all. A single question before that tells it at once, and leaves
    huggingface_hub its patience for the downloads themselves. Whatever the hub answers, and what
    HF_HUB_OFFLINE forbids, is for whoever loads the files.
    """
    import httpx
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        FileMetadataError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
    )

    try:
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            get_hf_file_metadata(hf_hub_url(name, files[0]))
        return
    except (HfHubHTTPError, HFValidationError, FileMetadataError, OfflineModeIsEnabled):
        return
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        raise ValueError(
            f"{field} must be a folder or a name on the hub, but there is no folder {name!r}, the"
            f" hub's cache has no {files[0]} of that name, and {constants.ENDPOINT} can't be"
            f" reached ({str(error) or type(error).__name__}): name a folder, or copy the cache of"
            " a machine that has it (HF_HOME) and set HF_HUB_OFFLINE=1"
        ) from error
    except httpx.HTTPError:  # somebody is there, if only slow or short of breath
        return
