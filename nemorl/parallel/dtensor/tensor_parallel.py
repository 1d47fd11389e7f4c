"""Tensor parallelism of a Hugging Face decoder: the dim along which each weight is cut, and the
layout of activations between modules.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import linear

from nemorl.models.adapters import adapted_layers, itself
from nemorl.models.causal_lm import decoder_of, head_of, is_scalar

PREFIX = "layers.*."


def is_tied(model: Any) -> bool:
    """Return whether input and output embeddings are one parameter."""
    return head_of(model).weight is model.get_input_embeddings().weight


def apply_tensor_parallel(model: Any, mesh: Any, *, sequence_parallel: bool) -> None:
    """Split each layer over the mesh, in place, by Megatron's scheme and transformers' plan.

    The output layer is cut along the vocabulary and does its own communication
    (`tokens.sharded_outputs`); a scalar head is whole on each rank.
    """
    decoder, head, tied = decoder_of(model), head_of(model), is_tied(model)
    # The embedding's output stays whole, because the model makes its positions from its shape; the
    # first layer cuts it.
    outer: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "norm": SequenceParallel(use_local_output=True) if sequence_parallel else Whole(),
    }
    if sequence_parallel:
        outer["layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    parallelize_module(decoder, mesh, outer)
    styles, experts = layer_styles(model.config), experts_of(model.config)
    for layer in decoder.layers:
        plan: dict[str, ParallelStyle] = {}
        for name in experts & {name for name, _ in layer.named_modules()}:
            if layer.get_submodule(name).num_experts % mesh.size() == 0:
                plan[name] = Experts()  # before their block, which they are a part of
        plan |= layer_plan(layer, styles, sequence_parallel=sequence_parallel)
        parallelize_module(layer, mesh, spread_adapters(layer, mesh, plan))
    # The embedding gives an asynchronous tensor, and a compiled layer that begins with one drops
    # its gradient (torch 2.13).
    decoder.embed_tokens.register_forward_hook(lambda module, inputs, output: output.clone())
    if tied:  # parallelize_module has made a new parameter of the embedding's
        head.weight = decoder.embed_tokens.weight
        return
    _spread(head, mesh, Replicate() if is_scalar(model) else Shard(0))


def _spread(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Distribute a module's own parameters over the mesh, in place, but for experts', which are
    distributed before their block.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            spread = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def _moved(values: Tensor, mesh: DeviceMesh, layout: Placement, wanted: Placement) -> Tensor:
    """Return this rank's part, in the wanted layout, of the tensor of which it has `values`."""
    spread = DTensor.from_local(values, mesh, [layout], run_check=False)
    return spread.redistribute(placements=[wanted]).to_local()


def _sum_backward(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return values that all ranks have; each gives a part of their gradient."""
    spread = DTensor.from_local(values, mesh, [Replicate()], run_check=False)
    return spread.to_local(grad_placements=[Partial()])


def layer_styles(config: Any) -> dict[str, str]:
    """Return how transformers splits the modules of a layer, by their names in it.

    Raises: ValueError for a model for which it has no plan.
    """
    plan = (getattr(config, "base_model_tp_plan", None) or {}).items()
    found = {name.removeprefix(PREFIX): style for name, style in plan if PREFIX in name}
    if not found:
        raise ValueError(f"transformers has no plan for tensor parallelism of {config.model_type}")
    return found


def experts_of(config: Any) -> set[str]:
    """Return the names in a layer of experts that transformers can divide among ranks."""
    plan = (getattr(config, "base_model_ep_plan", None) or {}).items()
    return {name.removeprefix(PREFIX) for name, style in plan if style == "ep_dispatch_experts"}


def layer_plan(
    layer: Any, styles: Mapping[str, str], *, sequence_parallel: bool
) -> dict[str, ParallelStyle]:
    """Return the plan of one decoder layer: `styles` cuts its blocks. Norms, and blocks with a
    part that is split in another way (linear attention), are whole on each rank but for `Experts`.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    known = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(output_layouts=between),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        # One weight for all heads, of which each rank has some.
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    plan: dict[str, ParallelStyle] = {}
    adapted = tuple(f"{name}." for name in adapted_layers(layer))
    norm = SequenceParallel(use_local_output=True) if sequence_parallel else Whole()
    for block, _ in layer.named_children():
        parts = [
            name
            for name, part in layer.named_modules()
            if f"{name}.".startswith(f"{block}.") and not name.startswith(adapted)
            if f"{name}." in adapted or [*part.parameters(recurse=False)]
        ]
        kinds = {style for name, style in styles.items() if name.startswith(f"{block}.")}
        if parts == [block]:
            plan[block] = norm
        elif block in parts or not kinds or kinds - known.keys():
            plan[block] = Whole(cut_between=sequence_parallel)
        else:
            plan |= {part: known[styles[part]] if part in styles else Whole() for part in parts}
            if sequence_parallel and "attn" in block:  # it gets a part of the tokens, computes all
                plan[block] = PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                )
            elif sequence_parallel:
                plan[block] = PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                )
    return plan


