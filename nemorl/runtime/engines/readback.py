"""What a vLLM worker computes with, read back for a receipt. Imported in the engines' processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan, prod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import (
    default_weight_loader,
    row_parallel_weight_loader,
)

from nemorl.models.adapters import PREFIX
from nemorl.models.digest import grid
from nemorl.runtime.engines.experts import Layouts, expert_values, experts_of
from nemorl.runtime.engines.spec import Numbers

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
WHOLE = (default_weight_loader, row_parallel_weight_loader)
"""What loads vectors as they are."""
Cut = tuple[int, int, int]
"""Where a worker's rows (or columns) of a matrix begin in its own tensor and in the whole one, and
their number.
"""
Reading = tuple[str, str, Numbers]
"""What was read, the name of the weight that it was made from, and its numbers."""


@torch.no_grad()
def readings(
    model: nn.Module, shapes: Mapping[str, Sequence[int]], version: int
) -> Iterator[Reading]:
    """Yield the numbers that this worker computes with, of all weights of these names and shapes
    that can be read.

    Unquantized layers can be read, also fused, padded, cut and repacked ones: a repacked matrix
    is multiplied with unit vectors, which gives its columns, but for rows with infinity or NaN.
    So can experts of vLLM's own kernels. Quantized layers, and what vLLM's model stores under names
    of no rule or changes as it loads it can't.
    """
    wrappers = {name: each for name, each in model.named_modules() if hasattr(each, "base_layer")}
    # A layer that vLLM has wrapped for adapters comes after its wrapper.
    modules = {name.replace(".base_layer", ""): each for name, each in model.named_modules()}
    packed = getattr(model, "packed_modules_mapping", None) or {}
    fused = {part: (name, i) for name, all_ in packed.items() for i, part in enumerate(all_)}
    columns_of: dict[nn.Module, Tensor] = {}
    head, untied = modules.get("lm_head"), "lm_head.weight" in shapes
    transposed = _transposes(modules, shapes)
    renamed = _renamed(model)
    experts, layouts = dict(experts_of(model)), Layouts()
    for name, shape in shapes.items():
        if name.startswith(PREFIX):
            if (values := _adapter(name, wrappers, fused, grid(shape, version), shape)) is not None:
                yield name, name, values
            continue
        at = grid(shape, version)
        own_name = renamed(name) or ""
        if own := next((one for one in experts if own_name.startswith(one)), None):
            leaf = own_name.removeprefix(own)
            values = _if_plain(expert_values, experts[own], leaf, shape, at, layouts)
            if values is not None:
                yield name, name, values
            continue
        path, _, leaf = own_name.rpartition(".")
        layer, part = modules.get(path), None
        if layer is None:
            parent, _, last = path.rpartition(".")
            own, part = fused.get(last, ("", None))
            layer = modules.get(f"{parent}.{own}")
        if layer is None:
            continue
        values = _if_plain(
            _values, layer, leaf, part, shape, _moved(model, name, at, shape), columns_of
        )
        square = len(shape) == 2 and shape[0] == shape[1]
        if values is not None and not (transposed and square and isinstance(layer, LinearBase)):
            yield name, name, values
        if isinstance(head, ParallelLMHead) and not untied and _embeds(layer, leaf, head):
            # It may compute with a copy, repacked or of its own.
            values = _if_plain(_values, head, leaf, None, shape, at, columns_of)
            yield f"lm_head.weight, tied to {name}", name, values or [None] * prod(map(len, at))


def _renamed(model: Any) -> Callable[[str], str | None]:
    """Return what gives a name in files as the model's own, parts of fused layers as they are."""
    if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is None:
        return str
    return replace(mapper, orig_to_new_stacked={}).map_name


