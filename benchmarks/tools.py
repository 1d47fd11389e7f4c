"""What a small model learns about a calculator: examples/tools.py, before and after GRPO.

    python benchmarks/tools.py

Three seeds of the model, of questions and of sampling. Greedy answers to 200 questions that were
not trained on, and samples at temperature 1 of the first and the last step: how many are right, and
calls to a question.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import command, quiet, silence

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How many runs, and how long."""

    seeds: int = 3
    """Runs."""
    sft: int = 400
    """Steps of SFT."""
    grpo: int = 30
    """Steps of GRPO."""


def shown(before: dict[str, Any], after: dict[str, Any]) -> str:
    return "".join(
        f"{before.get(name, 0.0):9.2f} -> {after.get(name, 0.0):4.2f}"
        for name in ("accuracy", "tool_calls")
    )


def main(options: Options) -> None:
    quiet()
    sys.path.insert(0, str(EXAMPLES))
    import tools

    os.chdir(tempfile.mkdtemp())
    print("  seed   greedy: right        calls   samples: right        calls   CPU seconds")
    for seed in range(options.seeds):
        start = time.process_time()
        with silence():
            history = tools.main(seed, options.sft, options.grpo)
        parts = [[x for x in history if x["phase"] == p] for p in ("validation", "train")]
        columns = "".join(shown(part[0], part[-1]) for part in parts)
        print(f"  {seed:<5}{columns}{time.process_time() - start:12.0f}", flush=True)


if __name__ == "__main__":
    command(main, Options, seeds=1, sft=2, grpo=1)
