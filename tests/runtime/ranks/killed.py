"""One rank of a run, which may be killed: python -m tests.runtime.ranks.killed POINT ARGUMENTS…

POINT: "" or RANK:METHOD:N:WHEN. 1:train_step:2:before kills rank 1 before the trainer's second call
of train_step.
ARGUMENTS: those of `nemorl`.
"""

import os
import signal
import sys
from typing import Any

from nemorl.runtime.cli import main as cli
from nemorl.runtime.ranks.rank import Rank


def die_at(method: str, number: int, when: str) -> None:
    """Kill this process before or after this call of the trainer's."""
    do, calls = Rank.do, 0

    def dying(self: Rank, name: str, *call: Any) -> Any:
        nonlocal calls
        calls += name == method
        here = name == method and calls == number
        if here and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        value = do(self, name, *call)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    Rank.do = dying  # type: ignore[method-assign]


def main(point: str, *arguments: str) -> int:
    if point:
        rank, method, number, when = point.split(":")
        if os.environ["RANK"] == rank:
            die_at(method, int(number), when)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
