"""What ranks are sent arrives as it was."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from nemorl.losses.logprobs import LogprobKind, Logprobs
from nemorl.losses.types import Mean, finalize
from nemorl.runtime.ranks.rank import dumps, loads
from tests.parallel.batches import random_batch


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3), (4, 1, 2)])
def test_tensors_arrive_bit_for_bit(dtype, shape):
    tensor = (torch.rand(shape) * 4).to(dtype)
    arrived = loads(dumps(tensor))
    assert arrived.dtype == dtype and arrived.shape == tensor.shape
    assert torch.equal(arrived.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    arrived.fill_(1)  # it may be written to


def test_views_arrive_as_what_they_show():
    tensor = torch.arange(12.0, requires_grad=True).view(3, 4).t()[1:]
    arrived = loads(dumps({"deep": [tensor]}))["deep"][0]
    assert torch.equal(arrived, tensor) and not arrived.requires_grad
    assert len(dumps(torch.zeros(1_000_000)[:2])[0]) < 1000, "what is not shown stays at home"


def test_batches_logprobs_and_metrics_arrive():
    batch = random_batch([3, 5])
    versions = torch.where(batch.loss_mask, 2**40, -1)
    batch = replace(batch, policy_versions=versions)
    arrived = loads(dumps(batch))
    assert torch.equal(arrived.policy_versions, versions)
    assert torch.equal(arrived.input_ids, batch.input_ids) and torch.equal(
        arrived.loss_weights, batch.loss_weights
    )
    logprobs = loads(dumps(Logprobs(torch.ones(1, 2), LogprobKind(temperature=0.5))))
    assert logprobs.kind.temperature == 0.5 and logprobs.values.sum() == 2
    assert finalize(loads(dumps({"x": Mean(torch.tensor(3.0), torch.tensor(2.0))}))) == {"x": 1.5}


@pytest.mark.slow
def test_functions_of_a_script_arrive_where_it_is_not_known():
    script = (
        "import sys; from nemorl.runtime.ranks.rank import dumps; f = lambda x: 2 * x;"
        " sys.stdout.buffer.write(dumps(lambda x: f(x) + 1)[0])"
    )
    data = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    assert loads([data])(10) == 21
