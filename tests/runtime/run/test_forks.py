"""A fork of the process that trains comes back from the user's code: it ends and writes nothing."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.runtime.runs import lines

ROOT = Path(__file__).parents[3]
RUN = """
import os, signal, sys
from nemorl.runtime.watch.callbacks import Callback
from tests.runtime import runs

def returns_twice():
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # one that goes on may hang in torch, whose threads it lacks
    else:
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

def forking(prompt, response, calls=[]):
    calls.append(response)
    if len(calls) == 30:  # in step 2
        returns_twice()
        if len(sys.argv) > 3 and os.getppid() == parent:
            sys.exit("like this")
    return runs.digits(prompt, response)

class Forking(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 2:
            returns_twice()

algorithm, folder, parent = sys.argv[1], sys.argv[2], os.getpid()
config = getattr(runs, f"{algorithm}_config")(folder, steps=3, run={"save_period": 1})
if algorithm == "grpo":
    runs.start(config, reward=forking)
else:
    runs.start(config, callbacks=[Forking()])
"""


@pytest.mark.parametrize("arguments", [("sft",), ("grpo",), ("grpo", "child exits")], ids=" ".join)
def test_a_fork_that_returns_ends_and_touches_nothing(tmp_path, forked, arguments):
    algorithm, *more = arguments
    folder = tmp_path / "run"
    script = tmp_path / "script.py"
    script.write_text(RUN)
    command = [forked / "python", script, algorithm, folder, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("child 1") == 1
    assert done.stderr.count(f", whose run writes {folder}, and came back from a reward") == 1
    assert [line["step"] for line in lines(folder, "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert {path.name for path in (folder / "checkpoints").glob("step_*")} == {"step_2", "step_3"}
    assert not [*folder.rglob(".tmp-*")]
