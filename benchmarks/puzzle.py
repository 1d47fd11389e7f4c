"""What a model that knows nothing learns of sliding puzzles: examples/puzzle.py for several seeds.

    python benchmarks/puzzle.py [--small]

The baseline is the same model before training, on the same boards, in the same run.
"""

import runpy
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import command, quiet, silence

EXAMPLE = Path(__file__).parent.parent / "examples" / "puzzle.py"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is trained."""

    sizes: tuple[int, ...] = (2, 3)
    """2: 2x2; 3: 3x3."""
    seeds: int = 3
    """Runs of each size, of seeds 0, 1, …"""
    steps: int | None = None
    """Steps of each run. Default: the example's."""


def main(options: Options) -> None:
    quiet()
    train = runpy.run_path(str(EXAMPLE))["main"]
    steps = {} if options.steps is None else {"steps": options.steps}
    print("| puzzle | seed | held out, before | after | trained on, before | after | CPU seconds |")
    print("|---|---|---|---|---|---|---|")
    for size in options.sizes:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder, silence():
                start = time.process_time()
                shares = train(size=size, seed=seed, dir=f"{folder}/run", **steps)
                seconds = time.process_time() - start
            held_out, others, *after = shares
            cells = [f"{share:.2f}" for share in (held_out, after[0], others, after[1])]
            print(f"| {size}×{size} | {seed} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    command(main, Options, sizes=(2,), seeds=1, steps=1)
