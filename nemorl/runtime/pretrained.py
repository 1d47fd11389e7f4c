"""Models and tokenizers as Hugging Face folders: found, loaded, written."""

import copy
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nemorl.rollout.causal_lm import load_causal_lm, usable_device
from nemorl.runtime.callbacks import Callback
from nemorl.runtime.run_directory import RunDirectory
from nemorl.runtime.state import Run


def model_folder(name: str) -> str:
    """The model that `name` means: for a run's directory its export, else the name itself (a folder or a hub name).

    Raises ValueError for a run that has not been exported.
    """
    path = Path(name)
    if not path.exists() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):  # a hub name is OWNER/NAME
        raise ValueError(f"the model must be a folder or a hub name (OWNER/NAME), but there is no folder {name}: check the path")
    if not (path / "checkpoints").is_dir() and not (path / "metrics.jsonl").exists():
        return name
    if not (path / "hf" / "config.json").exists():
        raise ValueError(f"model must have been exported, but the run {name} has no hf/ yet: nemorl export --run {name} --output {path / 'hf'}")
    return str(path / "hf")


def load_model(name: str, *, device: str | None = None) -> nn.Module:
    """For generating: on the given device, or on the first GPU if there is one."""
    return load_causal_lm(name, device=usable_device(device))


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


def with_template(tokenizer: Any, template: str | None) -> Any:
    """The tokenizer with this chat template, or with the one in the file of this name (a template has braces, a path hasn't). None: its own."""
    if template is None:
        return tokenizer
    if "{" not in template:
        try:
            template = Path(template).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"model.chat_template must be a Jinja template or a file with one, but {template!r} can't be read ({error.strerror})"
            ) from error
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def write_pretrained(directory: Path, weights: Iterable[tuple[str, Tensor]], model: nn.Module, tokenizer: Any) -> Path:
    """A folder that `transformers`, vLLM and others load: safetensors shards of at most 5 GB, configuration, tokenizer.

    It is written aside and renamed, so that nobody finds half of it. Raises ValueError if something else than an earlier export is in its place.
    """
    from huggingface_hub import save_torch_state_dict

    directory = directory.resolve()
    require_replaceable(directory)
    aside, old = (directory.with_name(f".{directory.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    save_torch_state_dict(dict(weights), aside)
    model.config.save_pretrained(aside)  # type: ignore[union-attr, operator]
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(aside)  # type: ignore[union-attr, operator]
    tokenizer.save_pretrained(aside)
    if directory.exists():
        directory.rename(old)
    aside.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
    return directory


def require_replaceable(directory: Path) -> None:
    """Raise a ValueError unless there is nothing at this place, or an empty folder, or a model folder that is no run."""
    if not directory.exists():
        return
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else {directory.name}
    if names and ("config.json" not in names or names & {"checkpoints", "metrics.jsonl", "config.yaml"}):
        found = ", ".join(sorted(names)[:3])
        raise ValueError(f"output must be a new folder or an earlier export, but {directory} holds other things ({found}): name another")


class ExportCallback(Callback):
    """The trained model in the run's hf/ folder when the run ends."""

    def __init__(self, directory: RunDirectory, model: nn.Module) -> None:
        self.directory, self.model = directory, model

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        write_pretrained(self.directory.hf, trainer.trainer.export_weights(), self.model, trainer.tokenizer)
