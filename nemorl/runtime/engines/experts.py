"""Experts of a vLLM worker, read back for a receipt. Imported in the engines' processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from nemorl.runtime.engines.spec import Numbers

Spot = tuple[int, int, int]
"""Expert, row and column of a number."""
Layouts = dict[Any, dict[tuple[int, int], int]]
"""Where vLLM's kernel for CPUs keeps numbers of a matrix, by row and column."""
PARTS = ("gate", "up", "down")
TENSORS = {"both": "w13_weight", "down": "w2_weight", "bias": "w13_bias", "last bias": "w2_bias"}
"""Parts of experts, and vLLM's names of them."""


def experts_of(model: nn.Module) -> Iterator[tuple[str, RoutedExperts]]:
    """Yield what the names of layers of experts begin with in files, and the layers."""
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            yield name.removesuffix("routed_experts"), layer


def expert_values(
    layer: Any, leaf: str, shape: Sequence[int], at: tuple[list[int], list[int]], known: Layouts
) -> Numbers | None:
    """Return the experts' numbers at these rows and columns; None if they can't be read.

    leaf: the rest of the name in files, as 3.up_proj.weight.
    """
    balanced = layer.moe_config.moe_parallel_config.enable_eplb  # then experts move
    if balanced or type(layer.quant_method) is not UnquantizedFusedMoEMethod:
        return None
    found = [_place(layer, leaf, shape, row, column) for row in at[0] for column in at[1]]
    tensor = getattr(layer, TENSORS.get(found[0][0], "w13_weight"))
    spots = [_here(layer, tensor, *one) for one in found]
    places = [one[1:] for one in spots if one]
    # Some kernels compute with what they load, that for CPUs packs matrices.
    backend = layer.quant_method.unquantized_backend.name
    if tensor.ndim == 2:
        table = {(row, 0): row for row, _ in places}
    elif backend == "CPU":
        key = (tuple(tensor.shape), *places)
        if key not in known:
            known[key] = _packed(layer, tensor, places)
        table = known[key]
    elif backend in ("TRITON", "BATCHED_TRITON"):
        table = {(row, column): row * tensor.shape[2] + column for row, column in places}
    else:
        return None
    own = [(expert, table[row, column]) for expert, row, column in filter(None, spots)]
    picked = torch.tensor(own, device=tensor.device, dtype=torch.long).view(-1, 2)
    values = iter(tensor.flatten(1)[picked[:, 0], picked[:, 1]].float().tolist())
    return [next(values) if spot else None for spot in spots]


def _place(
    layer: Any, leaf: str, shape: Sequence[int], row: int, column: int
) -> tuple[str, int, int, int]:
    """Return to which part, expert, row and column a number of a tensor in files belongs.

    Raises: ValueError for a name that is not known here.
    """
    index, _, rest = leaf.partition(".")
    names = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
    named = {f"{name}.weight": part for name, part in zip(names, PARTS, strict=True)}
    own = {name: part for part, name in TENSORS.items()}
    if rest in named:
        return named[rest], int(index), row, column
    if rest in own and len(shape) == 1:
        return own[rest], int(index), row, 0
    if rest in own:  # gpt-oss's are transposed
        return own[rest], int(index), column, row
    if len(shape) == 3 and leaf in (
        "gate_up_proj",
        "down_proj",
    ):  # so are Llama 4's, of all experts
        half, part = shape[2] // 2, "down"
        if leaf == "gate_up_proj":
            part, column = ("gate", column) if column < half else ("up", column - half)
        return part, row // shape[1], column, row % shape[1]
    raise ValueError(f"{leaf!r} is no known name of an expert's weights")


def _here(layer: Any, tensor: Tensor, part: str, expert: int, row: int, column: int) -> Spot | None:
    """Return where this worker has a number of an expert; None: another one has it."""
    config, place = layer.moe_config, [row, column]
    local = layer._map_global_expert_id_to_local_expert_id(expert)
    if part == "last bias":
        return (local, row, 0) if local >= 0 and config.tp_rank == 0 else None
    cut = 1 if part == "down" else 0  # the dimension that tensor parallelism cuts
    size = config.intermediate_size_per_partition_unpadded * (2 if part in ("both", "bias") else 1)
    place[cut] -= config.tp_rank * size
    if local < 0 or not 0 <= place[cut] < size:
        return None
    # Gate and up are halves of one tensor, which may be padded.
    return local, place[0] + (tensor.shape[1] // 2 if part == "up" else 0), place[1]


def _packed(
    layer: Any, tensor: Tensor, places: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """Return where a packed matrix has the numbers of these rows and columns: one that has nothing
    but their numbers from 1 on, few enough for any type, is packed the same way.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    marked = torch.zeros((1, *tensor.shape[1:]), dtype=tensor.dtype)
    inside = sorted(set(places))
    for number, (row, column) in enumerate(inside, 1):
        marked[0, row, column] = number
    isa = layer.quant_method.moe_kernel.fused_experts.isa
    packed = cpu_prepack_moe_weight(marked, isa).flatten()
    found = packed.nonzero().flatten()
    return dict(zip(inside, found[packed[found].argsort()].tolist(), strict=True))
