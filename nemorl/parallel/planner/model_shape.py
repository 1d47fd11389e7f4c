"""A decoder's parameters, read off the model on the meta device, and how a plan cuts them."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

from nemorl.checks import require
from nemorl.models.hub import loading
from nemorl.parallel.plan import ParallelPlan, num_experts

MIXERS, FEEDS = ("o_proj", "out_proj"), ("down_proj", "c_proj")
"""Names of the last linear layers of attention, or its like, and of a feed-forward."""


@dataclass(frozen=True)
class Matrix:
    """Parameters of one shape; `tp` is the axis that tensor parallelism splits."""

    name: str
    shape: tuple[int, ...]
    tp: int | None = None
    of_experts: bool = False
    linear: bool = False
    """Whether it may get an adapter."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def local(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Return the shape of a device's part."""
        parts = plan.ep if self.of_experts and plan.ep > 1 else plan.tp
        cut = 0 if self.of_experts and self.shape[0] % parts == 0 else self.tp
        return tuple(n // parts if axis == cut else n for axis, n in enumerate(self.shape))

    def on(self, plan: ParallelPlan) -> int:
        return prod(self.local(plan))

    def shard(self, plan: ParallelPlan) -> int:
        """Return the size that a device keeps: FSDP2 cuts the first axis, rounding up."""
        rows, *rest = self.local(plan)
        return -(-rows // shard_ranks(plan)) * prod(rest)


def shard_ranks(plan: ParallelPlan) -> int:
    """Return the devices over which FSDP2 cuts parameters: dp_shard · cp."""
    return (plan.dp_shard or 1) * plan.cp


@dataclass(frozen=True)
class Block:
    """A module's linear layers: to its inner widths, and back."""

    inner: tuple[Matrix, ...]
    output: Matrix | None

    @property
    def mixes(self) -> bool:
        """Whether it is attention or its like."""
        return self.output is not None and self.output.module.endswith(MIXERS)

    @property
    def gated(self) -> bool:
        if self.output is None or self.mixes:
            return False
        return sum(each.shape[0] for each in self.inner) == 2 * self.output.shape[1]

    def widths(self, plan: ParallelPlan) -> tuple[int, int]:
        """Return the numbers per token that `inner` give and `output` takes."""
        outs = sum(each.local(plan)[0] for each in self.inner)
        return outs, self.output.local(plan)[1] if self.output else 0


@dataclass(frozen=True)
class Layer:
    """Layers with parameters of the same shapes."""

    count: int
    matrices: tuple[Matrix, ...]

    def __iter__(self) -> Iterator[Matrix]:
        return iter(self.matrices)

    @cached_property
    def linear(self) -> tuple[Matrix, ...]:
        return tuple(each for each in self.matrices if each.linear)

    @cached_property
    def experts(self) -> tuple[Matrix, ...]:
        return tuple(each for each in self.matrices if each.of_experts and len(each.shape) == 3)

    @cached_property
    def norms(self) -> tuple[Matrix, ...]:
        return tuple(m for m in self.matrices if len(m.shape) == 1 and m.module.endswith("norm"))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        modules: dict[str, list[Matrix]] = {}
        for each in self.linear:
            modules.setdefault(each.module.rpartition(".")[0], []).append(each)
        blocks = []
        for parts in modules.values():
            last = [each for each in parts if each.module.endswith(MIXERS + FEEDS)]
            inner = tuple(each for each in parts if each not in last)
            blocks.append(Block(inner, last[0] if last else None))
        return tuple(blocks)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's parameters, and sizes by their Hugging Face names."""

    config: Any = field(compare=False)
    layers: tuple[Layer, ...]
    ends: tuple[Matrix, ...]
    """The embedding, the last norm and the head; a tied head is the embedding."""
    tied: bool
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int

    @property
    def num_hidden_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def head(self) -> Matrix:
        """The last layer: a product with the embedding, where tied."""
        return next(each for each in reversed(self.ends) if len(each.shape) > 1)

    @property
    def vocab_size(self) -> int:
        return self.ends[0].shape[0]

    @property
    def hidden_size(self) -> int:
        return self.ends[0].shape[1]

    @cached_property
    def moe_intermediate_size(self) -> int:
        down = next((m.size for layer in self.layers for m in layer.experts if "down" in m.name), 0)
        return down // max(self.num_experts * self.hidden_size, 1)

    def all(self) -> Iterator[tuple[int, Matrix]]:
        """Yield parameters, each after the number of its like."""
        for layer in self.layers:
            yield from ((layer.count, each) for each in layer)
        yield from ((1, each) for each in self.ends)

    @cached_property
    def num_parameters(self) -> int:
        return sum(count * each.size for count, each in self.all())

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that compute a token."""
        idle = self.num_experts - self.num_experts_per_tok
        experts = sum(count * each.size for count, each in self.all() if each.of_experts)
        return self.num_parameters - (experts * idle // self.num_experts if experts else 0)

    def cached_numbers(self, tp: int) -> int:
        """Return how many numbers an engine caches of a token."""
        latent = getattr(self.config, "kv_lora_rank", None)
        heads = 2 * max(1, self.num_key_value_heads // tp) * self.head_dim
        width = latent + self.config.qk_rope_head_dim if latent else heads
        attends = ("k_proj", "qkv_proj", "kv_b_proj")
        return width * sum(
            x.count for x in self.layers if any(m.module.endswith(attends) for m in x)
        )


def model_shape(config: Any, head: Literal["lm", "scalar"] = "lm") -> ModelShape:
    """Return the parameters of a model by its Hugging Face configuration.

    Raises: ValueError where a size is missing, or the model is not supported.
    """
    from nemorl.models.causal_lm import decoder_of, layers_of, on_meta

    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        size = getattr(config, name, None)
        require(
            isinstance(size, int) and size > 0,
            "the model",
            f"must say its {name}",
            size,
            "complete config.json, or take another model",
        )
    model = on_meta(config, head=head)
    layers = layers_of(decoder_of(model))
    kinds = Counter(_matrices(layer, config) for layer in layers)
    inside = {*layers.parameters()}
    outer = {n: tuple(each.shape) for n, each in model.named_parameters() if each not in inside}
    heads, experts = config.num_attention_heads, num_experts(config)
    return ModelShape(
        config=config,
        layers=tuple(Layer(count, matrices) for matrices, count in kinds.items()),
        ends=tuple(Matrix(n, s, 0 if len(s) > 1 < s[0] else None) for n, s in outer.items()),
        tied=sum(len(shape) > 1 for shape in outer.values()) == 1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        num_experts=experts,
        num_experts_per_tok=getattr(config, "num_experts_per_tok", 1) if experts else 0,
    )


def _matrices(layer: Any, config: Any) -> tuple[Matrix, ...]:
    """Return a layer's parameters, with their axes of tensor parallelism by backend dtensor."""
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from nemorl.parallel.dtensor.tensor_parallel import layer_plan, layer_styles

    styles = layer_styles(config) if getattr(config, "base_model_tp_plan", None) else {}
    plan = layer_plan(layer, styles, sequence_parallel=True)
    found = []
    for name, parameter in layer.named_parameters():
        module, _, leaf = name.rpartition(".")
        style, axis = plan.get(module), None
        if isinstance(style, ColwiseParallel):
            axis = 0
        elif isinstance(style, RowwiseParallel) and leaf == "weight":
            axis = 1
        experts = module.endswith("experts") and parameter.ndim > 1 and leaf != "weight"
        part = layer.get_submodule(module)
        plain = not type(part).__module__.startswith("transformers")  # not a router
        linear = isinstance(part, nn.Linear) and plain and leaf == "weight"
        found.append(Matrix(name, tuple(parameter.shape), axis, experts, linear))
    return tuple(found)


def read_shape(name: str, head: Any = "lm", *, field: str = "model.path") -> ModelShape:
    """Return the parameters of a folder, a config.json or a model on the hub."""
    from transformers import CONFIG_MAPPING

    with loading(name, field=field):
        path = Path(name)
        if not path.exists():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        path = path / "config.json" if path.is_dir() else path
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    require(
        kind in CONFIG_MAPPING,
        "the model's type",
        "must be one that transformers has",
        kind,
        "take another model",
    )
    with loading(name, field=field):
        config = CONFIG_MAPPING[kind].from_json_file(path)
    return model_shape(config, head)
