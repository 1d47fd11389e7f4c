"""An example that is killed amid a step: python -m tests.killed_script NAME STEP FLAGS…"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle

import nemorl
from nemorl.runtime.run.loop import Step
from tests.examples import load_example
from tests.runtime.runs import lines, numbers


def start(name: str, flags: list[str]) -> list[dict[str, Any]]:
    """Run an example and return the lines of its metrics."""
    module = load_example(name)
    cloudpickle.register_pickle_by_value(module)  # as what a script itself defines
    config = nemorl.cli(module.main.__annotations__["config"], flags)
    module.main(config)
    return [numbers(line) for line in lines(Path(config.run.dir), "metrics.jsonl")]


def main(name: str, last: str, *flags: str) -> None:
    log = Step.log

    def dying(self: Step, *args: Any, **kwargs: Any) -> None:
        log(self, *args, **kwargs)
        if self.number == int(last):
            os.kill(os.getpid(), signal.SIGKILL)

    Step.log = dying  # type: ignore[method-assign]
    start(name, list(flags))


if __name__ == "__main__":
    main(*sys.argv[1:])
