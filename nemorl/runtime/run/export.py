"""Trained models as folders that transformers and others load."""

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


def write_pretrained(
    directory: Path, weights: Iterable[tuple[str, Tensor]], model: nn.Module, tokenizer: Any
) -> Path:
    """A folder that `transformers`, vLLM and others load: safetensors shards of at most 5 GB,
    configuration, tokenizer.

    The weights are written as they come, so that no more than one shard is in memory at a time.

    Raises ValueError if something else than an earlier export is in its place.
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
    """What the training backend wrote into a checkpoint's folder `trainer`, as a folder for others.

    Of a run with LoRA: `lora` = "merged" adds the adapters to their base model, "adapter" gives
    them alone. `base` says where that model is now. Raises ValueError where it is not known or not
    the same any more, and where a run without LoRA is asked for either.
    """
    if not (trainer / CONFIG).exists():
        require(
            lora == "merged",
            "lora",
            "must be merged for a run that trained the whole model",
            lora,
            "leave it out",
        )
        require(
            base is None,
            "base_model",
            "is for runs with LoRA only, and this one trained the whole model",
            base,
            "leave it out",
        )
        return _copy_checkpoint(directory, trainer, tokenizer)
    base = base or base_of(trainer)
    if lora == "adapter":
        with replacing(directory) as aside:
            shutil.copy(trainer / WEIGHTS, aside)
            values = json.loads((trainer / CONFIG).read_text(encoding="utf-8")) | {
                "base_model_name_or_path": base
            }
            (aside / CONFIG).write_text(
                json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
            tokenizer.save_pretrained(aside)
        return directory.resolve()
    remedy = (
        "the run was handed its model in memory: name the folder or hub name that it came from"
        " (--base-model)"
    )
    require(
        bool(base), "base_model", "must name the model that the adapters belong to", base, remedy
    )
    try:
        model = load_causal_lm(str(base))
    except ValueError as error:
        raise ValueError(
            f"base_model must name the model that the adapters belong to, but {error}: say where it"
            " is now (--base-model)"
        ) from error
    check_base(
        json.loads((trainer / "backend.json").read_text(encoding="utf-8"))["base"],
        fingerprint(model),
        trainer,
    )
    model = merge_folder(model, trainer)
    return write_pretrained(directory, merged_tensors(model), model, tokenizer)


def _copy_checkpoint(directory: Path, trainer: Path, tokenizer: Any) -> Path:
    """The weights of a run without LoRA, tensor by tensor, from however many ranks' files.

    Raises ValueError where there are none.
    """
    from transformers import AutoConfig, GenerationConfig

    files = sorted(trainer.glob("model*.safetensors"))
    if not files or not (trainer / "config.json").exists():
        remedy = "its training backend has a form of its own, which that must export itself"
        raise ValueError(
            f"the checkpoint must hold config.json and model*.safetensors, but {trainer} does not:"
            f" {remedy}"
        )
    settings: list[Any] = [AutoConfig.from_pretrained(trainer)]
    if (trainer / "generation_config.json").exists():
        settings.append(GenerationConfig.from_pretrained(trainer))
    with TensorFiles(files) as stored:
        return _write(
            directory,
            ((name, stored.read(name)) for name in sorted(stored.shapes)),
            settings,
            tokenizer,
        )


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `directory` when all has been written into it, so
    that nobody finds half of it.
    """
    directory = directory.resolve()
    require_replaceable(directory)
    aside, old = (directory.with_name(f".{directory.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    (aside / EXPORT).write_text(
        json.dumps({"written_by": f"nemorl {version('nemorl')}"}) + "\n", encoding="utf-8"
    )
    yield aside
    if directory.exists():
        directory.rename(old)
    aside.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


EXPORT = "nemorl_export.json"
"""Marks a folder as an export of ours, which a later one may replace: never a model that somebody
put there.
"""
WRITTEN = (EXPORT, "config.json", "generation_config.json", "model", "adapter_", "tokenizer", "special_tokens", "added_tokens", "chat_template",
           "vocab", "merges", "spiece", "README.md")  # fmt: skip
"""How the names of the files in an export begin."""


def require_replaceable(directory: Path) -> None:
    """Raise a ValueError unless there is nothing at this place, an empty folder, or an earlier
    export to which nothing was added.
    """
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
    """The trained model in the run's hf/ folder when the run ends; with `adapter` its LoRA adapters
    alone.
    """

    def __init__(self, directory: RunDirectory, model: nn.Module, *, adapter: bool = False) -> None:
        self.directory, self.model, self.adapter = directory, model, adapter

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        if self.adapter:  # the checkpoint of the run's end has them, wherever the model is
            saved = self.directory.checkpoints / f"step_{trainer.state.step}" / "trainer"
            write_checkpoint(self.directory.hf, saved, trainer.tokenizer, lora="adapter")
            return
        write_pretrained(
            self.directory.hf, trainer.trainer.export_weights(), self.model, trainer.tokenizer
        )
