"""An example that is killed amid a step: python -m tests.killed_script NAME STEP FLAGS…"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle

import nemorl
from nemorl.runtime.run.loop import Step
from tests.examples import load_example
from tests.runtime.runs import numbers


def start(name: str, flags: list[str]) -> list[dict[str, Any]]:
    """Run an example and return the lines of its metrics."""
    module = load_example(name)
    cloudpickle.register_pickle_by_value(module)  # as what a script itself defines
    module.main(nemorl.cli(module.main.__annotations__["config"], flags))
    folder = [flag.partition("=")[2] for flag in flags if flag.startswith("--run.dir=")][-1]
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [numbers(json.loads(line)) for line in lines]


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
