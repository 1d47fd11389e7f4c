"""megatron-core's distributed optimizer: each data parallel rank has a share of AdamW's state."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from nemorl.parallel.accumulation import make_adamw
from nemorl.parallel.config import OptimizerConfig
from nemorl.parallel.megatron import core
from nemorl.parallel.world import DTYPES, World


class ShardedAdamW:
    """AdamW of a rank's stages, of whose parameters it has spans in float32.

    The spans of the ranks with the same stages (data and context parallel ones) make up each
    parameter. Gradients are summed over these ranks, never divided.
    """

    def __init__(self, stages: nn.ModuleList, config: OptimizerConfig, world: World) -> None:
        self.config, self.device = config, world.device
        settings = core.DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=world.plan.reduce_dtype == "float32",
            overlap_grad_reduce=world.plan.overlap_grad_reduce,
            overlap_param_gather=world.plan.overlap_param_gather,
            align_param_gather=True,  # `step` starts it
        )
        self.models = [
            core.DistributedDataParallel(stage.config, settings, stage) for stage in stages
        ]
        self._reductions: list[InOrder] = []
        if world.plan.overlap_grad_reduce:
            backward = self.models[::-1]
            # With process groups of their own.
            self._reductions = [
                InOrder([group for model in backward for group in model.bucket_groups]),
                InOrder([each for m in backward for each in m.expert_parallel_bucket_groups]),
            ]
        self._gathered: list[Any] = []
        """Groups of buckets to gather until their modules are called, in the order of a forward
        pass (`overlap_param_gather`).
        """
        if world.plan.overlap_param_gather:
            # megatron-core makes buckets from the last layer to the first.
            self._gathered = [
                group
                for model in self.models
                for groups in (model.bucket_groups, model.expert_parallel_bucket_groups)
                for group in reversed(groups)
            ]
        self._skip_gathering()
        dtype = DTYPES[world.plan.precision]
        self._settings = core.OptimizerConfig(
            bf16=dtype == torch.bfloat16, params_dtype=dtype, use_distributed_optimizer=True
        )
        state = core.parallel_state
        shared = state.get_data_parallel_group(with_context_parallel=True)
        self.parts = [self._part([model.buffers for model in self.models], shared)]
        experts = [model.expert_parallel_buffers for model in self.models]
        if any(experts):  # each is on fewer ranks
            self.parts.append(self._part(experts, state.get_expert_data_parallel_group()))

    def _part(self, buffers: list[list[Any]], group: dist.ProcessGroup) -> Any:
        parameters = nn.ParameterList(
            each for own in buffers for buffer in own for each in buffer.param_index_map
        )
        # In the order of its arguments: AdamW, settings, grad_scaler, init_state_fn.
        part = core.DistributedOptimizer(
            make_adamw(parameters, self.config),
            self._settings,
            None,
            None,
            model_chunks=self.models,
            per_model_buffers=dict(enumerate(buffers)),
            data_parallel_group=group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
        part.tp_group = core.parallel_state.get_tensor_model_parallel_group()
        return part

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def part(self, parameter: nn.Parameter) -> Any:
        return self.parts[0 if getattr(parameter, "allreduce", True) else -1]

    def adding(self, *, last: bool) -> AbstractContextManager[Any]:
        """Let a schedule add gradients in the block, the last ones of a step or not."""
        if not self._reductions:
            return nullcontext()
        settings = self.models[0].config
        return patch.object(settings, "no_sync_func", self._waiting) if last else self._waiting()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.no_sync())
            yield

    @property
    def reducing(self) -> bool:
        return any(
            group.grad_reduce_handle is not None
            for order in self._reductions
            for group in order.groups
        )

    def zero_grad(self) -> None:
        for order in self._reductions:
            order.reset()
        for model in self.models:
            model.restore_grad_buffers(synchronize=False)
            model.zero_grad_buffer()
        for part in self.parts:
            part.zero_grad()

    def free_gradients(self) -> None:
        for model in self.models:
            model.offload_grad_buffers(synchronize=False, empty_cache=False)
        for part in self.parts:
            part.zero_grad()

    def held(self) -> Iterator[Tensor]:
        for model in self.models:
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                yield buffer.grad_data
        for part in self.parts:
            for group in part.param_groups:
                yield from group["params"]
            for state in part.state.values():
                yield from (each for each in state.values() if isinstance(each, Tensor))

    def reduce(self) -> Float[Tensor, ""]:
        """Sum the gradients over ranks, and return the whole norm; a collective call."""
        for order in self._reductions:
            order.start_all()
        core.finalize_model_grads(self.models, None)
        self._skip_gathering()
        squares = torch.zeros((), device=self.device)
        for part in self.parts:
            part.prepare_grads()
            # megatron-core's own norm would wait for each gradient's.
            if own := part.get_main_grads_for_grad_norm():
                squares = squares + nn.utils.get_total_norm(own, foreach=True).square()
        dist.all_reduce(squares)
        return squares.sqrt()

    def step(self, norm: Float[Tensor, ""], limit: float) -> None:
        """Clip the gradient of this norm, and take a step; a collective call."""
        self.wait()
        for part in self.parts:
            if limit < math.inf:
                nn.utils.clip_grads_with_norm_(part.get_parameters(), limit, norm, foreach=True)
        for part in self.parts:
            # Its own step would gather all parameters for each part.
            core.MixedPrecisionOptimizer.step_with_ready_grads(part)
        for each in self._gathered or self.models:
            each.start_param_sync()

    def _skip_gathering(self) -> None:
        """Keep modules from gathering before a step: ranks may call them unequally often."""
        for group in self._gathered:
            group.param_gather_dispatched = True

    def wait(self) -> None:
        """Wait for the last step's parameters, before others than their modules use them."""
        for group in self._gathered:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    def span(self, parameter: nn.Parameter) -> slice | None:
        part = self.part(parameter)
        if parameter not in part.model_param_gbuf_map:
            return None
        found = part._get_model_param_range_map(parameter)["param"]
        return slice(found.start, found.end)

    def main(self, parameter: nn.Parameter) -> Tensor:
        part = self.part(parameter)
        group, index = part.model_param_group_index_map[parameter]
        return part.param_groups[group]["params"][index]

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if self.span(parameter) is None:
            return {}
        return self.part(parameter).state[self.main(parameter)]

    @torch.no_grad()
    def gathered(self, parameter: nn.Parameter, own: Tensor | None) -> Tensor:
        """Return all ranks' spans in the parameter's shape. own: this one's. A collective call."""
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=self.device)
        if (span := self.span(parameter)) is not None and own is not None:
            whole.view(-1)[span] = own
        # As integers: a sum of floats would lose the sign of zero.
        dist.all_reduce(whole.view(torch.int32), group=self.part(parameter).data_parallel_group)
        return whole


class InOrder:
    """Starts to reduce groups of buckets in a step's last microbatch (`overlap_grad_reduce`), each
    once it is ready, in the same order on all ranks. megatron-core would start each as it gets its
    gradients, and none with a parameter that has no gradient.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups, self.starts = groups, [group.start_grad_sync for group in groups]
        self.ready: set[int] = set()
        self.started = 0
        for number, group in enumerate(groups):
            # A backward pass adds to each parameter once. megatron-core would count that in the
            # first step, and fail where a parameter has no gradient.
            group.is_first_batch = False
            group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
            group.start_grad_sync = partial(self.start, number)

    def start(self, number: int, force_all_reduce: bool = False) -> None:
        self.ready.add(number)
        while self.started in self.ready:
            self.starts[self.started](force_all_reduce=force_all_reduce)
            self.started += 1

    def start_all(self) -> None:
        for number in range(self.started, len(self.groups)):
            self.start(number)

    def reset(self) -> None:
        self.ready.clear()
        self.started = 0
