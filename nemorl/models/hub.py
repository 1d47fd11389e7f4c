"""Which models are supported, and the one error for what can't be loaded. Free of torch."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError

from nemorl.checks import require

CONFIG, INDEX = "adapter_config.json", "model.safetensors.index.json"
"""Files of a folder with PEFT's adapters, and of one with a model in several files."""
PIECES = "weights-*-of-*.safetensors"
"""Files of a checkpoint with pieces of weights, as several ranks held them."""
DAMAGED_PICKLE = "its weights are a damaged pickle, or one that would run code"
PARTS = ("vision_config", "audio_config", "speech_config")
"""Configurations of what is beside the text in a model of several kinds of input."""


def check_supported(config: Any) -> None:
    """Raise ValueError unless a configuration is of a language model of text in full precision."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    kind, quantized = config.model_type, getattr(config, "quantization_config", None)
    own = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    others = [part for part in PARTS if getattr(config, part, None) is not None]
    require(
        not others,
        "the model",
        "must be of text alone",
        f"{kind} with {', '.join(others)}",
        "take a text model, such as the text part of it saved by itself",
    )
    require(
        kind in CAUSAL or own,
        "the model's type",
        "must have a causal language model in transformers",
        kind,
        "take another model",
    )
    if quantized is not None:
        values = quantized if isinstance(quantized, dict) else quantized.to_dict()
        require(
            False,
            "the model's weights",
            "must not be quantized",
            values.get("quant_method", "unknown"),
            "take the checkpoint that it was made from",
        )


def max_positions(config: Any) -> int | None:
    """Return the tokens of the longest sequence whose numbers are a model's own, None if unknown.

    With rope type longrope, frequencies of longer ones follow from the longest sequence of a batch.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    if ropes.get("rope_type", ropes.get("type")) == "longrope":
        original = ropes.get("original_max_position_embeddings")
        return original or getattr(config, "original_max_position_embeddings", None)
    return getattr(config, "max_position_embeddings", None)


def cannot_load(
    name: str, reason: object, *, field: str = "model.path", remedy: str = "check it"
) -> ValueError:
    first = next(iter(str(reason).strip().splitlines()), "")
    plain = isinstance(reason, OSError | ValueError | SafetensorError)
    if isinstance(reason, Exception) and not plain:  # KeyError: 'added_tokens'
        first = f"{type(reason).__name__}: {first}".removesuffix(": ")
    kind = "tokenizer" if field.endswith("tokenizer") else "model"
    if "trust_remote_code" in str(reason):
        first = "it needs Python code of its own, which is not run unless you allow it"
        remedy = (
            "read the code, then add --model.trust-remote-code (eval, generate and export:"
            " --trust-remote-code)"
        )
    return ValueError(
        f"{field} must be a folder with a Hugging Face {kind} or a hub name, but {name!r} could not"
        f" be loaded ({first or type(reason).__name__}): {remedy}"
    )


def read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def has_own_code(part: Any) -> bool:
    """Return whether a configuration, model or tokenizer is of a class in a model's folder."""
    return type(part).__module__.startswith("transformers_modules.")


def copy_code(folder: Path | str, *parts: Any) -> None:
    from transformers.dynamic_module_utils import custom_object_save

    for part in filter(has_own_code, parts):
        custom_object_save(part, folder)


def base_of(folder: Path) -> str | None:
    try:
        base = json.loads((folder / CONFIG).read_bytes())["base_model_name_or_path"]
        if not isinstance(base, str | None):
            raise TypeError(f"base_model_name_or_path is {base!r}")
        return base
    except KeyError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{folder / CONFIG} must be a JSON object as PEFT writes it, but can't be read as one"
            f" ({error}): write it again"
        ) from error


def is_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        return False


@contextmanager
def loading(
    name: str, *, field: str = "model.path", files: tuple[str, ...] = ("config.json",)
) -> Iterator[None]:
    """Load the model or tokenizer `name` in the block, with one error for all that goes wrong.

    files: JSON objects, of which the hub's cache has one if it has the model.
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
    except UnpicklingError as error:  # whose text advises to run it
        raise cannot_load(
            name, DAMAGED_PICKLE, field=field, remedy="ask its author for model.safetensors"
        ) from error
    except Exception as error:  # transformers refuses broken files with any
        if any(Path(name).glob(PIECES)):
            raise cannot_load(
                name,
                "it is a checkpoint of several ranks, each of which wrote pieces of weights",
                field=field,
                remedy="nemorl export writes a model of them"
                " (--run RUN --step STEP --output FOLDER)",
            ) from error
        for file in map(Path(name).joinpath, files):
            if file.is_file() and not is_object(file):
                raise cannot_load(name, f"{file.name} is not a JSON object", field=field) from error
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
        raise cannot_load(
            name,
            f"there is no such folder, the hub's cache does not have it, and {constants.ENDPOINT}"
            f" can't be reached: {str(error) or type(error).__name__}",
            field=field,
            remedy="check it, or set HF_HUB_OFFLINE=1 with the cache (HF_HOME) of another machine",
        ) from error
    except (httpx.HTTPError, OSError, ValueError):
        pass


def model_folder(name: str, *, field: str = "model.path") -> str:
    """Return the model that `name` means: the export of a run's directory, else the name itself."""
    path = Path(name)
    if not name:
        return name
    if not path.exists():
        in_a_folder = len(path.parts) > 1 and path.parent.is_dir()
        if name.count("/") != 1 or name.startswith((".", "/", "~")) or in_a_folder:
            raise cannot_load(
                name, f"there is no folder {name}", field=field, remedy="check the path"
            )
        require_hub(name, "config.json", CONFIG, field=field)
    else:
        _refuse_others(name, path)
    if (path / "config.json").is_file() and not is_object(path / "config.json"):
        raise cannot_load(name, "config.json is not a JSON object")
    has_model = any((path / file).exists() for file in ("config.json", CONFIG))
    if has_model and not (path / "config.yaml").exists():
        return name
    if not (path / "checkpoints").is_dir() and not (path / "metrics.jsonl").exists():
        return name
    if not any((path / "hf" / file).exists() for file in ("config.json", CONFIG)):
        raise ValueError(
            f"model must have been exported, but the run {name} has no hf/ yet: nemorl export --run"
            f" {name} --output {path / 'hf'}"
        )
    return str(path / "hf")


