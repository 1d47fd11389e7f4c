"""An example's loop that is killed amid a step: python -m tests.killed_script NAME STEP FLAGS…"""

import os
import signal
import sys
from typing import Any

import nemorl
from nemorl.runtime.run.loop import Step
from tests.examples import load_example


def config_of(module: Any) -> type:
    return module.main.__annotations__["config"]


def main(name: str, last: str, *flags: str) -> None:
    module, log = load_example(name), Step.log

    def dying(self: Step, *args: Any, **kwargs: Any) -> None:
        log(self, *args, **kwargs)
        if self.number == int(last):
            os.kill(os.getpid(), signal.SIGKILL)

    Step.log = dying  # type: ignore[method-assign]
    module.main(nemorl.cli(config_of(module), flags))


if __name__ == "__main__":
    main(*sys.argv[1:])
