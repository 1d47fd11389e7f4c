"""What a training backend can do, as plain data. Free of torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainingTraits:
    """What a training backend can do, and how it uses devices.

    The defaults are the ones of a class that says nothing.
    """

    packages: tuple[str, ...] = ()
    """Packages that it imports and nemorl does not require."""
    needs_ranks: bool = False
    """Whether it runs on ranks in other processes, even on a single one."""
    pipelines: bool = False
    """Whether devices may have different layers (parallel.pp and vpp)."""
    experts: tuple[str, ...] = ()
    """Settings for mixtures of experts that it has: parallel.ep, and those of the section trainer
    (router_replay, router_aux_loss_coef, router_bias_update_rate).
    """
    proves: bool = False
    """Whether it trains any decoder, with what is proved of it (`BackendConfig.proofs`)."""
    repeats_kv_heads: bool = False
    """Whether parallel.tp may exceed the model's key-value heads, of which ranks then have copies.
    """
    shards: Literal["parameters", "optimizer"] = "parameters"
    """What dp_shard divides: parameters, gradients and optimizer state, gathered while layers
    compute (FSDP2, where dp_replicate and cpu_offload are possible), or optimizer state alone.
    """
    heads: tuple[Literal["lm", "scalar"], ...] = ("lm",)
    """Last layers of a model that it can train (`BackendConfig.head`)."""
    adapters: bool = True
    """Whether it trains LoRA adapters."""
    generates: bool = False
    """Whether its ranks can sample (`open_engine`, `decode`, `take_weights`), for a generation
    backend whose traits say `on_trainer`.
    """
