"""How long OpenMP's threads spin: set before torch is loaded, or said where it is too late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemorl.openmp import CHOICES
from nemorl.runtime.run import launch

SHOWN = "import json, os, nemorl.openmp as o; print(o.SPINS, json.dumps(o.spinning_variables()))"


def python(code: str, **variables: str) -> str:
    """What a fresh interpreter prints, on either stream."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    command, root = [sys.executable, "-W", "always", "-c", code], Path(__file__).parent.parent
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=root, env={**kept, **variables}
    )
    return (done.stdout + done.stderr).strip()


def test_the_import_sets_it():
    assert python(SHOWN) == 'False {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}'


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("torch_first", [False, True])
def test_what_the_user_has_set_stays(torch_first: bool):
    code = f"import torch; {SHOWN}" if torch_first else SHOWN
    assert python(code, OMP_WAIT_POLICY="active") == 'False {"OMP_WAIT_POLICY": "active"}'
    assert python(code, GOMP_SPINCOUNT="7").startswith('False {"GOMP_SPINCOUNT": "7"')


@pytest.mark.slow
def test_too_late_is_known_and_an_import_says_nothing():
    code = "import torch; from nemorl.losses import clipped; " + SHOWN
    assert python(code) == 'True {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}'


@pytest.mark.parametrize("spins", [True, False])
def test_a_run_says_that_it_was_too_late(monkeypatch, recwarn, spins: bool):
    monkeypatch.setattr(launch, "SPINS", spins)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    launch._warn_of_spinning()
    said = [str(each.message) for each in recwarn]
    assert len(said) == spins
    assert all("import nemorl first, or set GOMP_SPINCOUNT" in each for each in said)
