"""Models and tokenizers as Hugging Face folders: where they are, and what their files are.
Free of torch.
"""

import json
from pathlib import Path
from typing import Any

from nemorl.models.hub import CONFIG, INDEX, base_of, cannot_load, is_object, loading, require_hub


def model_folder(name: str) -> str:
    """Return the model that `name` means: the export of a run's directory, else the name itself."""
    path = Path(name)
    if not name:
        return name
    if not path.exists():
        in_a_folder = len(path.parts) > 1 and path.parent.is_dir()
        if name.count("/") != 1 or name.startswith((".", "/", "~")) or in_a_folder:
            raise cannot_load(name, f"there is no folder {name}", remedy="check the path")
        require_hub(name, "config.json", CONFIG)
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
    """Raise ValueError for a file, for a part of a run, and for an adapter without its base."""
    if (path / CONFIG).is_file():
        base = base_of(path)
        try:
            model_folder(base or "")
        except ValueError as error:
            remedy = f"correct base_model_name_or_path in {path / CONFIG}"
            reason = f"it is an adapter of {base}, which can't be found"
            raise cannot_load(name, reason, remedy=remedy) from error
        return
    if path.is_dir() and any((path / file).exists() for file in ("config.json", "config.yaml")):
        return
    runs = [each for each in path.parents if (each / "config.yaml").exists()]
    if runs and (runs[0] / "checkpoints").is_dir():
        other = f"nemorl export {runs[0]} --step STEP --output FOLDER"
        remedy = f"name {runs[0]}, or write another of its checkpoints by {other}"
        raise cannot_load(name, f"it is a part of the run {runs[0]}", remedy=remedy)
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        remedy = "name the folder of safetensors that it was made from"
        raise cannot_load(name, "it is a model in the GGUF format", remedy=remedy)
    if path.is_file() and path.suffix != ".json":
        remedy = "name the folder with config.json, the weights and the tokenizer"
        raise cannot_load(name, "it is a single file", remedy=remedy)
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
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise cannot_load(str(folder), f"{INDEX} can't be read: {error!r}") from error
    return [folder / name for name in sorted(names)]


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    files = ("tokenizer_config.json", "tokenizer.json", "config.json")
    if (Path(name) / CONFIG).is_file() and not any((Path(name) / file).is_file() for file in files):
        remedy = f"add --model.tokenizer {base_of(Path(name))}, the base model's"
        reason = "it is an adapter without a tokenizer"
        raise cannot_load(name, reason, field="model.tokenizer", remedy=remedy)
    with loading(name, field="model.tokenizer", files=files):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        # Without its file, transformers makes one that knows its special tokens alone.
        lacks = Path(name).is_dir() and not (Path(name) / "tokenizer.json").is_file()
        ids = tokenizer("a 0" if lacks else "", add_special_tokens=False)["input_ids"]
        if lacks and not ids:
            raise ValueError("it has no tokenizer.json, and no tokens for text")
    return tokenizer


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
