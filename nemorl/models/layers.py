"""The linear layers of a model, which adapters and quantization are for."""

from typing import Any

from torch import nn


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers but the output layer and routers, by name."""
    head = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not type(layer).__module__.startswith("transformers")
        if layer is not head
    }
