"""A whole model beside one that is spread over ranks: what an engine that computes in this process
computes with.
"""

from typing import Any

import torch
from torch import nn

from nemorl.models.causal_lm import usable_device


def replica_of(model: Any, device: str | None) -> nn.Module:
    """A model of the same configuration in float32, on `device` (None: the best there is), without
    weights: `update_weights` has to bring them.

    `model` may be on the meta device. No random number is drawn.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device(usable_device(device)):
        replica = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    replica.tie_weights()  # which making it without weights leaves out
    if getattr(model, "generation_config", None) is not None:
        replica.generation_config = model.generation_config
    return replica.eval().requires_grad_(False)


def shares_model(generator_class: type) -> bool:
    """Whether an engine of this kind computes with the model that it is made with, as all do that
    don't say `shares_model = False`.
    """
    return getattr(generator_class, "shares_model", True)
