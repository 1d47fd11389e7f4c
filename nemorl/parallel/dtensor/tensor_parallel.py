"""Tensor parallelism of a Hugging Face decoder: which weight is cut along which dim, and in which
layout activations pass from module to module.
"""

from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nemorl.parallel.dtensor.titan import NoParallel

KNOWN_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"}
"""Of Hugging Face's own tensor-parallel plans: a model that needs another style has a layer that
the plan below does not know.
"""


def is_tied(model: Any) -> bool:
    """Whether input and output embeddings are one parameter."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def apply_tensor_parallel(model: Any, mesh: Any, *, sequence_parallel: bool) -> None:
    """Split every layer over the mesh, in place (Megatron's scheme; with `sequence_parallel` norms
    and residuals are split over tokens).

    The output layer is cut along the vocabulary, and does its own communication (see `head.py`).
    What enters the model is the same on all ranks. Raises ValueError for a model whose layers are
    not those of a plain decoder.
    """
    styles = set((model.config.base_model_tp_plan or {}).values())
    if not styles or styles - KNOWN_STYLES:
        raise ValueError(
            f"parallel.tp must be 1 for a {model.config.model_type} model, whose layers are split"
            " in ways that are not known here"
            f" ({', '.join(sorted(styles - KNOWN_STYLES)) or 'it has no plan'}): use"
            " parallel.dp_shard or parallel.cp"
        )
    tied, decoder = is_tied(model), model.get_decoder()
    between = Shard(1) if sequence_parallel else Replicate()
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
    parallelize_module(model.get_output_embeddings(), mesh, ColwiseParallel(), src_data_rank=None)
    for hooks in (
        model.get_output_embeddings()._forward_hooks,
        model.get_output_embeddings()._forward_pre_hooks,
    ):
        hooks.clear()
    for layer in decoder.layers:
        parallelize_module(
            layer, mesh, layer_plan(layer, between, sequence_parallel=sequence_parallel)
        )
    # The embedding gives an asynchronous tensor, and a compiled layer that begins with one drops
    # its gradient (torch 2.13).
    decoder.embed_tokens.register_forward_hook(lambda module, inputs, output: output.clone())
    if tied:  # parallelize_module makes two parameters of the one
        model.get_output_embeddings().weight = decoder.embed_tokens.weight


def layer_plan(layer: Any, between: Any, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Of one decoder layer: heads and the feed-forward's width are cut, `between` is the layout of
    what passes between its halves.
    """
    plan: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {
        name: RowwiseParallel(output_layouts=between)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    plan |= {
        name: _norm(sequence_parallel) for name in ("input_layernorm", "post_attention_layernorm")
    }
    if sequence_parallel:
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    if hasattr(layer.self_attn, "q_norm"):  # one weight for all heads, of which each rank has some
        plan |= {
            f"self_attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True)
            for name in ("q_norm", "k_norm")
        }
    return plan


def _norm(sequence_parallel: bool) -> ParallelStyle:
    """Its weight is on the mesh in either case, or the norm of all gradients could not be taken
    over it.
    """
    return (
        SequenceParallel(use_local_output=True)
        if sequence_parallel
        else NoParallel(input_layout=Replicate(), use_local_output=True)
    )
