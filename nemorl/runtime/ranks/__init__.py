"""One training backend on many ranks: Ray actors, or the processes of torchrun.

Others use `trainer.make_trainer` (a `TrainingBackend` for all ranks), `generator.RankedGenerator`
(the same ranks as a `GenerationBackend`), `rank.follow`, and this file's tests for torchrun.
"""

import os
from collections.abc import Mapping


def torchrun_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many processes torchrun, or another launcher that sets RANK and WORLD_SIZE, has
    started; None where this is none of them.

    >>> torchrun_size({"RANK": "1", "WORLD_SIZE": "2"}), torchrun_size({})
    (2, None)
    """
    started = "RANK" in environment and "WORLD_SIZE" in environment
    return int(environment["WORLD_SIZE"]) if started else None


def is_follower(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is a process of torchrun other than rank 0."""
    return torchrun_size(environment) is not None and environment["RANK"] != "0"
