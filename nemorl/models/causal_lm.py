"""A Hugging Face decoder with a head for tokens or for values: how it is loaded, and its parts."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.library import register_autocast
from torch.overrides import TorchFunctionMode

from nemorl.checks import require, warn
from nemorl.losses.logprobs import Logits
from nemorl.models.adapters import base_of, canonical, has_adapters, merge_adapters, merge_folder
from nemorl.models.hub import CONFIG, INDEX, check_supported, loading, read_config

Head = Literal["lm", "scalar"]
"""What a model has after its decoder: logits of the vocabulary, or one number per token."""
SCORE = ["score.weight"]
"""Names of a scalar head's parameters."""


def load_causal_lm(
    path: str,
    *,
    from_scratch: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    field: str = "model.path",
    head: Head = "lm",
) -> nn.Module:
    """Load a causal language model in float32 on the CPU.

    path: a folder or a hub name; of an adapter folder its base model with the adapters merged.
    from_scratch: random weights from `seed`, for the configuration alone.
    head: scalar is transformers' AutoModelForSequenceClassification with one label. If the folder
    has no scalar head, its weights are `fresh_head`'s.
    """
    folder = Path(path)
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if path and (folder / CONFIG).is_file():
        base = base_of(folder)
        if not base:
            raise ValueError(
                f"the adapters in {path} must name their base model, but they don't: nemorl export"
                " --lora merged --base-model …"
            )
        field = f"the base model of the adapters in {path}"
        model = load_causal_lm(base, seed=seed, **trust, field=field, head=head)
        return merge_folder(model, folder)
    with loading(path, field=field, files=("config.json", INDEX, "generation_config.json")):
        lacks_head = from_scratch
        if from_scratch:
            torch.manual_seed(seed)
            model = from_config(read_config(path, **trust), head, **trust)
        else:
            with _quiet(folder, head):
                loaded: Any = model_class(head).from_pretrained(
                    path,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # for an error that says which
                    **({"num_labels": 1} if head == "scalar" else {}),
                    **trust,
                )
            model, report = loaded
            lacks_head = set(SCORE) <= report["missing_keys"]
            for key, found, wanted in sorted(report.get("mismatched_keys", ())):
                raise ValueError(
                    f"its {key} is {list(found)}, where config.json wants {list(wanted)}"
                )
            refuse_other_head(report.get("unexpected_keys", ()), head)
            # transformers would fill them with random numbers, and only warn.
            warn_of_unused(report.get("unexpected_keys", ()))
            if missing := sorted(report["missing_keys"] - set(SCORE * lacks_head)):
                raise ValueError(
                    f"its weights lack {', '.join(missing[:3])}, {len(missing)} in all"
                )
    check_supported(model.config)
    if head == "scalar":
        model.config.architectures = [type(model).__name__]
        if lacks_head:
            model.load_state_dict(fresh_head(model.config, seed=seed), strict=False)
    return merge_adapters(model) if has_adapters(model) else model


def model_class(head: Head) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if head == "scalar" else AutoModelForCausalLM


def from_config(config: Any, head: Head = "lm", **trust: Any) -> Any:
    """Build a model in float32 with random weights from a Hugging Face configuration."""
    if head == "lm":
        return model_class(head).from_config(config, dtype=torch.float32, **trust)
    config = copy.deepcopy(config)
    config.num_labels = 1
    model = model_class(head).from_config(config, dtype=torch.float32, **trust)
    model.config.architectures = [type(model).__name__]
    return model


def fresh_head(config: Any, *, seed: int) -> Mapping[str, torch.Tensor]:
    """Return the initial parameters of a scalar head, normally distributed."""
    weight = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return dict.fromkeys(SCORE, getattr(config, "initializer_range", 0.02) * weight)


def on_meta(source: Any, *, trust_remote_code: bool = False, head: Head = "lm") -> Any:
    """Build a model in float32 on the meta device, from its configuration, folder or hub name."""
    trust = {"trust_remote_code": trust_remote_code}
    if isinstance(source, str):
        with loading(source):
            source = read_config(source, **trust)
    check_supported(source)
    with torch.device("meta"):
        return from_config(source, head, **trust)


Shapes = Mapping[str, tuple[int, ...]]


def check_files(model: Any, stored: Shapes, wanted: Shapes) -> set[str]:
    """Return the names in a model's files that it does not use, as transformers tells them.

    wanted: its tensors, as files have them.

    Raises: ValueError for missing tensors, other shapes, and another head's weights.
    """
    report = SimpleNamespace(
        missing_keys=set(),
        unexpected_keys={*stored} - {*wanted} - {canonical(name) for name in model.state_dict()},
    )
    model._adjust_missing_and_unexpected_keys(report)
    refuse_other_head(report.unexpected_keys, "scalar" if is_scalar(model) else "lm")
    wrong = []
    for name, shape in wanted.items():
        if (found := stored.get(name)) is None:
            wrong.append(f"{name} is missing")
        elif found != shape:
            wrong.append(f"{name} is {list(found)}, where {list(shape)} is expected")
    if wrong:
        raise ValueError(f"{'; '.join(wrong[:3])} ({len(wrong)} in all)")
    return report.unexpected_keys


