"""What parity does not see of routers: what is recorded, and what is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.experts import require_routes
from nemorl.parallel.megatron.routing import Routes
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.ways import LENGTHS, start
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model


def of_reference(folder: Path, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    trainer = TrainerConfig(device="cpu", router_replay=True)
    backend = start("ep 2", folder, trainer=trainer, keep_reference=True)
    found = backend.get_reference_logprobs(batch).values, backend.get_logprobs(batch).values
    with pytest.raises(ValueError, match="routed_experts must be in every batch"):
        backend.get_logprobs(random_batch(LENGTHS))
    with pytest.raises(ValueError, match="routed_experts must be in every batch"):
        backend.train_step(random_batch(LENGTHS), nll_loss)
    backend.shutdown()
    return found


@pytest.mark.slow
def test_the_reference_model_chooses_its_own_experts(tmp_path: Path):
    model, batch = tiny_model("mixtral", scale=2.0), random_batch(LENGTHS)
    model.save_pretrained(tmp_path)
    experts = torch.tensor([0, 1]).expand(*batch.input_ids.shape, 2, 2).to(torch.int16)
    given = replace(batch, routed_experts=experts)
    for reference, policy in run_ranks(2, of_reference, tmp_path, given):
        for row, length in enumerate(LENGTHS):
            ids = batch.input_ids[row : row + 1, :length]
            with torch.no_grad():
                logprobs = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            expected = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(reference[row, 1:length], expected, atol=2e-6, rtol=0)
        assert (reference - policy).abs().max() > 0.01


def test_given_experts_are_taken_and_weighted_by_their_scores():
    routes, scores = Routes(), torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.4, 0.3, 0.2, 0.1]])
    routes.given = torch.tensor([[3, 0], [-1, -1]], dtype=torch.int16)

    def largest(scores: Tensor, topk: int, **_: object) -> tuple[Tensor, Tensor]:
        found = scores.topk(topk, -1)
        return found.values, found.indices

    found, experts = routes.get_replay_topk(scores, 2, None, None, largest)
    assert experts.tolist() == [[3, 0], [0, 1]]
    assert torch.equal(found, torch.tensor([[0.0, 0.1], [0.4, 0.3]]))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, r"routed_experts must be in every batch with trainer.router_replay, but it is None"),
        (torch.zeros(1, 4, 3, 2), r"must be \[batch, seq, \*\(2, 2\)\].* it is \(1, 4, 3, 2\)"),
        (torch.full((1, 4, 2, 2), 8), r"must be numbers of the model's 8 experts, .* it is 8"),
    ],
)
def test_batches_that_do_not_fit_the_model(experts: Tensor | None, message: str):
    model = SimpleNamespace(num_experts_per_tok=2, num_local_experts=8)
    batch = random_batch([4])
    if experts is not None:
        batch = replace(batch, routed_experts=experts.to(torch.int16))
    with pytest.raises(ValueError, match=message):
        require_routes(batch, model, layers=2)
