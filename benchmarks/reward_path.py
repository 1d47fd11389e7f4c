"""Follow one reward from the function that gives it to the gradient, and count the code on its way.

Runs one GRPO step of a tiny model and records every function of nemorl that is called between the
first reward and the end of the optimizer step. Prints lines and files, room by room.
"""

import inspect
import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from common import command, quiet, save_model

import nemorl

ROOT = Path(nemorl.__file__).parent
NOT_ON_THE_WAY = ("runtime/run", "runtime/store", "runtime/watch")


@dataclass(frozen=True)
class Options:
    """Count the code on a reward's way to the gradient."""


def called_after_first_reward() -> set[CodeType]:
    """Return the code of nemorl that one training step runs from the first reward on."""
    found: set[CodeType] = set()
    rewarded = 0

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and rewarded and frame.f_code.co_filename.startswith(str(ROOT)):
            found.add(frame.f_code)

    def reward(prompt: str, response: str, answer: str) -> float:
        nonlocal rewarded
        rewarded += 1
        return float(rewarded % 2)  # equal ones within a group would teach nothing: no step

    class Stop(nemorl.Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            sys.setprofile(None)
            threading.setprofile(None)
            assert metrics["grad_norm"] > 0, metrics

    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        sys.setprofile(watch)
        threading.setprofile(watch)  # rewards are called in a thread
        nemorl.train(
            model=folder,
            dataset=[{"prompt": "t2 t3", "answer": "t4"}] * 4,
            reward_fn=reward,
            callbacks=[Stop()],
            model__tokenizer=f"{folder}/tokenizer",
            max_num_steps=1,
            num_prompts_per_step=4,
            num_generations_per_prompt=4,
            max_new_tokens=4,
            run={"dir": f"{folder}/run", "display": "none", "plots": False, "export": False},
        )
    return found


def main(options: Options) -> None:
    quiet()
    lines: dict[str, int] = defaultdict(int)
    files: dict[str, set[str]] = defaultdict(set)
    for code in called_after_first_reward():
        path = Path(code.co_filename).relative_to(ROOT)
        room = "/".join(path.parts[: 2 if path.parts[0] == "runtime" else 1])
        if room not in NOT_ON_THE_WAY and not code.co_name.startswith("<"):
            lines[room] += len(inspect.getsourcelines(code)[0])
            files[room].add(str(path))
    for room in sorted(lines):
        print(f"{room:20} {lines[room]:5} lines in {len(files[room]):2} files")
    count = sum(map(len, files.values()))
    print(f"from the sampler to the gradient: {sum(lines.values())} lines in {count} files")


if __name__ == "__main__":
    command(main, Options)