def warn_of_unused(unused: Iterable[str]) -> None:
    if found := sorted(unused):
        warn(f"the model does not use {', '.join(found[:3])} of its files ({len(found)} in all)")


def refuse_other_head(unused: Iterable[str], head: Head) -> None:
    """Raise ValueError where weights that a model does not use are those of another head."""
    if found := sorted({*unused} & {"score.weight", "score.bias"}):
        kind = "a language model" if head == "lm" else "an AutoModelForSequenceClassification"
        raise ValueError(f"it is not {kind}: its weights have {', '.join(found)}")


@contextmanager
def _quiet(folder: Path, head: Head) -> Iterator[None]:
    """Show no progress bar for a small model in the block, and no warning of a fresh head."""
    from transformers.utils import logging

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    hides, before = 0 < size < 1e9 and logging.is_progress_bar_enabled(), logging.get_verbosity()
    if hides:
        logging.disable_progress_bar()
    if head == "scalar":
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if hides:
            logging.enable_progress_bar()


def usable_device(name: str | None) -> torch.device:
    """Return the device of this name, or the first GPU, else the CPU, for None."""
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


def decoder_of(model: Any) -> Any:
    """Return the part that turns token ids into hidden states."""
    found = model.get_decoder()
    return model.model if found is model else found  # as that of Llama 4 says


def layers_of(decoder: nn.Module) -> nn.ModuleList:
    """Return the layers of a decoder: its longest list of modules."""
    found = [part for part in decoder.children() if isinstance(part, nn.ModuleList)]
    require(
        bool(found),
        "the model's decoder",
        "must have a list of layers",
        type(decoder).__name__,
        "take another model",
    )
    return max(found, key=len)


def logits_of(config: Any) -> Logits:
    """Return how a Hugging Face configuration has the logits computed: Cohere multiplies, Granite
    divides, and Gemma caps.
    """
    return Logits(
        getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0),
        getattr(config, "final_logit_softcapping", None),
    )


def is_scalar(model: Any) -> bool:
    score = getattr(model, "score", None)
    return isinstance(score, nn.Linear) and score.out_features == 1


def head_of(model: Any) -> Any:
    """Return a model's last layer: its scalar head or its output layer."""
    return model.score if is_scalar(model) else model.get_output_embeddings()


def require_head(model: nn.Module, head: Head) -> None:
    """Raise ValueError unless a given model has this head; name its class in its configuration."""
    has_bias = getattr(getattr(model, "score", None), "bias", None) is not None
    scalar = "AutoModelForSequenceClassification with num_labels=1"
    require(
        is_scalar(model) == (head == "scalar") and not has_bias,
        "model",
        f"must have the head {head!r}",
        type(model).__name__,
        f"load it with transformers' {scalar if head == 'scalar' else 'AutoModelForCausalLM'}",
    )
    if head == "scalar":  # transformers does so where it saves a model
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]


def head_weight(model: nn.Module) -> torch.Tensor:
    return model.get_output_embeddings().weight  # type: ignore[operator]


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a response: the tokenizer's and the generation configuration's."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    own = getattr(tokenizer, "eos_token_id", None)
    return {own, *(ends if isinstance(ends, list) else [ends])} - {None}


for _device in ("cpu", "cuda"):
    # The product that fused experts are computed by: autocast leaves it in float32 (torch 2.13).
    register_autocast("aten::_grouped_mm", _device, torch.bfloat16)


def blocks_of(model: Any) -> list[Any]:
    """Return the blocks with `experts`, in the order of the layers; none of a dense model."""
    parts = decoder_of(model).modules()
    return [part for part in parts if isinstance(getattr(part, "experts", None), nn.Module)]


@contextmanager
def recorded(blocks: list[Any]) -> Iterator[list[Int[Tensor, "tokens topk"]]]:
    """Record the experts that compute each token in the block, one entry per block and pass."""
    found: list[Tensor] = []
    with ExitStack() as hooks:
        for block in blocks:
            hook = block.experts.register_forward_pre_hook(lambda _, args: found.append(args[1]))
            hooks.enter_context(hook)
        yield found


class Given(TorchFunctionMode):
    """Has a router choose given experts: it takes those in place of the largest scores, and weighs
    them as if it had chosen them itself. -1: the router's own choice.
    """

    def __init__(self, experts: Int[Tensor, "tokens topk"], total: int) -> None:
        super().__init__()
        self.experts, self.total, self.taken = experts.long(), total, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        largest = func in (torch.topk, Tensor.topk) and args[0].shape[-1] == self.total
        if not largest or found.indices.shape != self.experts.shape:
            return found  # of groups of experts, as in DeepSeek-V3
        self.taken = True
        experts = torch.where((self.experts < 0).any(-1, keepdim=True), found.indices, self.experts)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))


def choosing(router: nn.Module, experts: Int[Tensor, "tokens topk"], total: int) -> Any:
    """Return the router's `forward` with `Given` experts, of `total` ones."""
    forward = router.forward

    def choose(*args: Any, **options: Any) -> Any:
        with Given(experts, total) as given:
            found = forward(*args, **options)
        if not given.taken:
            raise RuntimeError(
                "the sampler's experts can't be replayed: the model's router does not choose by"
                " torch.topk over all experts; remove trainer.router_replay"
            )
        return found

    return choose