def _refuse_others(name: str, path: Path) -> None:
    if (path / CONFIG).is_file():
        base = base_of(path)
        try:
            model_folder(base or "")
        except ValueError as error:
            raise cannot_load(
                name,
                f"it is an adapter of {base}, which can't be found",
                remedy=f"correct base_model_name_or_path in {path / CONFIG}",
            ) from error
        return
    if path.is_dir() and any((path / file).exists() for file in ("config.json", "config.yaml")):
        return
    runs = [each for each in path.parents if (each / "config.yaml").exists()]
    if runs and (runs[0] / "checkpoints").is_dir():
        raise cannot_load(
            name,
            f"it is a part of the run {runs[0]}",
            remedy=f"name {runs[0]}, or write another of its checkpoints by nemorl export"
            f" {runs[0]} --step STEP --output FOLDER",
        )
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        raise cannot_load(
            name,
            "it is a model in the GGUF format",
            remedy="name the folder of safetensors that it was made from",
        )
    if path.is_file() and path.suffix != ".json":
        raise cannot_load(
            name,
            "it is a single file",
            remedy="name the folder with config.json, the weights and the tokenizer",
        )
    if path.is_dir() and not any(path.iterdir()):
        raise cannot_load(name, "it is an empty folder")


def weights_folder(name: str, *, trust_remote_code: bool = False) -> Path | None:
    """Return the folder with a model's safetensors; None for adapters and other formats."""
    with loading(name):
        folder = Path(name)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            patterns = ["model*.safetensors", "*.json", *["*.py"] * trust_remote_code]
            folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns="*/*"))
        return None if (folder / CONFIG).is_file() or not weight_files(folder) else folder


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors that `transformers` reads: model.safetensors, or the index's files."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / INDEX).is_file():
        return []
    try:
        names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise cannot_load(str(folder), f"{INDEX} can't be read: {error!r}") from error
    return [folder / name for name in sorted(names)]


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a folder or hub name. Raises ValueError where none loads."""
    from transformers import AutoTokenizer

    files = ("tokenizer_config.json", "tokenizer.json", "config.json")
    if (Path(name) / CONFIG).is_file() and not any((Path(name) / file).is_file() for file in files):
        raise cannot_load(
            name,
            "it is an adapter without a tokenizer",
            field="model.tokenizer",
            remedy=f"add --model.tokenizer {base_of(Path(name))}, the base model's",
        )
    with loading(name, field="model.tokenizer", files=files):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        # Without its file, transformers makes one that knows its special tokens alone.
        lacks = Path(name).is_dir() and not (Path(name) / "tokenizer.json").is_file()
        ids = tokenizer("a 0" if lacks else "", add_special_tokens=False)["input_ids"]
        if lacks and not ids:
            raise ValueError("it has no tokenizer.json, and no tokens for text")
    return tokenizer


PROBE = "The café's 12 + 34 = 46; naïve “quotes”, 日本語 Привет\n\tdef f(x): return x**2 != [1]"
"""A text that different tokenizers split differently."""


def reader(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Return what makes a text's token ids."""
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def require_same_tokens(
    field: str, tokenizer: Any, read: Callable[[str], Sequence[int]], texts: Sequence[str] = ()
) -> None:
    """Raise ValueError unless another model reads texts as a tokenizer does."""
    for text in (PROBE, *texts):
        own, theirs = reader(tokenizer)(text), [*read(text)]
        require(
            own == theirs,
            field,
            f"must have the policy's tokenizer, which reads {text!r} as {own}",
            theirs,
            "take a model of the same family",
        )


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Raise ValueError if a token, other than one that only pads, has no embedding in the model."""
    rows = model.get_input_embeddings().weight.shape[0]
    names = ("eos_token_id", "bos_token_id", "unk_token_id")
    unused = {tokenizer.pad_token_id} - {getattr(tokenizer, name, None) for name in names}
    highest = max(set(tokenizer.get_vocab().values()) - unused, default=0)
    if highest >= rows:
        raise ValueError(
            "model.tokenizer must be made for the model, which has embeddings for the tokens 0 …"
            f" {rows - 1}, but one of its tokens is {highest}: name the model's own"
            " (--model.tokenizer)"
        )
