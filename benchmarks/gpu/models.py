"""Models with random weights, in the shapes of Qwen2's."""

from typing import Any

import torch
from common import model_config

from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend

QWEN = {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 64, "num_hidden_layers": 2},
    "0.5B": {
        **QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5B": {
        **QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}


def config_of(shape: str, **sizes: Any) -> Any:
    options = {"max_position_embeddings": 32_768, "eos_token_id": None, **SHAPES[shape], **sizes}
    return model_config(**options)


def random_model(config: Any, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Make it where it is to be, which takes seconds at most."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def trainer(model: Any, row_tokens: int, **settings: Any) -> DTensorBackend:
    """A backend on the model's device, for packed rows, one a pass."""
    packed = TrainerConfig(
        device=model.device.type,
        sequence_packing=True,
        packed_row_tokens=row_tokens,
        train_micro_batch_size=1,
    )
    made = DTensorBackend(model)
    made.setup(BackendConfig(trainer=packed, **settings))
    return made
