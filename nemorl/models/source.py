"""A model as engines are made from it: `ModelSource`."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.models.adapters import live_tensors, merged_tensors
from nemorl.models.causal_lm import (
    check_files,
    load_causal_lm,
    on_meta,
    usable_device,
    warn_of_unused,
)
from nemorl.models.hub import (
    CONFIG,
    base_of,
    check_supported,
    has_own_code,
    loading,
    read_config,
    weight_files,
    weights_folder,
)
from nemorl.models.tensor_files import TensorFiles, shapes_of


class ModelSource:
    """A live model, or a folder or hub name, of which nothing but the configuration is read until
    `load` or `weights` is called.

    A live model on the meta device, as a trainer on ranks has it, has no weights: `load` makes an
    empty model, for an update of the weights to fill.

    device: where `load` puts a model that it makes. None: the best device there is.
    dtype: type of the empty model's parameters.
    trust_remote_code: run Python code that comes with a folder or hub name.
    """

    def __init__(
        self,
        model: Any,
        *,
        device: str | None = None,
        dtype: torch.dtype = torch.float32,
        trust_remote_code: bool = False,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        self._live: Any = None
        self._outline: Any = None
        self._name = str(model) if isinstance(model, str | Path) else ""
        if not self._name:
            self._outline = model
            if not (isinstance(model, nn.Module) and any(x.is_meta for x in model.parameters())):
                self._live = model
            self.config: Any = getattr(model, "config", None)
            self.generation_config: Any = getattr(model, "generation_config", None)
            return
        base = base_of(Path(model)) if (Path(model) / CONFIG).is_file() else None
        with loading(base or self._name):
            self.config = read_config(base or self._name, **self._trust)
        check_supported(self.config)
        self.generation_config = _generation_config(base or self._name, self.config)

    @classmethod
    def of(cls, model: Any) -> "ModelSource":
        return model if isinstance(model, ModelSource) else cls(model)

    @property
    def outline(self) -> Any:
        """The model without weights (meta device), or the live one: for class, names and shapes."""
        if self._outline is None:
            self._outline = on_meta(self.config, **self._trust)
        return self._outline

    def load(self) -> Any:
        """Return the live model. The first call makes it: from a folder in float32."""
        if self._live is None:
            device = usable_device(self._device)
            if self._name:
                self._live = load_causal_lm(self._name, **self._trust).to(device)
            else:
                self._live = empty_model(self.outline, device, self._dtype)
        return self._live

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor under its Hugging Face name, tied ones once, adapters merged.

        A folder's weights are read one by one from its safetensors, in their stored type, without
        building the model; only adapters and other formats are loaded first.
        """
        if self._live is None and not self._name:
            raise RuntimeError(
                "the model has no weights here, because they are on the trainer's ranks: call"
                " update_weights() first"
            )
        if self._live is not None:
            yield from merged_tensors(self._live)
            return
        folder = weights_folder(self._name, **self._trust)
        if folder is None:
            yield from merged_tensors(load_causal_lm(self._name, **self._trust))
            return
        with loading(str(folder)):
            stored, tensors = TensorFiles(weight_files(folder)), live_tensors(self.outline)
            if not tensors.keys() <= stored.shapes.keys():  # transformers may know older names
                yield from merged_tensors(load_causal_lm(self._name, **self._trust))
                return
            warn_of_unused(check_files(self.outline, stored.shapes, shapes_of(tensors, {})))
        for name in tensors:
            yield name, stored.read(name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights()


def empty_model(like: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model without weights, like another, on a device. No random number is drawn."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    trust = has_own_code(like.config)
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(like.config, dtype=dtype, trust_remote_code=trust)
    model.tie_weights()  # not done where no weights are made
    if getattr(like, "generation_config", None) is not None:
        model.generation_config = like.generation_config
    return model.eval().requires_grad_(False)


def _generation_config(name: str, config: Any) -> Any:
    from transformers import GenerationConfig

    with suppress(OSError, ValueError):  # there need not be one
        return GenerationConfig.from_pretrained(name)
    return GenerationConfig.from_model_config(config)
