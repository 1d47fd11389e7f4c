"""Parameters that are gathered from ranks while what follows a step goes on."""

from collections.abc import Sequence
from typing import Any


class Gathering:
    """Gathers the buckets of megatron-core's models (`overlap_param_gather`) until a module that is
    called needs them.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        # megatron-core makes buckets from the last layer to the first.
        self.groups = [
            group
            for model in models
            for groups in (model.bucket_groups, model.expert_parallel_bucket_groups)
            for group in reversed(groups)
        ]
        self.skip()

    def start(self) -> None:
        """Start to gather what a step has changed, in the order of a forward pass."""
        for group in self.groups:
            group.start_param_sync()

    def skip(self) -> None:
        """Have modules start nothing by themselves, before the step that changes parameters: ranks
        may call them unequally often.
        """
        for group in self.groups:
            group.param_gather_dispatched = True

    def wait(self) -> None:
        """Wait until all is gathered."""
        for group in self.groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
