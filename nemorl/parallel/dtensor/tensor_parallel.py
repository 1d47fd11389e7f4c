"""Tensor parallelism of a Hugging Face decoder: the dim along which each weight is cut, and the
layout of activations between modules.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nemorl.models.causal_lm import head_of, is_scalar
from nemorl.parallel.dtensor.lora_parallel import spread_adapters
from nemorl.parallel.dtensor.titan import NoParallel


def is_tied(model: Any) -> bool:
    """Return whether input and output embeddings are one parameter."""
    return head_of(model).weight is model.get_input_embeddings().weight


def apply_tensor_parallel(model: Any, mesh: Any, *, sequence_parallel: bool) -> None:
    """Split each layer over the mesh, in place, by Megatron's scheme.

    The output layer is cut along the vocabulary and does its own communication (`head.py`); a
    scalar head is whole on each rank. The model's inputs are the same on all ranks.

    sequence_parallel: split norms and residuals over tokens.
    """
    decoder, head, tied = model.get_decoder(), head_of(model), is_tied(model)
    # The embedding's output stays whole, because the model makes its positions from its shape; the
    # first layer cuts it.
    outer: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "norm": _norm(sequence_parallel),
    }
    if sequence_parallel:
        outer["layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    parallelize_module(decoder, mesh, outer)
    for layer in decoder.layers:
        plan = layer_plan(layer, sequence_parallel=sequence_parallel)
        parallelize_module(layer, mesh, spread_adapters(layer, mesh, plan))
    # The embedding gives an asynchronous tensor, and a compiled layer that begins with one drops
    # its gradient (torch 2.13).
    decoder.embed_tokens.register_forward_hook(lambda module, inputs, output: output.clone())
    if tied:  # parallelize_module has made a new parameter of the embedding's
        head.weight = decoder.embed_tokens.weight
        return
    placement = Replicate() if is_scalar(model) else Shard(0)
    for name, parameter in list(head.named_parameters()):
        spread = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        setattr(head, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def layer_plan(layer: Any, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Return the plan of one decoder layer: heads and the feed-forward's width are cut."""
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[name] = RowwiseParallel(output_layouts=between)
    for name in ("input_layernorm", "post_attention_layernorm"):
        plan[name] = _norm(sequence_parallel)
    if sequence_parallel:
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    if hasattr(layer.self_attn, "q_norm"):  # one weight for all heads, of which each rank has some
        for name in ("q_norm", "k_norm"):
            plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def _norm(sequence_parallel: bool) -> ParallelStyle:
    """Return a style with the weight on the mesh, over which the gradient norm is taken."""
    if sequence_parallel:
        return SequenceParallel(use_local_output=True)
    return NoParallel(input_layout=Replicate(), use_local_output=True)
