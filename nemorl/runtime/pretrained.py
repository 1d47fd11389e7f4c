"""Models and tokenizers as Hugging Face folders: found, loaded, written."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.rollout.causal_lm import load_causal_lm
from nemorl.runtime.callbacks import Callback
from nemorl.runtime.run_directory import RunDirectory
from nemorl.runtime.state import Run


def model_folder(name: str) -> str:
    """The model that `name` means: for a run's directory its export, else the name itself (a folder or a hub name).

    Raises ValueError for a run that has not been exported.
    """
    path = Path(name)
    if not (path / "checkpoints").is_dir() and not (path / "metrics.jsonl").exists():
        return name
    if not (path / "hf" / "config.json").exists():
        raise ValueError(f"model must have been exported, but the run {name} has no hf/ yet: nemorl export --run {name} --output {path / 'hf'}")
    return str(path / "hf")


def load_model(name: str, *, device: str | None = None) -> nn.Module:
    """For generating: on the given device, or on the first GPU if there is one."""
    return load_causal_lm(name, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_tokenizer(name: str) -> Any:
    """Raises ValueError where there is no tokenizer."""
    from transformers import AutoTokenizer

    if not name:
        raise ValueError("model.path must name a model folder or a hub model, but it is empty: give --model.path PATH")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the tokenizer must be in a model folder or on the hub, but none could be loaded from {name!r} ({reason}): give --model.tokenizer"
        ) from error


def read_template(template: str | None) -> str | None:
    """A chat template as it stands, or from the file that is named (a template has braces, a path hasn't)."""
    if template is None or "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"model.chat_template must be a Jinja template or a file with one, but {template!r} can't be read ({error.strerror})"
        ) from error


def write_pretrained(directory: Path, weights: Iterable[tuple[str, Tensor]], model_config: Any, tokenizer: Any) -> Path:
    """A folder that `transformers`, vLLM and others load: safetensors shards of at most 5 GB, configuration, tokenizer.

    It is written aside and renamed, so that nobody finds half of it.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import GenerationConfig

    aside = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_torch_state_dict(dict(weights), aside)
    model_config.save_pretrained(aside)
    if tokenizer is not None:
        tokenizer.save_pretrained(aside)
        GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(aside)
    shutil.rmtree(directory, ignore_errors=True)
    aside.rename(directory)
    return directory


class ExportCallback(Callback):
    """The trained model in the run's hf/ folder when the run ends."""

    def __init__(self, directory: RunDirectory, model_config: Any) -> None:
        self.directory, self.model_config = directory, model_config

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        write_pretrained(self.directory.hf, trainer.trainer.export_weights(), self.model_config, trainer.tokenizer)
