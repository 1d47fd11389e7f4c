"""What is broken on purpose: each is one line that a plan needs, left out."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def no_reduction() -> Iterator[None]:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    from nemorl.parallel.megatron.core import DistributedDataParallel

    def own_part(self: Any, output_tensor: Any, input_tensor: Any, group: Any, **_: Any) -> None:
        output_tensor.copy_(input_tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)])

    with (
        patch.object(DefaultReduceScatter, "__call__", own_part),
        patch.object(DistributedDataParallel, "finish_grad_sync"),
    ):
        yield


def no_reduction_over_replicas() -> AbstractContextManager[Any]:
    """HSDP's second reduction is left out."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    functions = {name: getattr(dist, name) for name in dir(dist)}
    functions["all_reduce"] = lambda *_, **__: None
    return patch.object(_fsdp_collectives, "dist", SimpleNamespace(**functions))


@contextmanager
def mean_of_gradients() -> Iterator[None]:
    from torch.distributed.fsdp import FSDPModule

    from nemorl.parallel.megatron.optimizer import ShardedAdamW

    reduce = ShardedAdamW.reduce

    def averaged(self: Any) -> Any:
        for model in self.models:
            model.scale_gradients(1 / self.parts[0].data_parallel_group.size())
        return reduce(self)

    with (
        patch.object(FSDPModule, "set_gradient_divide_factor"),
        patch.object(ShardedAdamW, "reduce", averaged),
    ):
        yield


def no_gradients_of_others(what: str) -> Callable[[], AbstractContextManager[Any]]:

    def broken() -> AbstractContextManager[Any]:
        module = import_module("megatron.core.distributed.finalize_model_grads")
        return patch.object(module, what)

    return broken


@contextmanager
def untied() -> Iterator[None]:
    from nemorl.parallel.dtensor import tensor_parallel

    whole = tensor_parallel.apply_tensor_parallel

    def untying(model: Any, mesh: Any, **options: Any) -> None:
        whole(model, mesh, **options)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    with patch.object(tensor_parallel, "apply_tensor_parallel", untying):
        yield


@contextmanager
def no_packed_mask() -> Iterator[None]:
    """A token sees all that stands before it in its row, whatever sequence that is."""
    from nemorl.parallel import attention, tokens

    with_mask = attention.ContextState.with_bias

    def without_mask(segment_ids: torch.Tensor, position_ids: torch.Tensor, *more: Any) -> Any:
        return with_mask(
            torch.ones_like(segment_ids),
            torch.arange(segment_ids.shape[1]).expand_as(position_ids),
            *more,
        )

    plan, split_plan = tokens.work_of, tokens.split_work

    def without_segments(*given: Any, **options: Any) -> Any:
        return replace(plan(*given, **options | {"share": False}), segments=None)

    def split_without(*given: Any, **options: Any) -> Any:
        return replace(split_plan(*given, **options), segments=None)

    with (
        patch.object(tokens, "work_of", without_segments),
        patch.object(tokens, "split_work", split_without),
        patch.object(attention.ContextState, "with_bias", without_mask),
    ):
        yield


def own_experts() -> AbstractContextManager[Any]:
    from nemorl.parallel.megatron import pipeline

    return patch.object(pipeline, "routes_of", lambda *_, **__: None)


def any_prompt() -> AbstractContextManager[Any]:
    from nemorl.parallel import tokens

    once = tokens.once

    def blind(batch: Any) -> Any:
        return once(replace(batch, input_ids=torch.zeros_like(batch.input_ids)))

    return patch.object(tokens, "once", blind)


@contextmanager
def own_vocabulary_alone() -> Iterator[None]:
    """The gradient of the last hidden states comes from this rank's part of the vocabulary only."""
    from nemorl.parallel import tokens
    from nemorl.parallel.megatron import model

    with (
        patch.object(tokens, "sum_backward", lambda values, _: values),
        patch.object(model, "sum_backward", lambda values, _: values),
    ):
        yield


def counted_by_every_rank() -> AbstractContextManager[Any]:
    """With cp every rank computes the loss of whole rows; here each counts."""
    from nemorl.parallel import tokens, world

    return patch.object(tokens, "all_gather_same", world.all_gather)


SABOTAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the reduction of gradients": no_reduction,
    "the reduction over replicas": no_reduction_over_replicas,
    "the sum of gradients (a mean instead)": mean_of_gradients,
    "the tied weight": untied,
    "the packed mask": no_packed_mask,
    "which prompts are the same": any_prompt,
    "the sampler's experts": own_experts,
    "the gradient of the others' vocabulary": own_vocabulary_alone,
    "counting the loss once": counted_by_every_rank,
    "the gradients of norms": no_gradients_of_others("_allreduce_non_tensor_model_parallel_grads"),
    "the gradient of the other stage's embedding": no_gradients_of_others(
        "_allreduce_word_embedding_grads"
    ),
}
