"""Law 16 for torch.compile: `fullgraph=True` gives the eager value, gradient and metrics."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.losses.cases import CASES
from tests.losses.wrong import UNCOMPILABLE

ROOT = Path(__file__).parent.parent.parent
INDUCTOR = (
    "clipped",
    "gspo",
    "kl_loss score",
    "nll",
    "importance_weights",
    "token_logprobs",
    "distillation_topk zero reverse",
    "dpo",
)


def _compile(forked: Path, backend: str, options: str, *names: str) -> dict[str, str | None]:
    command = [forked / "python", "-m", "tests.losses.compiled", backend, options, *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line) for line in run.stdout.splitlines())


def test_every_case_compiles_into_one_graph(forked: Path):
    """With its first option and gradients by eager operations, as tracing these takes longest; one
    program for all cases.
    """
    assert _compile(forked, "eager", "1", *CASES) == dict.fromkeys(CASES)


@pytest.mark.slow
def test_every_option_compiles_into_one_graph(forked: Path):
    assert _compile(forked, "aot_eager", "all", *CASES) == dict.fromkeys(CASES)


def test_a_loss_that_waits_for_the_host_is_caught(forked: Path):
    assert all(error for error in _compile(forked, "eager", "all", *UNCOMPILABLE).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_gives_the_eager_result(forked: Path, name: str):
    assert _compile(forked, "inductor", "all", name) == {name: None}