class Whole(ParallelStyle):
    """Computes a module on each rank from the same inputs. Its parameters are whole, but on the
    mesh: the gradient norm is taken over it.
    """

    def __init__(self, *, cut_between: bool = False) -> None:
        self.cut_between = cut_between

    def _apply(self, module: Any, mesh: DeviceMesh) -> Any:
        for part in module.modules():
            _spread(part, mesh, Replicate())
        inner = module.forward

        @wraps(inner)
        def forward(*args: Any, **options: Any) -> Any:
            if not self.cut_between:
                with _local_parameters(module):
                    return inner(*args, **options)
            given = options.pop("hidden_states", None)
            hidden = _moved(args[0] if given is None else given, mesh, Shard(1), Replicate())
            with _local_parameters(module):
                output = inner(hidden, *args[1:], **options)
            first, *others = output if isinstance(output, tuple) else (output,)
            first = _moved(first.view(hidden.shape), mesh, Replicate(), Shard(1))
            return (first, *others) if isinstance(output, tuple) else first

        module.forward = forward
        return module


class Experts(ParallelStyle):
    """Gives each rank some experts of a block that is `Whole`: it computes the tokens that go to
    them, and the sum over ranks is the block's.

    Source: transformers' style ep_dispatch_experts, whose way of leaving tokens out is used.
    """

    def _apply(self, module: Any, mesh: DeviceMesh) -> Any:
        _spread(module, mesh, Shard(0))
        count = module.num_experts // mesh.size()
        first = count * mesh.get_local_rank()
        module.num_experts, module._is_expert_parallel = count, True
        inner = module.forward

        @wraps(inner)
        def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            here = (chosen >= first) & (chosen < first + count)
            own = torch.where(here, chosen - first, count)  # `count`: it is left out
            weights = _sum_backward(weights, mesh).masked_fill(~here, 0.0)
            found = inner(_sum_backward(hidden, mesh), own, weights)
            return _moved(found, mesh, Partial(), Replicate())

        module.forward = forward
        return module


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    found = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    for part, name, parameter in found:
        part.__dict__[name] = parameter.to_local()  # comes before parameters
    try:
        yield
    finally:
        for part, name, _ in found:
            del part.__dict__[name]


def spread_adapters(
    layer: nn.Module, mesh: Any, plan: Mapping[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Spread a decoder layer's adapters over a mesh, in place; return the plan for the layers that
    they adapt.

    The wide side of an adapter (rows of B, or columns of A) is cut as its layer is. The other
    matrix is whole on each rank: only what is between the two is sent.
    """
    left = dict(plan)
    for name, adapted in adapted_layers(layer).items():
        style = left.pop(name, None)
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue  # it is in a block that each rank has as a whole
        (layout,) = style.output_layouts
        by_rows = isinstance(style, ColwiseParallel)
        moved = partial(_moved, mesh=mesh, wanted=layout)
        first: Placement = Replicate()
        second: Placement = Replicate()
        if (layout if by_rows else style.input_layouts[0]).is_replicate():
            inner, outer = _product(), _product(partial(moved, layout=Replicate()))
        elif by_rows:  # each rank has the outputs of its rows of B
            second = Shard(0)
            inner, outer = _product(partial(_sum_backward, mesh=mesh)), _product()
        else:  # products with columns of A are summed; B takes all tokens, or the rank's
            first, gradient = Shard(1), Partial() if layout.is_shard() else Replicate()
            inner = _product(partial(moved, layout=Partial()))
            outer = _product(gradient=[gradient])
        for key in adapted.lora_A:
            _place(adapted.lora_A[key], mesh, first, inner)
            _place(adapted.lora_B[key], mesh, second, outer)
        left[f"{name}.base_layer"] = style
    return left


def _product(
    after: Callable[[Tensor], Tensor] = itself, gradient: Sequence[Placement] | None = None
) -> Any:
    """Return the forward pass of an adapter's matrix. gradient: the layout of its gradient."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.to_local() if isinstance(x, DTensor) else x  # with sequence parallelism
        return after(linear(x, self.weight.to_local(grad_placements=gradient)))

    return forward


def _place(matrix: nn.Module, mesh: Any, placement: Placement, forward: Any) -> None:
    _spread(matrix, mesh, placement)
    matrix.forward = types.MethodType(forward, matrix)
