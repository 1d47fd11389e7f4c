"""Trained models as folders that transformers, vLLM and PEFT load."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nemorl.checks import require
from nemorl.models.adapters import WEIGHTS, merge_folder, merged_tensors
from nemorl.models.causal_lm import load_causal_lm
from nemorl.models.hub import CONFIG, base_of, copy_code
from nemorl.models.tensor_files import TensorFiles, write_model_files
from nemorl.parallel.checkpoint import Saved, saved_weights
from nemorl.parallel.fingerprint import ALONE, fingerprint
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import version_of
from nemorl.runtime.store.files import writing

EXPORT = "nemorl_export.json"
"""Lists an export's files, which the next one may replace."""


def write_pretrained(
    directory: Path, weights: Iterable[tuple[str, Tensor]], model: nn.Module, tokenizer: Any
) -> None:
    """Write a folder that `transformers` loads, one file of weights at a time."""
    with replacing(directory) as aside:
        write_model_files(aside, weights)
        copy_code(aside, model)
        parts: Any = (model.config, getattr(model, "generation_config", None), tokenizer)
        for part in parts:
            if part is not None:
                part.save_pretrained(aside)
        _set_padding(aside, tokenizer)


def write_checkpoint(
    directory: Path,
    saved: Path,
    tokenizer: Any,
    *,
    lora: str = "merged",
    base: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write a backend's model from a checkpoint as a folder that others load.

    saved: the backend's folder, such as step_5/policy.
    lora: "merged" adds adapters to their base model, now at `base`; "adapter" writes them alone.
    Raises: ValueError where the base model is unknown or has changed, or the run had none.
    """
    if not (saved / CONFIG).exists():
        whole = "for a run that trained the whole model"
        require(lora == "merged", "lora", f"must be merged {whole}", lora, "omit it")
        require(base is None, "base_model", f"must be omitted {whole}", base, "omit it")
        checksums = checkpoint.verify(saved.parent, largest=checkpoint.SMALL)
        files = saved_weights(saved)
        if not files or not (saved / "config.json").exists():
            raise ValueError(
                f"the checkpoint must hold config.json and safetensors of weights, but {saved} does"
                " not: export it with its training backend"
            )
        stored = TensorFiles(files, {file.name: checksums[file] for file in files})
        with replacing(directory) as aside:
            write_model_files(aside, ((name, stored.read(name)) for name in sorted(stored.shapes)))
            for file in saved.glob("*config.json"):
                shutil.copy(file, aside)
            tokenizer.save_pretrained(aside)
            _set_padding(aside, tokenizer)
        return
    checkpoint.verify(saved.parent)
    base = base or base_of(saved)
    if lora == "merged":
        must = "must name the model that the adapters belong to"
        remedy = "the run was given its model in memory: name where it came from (--base-model)"
        require(bool(base), "base_model", must, base, remedy)
        try:
            model = load_causal_lm(str(base), trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise ValueError(f"base_model {must}, but {error}: name it (--base-model)") from error
        Saved(saved, ALONE).require_base(fingerprint(model))
        model = merge_folder(model, saved)
        write_pretrained(directory, merged_tensors(model), model, tokenizer)
        return
    with replacing(directory) as aside:
        shutil.copy(saved / WEIGHTS, aside)
        values = json.loads((saved / CONFIG).read_text(encoding="utf-8"))
        values["base_model_name_or_path"] = base
        (aside / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        tokenizer.save_pretrained(aside)


def _set_padding(folder: Path, tokenizer: Any) -> None:
    """Have transformers score the last token of a sequence classifier's unpadded input."""
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    if "ForSequenceClassification" in str(values.get("architectures")):
        values["pad_token_id"] = tokenizer.pad_token_id
        file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yield a folder that replaces `directory` after the block."""
    directory = directory.resolve()
    if directory.exists():
        within = directory.iterdir() if directory.is_dir() else [directory]
        foreign = {path.name for path in within}
        with suppress(OSError, ValueError, TypeError, KeyError):  # no export is there
            foreign -= {EXPORT, *json.loads((directory / EXPORT).read_bytes())["files"]}
        if foreign:
            found = ", ".join(sorted(foreign)[:3])
            raise ValueError(
                f"output must be a new folder or an earlier export, but {directory} holds other"
                f" things ({found}): name another"
            )
    aside, old = (directory.with_name(f".{directory.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with writing("the model", directory):
            aside.mkdir(parents=True)
            yield aside
            files = sorted(path.name for path in aside.iterdir())
            record = {"written_by": f"nemorl {version_of('nemorl')}", "files": files}
            (aside / EXPORT).write_text(json.dumps(record) + "\n")
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if directory.exists():
        directory.rename(old)
    aside.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
