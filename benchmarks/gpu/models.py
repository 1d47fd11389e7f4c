"""Models with random weights, in the shapes of Qwen2's."""

from typing import Any

import torch
from common import model_config

from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend

NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
SIZES: dict[str, tuple[int, ...]] = {
    "small": (64, 256, 2, 4, 2, 512, True),
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
PEERS: dict[str, Any] = {
    **{"hidden": 896, "layers": 24, "heads": 14, "rounds": 3},
    **{"device": "cuda", "precision": "bfloat16"},
}
"""Options of the benchmarks against TRL."""


def config_of(shape: str, **sizes: Any) -> Any:
    found = dict(zip(NAMES, SIZES[shape], strict=True)) | sizes
    return model_config(max_position_embeddings=32_768, eos_token_id=None, **found)


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
