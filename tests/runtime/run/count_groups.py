"""Counts what became of each prompt of a run, from its files alone: it imports nothing of nemorl.

python tests/runtime/run/count_groups.py RUN
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def count(folder: Path) -> dict[str, Any]:
    """Return lost and doubled groups, groups in samples/ that no step trained on, and the prompt of
    each group in the order in which steps trained on them.
    """
    lines = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    trained = [(line["step"], number) for line in lines for number in line["trained"]]
    dropped = [number for line in lines for each in line["dropped"].values() for number in each]
    taken = Counter([*(number for _, number in trained), *dropped, *lines[-1]["open"]])
    samples = {
        (int(file.stem.removeprefix("step_")), sample["group"]): sample["prompt"]
        for file in (folder / "samples").iterdir()
        for sample in map(json.loads, file.read_text().splitlines())
        if "failure" not in sample
    }
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": len(lines),
        "of": sum(line["phase"] == "train" for line in metrics),
        "lost": [number for number in range(max(taken) + 1) if not taken[number]],
        "doubled": [number for number, times in taken.items() if times > 1],
        "untold": sorted({*samples} ^ {*trained}),
        "prompts": [(*place, samples.get(place)) for place in trained],
    }


if __name__ == "__main__":
    found = count(Path(sys.argv[1]))
    print({name: value for name, value in found.items() if name != "prompts"})
    sys.exit(bool(found["lost"] or found["doubled"]))
