"""The preference loop: it learns, begins where it must, doesn't depend on the layout, and uses
every setting.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nemorl
from nemorl import DPOConfig, DPOLoss, HingeLoss, IPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.algorithms.comparisons import baseline, comparisons
from tests.runtime.runs import TRAINER, dpo_config, of_phase, preference_rows, samples_at, start
from tests.tiny_models import tiny_model, tiny_tokenizer

LOSSES = {
    "dpo": DPOLoss(),
    "dpo with label smoothing": DPOLoss(label_smoothing=0.1),
    "robust dpo": DPOLoss(label_smoothing=0.1, robust=True),
    "ipo": IPOLoss(),
    "hinge": HingeLoss(),
    "simpo": SimPOLoss(),
    "orpo": ORPOLoss(),
    "kto": KTOLoss(),
}
WRONG = {"dpo with label smoothing": 0.1, "robust dpo": 0.1}
"""The share of training labels that are wrong, where a loss expects such."""


@pytest.mark.slow_cases(but=["dpo", "kto"])
@pytest.mark.parametrize("name", LOSSES)
def test_it_learns_what_is_preferred(tmp_path: Path, name: str):
    """On 100 held-out pairs of words and digits that were never seen, from a model that knows
    nothing: chance is one half.
    """
    config = dpo_config(
        tmp_path, steps=40, run={"val_at_start": True, "val_period": 40}, loss=LOSSES[name]
    )
    result = start(
        config,
        rows=preference_rows(400, seed=1, wrong=WRONG.get(name, 0.0)),
        validation=preference_rows(100, seed=2),
        scale=1.0,
    )
    before, after = (line for line in of_phase(result, "validation"))
    assert before["accuracy"] < 0.6
    assert after["accuracy"] > 0.9
    assert after["margin"] > before["margin"] + 0.2
    margin = after["chosen_reward"] - after["rejected_reward"]
    assert after["margin"] == pytest.approx(margin, abs=1e-4)
    assert after["loss"] < before["loss"]


@pytest.mark.parametrize("reference", ["live", "precomputed"])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPOLoss(), math.log(2)),
        (DPOLoss(beta=0.5, label_smoothing=0.3, robust=True), math.log(2)),
        (IPOLoss(beta=0.25), 4.0),
        (HingeLoss(), 1.0),
        (KTOLoss(), 0.5),
    ],
)
def test_the_first_loss_is_that_of_two_equal_models(tmp_path: Path, reference, loss, expected):
    history = start(
        dpo_config(tmp_path, steps=2, loss=loss, reference=reference, train_global_batch_size=8)
    ).history
    assert history[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert history[1]["loss"] != pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("loss", [DPOLoss(), KTOLoss()])
def test_both_references_give_one_run(tmp_path: Path, loss):
    def run(reference: str) -> list[dict]:
        config = dpo_config(
            tmp_path / reference, steps=4, loss=loss, reference=reference, run={"val_period": 2}
        )
        return start(config, validation=preference_rows(20, seed=1)).history

    live, precomputed = run("live"), run("precomputed")
    for name in ("loss", "grad_norm", "margin", "kl_baseline"):
        assert [line.get(name) for line in precomputed] == pytest.approx(
            [line.get(name) for line in live], abs=1e-3, nan_ok=True
        )


def backend(*, keep_reference: bool = False, model=None) -> DTensorBackend:
    trainer = DTensorBackend(model or tiny_model(scale=2.0))
    trainer.setup(BackendConfig(trainer=TRAINER, keep_reference=keep_reference))
    return trainer


@pytest.mark.parametrize(
    ("config", "live"),
    [
        (DPOConfig(), True),
        (DPOConfig(reference="precomputed"), False),
        (DPOConfig(loss=SimPOLoss()), False),
        (DPOConfig(loss=ORPOLoss()), False),
    ],
)
def test_no_second_model_where_none_is_needed(config, live, tmp_path: Path, monkeypatch):
    """Not at a time: logprobs are computed before the model that trains is loaded."""
    seen, setup, shutdown = [], DTensorBackend.setup, DTensorBackend.shutdown

    def watched(self, config):
        seen.append(config.keep_reference)
        setup(self, config)

    def ended(self):
        seen.append("shutdown")
        shutdown(self)

    monkeypatch.setattr(DTensorBackend, "setup", watched)
    monkeypatch.setattr(DTensorBackend, "shutdown", ended)
    mine = dpo_config(tmp_path, steps=1, loss=config.loss, reference=config.reference)
    start(mine, rows=preference_rows(4))
    before = [False, "shutdown"] if config.reference == "precomputed" else []
    assert seen == [*before, live, "shutdown"]


@pytest.mark.parametrize("size", [1, 100])
def test_ktos_baseline_by_hand(tmp_path: Path, size):
    """The mean over responses to other prompts of what policy and reference say, however many are
    computed at a time.
    """
    config = dpo_config(tmp_path, loss=KTOLoss(), train_global_batch_size=size)
    data, *_ = comparisons(config, preference_rows(6), tiny_tokenizer())
    trainer = backend(keep_reference=True)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
    models, total = (trainer.model, tiny_model(scale=2.0)), [0.0, 0.0]
    assert len(data.mismatched) == len(data.rows) == 12
    for (example,), (other,) in zip(data.rows, data.mismatched, strict=True):
        begin = list(example.loss_mask).index(True)
        assert other.input_ids[:begin] == example.input_ids[:begin]
        assert other.input_ids[begin:] != example.input_ids[begin:]
        assert not any(other.loss_mask[:begin]) and all(other.loss_mask[begin:])
    for (example,) in data.mismatched:
        for i, model in enumerate(models):
            ids = torch.tensor([example.input_ids])
            with torch.no_grad():
                every = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            logprobs = every.gather(-1, ids[0, 1:, None])[:, 0]
            total[i] += float(logprobs[torch.tensor(example.loss_mask[1:])].sum())
    assert abs(total[0] - total[1]) > 1
    found = baseline(trainer, data.mismatched, config)
    assert found == pytest.approx((total[0] - total[1]) / 12, rel=1e-4)


def test_kto_takes_labelled_rows_and_pairs_apart(tmp_path: Path):
    labelled = [
        {"prompt": "a=", "response": "24", "label": True},
        {"prompt": "b=", "response": "24", "label": False},
    ] * 8
    config = dpo_config(tmp_path, loss=KTOLoss(), steps=2, train_global_batch_size=16)
    result = start(config, rows=labelled, validation=labelled[:2])
    assert result.history[0]["desirable_fraction"] == 0.5
    assert result.history[0]["num_tokens"] == 16 * 5
    assert 0 < result.metrics["val_loss"] < 1
    assert "val_accuracy" not in result.metrics, "single responses are not compared"
    data, *_ = comparisons(config, preference_rows(3), tiny_tokenizer())
    assert [len(row) for row in data.rows] == [1] * 6
    labels = [{sign for sign in row[0].advantages or [] if sign} for row in data.rows]
    assert labels == [{1.0}, {-1.0}] * 3
    other_seed, *_ = comparisons(
        replace(config, run=replace(config.run, seed=5)), preference_rows(3), tiny_tokenizer()
    )
    assert other_seed.rows == data.rows and other_seed.mismatched != data.mismatched
    held_out, *_ = comparisons(config, preference_rows(3), tiny_tokenizer(), in_pairs=True)
    assert held_out.in_pairs and not data.in_pairs
    assert held_out.rows == data.rows, "chosen and rejected in turn, a row each"
    assert [len(row) for row in held_out.mismatched] == [1] * 6


def test_the_likelihood_term_counts(tmp_path: Path):
    ways = (
        {},
        {"sft_coef": 0.5},
        {"sft_coef": 0.5, "sft_reduction": "sequence_mean"},
        {"loss": ORPOLoss()},
        {"loss": ORPOLoss(), "sft_coef": 0.0},
    )
    first = [
        start(dpo_config(tmp_path / str(n), steps=1, **options)).history[0]
        for n, options in enumerate(ways)
    ]
    plain, added, by_sequence, orpo, bare = (line["loss"] for line in first)
    assert added == pytest.approx(plain + 0.5 * first[0]["nll"], rel=1e-4)
    assert abs(by_sequence - added) > 1e-4 and abs(orpo - bare) > 1


def test_several_sets_have_their_shares(tmp_path: Path):
    """Nine tenths come from the set with answers of 4 digits, though it is the smaller one; of the
    pairs, and for KTO of the responses.
    """
    short, long = (
        [{"prompt": "a=", "chosen": "2" * n, "rejected": "3" * n}] * count
        for n, count in ((1, 30), (4, 10))
    )
    for loss, sequences in ((DPOLoss(), 2), (KTOLoss(), 1)):
        data = nemorl.DataConfig(max_total_sequence_length=32, weights=(1.0, 9.0))
        config = dpo_config(
            tmp_path / loss.name, steps=1, data=data, loss=loss, train_global_batch_size=1000
        )
        start(config, rows=[short, long], callbacks=[counted := Counted()])
        assert counted.num_tokens == sequences * (900 * 7 + 100 * 4)


class Counted(nemorl.Callback):
    def on_step_end(self, trainer, step, metrics) -> None:
        self.num_tokens = metrics["num_tokens"]


def test_a_pair_goes_whole(tmp_path: Path):
    data = nemorl.DataConfig(max_total_sequence_length=8, too_long="drop")
    rows = [
        *preference_rows(20),
        {"prompt": "a=", "chosen": "2" * 30, "rejected": "1"},
        {"prompt": "a=", "chosen": "2", "rejected": "1" * 30},
    ]
    with pytest.warns(UserWarning, match="pairs: .* dropped"):
        _, _, lengths = comparisons(dpo_config(tmp_path, data=data), rows, tiny_tokenizer())
    assert max(lengths.tokens) <= 8 and lengths.num_dropped >= 2


def test_pairs_that_teach_nothing(tmp_path: Path):
    rows = preference_rows(3)
    alike = {**rows[0], "chosen": rows[0]["rejected"]}
    with pytest.warns(UserWarning, match="1 of 4 pairs have the same response on both sides"):
        comparisons(dpo_config(tmp_path), [*rows, alike], tiny_tokenizer())


def test_ranked_completions_and_samples(tmp_path: Path):
    """NeMo RL's form, of which a row gives several pairs; validation writes some of them to the
    sample log.
    """
    rows = [
        {
            "context": f"{word}=",
            "completions": [{"rank": rank, "completion": str(rank) * 2} for rank in (2, 0, 1)],
        }
        for word in ("ab", "cd", "ef")
    ]
    config = dpo_config(tmp_path, steps=2, train_global_batch_size=9, run={"samples_per_step": 3})
    result = start(config, rows=rows, validation=rows)
    assert result.history[0]["num_tokens"] == 9 * 2 * 6
    samples = samples_at(tmp_path, 2)
    assert [sample["prompt"] for sample in samples] == ["ab=", "cd=", "ef="]
    for sample in samples:
        assert (sample["chosen"], sample["rejected"]) == ("00<eos>", "11<eos>")
        margin = sample["chosen_reward"] - sample["rejected_reward"]
        assert sample["margin"] == pytest.approx(margin, abs=1e-6)
    assert result.metrics["val_margin"] != 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": {"name": "kto", "beta": 0}}, r"loss.beta must be positive, but it is 0"),
        (
            {"loss": {"name": "dpo", "robust": True}},
            r"loss.robust needs loss.label_smoothing, but it is True: add --loss.label-smoothing",
        ),
        ({"loss": {"name": "kto", "margin": 1.0}}, r"unknown key loss.margin"),
        (
            {"loss": "simpo", "reference": "precomputed"},
            r"reference can't be precomputed for simpo, which compares with no reference",
        ),
        (
            {"data": {"max_total_sequence_length": 64}, "trainer": {"micro_batch_tokens": 127}},
            r"trainer.micro_batch_tokens must hold the longest pair, .* so make it 128 or more",
        ),
    ],
)
def test_settings_that_cannot_be(options, message):
    from nemorl.runtime.config.tree import from_dict

    with pytest.raises(ValueError, match=message):
        from_dict(DPOConfig, options)


@pytest.mark.parametrize(
    "options", [{"micro_batch_tokens": 20}, {"sequence_packing": True, "packed_row_tokens": 20}]
)
def test_kto_needs_no_room_for_pairs(options, tmp_path: Path):
    """Not in validation either, where pairs are compared: rows that hold no pair give what roomy
    ones do.
    """
    rows = [{**row, "prompt": "add up " + row["prompt"]} for row in preference_rows(8, seed=1)]
    found = []
    for name, trainer in (("narrow", replace(TRAINER, **options)), ("wide", TRAINER)):
        config = dpo_config(
            tmp_path / name,
            steps=2,
            loss=KTOLoss(),
            train_global_batch_size=4,
            data=nemorl.DataConfig(max_total_sequence_length=20),
            trainer=trainer,
        )
        found.append(of_phase(start(config, validation=rows), "validation")[-1])
    for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3, abs=1e-5), name
    told = {
        tuple(sample[name].removesuffix("<eos>") for name in ("prompt", "chosen", "rejected"))
        for sample in samples_at(tmp_path / "narrow", 2)
    }
    assert told and told <= {(row["prompt"], row["chosen"], row["rejected"]) for row in rows}
