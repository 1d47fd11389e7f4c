"""All that we take from megatron-core; nothing else imports it."""

import logging
import warnings

# Advice to install Transformer Engine and Apex, and what newer versions of PyTorch deprecate, which
# is said there, or where `without_cuda` passes on a call.
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
