"""All that we take from megatron-core, which nothing else imports; and any other device where it
asks for CUDA. On a GPU of CUDA nothing is changed.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

# Advice to install Transformer Engine and Apex, and what newer versions of PyTorch deprecate, which
# is said there, or where `runtime` passes on a call.
warnings.filterwarnings("ignore", module=r"(nemorl\.parallel\.)?megatron\.")
for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
    warnings.filterwarnings("ignore", rf".*{name}. is deprecated", FutureWarning)

try:
    from megatron.core import parallel_state as parallel_state
    from megatron.core.distributed import DistributedDataParallel as DistributedDataParallel
    from megatron.core.distributed import (
        DistributedDataParallelConfig as DistributedDataParallelConfig,
    )
    from megatron.core.distributed import finalize_model_grads as finalize_model_grads
    from megatron.core.models.gpt import GPTModel as GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec as get_gpt_layer_local_spec,
    )
    from megatron.core.optimizer import OptimizerConfig as OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import (
        DistributedOptimizer as DistributedOptimizer,
    )
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer as MixedPrecisionOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams as PackedSeqParams
    from megatron.core.pipeline_parallel import (
        get_forward_backward_func as get_forward_backward_func,
    )
    from megatron.core.tensor_parallel import random as random
    from megatron.core.transformer import TransformerConfig as TransformerConfig
    from megatron.core.transformer.module import MegatronModule as MegatronModule
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe import token_dispatcher as token_dispatcher
    from megatron.core.transformer.moe.router import TopKRouter as TopKRouter
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules as TransformerBlockSubmodules,
    )
except ImportError as error:
    raise ValueError(
        f"trainer.backend megatron needs megatron-core, which can't be imported ({error}): pip"
        " install 'nemorl[megatron]'"
    ) from error

# megatron-core 0.16.1 lacks the name where there is no Transformer Engine, and asks for it.
vars(moe_utils).setdefault("te_general_gemm", None)
# It logs the settings of every model.
logging.getLogger("megatron.core").setLevel(logging.WARNING)


class _CudaIs(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{func(*args).rpartition('.')[2]}"
        if kwargs and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **(kwargs or {}))


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _splits(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.cpu().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def runtime(device: torch.device) -> Iterator[None]:
    """Run megatron-core's functions in the block on this device; models have no dropout."""
    with ExitStack() as stack:
        if device.type != "cuda":
            for place, name, function in (
                (torch.cuda, "current_device", lambda: device),
                (torch.cuda, "synchronize", lambda *_: None),
                (torch.cuda, "Stream", _Stream),
                (torch.cuda, "current_stream", _Stream),
                (torch.cuda, "stream", lambda _: nullcontext()),
                (token_dispatcher, "maybe_move_tensor_to_cpu", _splits),
                (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
                (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
            ):
                stack.enter_context(patch.object(place, name, function))
            stack.enter_context(_CudaIs(device))
        yield
