"""Tensors of a Hugging Face model as megatron-core has them, and back, bit for bit.

A pipeline stage has some of the layers, each under its number on that stage. Its parameters' names
begin with the number that the stage has among those of its rank. A rank of tensor parallelism has
rows or columns of matrices; queries, keys and values lie in one matrix, group by group of query
heads, as do gate and up projection.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from nemorl.parallel.world import World

Read = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Returns the box of a whole tensor by its Hugging Face name: where it begins, and its shape."""
Shapes = dict[str, tuple[int, ...]]
"""Shapes of whole tensors by Hugging Face name."""


@dataclass(frozen=True)
class Entry:
    """A parameter of megatron-core, and the Hugging Face tensors that it is made of."""

    kind: str
    """What a rank of tensor parallelism has of them: whole, rows, columns, gated (rows of both), or
    qkv (groups of heads).
    """
    names: tuple[str, ...]
    divided: bool = True
    """Whether ranks of tensor parallelism have parts of it, as they have not of experts with expert
    parallelism.
    """

    @property
    def dim(self) -> int | None:
        """The dimension that ranks of tensor parallelism split."""
        if not self.divided:
            return None
        return {"whole": None, "columns": 1}.get(self.kind, 0)


LAYER = {
    "input_layernorm.weight": ("whole", "input_layernorm.weight"),
    "self_attention.linear_proj.weight": ("columns", "self_attn.o_proj.weight"),
    "self_attention.q_layernorm.weight": ("whole", "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": ("whole", "self_attn.k_norm.weight"),
    "pre_mlp_layernorm.weight": ("whole", "post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": ("gated", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("columns", "mlp.down_proj.weight"),
    **{
        f"self_attention.linear_qkv.{leaf}": ("qkv", *(f"self_attn.{x}_proj.{leaf}" for x in "qkv"))
        for leaf in ("weight", "bias")
    },
}
"""Parameters of a layer: kind, and names in Hugging Face's layer."""
EXPERTS = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
"""By model type how files call a mixture of experts, and an expert's matrices: gate, up and down.
`transformers` has each kind of all experts in one tensor, under names of its own.
"""
EMBEDDING, NORM, HEAD = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)


class Conversion:
    """Converts the tensors of one model in this rank's place.

    shapes: of the whole Hugging Face tensors, tied ones once.
    """

    def __init__(self, hf: Any, shapes: Shapes, world: World) -> None:
        self.shapes, self.world = shapes, world
        self.num_layers = hf.num_hidden_layers // world.plan.num_stages
        self.groups = getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads
        self.heads_per_group = hf.num_attention_heads // self.groups
        self.experts = EXPERTS.get(hf.model_type)
        self.num_experts = hf.num_local_experts // world.plan.ep if self.experts else 0
        self.here: dict[str, Entry] = {}
        for stage in map(world.stage, range(world.plan.vpp)):
            self.here |= self.entries(stage) | self.entries_of_experts(stage, world.ep_rank)

    def entries(self, stage: int) -> dict[str, Entry]:
        """Return what the parameters of a pipeline stage are made of, by their names on its rank;
        without its experts.
        """
        found, last = {}, self.world.plan.num_stages - 1
        embedding, part = Entry("rows", ("model.embed_tokens.weight",)), self._part(stage)
        if stage == 0:
            found[f"{part}.{EMBEDDING}"] = embedding
        for number in range(self.num_layers):
            layer = f"model.layers.{stage * self.num_layers + number}"
            for leaf, (kind, *leaves) in LAYER.items():
                names = tuple(f"{layer}.{each}" for each in leaves)
                if names[0] in self.shapes:
                    found[f"{part}.decoder.layers.{number}.{leaf}"] = Entry(kind, names)
            if self.experts:
                own = f"{part}.decoder.layers.{number}.mlp.router.weight"
                found[own] = Entry("whole", (f"{layer}.{self.experts[0]}.gate.weight",))
        if stage == last:
            found[f"{part}.{NORM}"] = Entry("whole", ("model.norm.weight",))
            if "lm_head.weight" in self.shapes:
                found[f"{part}.{HEAD}"] = Entry("rows", ("lm_head.weight",))
            elif last:  # its copy of a tied embedding
                found[f"{part}.{HEAD}"] = embedding
        return found

    def _part(self, stage: int) -> int:
        """Return the number of a stage among those of its rank."""
        return stage // self.world.plan.pp

    def entries_of_experts(self, stage: int, rank: int) -> dict[str, Entry]:
        """Return the same of the experts that a rank of expert parallelism has."""
        found: dict[str, Entry] = {}
        if self.experts is None:
            return found
        where, gate, up, down = self.experts
        for number in range(self.num_layers):
            layer = f"model.layers.{stage * self.num_layers + number}.{where}.experts"
            for index in range(self.num_experts):
                theirs = f"{layer}.{rank * self.num_experts + index}"
                own = f"decoder.layers.{number}.mlp.experts.local_experts.{index}"
                own = f"{self._part(stage)}.{own}"
                names = tuple(f"{theirs}.{each}.weight" for each in (gate, up))
                divided = self.world.plan.ep == 1
                found[f"{own}.linear_fc1.weight"] = Entry("gated", names, divided)
                names = (f"{theirs}.{down}.weight",)
                found[f"{own}.linear_fc2.weight"] = Entry("columns", names, divided)
        return found

    def _everywhere(self) -> Iterator[tuple[int, int | None, dict[str, Entry]]]:
        """Yield all entries by stage and, of experts, by rank of expert parallelism."""
        for stage in range(self.world.plan.num_stages):
            yield stage, None, self.entries(stage)
            for rank in range(self.world.plan.ep if self.experts else 0):
                yield stage, rank, self.entries_of_experts(stage, rank)

    def order(self) -> list[str]:
        """Return the Hugging Face names in the order of `whole`."""
        stages = [entries.values() for _, _, entries in self._everywhere()]
        return list(
            dict.fromkeys(name for each in stages for entry in each for name in entry.names)
        )

    def own(self, entry: Entry, read: Read) -> Tensor:
        """Return this rank's part of a parameter."""
        tp, rank = self.world.plan.tp, self.world.tp_rank
        if entry.kind == "qkv" and self.groups % tp:  # a group is of several ranks
            whole = fused([self._box(name, read) for name in entry.names], self.groups)
            return whole.chunk(tp)[rank]
        parts = [self._box(name, read, entry.dim, rank, tp) for name in entry.names]
        return fused(parts, self.groups // tp) if entry.kind == "qkv" else torch.cat(parts)

    def _box(
        self, name: str, read: Read, dim: int | None = None, rank: int = 0, parts: int = 1
    ) -> Tensor:
        shape, offsets = list(self.shapes[name]), [0] * len(self.shapes[name])
        if dim is not None:
            shape[dim] //= parts
            offsets[dim] = rank * shape[dim]
        return read(name, tuple(offsets), tuple(shape))

    def whole(
        self, own: Callable[[str], Tensor], dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all whole Hugging Face tensors, each on all ranks; a collective call.

        own: returns, by name, this rank's part of a parameter of its stages; called in order.
        """
        world = self.world
        for stage, expert_rank, entries in self._everywhere():
            rank = stage % world.plan.pp
            here = rank == world.pp_rank and expert_rank in (None, world.ep_rank)
            for name, entry in entries.items():
                if stage and entry.names[0] == "model.embed_tokens.weight":
                    continue
                wholes: list[Tensor | None] = [None] * len(entry.names)
                if here:
                    wholes = list(self._wholes(entry, own(name).detach().to(dtype)))
                for hf_name, value in zip(entry.names, wholes, strict=True):
                    if value is None:
                        shape = self.shapes[hf_name]
                        value = torch.empty(shape, dtype=dtype, device=world.device)
                    yield hf_name, self._sent(value.contiguous(), rank, expert_rank)

    def _wholes(self, entry: Entry, own: Tensor) -> list[Tensor]:
        """Gather the parts of all ranks of tensor parallelism."""
        group, parts = self.world.tp_group, [own]
        if group is not None and entry.dim is not None:
            parts = [torch.empty_like(own) for _ in range(self.world.plan.tp)]
            dist.all_gather(parts, own.contiguous(), group=group)
        if entry.kind == "gated":
            halves = [part.chunk(2) for part in parts]
            return [torch.cat(each) for each in zip(*halves, strict=True)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, entry.dim or 0)
        if entry.kind == "qkv":
            return split(whole, self.groups, self.heads_per_group)
        return [whole]

    def _sent(self, value: Tensor, pp_rank: int, expert_rank: int | None) -> Tensor:
        """Return the tensor that a rank of the pipeline, with some experts, has; in place."""
        world = self.world
        for group, source in ((world.ep_group, expert_rank), (world.pp_group, pp_rank)):
            if group is not None and source is not None:
                dist.broadcast(value, dist.get_global_rank(group, source), group=group)
        return value


def fused(parts: list[Shaped[Tensor, "..."]], groups: int) -> Shaped[Tensor, "rows ..."]:
    """Join the rows of queries, keys and values group by group: the rows of its query heads, of its
    key and of its value head.

    >>> fused([torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6]), torch.tensor([7, 8])], 2).tolist()
    [1, 2, 5, 7, 3, 4, 6, 8]
    """
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def split(
    whole: Shaped[Tensor, "rows ..."], groups: int, heads_per_group: int
) -> list[Shaped[Tensor, "..."]]:
    """Undo `fused`.

    >>> [part.tolist() for part in split(torch.tensor([1, 2, 5, 7, 3, 4, 6, 8]), 2, 2)]
    [[1, 2, 3, 4], [5, 6], [7, 8]]
    """
    of_groups = whole.unflatten(0, (groups, heads_per_group + 2, -1))
    parts = of_groups.split([heads_per_group, 1, 1], 1)
    return [part.flatten(0, 2) for part in parts]


def mark_split(model: nn.Module, conversion: Conversion) -> None:
    """Tell megatron-core of which parameters each rank of tensor parallelism has its own, as it
    does itself only where it initializes them: the gradient's norm counts all others once.
    """
    for name, parameter in model.named_parameters():
        entry = conversion.here[name]
        if entry.dim is not None or not entry.divided:
            dim = entry.dim or 0
            marks = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}
            vars(parameter).update(marks)
