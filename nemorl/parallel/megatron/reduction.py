"""Gradients that are summed over ranks while the backward pass goes on."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any


class Reduction:
    """Starts to reduce the buckets of megatron-core's models (`overlap_grad_reduce`) in a step's
    last microbatch, where that is known, and in the same order on all ranks.

    megatron-core starts them as they get their gradients, on each rank for itself, and never a
    bucket with a parameter that got no gradient.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self.models = models
        backward = list(reversed(models))
        # Each of the two has process groups of its own.
        self.orders = [
            InOrder([group for model in backward for group in model.bucket_groups]),
            InOrder([group for model in backward for group in model.expert_parallel_bucket_groups]),
        ]

    @contextmanager
    def adding(self, *, last: bool) -> Iterator[None]:
        """Let a schedule add gradients in the block, the last ones of a step or not."""
        config = self.models[0].config
        with ExitStack() as stack:
            if last:
                config.no_sync_func = self._waiting
                stack.callback(setattr, config, "no_sync_func", None)
            else:
                stack.enter_context(self._waiting())
            yield

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Start no reduction in the block."""
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.no_sync())
            yield

    def start(self) -> None:
        """Start the reductions that have not begun yet."""
        for order in self.orders:
            order.start_all()

    @property
    def under_way(self) -> bool:
        """Whether some have begun that nobody has waited for."""
        groups = (group for order in self.orders for group in order.groups)
        return any(group.grad_reduce_handle is not None for group in groups)

    def reset(self) -> None:
        """Forget what was reduced."""
        for order in self.orders:
            order.reset()


class InOrder:
    """Starts the reductions of groups of buckets one after the other, as soon as a group and all
    before it are ready.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups, self.starts = groups, [group.start_grad_sync for group in groups]
        self.ready: set[int] = set()
        self.started = 0
        for number, group in enumerate(groups):
            # How often a backward pass adds to each parameter: once. megatron-core would count it
            # in the first step, and fails where a parameter has no gradient in that step.
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
