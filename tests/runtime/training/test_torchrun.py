"""Ranks that torchrun has started: what users see of a job."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.cluster.processes import soon_gone


def torchrun(what: str, folder: Path, *, timeout_s: float = 300) -> tuple[int, str]:
    """The exit code of a job of two processes, and what it said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.runtime.training.job", what, str(folder)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    return done.returncode, done.stdout + done.stderr


def test_the_others_follow_rank_zero(model_folder: Path):
    code, said = torchrun("everything", model_folder)
    assert code == 0, said
    assert said.count("did everything") == 2 and "farewell of run 0" in said and "farewell of run 1" in said
    assert "Traceback" not in said.replace("in worker", ""), "what rank 0 has caught is nobody's business"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raising_alone", r"rank 1 \(process \d+ on \S+\) failed alone in train_step after 0 .*:\nTraceback(.*\n)+ZeroDivisionError: only here"),
        ("asleep", r"rank 1 \(process \d+ on \S+\) hung in train_step after 0 optimizer steps: no answer within 3 s. What every rank was doing:\n"
                   r"  rank 0 .*: \d\.\d s in train_step, after 0 .*torch/distributed/.*\n  rank 1 .* asleep < "),
        pytest.param("stopped", r"rank 1 \(process \d+ on \S+\) hung in train_step(.*\n)+.*it does not even say what it is doing",
                     marks=pytest.mark.slow),
        pytest.param("killed", r"exitcode *: -9", marks=pytest.mark.slow),
        ("raising", r"FloatingPointError: the loss must be finite, but it is nan on rank 0"),
    ],
    ids=["raising_alone", "asleep", "stopped", "killed", "raising"],
)  # fmt: skip
def test_a_job_that_fails_ends_and_says_why(model_folder: Path, what: str, told: str):
    code, said = torchrun(what, model_folder)
    assert code == 1 and re.search(told, said), said
    assert soon_gone(*map(int, re.findall(r"follower (\d+)", said)))
