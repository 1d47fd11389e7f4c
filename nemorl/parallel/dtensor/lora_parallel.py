"""LoRA adapters of layers that tensor parallelism cuts.

The wide side of an adapter is cut as its layer is: the rows of B where the layer's rows are cut,
the columns of A where its columns are. The other matrix is whole on each rank, and what is between
the two, as wide as the rank, is all that is sent.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.functional import linear

from nemorl.models.adapters import adapted_layers


def spread_adapters(
    layer: nn.Module, mesh: Any, plan: Mapping[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Spread a decoder layer's adapters over a mesh, in place, as the plan cuts their layers.

    Returns: the plan, whose styles of adapted layers are for what the adapters adapt.
    """
    left = dict(plan)
    for name, adapted in adapted_layers(layer).items():
        style = left.pop(name, None)
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue  # it is in a block that each rank has as a whole
        (layout,) = style.output_layouts
        by_rows = isinstance(style, ColwiseParallel)
        if (layout if by_rows else style.input_layouts[0]).is_replicate():
            _compute_whole(adapted, mesh, layout)
        elif by_rows:
            _follow_rows(adapted, mesh)
        else:
            _follow_columns(adapted, mesh, layout)
        left[f"{name}.base_layer"] = style
    return left


def _compute_whole(adapted: Any, mesh: Any, layout: Placement) -> None:
    """Compute both products on each rank, of a layer that gets all and gives all, or with sequence
    parallelism (`layout` Shard) the rank's tokens.
    """
    for name in adapted.lora_A:
        first, second = adapted.lora_A[name], adapted.lora_B[name]
        _place(first, mesh, Replicate())
        _place(second, mesh, Replicate())

        def inner(self: Any, x: Tensor) -> Tensor:
            x = x.to_local() if isinstance(x, DTensor) else x
            return linear(x, self.weight.to_local())

        def outer(self: Any, x: Tensor) -> Tensor:
            found = linear(x, self.weight.to_local())
            whole = DTensor.from_local(found, mesh, [Replicate()], run_check=False)
            return whole.redistribute(placements=[layout]).to_local()

        first.forward = types.MethodType(inner, first)
        second.forward = types.MethodType(outer, second)


def _follow_rows(adapted: Any, mesh: Any) -> None:
    """Give each rank the outputs of its rows: x ↦ B (A x), of which it has rows of B."""
    for name in adapted.lora_A:
        first, second = adapted.lora_A[name], adapted.lora_B[name]
        _place(first, mesh, Replicate())
        _place(second, mesh, Shard(0))

        def inner(self: Any, x: Tensor) -> Tensor:
            x = x.to_local() if isinstance(x, DTensor) else x  # with sequence parallelism
            found = linear(x, self.weight.to_local())
            # Each rank's rows give a part of the gradient.
            whole = DTensor.from_local(found, mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial()])

        def outer(self: Any, x: Tensor) -> Tensor:
            return linear(x, self.weight.to_local())

        first.forward = types.MethodType(inner, first)
        second.forward = types.MethodType(outer, second)


def _follow_columns(adapted: Any, mesh: Any, layout: Placement) -> None:
    """Sum the products with each rank's columns of A; then B is applied to all tokens, or with
    sequence parallelism (`layout` Shard) to the rank's.
    """
    gradient = Partial() if layout.is_shard() else Replicate()
    for name in adapted.lora_A:
        first, second = adapted.lora_A[name], adapted.lora_B[name]
        _place(first, mesh, Shard(1))
        _place(second, mesh, Replicate())

        def inner(self: Any, x: Tensor) -> Tensor:
            found = linear(x, self.weight.to_local())
            part = DTensor.from_local(found, mesh, [Partial()], run_check=False)
            return part.redistribute(placements=[layout]).to_local()

        def outer(self: Any, x: Tensor) -> Tensor:
            return linear(x, self.weight.to_local(grad_placements=[gradient]))

        first.forward = types.MethodType(inner, first)
        second.forward = types.MethodType(outer, second)


def _place(matrix: nn.Module, mesh: Any, placement: Placement) -> None:
    weight: Any = matrix.weight
    spread = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
    matrix.weight = nn.Parameter(spread, requires_grad=weight.requires_grad)
