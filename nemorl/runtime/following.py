"""What torchrun's processes other than rank 0 do: they serve it with their parts of the model, and leave it to speak."""

import os
import time
from typing import TYPE_CHECKING

from nemorl.runtime.config import BaseConfig

if TYPE_CHECKING:
    from nemorl.runtime.result import TrainResult

FAREWELL_S = 10.0
"""torchrun ends all processes as soon as one has failed, which should be the one that tells why."""


class FollowedRunFailed(SystemExit):
    """The run that this process had a part in has ended with an error on rank 0, which tells it. Uncaught it ends the process without a word."""

    def __init__(self) -> None:
        super().__init__(1)


def follows() -> bool:
    """Whether this is one of torchrun's processes, but not rank 0."""
    if "RANK" not in os.environ:
        return False
    from nemorl.runtime.training.make import is_follower

    return is_follower()


def wait_for_rank_zero() -> None:
    """Give rank 0 the time to fail first, as it does where all ranks are told the same nonsense; this process is ended meanwhile."""
    time.sleep(FAREWELL_S)


def follow(config: BaseConfig) -> "TrainResult":
    """Serve rank 0 until its run is over, and return what the run returned there. Raises FollowedRunFailed."""
    from nemorl.runtime.training.make import serve_as_follower

    result = serve_as_follower(config.trainer.backend, config.runtime.timeout_s, device=config.trainer.device)
    if result is None:
        wait_for_rank_zero()
        raise FollowedRunFailed
    return result
