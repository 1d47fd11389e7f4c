"""Trained models as folders that transformers, vLLM and PEFT load."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nemorl.checks import require
from nemorl.models.adapters import CONFIG, WEIGHTS, base_of, merge_folder, merged_tensors
from nemorl.models.causal_lm import load_causal_lm
from nemorl.models.tensor_files import TensorFiles, write_model_files
from nemorl.parallel.dtensor.lora import check_base, fingerprint
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.state import Run

EXPORT = "nemorl_export.json"
"""Marks a folder as an export of ours, which a later one may replace."""
WRITTEN = (
    EXPORT, "config.json", "generation_config.json", "model", "adapter_", "tokenizer",
    "special_tokens", "added_tokens", "chat_template", "vocab", "merges", "spiece", "README.md",
)  # fmt: skip
"""How the names of files in an export begin."""


def write_pretrained(
    directory: Path, weights: Iterable[tuple[str, Tensor]], model: nn.Module, tokenizer: Any
) -> Path:
    """Write a folder that `transformers` loads: safetensors of at most 5 GB each, configuration,
    tokenizer. No more than one file of weights is in memory at a time.

    Raises ValueError if something other than an earlier export is in its place.
    """
    settings = (model.config, getattr(model, "generation_config", None))
    return _write(directory, weights, [each for each in settings if each is not None], tokenizer)


def _write(
    directory: Path, weights: Iterable[tuple[str, Tensor]], settings: Iterable[Any], tokenizer: Any
) -> Path:
    with replacing(directory) as aside:
        write_model_files(aside, weights)
        for each in (*settings, tokenizer):
            each.save_pretrained(aside)
    return directory.resolve()


def write_checkpoint(
    directory: Path, trainer: Path, tokenizer: Any, *, lora: str = "merged", base: str | None = None
) -> Path:
    """Write the model in a checkpoint's folder `trainer` as a folder that others load.

    Args:
        lora: of a run with LoRA: "merged" adds the adapters to their base model, "adapter" writes
            them alone.
        base: where that base model is now.

    Raises:
        ValueError: the base model is unknown or has changed, or the run had no LoRA but `lora` or
            `base` is given.
    """
    if (trainer / CONFIG).exists():
        write = _write_adapter if lora == "adapter" else _write_merged
        return write(directory, trainer, tokenizer, base or base_of(trainer))
    whole = "for a run that trained the whole model"
    require(lora == "merged", "lora", f"must be merged {whole}", lora, "omit it")
    require(base is None, "base_model", f"must be omitted {whole}", base, "omit it")
    return _copy_checkpoint(directory, trainer, tokenizer)


def _write_adapter(directory: Path, trainer: Path, tokenizer: Any, base: str | None) -> Path:
    with replacing(directory) as aside:
        shutil.copy(trainer / WEIGHTS, aside)
        values = json.loads((trainer / CONFIG).read_text(encoding="utf-8"))
        values["base_model_name_or_path"] = base
        (aside / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        tokenizer.save_pretrained(aside)
    return directory.resolve()


def _write_merged(directory: Path, trainer: Path, tokenizer: Any, base: str | None) -> Path:
    must = "must name the model that the adapters belong to"
    remedy = (
        "the run was given its model in memory: name the folder or hub name that it came from"
        " (--base-model)"
    )
    require(bool(base), "base_model", must, base, remedy)
    try:
        model = load_causal_lm(str(base))
    except ValueError as error:
        raise ValueError(
            f"base_model {must}, but {error}: say where it is now (--base-model)"
        ) from error
    state = json.loads((trainer / "backend.json").read_text(encoding="utf-8"))
    check_base(state["base"], fingerprint(model), trainer)
    model = merge_folder(model, trainer)
    return write_pretrained(directory, merged_tensors(model), model, tokenizer)


def _copy_checkpoint(directory: Path, trainer: Path, tokenizer: Any) -> Path:
    """Write the weights of a run without LoRA tensor by tensor, from any number of files."""
    from transformers import AutoConfig, GenerationConfig

    files = sorted(trainer.glob("model*.safetensors"))
    if not files or not (trainer / "config.json").exists():
        raise ValueError(
            f"the checkpoint must hold config.json and model*.safetensors, but {trainer} does not:"
            " its training backend has a form of its own, which that must export itself"
        )
    settings: list[Any] = [AutoConfig.from_pretrained(trainer)]
    if (trainer / "generation_config.json").exists():
        settings.append(GenerationConfig.from_pretrained(trainer))
    stored = TensorFiles(files)
    weights = ((name, stored.read(name)) for name in sorted(stored.shapes))
    return _write(directory, weights, settings, tokenizer)


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `directory` at the end of the block, so that
    half an export is never found there.
    """
    directory = directory.resolve()
    require_replaceable(directory)
    aside, old = (directory.with_name(f".{directory.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    (aside / EXPORT).write_text(json.dumps({"written_by": f"nemorl {version('nemorl')}"}) + "\n")
    yield aside
    if directory.exists():
        directory.rename(old)
    aside.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def require_replaceable(directory: Path) -> None:
    """Raise ValueError unless `directory` is missing, empty or an unchanged earlier export."""
    if not directory.exists():
        return
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else {directory.name}
    foreign = {name for name in names if not name.startswith(WRITTEN)} if EXPORT in names else names
    if foreign:
        found = ", ".join(sorted(foreign)[:3])
        raise ValueError(
            f"output must be a new folder or an earlier export, but {directory} holds other things"
            f" ({found}): name another"
        )


class ExportCallback(Callback):
    """Writes the trained model, or with `adapter` its LoRA adapters alone, to the run's hf/ folder
    when the run ends.
    """

    def __init__(self, directory: RunDirectory, model: nn.Module, *, adapter: bool = False) -> None:
        self.directory, self.model, self.adapter = directory, model, adapter

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        if self.adapter:  # the checkpoint at the run's end has them
            saved = self.directory.checkpoints / f"step_{trainer.state.step}" / "trainer"
            write_checkpoint(self.directory.hf, saved, trainer.tokenizer, lora="adapter")
        else:
            weights = trainer.trainer.export_weights()
            write_pretrained(self.directory.hf, weights, self.model, trainer.tokenizer)
