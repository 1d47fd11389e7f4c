"""How long one waits: `import nemorl`, `nemorl --help`, `nemorl grpo --help`, and a whole run of
one step from the command line.

    python benchmarks/startup.py

The baselines are what nobody can do without: an empty Python, `import torch`, and loading the model
and tokenizer with transformers. Each is a process of its own; they take turns, and medians count.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import command, saved_model, words


@dataclass(frozen=True, kw_only=True)
class Options:
    """How often."""

    rounds: int = 5
    """Turns of each."""


def main(options: Options) -> None:
    with saved_model() as (folder, _):
        rng = np.random.default_rng(0)
        rows = "".join(
            json.dumps({"prompt": words(16, rng), "answer": "t2"}) + "\n" for _ in range(16)
        )
        (folder / "rows.jsonl").write_text(rows)
        python, nemorl = [sys.executable, "-c"], [sys.executable, "-m", "nemorl.runtime.cli.main"]
        if shutil.which("nemorl", path=str(Path(sys.executable).parent)):
            nemorl = [str(Path(sys.executable).with_name("nemorl"))]
        load = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T"
        tokenizer, run = (
            folder / "model" / "tokenizer",
            ["--run.dir", "RUN", "--run.display", "none", "--max-num-steps", "1"],
        )
        step = [
            *nemorl,
            "grpo",
            *run,
            "--model.path",
            str(folder / "model"),
            "--model.tokenizer",
            str(tokenizer),
            "--data.train",
            str(folder / "rows.jsonl"),
            "--data.max-total-sequence-length",
            "64",
            "--generation.max-new-tokens",
            "8",
            "--num-prompts-per-step",
            "4",
            "--num-generations-per-prompt",
            "4",
        ]
        commands = {
            "python -c pass": [*python, "pass"],
            "import torch": [*python, "import torch"],
            "import transformers' model and tokenizer, load both": [
                *python,
                (
                    f"{load}; M.from_pretrained({str(folder / 'model')!r});"
                    f" T.from_pretrained({str(folder / 'model' / 'tokenizer')!r})"
                ),
            ],
            "import nemorl": [*python, "import nemorl"],
            "import nemorl; nemorl.GRPOConfig": [*python, "import nemorl; nemorl.GRPOConfig"],
            "nemorl --help": [*nemorl, "--help"],
            "nemorl grpo --help": [*nemorl, "grpo", "--help"],
            "nemorl grpo: a run of one step": step,
        }
        seconds: dict[str, list[float]] = {title: [] for title in commands}
        for number in range(options.rounds + 1):
            for title, command in commands.items():
                command = [
                    str(folder / f"run{number}") if part == "RUN" else part for part in command
                ]
                start = time.perf_counter()
                done = subprocess.run(
                    command,
                    capture_output=True,
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                    check=False,
                )
                if done.returncode:
                    raise RuntimeError(f"{title} failed:\n{done.stderr.decode()[-2000:]}")
                if number:  # the first turn fills the file cache
                    seconds[title].append(time.perf_counter() - start)
        base = seconds["import torch"]
        for title, times in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
            print(f"  {title:<52}{statistics.median(times):6.2f} s   {ratio:5.2f} x import torch")


if __name__ == "__main__":
    command(main, Options, rounds=1)
