"""Training backends with no more than the methods that the description names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nemorl
from nemorl.data import collate, to_examples
from nemorl.losses import token_mean_weights
from nemorl.losses.types import Sum, finalize
from nemorl.parallel.backend import ForwardOutput, Output, TrainingBackend, as_training_backend
from nemorl.parallel.config import BackendConfig
from nemorl.runtime.algorithms import sft
from nemorl.runtime.run import devices, registry
from tests.runtime.runs import (
    addition_rows,
    digits,
    dpo_config,
    grpo_config,
    numbers,
    of_phase,
    preference_rows,
    saved_model,
    sft_config,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

TRAIN = nemorl.TrainerConfig(backend="small", device="cpu")


class Small:
    """Plain torch: the whole batch at once, SGD, and nothing that is not needed."""

    def setup(self, config):
        torch.manual_seed(config.seed)
        self.network = tiny_model(scale=2.0)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=config.optimizer.lr)

    def logprobs(self, batch):
        ids = batch.input_ids
        logits = self.network(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        found = logits.gather(-1, ids[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(found, (1, 0))

    def train_step(self, batch, loss_fn):
        self.optimizer.zero_grad()
        found = self.logprobs(batch)
        output = loss_fn(ForwardOutput(found), batch)
        output.loss.backward()
        self.optimizer.step()
        return {"loss": float(output.loss), **finalize(output.metrics)}

    def get_logprobs(self, batch):
        with torch.no_grad():
            return self.logprobs(batch)

    def save_checkpoint(self, path):
        torch.save(self.network.state_dict(), Path(path) / "weights.pt")

    def load_checkpoint(self, path):
        self.network.load_state_dict(torch.load(Path(path) / "weights.pt"))

    def shutdown(self):
        self.network = None


class Derived(Small, TrainingBackend):
    """Also where the other methods are there, but do nothing."""

    def __init__(self):
        pass


@pytest.fixture(params=[Small, Derived])
def registered(request, monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.setattr(registry, "TRAINING_BACKENDS", dict(registry.TRAINING_BACKENDS))
    return nemorl.register_training_backend("small")(request.param)


def test_by_its_name(registered: type, tmp_path: Path):
    backend, other = (nemorl.get_training_backend("small") for _ in range(2))
    for each in (backend, other):
        each.setup(BackendConfig(optimizer=nemorl.OptimizerConfig(lr=0.1)))
    examples = to_examples(addition_rows(4), tiny_tokenizer())
    batch = collate(examples)
    batch = replace(batch, loss_weights=token_mean_weights(batch.loss_mask))
    before = backend.get_logprobs(batch)
    assert before.kind == batch.logprob_kind and backend.step == 0
    assert backend.train_step(batch, sft.loss_fn)["loss"] > 0 and backend.step == 1
    after = backend.get_logprobs(batch)
    assert not torch.equal(after.values, before.values)
    backend.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert other.step == 1 and torch.equal(other.get_logprobs(batch).values, after.values)
    with pytest.raises(AttributeError, match=r"training backend \w+ has no forward_backward\(\)"):
        backend.forward_backward(batch, sft.loss_fn)
    backend.shutdown()
    with pytest.raises(ValueError, match="can't be made with a loaded model: name the model's fol"):
        nemorl.get_training_backend("small", tiny_model())


def test_plain_metrics_become_an_output():
    class Accumulates(Small):
        def forward_backward(self, batch, loss_fn):
            return batch

    metrics = {"loss": Sum(torch.ones(()))}
    output = as_training_backend(Accumulates()).forward_backward(metrics, None)
    assert output == Output(metrics) and output.token_logprobs is None


def run(config, folder: Path, **given):
    model = nemorl.ModelConfig(path=str(saved_model(folder / "model")))
    return nemorl.run(replace(config, model=model), **given)


def test_sft_and_dpo_run_and_resume(registered, tmp_path: Path):
    sft = sft_config(tmp_path / "sft", trainer=TRAIN, steps=6)
    rows = [{"prompt": row["prompt"], "response": row["response"]} for row in addition_rows()]
    whole = run(sft, tmp_path, train=rows, validation=rows[:4])
    losses = [line["loss"] for line in of_phase(whole, "train")]
    assert losses[-1] < losses[0]
    dpo = {"loss": nemorl.SimPOLoss(), "trainer": TRAIN}
    assert run(dpo_config(tmp_path / "dpo", **dpo), tmp_path, train=preference_rows(20)).metrics
    half = sft_config(tmp_path / "half", trainer=TRAIN, steps=3)
    run(half, tmp_path, train=rows)
    again = sft_config(tmp_path / "half", trainer=TRAIN, steps=6, run={"resume": True})
    resumed = run(again, tmp_path, train=rows)
    lines = [list(map(numbers, of_phase(each, "train"))) for each in (resumed, whole)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("dp_shard", [1, 2])
def test_what_a_run_needs_besides_is_said_before_it_starts(
    registered, dp_shard: int, tmp_path: Path, monkeypatch
):
    rows = addition_rows(4)
    options = {"trainer": TRAIN, "parallel": nemorl.ParallelPlan(dp_shard=dp_shard)}
    with pytest.raises(ValueError, match="must have the method get_reference_logprobs for the"):
        run(dpo_config(tmp_path / "dpo", **options), tmp_path, train=preference_rows(4))
    monkeypatch.setattr(devices, "_num_gpus", lambda *_: 2)
    options["trainer"] = nemorl.TrainerConfig(backend="small", offload_during_generation=True)
    with pytest.raises(ValueError, match=r"method offload for trainer.offload_during"):
        run(grpo_config(tmp_path / "grpo", **options), tmp_path, train=rows, reward=digits)
