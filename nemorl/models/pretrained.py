"""Models and tokenizers as Hugging Face folders: found and loaded."""

from pathlib import Path
from typing import Any

from torch import nn

from nemorl.models.adapters import CONFIG
from nemorl.models.causal_lm import load_causal_lm, usable_device
from nemorl.models.hub import require_hub


def model_folder(name: str) -> str:
    """The model that `name` means: for a run's directory its export, else the name itself (a folder
    or a hub name).

    Raises ValueError for a run that has not been exported, and for a hub name that is neither in
    the cache nor to be fetched.
    """
    path = Path(name)
    if not name:
        return name
    in_a_folder = len(path.parts) > 1 and path.parent.is_dir()
    if not path.exists() and (
        name.count("/") != 1 or name.startswith((".", "/", "~")) or in_a_folder
    ):  # a hub name is OWNER/NAME
        raise ValueError(
            f"the model must be a folder or a hub name (OWNER/NAME), but there is no folder {name}:"
            " check the path"
        )
    if not path.exists():
        require_hub(name, "config.json", CONFIG, field="the model")
    if (
        any((path / file).exists() for file in ("config.json", CONFIG))
        and not (path / "config.yaml").exists()
    ):  # whatever else is in there
        return name
    if not (path / "checkpoints").is_dir() and not (path / "metrics.jsonl").exists():
        return name
    if not any((path / "hf" / file).exists() for file in ("config.json", CONFIG)):
        raise ValueError(
            f"model must have been exported, but the run {name} has no hf/ yet: nemorl export --run"
            f" {name} --output {path / 'hf'}"
        )
    return str(path / "hf")


def load_model(name: str, *, device: str | None = None) -> nn.Module:
    """For generating: on the given device, or on the first GPU if there is one."""
    return load_causal_lm(name, device=usable_device(device))


def load_tokenizer(name: str) -> Any:
    """Raises ValueError where there is no tokenizer."""
    from transformers import AutoTokenizer

    if not name:
        raise ValueError(
            "model.path must name a model folder or a hub model, but it is empty: give --model.path"
            " PATH"
        )
    if not Path(name).exists():
        require_hub(
            name, "tokenizer_config.json", "tokenizer.json", "config.json", field="the tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            "the tokenizer must be in a model folder or on the hub, but none could be loaded from"
            f" {name!r} ({reason}): give --model.tokenizer"
        ) from error


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Raise ValueError if the tokenizer has a token that the model has no embedding for (one that
    only pads doesn't matter).
    """
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    highest = max(
        (index for index in tokenizer.get_vocab().values() if index != tokenizer.pad_token_id),
        default=0,
    )
    if highest >= rows:
        raise ValueError(
            "model.tokenizer must be made for the model, which has embeddings for the tokens 0 …"
            f" {rows - 1}, but one of its tokens is {highest}: name the model's own"
            " (--model.tokenizer)"
        )
