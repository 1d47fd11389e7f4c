"""Law 16 for torch.compile:

`fullgraph=True` gives the eager value, gradient and metrics, for every case and each of its
options.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.losses.cases import CASES
from tests.losses.test_negative_controls import UNCOMPILABLE

ROOT = Path(__file__).parent.parent.parent
INDUCTOR = (
    "clipped",
    "gspo",
    "kl_loss score",
    "nll",
    "importance_weights",
    "token_logprobs_and_entropy",
    "distillation",
    "dpo",
)


def _compile(forked: Path, backend: str, *names: str) -> dict[str, str | None]:
    command = [forked / "python", "-m", "tests.losses.compiled", backend, *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line) for line in run.stdout.splitlines())


@pytest.mark.parametrize(
    "half", (0, 1)
)  # one program for many cases, as starting it costs most; two, as the tests run in two processes
def test_every_case_compiles_into_one_graph(forked: Path, half: int):
    names = list(CASES)[half::2]
    assert _compile(forked, "aot_eager", *names) == dict.fromkeys(names)


def test_a_loss_that_waits_for_the_host_is_caught(forked: Path):
    assert all(error for error in _compile(forked, "eager", *UNCOMPILABLE).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_gives_the_eager_result(forked: Path, name: str):
    assert _compile(forked, "inductor", name) == {name: None}
