"""A Hugging Face causal language model: how it is loaded, and its parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemorl.models.adapters import base_of, has_adapters, merge_adapters, merge_folder
from nemorl.models.hub import CONFIG, INDEX, check_supported, loading, read_config


def load_causal_lm(
    path: str,
    *,
    from_scratch: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    field: str = "model.path",
    experts: bool = False,
) -> nn.Module:
    """Load a causal language model in float32 on the CPU.

    path: a folder or a hub name; of an adapter folder its base model with the adapters merged.
    from_scratch: random weights from `seed`, for the configuration alone.
    trust_remote_code: run Python code that comes with the model.
    field: the setting that an error names.
    experts: a mixture of experts may be loaded.

    Raises: ValueError where the model can't be loaded or is not supported (`check_supported`).
    """
    from transformers import AutoModelForCausalLM

    folder = Path(path)
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if path and (folder / CONFIG).is_file():
        base = base_of(folder)
        if not base:
            raise ValueError(
                f"the adapters in {path} must name their base model, but they don't: nemorl export"
                " --lora merged --base-model …"
            )
        model = load_causal_lm(base, **trust, field=f"the base model of the adapters in {path}")
        return merge_folder(model, folder)
    with loading(path, field=field, files=("config.json", INDEX, "generation_config.json")):
        if from_scratch:
            torch.manual_seed(seed)
            config = read_config(path, **trust)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **trust)
        else:
            with _progress_bar(folder):
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    path,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # for an error that says which
                    **trust,
                )
            model, report = loaded
            for key, found, wanted in sorted(report.get("mismatched_keys", ())):
                raise ValueError(
                    f"its {key} is {list(found)}, where config.json wants {list(wanted)}"
                )
            # transformers would fill them with random numbers, and only warn.
            if missing := sorted(report["missing_keys"]):
                names = ", ".join(missing[:3])
                raise ValueError(f"its weights lack {names}, {len(missing)} in all")
    check_supported(model.config, experts=experts)
    return merge_adapters(model) if has_adapters(model) else model


def on_meta(source: Any, *, trust_remote_code: bool = False, experts: bool = False) -> Any:
    """Build a model in float32 on the meta device, without memory.

    source: a Hugging Face configuration, or the folder or hub name of a model.
    experts: it may be a mixture of experts.
    """
    from transformers import AutoModelForCausalLM

    trust = {"trust_remote_code": trust_remote_code}
    if isinstance(source, str):
        with loading(source):
            source = read_config(source, **trust)
    check_supported(source, experts=experts)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(source, dtype=torch.float32, **trust)


@contextmanager
def _progress_bar(folder: Path) -> Iterator[None]:
    """Hide transformers' progress bar for a local model that loads within seconds."""
    from transformers.utils import logging

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    quiet = 0 < size < 1e9 and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            logging.enable_progress_bar()


def usable_device(name: str | None) -> torch.device:
    """Return the device of this name, or the first GPU, else the CPU, for None.

    Raises: ValueError where torch can't use it.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(
            f"device must be one that torch can use here, but it is {name!r} ({reason}): omit it"
            " for the best there is"
        ) from error
    return device


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the part that turns token ids into hidden states."""
    return model.get_decoder()  # type: ignore[operator]


def head_weight(model: nn.Module) -> torch.Tensor:
    """Return the output layer's weight, `[vocab, hidden]`."""
    return model.get_output_embeddings().weight  # type: ignore[operator]


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a response: the tokenizer's and the generation configuration's."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    own = getattr(tokenizer, "eos_token_id", None)
    return {own, *(ends if isinstance(ends, list) else [ends])} - {None}
