"""A backend computes what a loss declares that it needs, no more; models with a scalar head."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import nemorl
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput, finalize
from nemorl.losses.value import value_loss
from nemorl.models.causal_lm import load_causal_lm, on_meta
from nemorl.models.tensor_files import as_stored, stored_names
from nemorl.parallel.backend import ForwardOutput
from nemorl.parallel.config import BackendConfig, ModelConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.dtensor.build import load_folder
from nemorl.parallel.megatron.backend import MegatronBackend, source_of
from tests.parallel.batches import ATOL, DEVICE, LAYOUTS, LENGTHS, nll_loss, random_batch
from tests.parallel.saved import exported
from tests.parallel.ways import set_up, weights
from tests.ranks import run_ranks
from tests.tiny_models import tiny_critic, tiny_model

OPTIMIZER = {"max_grad_norm": None, "eps": 1e-4}


def backend(model: Any = None, *, trainer: Any = None, **options: Any) -> DTensorBackend:
    trainer = {"device": DEVICE, **(trainer or {})}
    return set_up(model, trainer=trainer, optimizer=OPTIMIZER, **options)


def critic(model: Any = None, **options: Any) -> DTensorBackend:
    return backend(model or tiny_critic(), head="scalar", **options)


@nemorl.needs(entropy=True)
def with_entropy(output: ForwardOutput, batch: nemorl.TokenBatch) -> LossOutput:
    found = nll_loss(output, batch)
    return replace(found, loss=found.loss - (output.entropy * batch.loss_weights).sum())


@nemorl.needs(values=True)
def regression(output: ForwardOutput, batch: nemorl.TokenBatch) -> LossOutput:
    assert batch.loss_weights is not None
    returns = batch.input_ids / 40.0
    return value_loss(output.values, output.values, returns, batch.loss_weights, clip=None)


def test_a_loss_gets_what_it_declares():
    batch = random_batch(LENGTHS)
    found = backend(tiny_model()).train_step(batch, with_entropy)
    plain = backend(tiny_model()).train_step(batch, nll_loss)
    assert finalize(found)["loss"] < finalize(plain)["loss"] - 1

    def undeclared(output, part):
        return with_entropy(output, part)

    with pytest.raises(AttributeError, match=r"needs entropy: .* @nemorl.needs\(entropy=True\)"):
        backend(tiny_model()).train_step(batch, undeclared)


@nemorl.needs(top_k=2)
def topmost(output: ForwardOutput, batch: nemorl.TokenBatch) -> LossOutput:
    assert batch.loss_weights is not None
    return nll(output.top_logprobs.logsumexp(-1), batch.loss_weights)


@nemorl.needs(targets=True)
def cross_entropy(output: ForwardOutput, batch: nemorl.TokenBatch) -> LossOutput:
    assert batch.loss_weights is not None and batch.target_weights is not None
    each = (output.target_logprobs * batch.target_weights).sum(-1)
    assert torch.equal(each, output.token_logprobs)
    return nll(each, batch.loss_weights)


def with_targets(batch: nemorl.TokenBatch) -> nemorl.TokenBatch:
    """Of each token 0.75 of itself and, twice named, 0.25 of the token 2."""
    ids, real = batch.input_ids, (batch.segment_ids > 0).long()
    weights = torch.tensor([0.75, 0.25, 0.0]) * real[..., None]
    targets = torch.stack([ids, 2 * real, 2 * real], -1)
    return replace(batch, target_ids=targets, target_weights=weights)


def test_a_loss_of_targets_is_the_cross_entropy_with_them():
    batch = with_targets(random_batch(LENGTHS))
    twos = replace(batch, target_ids=batch.target_ids[..., 1], target_weights=None)
    plain = replace(batch, target_ids=None, target_weights=None)
    found = [
        weights(made) | {"loss": torch.tensor(finalize(made.train_step(part, loss))["loss"])}
        for part, loss in (
            (batch, cross_entropy),
            (batch, nll_loss),
            (twos, nll_loss),
            (plain, nll_loss),
        )
        for made in [backend(tiny_model())]
    ]
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)
    mixed = 0.75 * found[3]["loss"] + 0.25 * found[2]["loss"]
    torch.testing.assert_close(found[0]["loss"], mixed)
    top = finalize(backend(tiny_model()).train_step(plain, topmost))["loss"]
    assert 0 < top < found[3]["loss"]


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"top_k": -1}, r"needs.top_k must be a number of tokens, at least 0, but it is -1"),
        ({"top_k": 3, "values": True}, "needs.top_k can't be given together with values"),
        ({"targets": True, "values": True}, "needs.targets can't be given together with values"),
        ({"top_k": 10**6}, "needs.top_k must be at most the vocabulary's .* ask for fewer"),
        ({"targets": True}, r"batch.target_ids must be \[batch, seq, k\] .* but it is None: give"),
    ],
)
def test_needs_that_nothing_fulfills_are_errors(needs, message):
    with pytest.raises(ValueError, match=message):
        backend(tiny_model()).compute(random_batch([3, 4]), nemorl.Needs(**needs))


def plain_values(model: Any, batch: nemorl.TokenBatch) -> Tensor:
    found = torch.zeros(batch.input_ids.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        if length > 1:
            hidden = model.model(batch.input_ids[row : row + 1, :length], use_cache=False)[0]
            found[row, 1:length] = model.score(hidden)[0, :-1, 0]
    return found


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_values_are_those_of_each_sequence_alone(kind, layout):
    batch, options = random_batch(LENGTHS), dict(LAYOUTS[layout])
    plan = {k: options.pop(k) for k in ["activation_checkpointing"] if k in options}
    made = critic(tiny_critic(kind), trainer=options, plan=plan)
    with torch.no_grad():
        expected = plain_values(tiny_critic(kind), batch)
    found = made.compute(batch, nemorl.Needs(values=True))
    assert expected.std() > 0.3
    torch.testing.assert_close(found.values, expected, atol=ATOL, rtol=0)
    with pytest.raises(AttributeError, match="needs token_logprobs: remove values=True"):
        found.token_logprobs  # noqa: B018


def stored(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(as_stored(tensors.items(), stored_names(model)))


def outcome(made: DTensorBackend) -> dict[str, Any]:
    batch, wanted = random_batch(LENGTHS), nemorl.Needs(values=True)
    found = {"before": made.compute(batch, wanted).values}
    metrics = [finalize(made.train_step(batch, regression)) for _ in range(3)]
    return {
        **found,
        "after": made.compute(batch, wanted).values,
        "metrics": [{k: step[k] for k in ("loss", "grad_norm", "value_mean")} for step in metrics],
        "weights": stored(made.model, weights(made)),
    }


def close(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one["before"], other["before"], atol=5e-6, rtol=0)
    torch.testing.assert_close(one["after"], other["after"], atol=2e-4, rtol=0)
    torch.testing.assert_close(one["weights"], other["weights"], atol=2e-4, rtol=0)
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_training_values_does_not_depend_on_the_layout():
    expected = outcome(critic())
    for layout in ("one row", "packed", "packed budget"):
        close(outcome(critic(trainer=LAYOUTS[layout])), expected)


def sharded_outcome(folder: Path, kind: type, plan: dict, trainer: dict) -> dict[str, Any]:
    made = backend(path=folder, trainer=trainer, plan=plan, make=kind, head="scalar")
    found = outcome(made)
    made.save_checkpoint(folder.with_name("saved"))
    made.shutdown()
    return found


DP, TP, CP, PP = ({"dp_shard": 1, name: 2} for name in ("dp_shard", "tp", "cp", "pp"))
NO_SP = {**TP, "sequence_parallel": False}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
RANKS = {
    **{f"FSDP2 {plan}": (DTensorBackend, plan) for plan in (DP, TP, NO_SP, CP)},
    **{
        f"megatron {plan}": (MegatronBackend, plan)
        for plan in (
            *(TP, NO_SP, CP, {**CP, "cp_method": "allgather"}),
            *(PP, {**PP, "vpp": 2}, {**DP, **OVERLAP}, {**DP, "ep": 2}, {**TP, "ep": 2}),
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("way", RANKS)
def test_values_on_ranks_are_those_of_one_process(way, tmp_path):
    (kind, plan), folder = RANKS[way], tmp_path / "model"
    experts, packed = "ep" in plan, kind is MegatronBackend
    trainer = {"router_aux_loss_coef": 0.1} if experts else {}
    options = {"tied": "pp" in plan, "num_hidden_layers": 4}
    tiny_model("mixtral" if experts else "qwen2", scale=2.0, **options).save_pretrained(folder)
    one, other = (backend(path=folder, trainer=trainer, head="scalar") for _ in range(2))
    trainer |= {"sequence_packing": packed}
    alone = outcome(one)
    for found in run_ranks(2, sharded_outcome, folder, kind, plan, trainer):
        close(found, alone)
    other.load_checkpoint(tmp_path / "saved")
    for made in (one, other):
        made.train_step(random_batch(LENGTHS), regression)
    torch.testing.assert_close(weights(one), weights(other), atol=2e-4, rtol=0)
    saved = AutoModelForSequenceClassification.from_pretrained(exported(tmp_path / "saved"))
    named = stored(saved, dict(saved.named_parameters()))
    torch.testing.assert_close(named, found["weights"], atol=0, rtol=0)


def test_a_checkpoint_of_a_critic_continues_and_loads_in_transformers(tmp_path):
    made, batch = critic(), random_batch(LENGTHS)
    for _ in range(2):
        made.train_step(batch, regression)
    made.save_checkpoint(tmp_path / "saved")
    other = critic(tiny_critic(seed=3))
    other.load_checkpoint(tmp_path / "saved")
    assert outcome(other)["metrics"] == outcome(made)["metrics"]
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert again.config.architectures == ["Qwen2ForSequenceClassification"]
    other.load_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        expected = plain_values(again, batch)
    values = other.compute(batch, nemorl.Needs(values=True)).values
    torch.testing.assert_close(values, expected, atol=ATOL, rtol=0)
    head = load_causal_lm(str(tmp_path / "saved"), head="scalar", seed=9).score
    torch.testing.assert_close(head.weight, again.score.weight, atol=0, rtol=0)


def test_a_critics_folder_is_no_language_model(tmp_path):
    tiny_critic().save_pretrained(tmp_path)
    model, message = str(tmp_path), "not a language model: its weights have score.weight"
    for load in (
        lambda: load_causal_lm(model),
        lambda: load_folder(on_meta(model), tmp_path, seed=0),
        lambda: source_of(BackendConfig(model=ModelConfig(path=model)), None),
    ):
        with pytest.raises(ValueError, match=message):
            load()


def test_a_head_with_a_bias_is_an_error(tmp_path):
    config = tiny_model().config
    config.num_labels = 1
    biased = AutoModelForTokenClassification.from_config(config)
    biased.save_pretrained(tmp_path)
    for load in (
        lambda: load_causal_lm(str(tmp_path), head="scalar"),
        lambda: load_folder(on_meta(str(tmp_path), head="scalar"), tmp_path, seed=0),
    ):
        with pytest.raises(ValueError, match=r"AutoModelForSequenceClassification: .* score.bias"):
            load()
    for head in ("lm", "scalar"):
        with pytest.raises(ValueError, match=f"model must have the head {head!r}"):
            backend(biased, head=head)


def test_a_fresh_head_is_of_the_seed(tmp_path):
    model = str(tmp_path / "model")
    tiny_model().save_pretrained(model)

    def weight(seed: int) -> Tensor:
        found = load_causal_lm(model, head="scalar", seed=seed).score.weight
        config = BackendConfig(model=ModelConfig(path=model), head="scalar", seed=seed)
        read = source_of(config, None).read("score.weight", (0, 0), tuple(found.shape))
        assert torch.equal(read, found)
        return found

    assert torch.equal(weight(1), weight(1)) and not torch.equal(weight(1), weight(2))
    assert weight(1).any()


def test_the_wrong_head_is_an_error():
    batch, lm, values = random_batch([3, 4]), backend(tiny_model()), nemorl.Needs(values=True)
    with pytest.raises(ValueError, match="head must be scalar for values, but it is 'lm': load"):
        lm.compute(batch, values)
    with pytest.raises(ValueError, match=r"must be lm for token_logprobs, .*needs\(values=True"):
        critic().train_step(batch, nll_loss)
    for made in (partial(critic, tiny_model()), partial(backend, tiny_critic())):
        with pytest.raises(ValueError, match=r"model must have the head .* AutoModelFor"):
            made()