def _moved(
    model: Any, name: str, at: tuple[list[int], list[int]], shape: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return where the model has these rows and columns, if it moves rows as Llama 4's does."""
    if not hasattr(model, "permute_qk_weight_for_rotary") or len(shape) != 2:
        return at
    rows = torch.arange(shape[0])[:, None]
    order = model.permute_qk_weight_for_rotary(name, rows)[1].flatten().argsort().tolist()
    return [order[row] for row in at[0]], at[1]


def _adapter(
    name: str,
    wrappers: Mapping[str, nn.Module],
    fused: Mapping[str, tuple[str, int]],
    at: tuple[list[int], list[int]],
    shape: Sequence[int],
) -> Numbers | None:
    """Return an adapter's numbers at these rows and columns; None where the workers share it."""
    path, _, matrix = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    parent, _, last = path.rpartition(".")
    own, part = fused.get(last, (last, 0))
    layer: Any = wrappers.get(path) or wrappers.get(f"{parent}.{own}")
    stacked = getattr(layer, f"{matrix.lower()}_stacked", None)
    if stacked is None or layer.tp_size > 1:
        return None
    table = stacked[part if len(stacked) > 1 else 0][0, 0]
    if any(have < wanted for have, wanted in zip(table.shape, shape, strict=True)):
        return None
    return table[at[0]][:, at[1]].float().flatten().tolist()


def _embeds(layer: nn.Module, leaf: str, head: ParallelLMHead) -> bool:
    """Return whether a layer has the input embeddings of the head's tokens."""
    embeds = isinstance(layer, VocabParallelEmbedding) and leaf == "weight" and layer is not head
    return embeds and layer.org_vocab_size == head.org_vocab_size


def _transposes(modules: Mapping[str, nn.Module], shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether the model transposes matrices as it loads them, as GPT-2 does: its square ones
    do not show it.
    """
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        layer = modules.get(path)
        if isinstance(layer, LinearBase) and leaf == "weight" and len(shape) == 2:
            whole = (layer.output_size, layer.input_size)
            if tuple(shape) == whole[::-1] != whole:
                return True
    return False


def _if_plain(read: Callable[..., Numbers | None], *args: Any) -> Numbers | None:
    """Return what `read` gives; None also where the tensor has another form than is known here."""
    try:
        return read(*args)
    except (AttributeError, IndexError, RuntimeError, ValueError):
        return None


def _values(
    layer: Any,
    leaf: str,
    part: int | None,
    shape: Sequence[int],
    at: tuple[list[int], list[int]],
    columns_of: dict[nn.Module, Tensor],
) -> Numbers | None:
    """Return the layer's numbers at these rows and columns; None if it can't be read."""
    parameter, (rows, columns) = getattr(layer, leaf, None), at
    if not isinstance(parameter, Tensor):
        return None
    multiplies = leaf == "weight" and isinstance(layer, LinearBase | ParallelLMHead)
    if not isinstance(layer, LinearBase | VocabParallelEmbedding):
        plain = getattr(parameter, "weight_loader", default_weight_loader) in WHOLE
        if not plain or tuple(parameter.shape) != tuple(shape) or len(shape) > 2:
            return None
        matrix = parameter.view(-1, shape[-1] if len(shape) > 1 else 1)
        return matrix[rows][:, columns].float().flatten().tolist()
    cuts = _cuts(layer, part, shape)
    if cuts is None or not isinstance(layer.quant_method, PLAIN):
        return None
    of_rows, of_columns = cuts
    if leaf == "weight" and (len(shape) != 2 or _width(layer) != of_columns[2]):
        return None  # the model changes it as it loads it
    held = _held(rows, of_rows), _held(columns, of_columns)
    repacked = multiplies and hasattr(layer, "cpu_linear")
    if repacked:
        table = _columns(layer, held[1], columns_of)
    elif leaf == "weight":
        table = parameter[:, [max(i, 0) for i in held[1]]]
    else:
        table = parameter[:, None]
    if table.shape[0] < of_rows[0] + of_rows[2]:
        return None
    values = table[[max(i, 0) for i in held[0]]].float().flatten().tolist()
    here = [row >= 0 and column >= 0 for row in held[0] for column in held[1]]
    found = zip(values, here, strict=True)
    return [one if own and not (repacked and isnan(one)) else None for one, own in found]


def _cuts(layer: Any, part: int | None, shape: Sequence[int]) -> tuple[Cut, Cut] | None:
    """Return which rows and columns of a whole tensor this worker's layer has."""
    width = shape[1] if len(shape) > 1 else 1
    rank, size = layer.tp_rank, layer.tp_size
    rows, columns = (0, 0, shape[0]), (0, 0, width)
    if isinstance(layer, VocabParallelEmbedding):
        own = layer.shard_indices
        begin, end = own.org_vocab_start_index, own.org_vocab_end_index
        return (0, begin, end - begin), columns
    if isinstance(layer, RowParallelLinear):
        own_width = layer.input_size_per_partition if len(shape) > 1 else width
        return rows, (0, rank * own_width if len(shape) > 1 else 0, own_width)
    if isinstance(layer, QKVParallelLinear) and part is not None:
        sizes = [layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size]
        sizes.append(layer.num_kv_heads * layer.v_head_size)
        block = rank // layer.num_kv_head_replicas if part else rank
        return (sum(sizes[:part]), block * sizes[part], sizes[part]), columns
    if isinstance(layer, MergedColumnParallelLinear) and part is not None:
        sizes = [one // size for one in layer.output_sizes]
        return (sum(sizes[:part]), rank * sizes[part], sizes[part]), columns
    if isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear) and size > 1:
        return None  # its parts are cut one by one
    if isinstance(layer, ColumnParallelLinear):
        own_height = layer.output_size_per_partition
        return (0, rank * own_height, own_height), columns
    return rows, columns


def _columns(layer: Any, held: list[int], columns_of: dict[nn.Module, Tensor]) -> Tensor:
    """Return `[rows, len(held)]` of a matrix, as products with unit vectors: exact, where all of
    its numbers are finite. Parts of a fused layer share them.
    """
    if layer not in columns_of:
        units = torch.zeros(
            len(held), _width(layer), dtype=layer.weight.dtype, device=layer.weight.device
        )
        for i, column in enumerate(held):
            units[i, max(column, 0)] = 1
        columns_of[layer] = layer.quant_method.apply(layer, units, None).t()
    return columns_of[layer]


def _width(layer: Any) -> int:
    """Return how many columns of a matrix this worker has."""
    if isinstance(layer, LinearBase):
        return getattr(layer, "input_size_per_partition", layer.input_size)
    return layer.embedding_dim


def _held(places: Sequence[int], cut: Cut) -> list[int]:
    """Return where places of a whole tensor are in this worker's; -1: elsewhere."""
    own, begin, count = cut
    return [own + i - begin if begin <= i < begin + count else -1 for i in places]
