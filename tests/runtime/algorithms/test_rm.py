"""Reward models: they learn what is preferred, score as transformers does, and give rewards."""

import gc
import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import nemorl
from nemorl.losses.types import finalize
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.environments import make_environment
from nemorl.runtime.algorithms.rm import calibration_of, pair_loss, set_padding, to_batch
from nemorl.runtime.store.export import write_checkpoint
from nemorl.runtime.watch.report import write_report
from tests.parallel.batches import LAYOUTS
from tests.parallel.ways import set_up, weights
from tests.ranks import run_ranks
from tests.runtime.algorithms.pairs import random_example
from tests.runtime.runs import (
    grpo_config,
    of_phase,
    preference_rows,
    rm_config,
    samples_at,
    saved_model,
    start,
)
from tests.tiny_models import tiny_critic, tiny_model, tiny_tokenizer

Rows = list[dict[str, Any]]


def trained(folder: Path, *, steps: int = 40, seed: int = 0, **options: Any) -> nemorl.TrainResult:
    run = {"val_at_start": True, "val_period": steps, "seed": seed, "export": True}
    config = rm_config(folder, steps=steps, run=run, **options)
    rows, validation = preference_rows(400, seed=seed), preference_rows(100, seed=seed + 50)
    return start(config, rows=rows, validation=validation, scale=1.0, seed=seed)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    trained(folder := tmp_path_factory.mktemp("rm") / "run")
    return folder


@pytest.mark.slow_cases(but=["0"])
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_what_is_preferred(tmp_path: Path, seed: int):
    before, after = of_phase(trained(tmp_path / "run", seed=seed), "validation")
    assert before["accuracy"] < 0.7 and after["accuracy"] > 0.95
    assert after["calibration_error"] < 0.05 < before["calibration_error"]
    scores = after["chosen_reward"], after["rejected_reward"]
    assert after["margin"] == pytest.approx(scores[0] - scores[1], abs=1e-4)
    assert abs(sum(scores)) < 0.25 * after["margin"], "centering draws them to 0"


def pairs_of(sizes: int = 6) -> list[tuple[Any, Any]]:
    random = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 20, (sizes, 2), generator=random).tolist()
    margins = torch.rand(sizes, generator=random).tolist()
    return [
        tuple(
            replace(
                random_example(length, random, label=None),
                reference_logprobs=None,
                advantages=[margin] * length,
            )
            for length in pair
        )
        for pair, margin in zip(lengths, margins, strict=True)
    ]


def transformers_scores(model: Any, ids: list[list[int]]) -> torch.Tensor:
    return torch.stack([model(torch.tensor([each])).logits[0, 0] for each in ids])


def steps_of(layout: dict[str, Any], pairs: Any) -> tuple[list[dict[str, float]], Any]:
    trainer = {"device": "cpu", **layout}
    plan = {key: trainer.pop(key) for key in ["activation_checkpointing"] if key in trainer}
    optimizer = {"max_grad_norm": None, "eps": 1e-4, "lr": 1e-3}
    options = {"trainer": trainer, "optimizer": optimizer, "plan": plan, "head": "scalar"}
    made = set_up(tiny_critic(), **options)
    loss, batch = partial(pair_loss, centering=0.1), to_batch(pairs)
    return [finalize(made.train_step(batch, loss)) for _ in range(4)], weights(made)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_each_step_is_trls_formula_whatever_the_layout(layout: str):
    """Of scores of each sequence alone, by transformers; one pair is alike on both sides."""
    pairs = pairs_of()
    pairs[0] = (pairs[0][0], pairs[0][0])
    found, ours = steps_of(LAYOUTS[layout], pairs)
    model = tiny_critic()
    model.config.pad_token_id = None
    own = {"lr": 1e-3, "eps": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **own)
    margins = torch.tensor([pair[0].advantages[0] for pair in pairs])
    for line in found:
        ids = [[list(each.input_ids) for each in side] for side in zip(*pairs, strict=True)]
        chosen, rejected = (transformers_scores(model, side) for side in ids)
        expected = -logsigmoid(chosen - rejected - margins).mean()
        expected = expected + 0.1 * ((chosen + rejected) ** 2).mean()
        assert line["loss"] == pytest.approx(expected.item(), rel=1e-4)
        wins = int((chosen > rejected)[1:].sum())  # rounding decides over the pair that is alike
        assert round(6 * line["accuracy"]) in (wins, wins + 1)
        assert line["chosen_reward"] == pytest.approx(chosen.mean().item(), abs=1e-4)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    plain = dict(model.named_parameters())
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-3)


def outcome(folder: Path, plan: dict[str, Any], pairs: Any) -> list[dict[str, float]]:
    made: DTensorBackend = set_up(
        None, path=folder, plan=plan, head="scalar", trainer={"device": "cpu"}
    )
    loss = partial(pair_loss, centering=0.1)
    found = [finalize(made.train_step(to_batch(pairs), loss)) for _ in range(3)]
    made.shutdown()
    return [{k: v for k, v in line.items() if "/" not in k} for line in found]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_pairs_on_ranks_are_those_of_one_process(plan: dict[str, Any], tmp_path: Path):
    folder = saved_model(tmp_path / "model", tied=False)
    alone = outcome(folder, {}, pairs_of())
    for found in run_ranks(2, outcome, folder, plan, pairs_of()):
        for line, expected in zip(found, alone, strict=True):
            assert line == pytest.approx(expected, rel=1e-4, abs=1e-6)


def without_padding(**special: str) -> Any:
    """A tokenizer that pads with what ends a sequence, as those of many Llamas."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.unk_token = "<eos>", None
    tokenizer.add_special_tokens(special)
    return tokenizer


TOKENIZERS = {
    "a token for padding": tiny_tokenizer,
    "an unknown token": partial(without_padding, unk_token="<pad>"),
    "a first token": partial(without_padding, bos_token="<pad>"),
    "another special token": partial(without_padding, additional_special_tokens=["<pad>"]),
}


@pytest.mark.parametrize("special", TOKENIZERS)
@pytest.mark.parametrize("again", [False, True], ids=["hf", "exported again"])
def test_transformers_scores_what_was_trained(tmp_path: Path, special: str, again: bool):
    """Alone and in a batch, padded at either side, by the tokenizer of the export."""
    folder, rows = tmp_path / "run", preference_rows(8)
    config = rm_config(folder, steps=2, run={"export": True, "samples_per_step": 8})
    model = saved_model(tmp_path / "model", pad_token_id=1)  # what ends a response
    config = replace(config, model=nemorl.ModelConfig(path=str(model)))
    nemorl.run(config, tokenizer=TOKENIZERS[special](), train=rows, validation=rows)
    if again:
        saved = folder / "checkpoints" / "step_2" / "policy"
        write_checkpoint(tmp_path / "again", saved, AutoTokenizer.from_pretrained(folder / "hf"))
    made = tmp_path / "again" if again else folder / "hf"
    scorer = AutoModelForSequenceClassification.from_pretrained(made)
    assert scorer.config.num_labels == 1 and scorer.config.pad_token_id == 0
    said = [
        (sample["prompt"] + sample[side], sample[f"{side}_reward"])
        for sample in samples_at(folder, 2)
        for side in ("chosen", "rejected")
    ]
    texts, expected = [text for text, _ in said], torch.tensor([score for _, score in said])
    assert all(text.endswith("<eos>") for text in texts) and expected.std() > 1e-3
    for side in ("left", "right"):
        tokenizer = AutoTokenizer.from_pretrained(made, padding_side=side)
        inputs = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        assert not inputs["attention_mask"].all()
        with torch.no_grad():
            found = scorer(**{k: inputs[k] for k in ("input_ids", "attention_mask")}).logits
        torch.testing.assert_close(found[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_the_export_of_a_given_model_pads_as_its_tokenizer(tmp_path: Path):
    config = tiny_critic(pad_token_id=1).config
    config.architectures = None
    start(
        rm_config(tmp_path / "run", steps=1, run={"export": True}),
        given=AutoModelForSequenceClassification.from_config(config),
    )
    assert json.loads((tmp_path / "run/hf/config.json").read_text())["pad_token_id"] == 0


def test_without_a_token_for_padding_it_does_not_begin(tmp_path: Path):
    with pytest.raises(ValueError, match=r"must have a special token that ends no sequence.*<eos>"):
        nemorl.run(
            rm_config(tmp_path / "run"),
            model=tiny_critic(),
            tokenizer=without_padding(),
            train=preference_rows(8),
        )


def test_a_token_that_ends_a_response_does_not_pad():
    """As one that a template ends with, or an unknown one where a response was cut."""
    tokenizer, example = without_padding(bos_token="a", unk_token="<pad>"), pairs_of()[0][0]
    set_padding(tokenizer, [replace(example, input_ids=[*example.input_ids[1:], 0])])
    assert tokenizer.pad_token == "a"


def test_calibration_by_hand():
    margins = torch.tensor([0.0, 1.0, -1.0, 1.2, 9.0])
    found = calibration_of(margins)
    one, other = torch.tensor(1.0).sigmoid(), torch.tensor(1.2).sigmoid()
    assert found["calibration/0.7/pairs"] == 3
    assert found["calibration/0.7/predicted"] == pytest.approx(float(2 * one + other) / 3)
    assert found["calibration/0.7/right"] == pytest.approx(2 / 3)
    assert found["calibration/0.5/right"] == 0.5
    error = abs(float(2 * one + other) - 2) + 1 - float(torch.tensor(9.0).sigmoid())
    assert found["calibration_error"] == pytest.approx(error / 5)


def test_the_report_has_a_table_of_the_calibration(learned: Path, tmp_path: Path):
    page = write_report(learned, tmp_path / "report.html").read_text()
    assert "<h2>Calibration</h2>" in page and "<td>100</td>" in page
    assert "Calibration error" in page and "calibration/" not in page


def rewards_of(environment: Any, rows: Rows, side: str) -> torch.Tensor:
    logs = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in rows
    ]
    environment.check(rows)
    return torch.tensor(environment.step(logs, rows).rewards)


@pytest.mark.slow
def test_a_trained_model_is_a_reward_in_a_process_of_its_own(learned: Path):
    """The validation's scores, in the order of the responses, until its process is killed."""
    others = {*psutil.Process().children()}
    environment = make_environment(f"rm:{learned}")
    (child,) = {*psutil.Process().children()} - others
    samples, sides = samples_at(learned, 40), ("chosen", "rejected")
    rows = [
        {"prompt": each["prompt"], **{side: each[side].removesuffix("<eos>") for side in sides}}
        for each in samples
    ]
    for side in sides:
        found = rewards_of(environment, rows, side)
        expected = [sample[f"{side}_reward"] for sample in samples]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    os.killpg(child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="its process ended") as failure:
        rewards_of(environment, rows, "chosen")
    assert "reward 'rm:" in str(failure.value.__notes__)
    assert len(rewards_of(environment, rows, "chosen")) == len(rows), "and another begins"
    del environment, failure
    gc.collect()
    assert {*psutil.Process().children()} <= others


@pytest.mark.slow
def test_a_policy_learns_from_it(learned: Path, tmp_path: Path):
    rows = [{"prompt": row["prompt"], "answer": "1"} for row in preference_rows(40, seed=3)]
    config = grpo_config(tmp_path / "run", steps=12, run={"val_period": 12, "val_at_start": True})
    result = nemorl.run(
        replace(config, reward=f"rm:{learned}"),
        model=tiny_model(scale=2.0),
        tokenizer=tiny_tokenizer(),
        train=rows,
        validation=rows,
    )
    before, after = (line["reward"] for line in of_phase(result, "validation"))
    assert after > before + 0.5


def as_llama(folder: Path) -> None:
    """As config.json says it."""
    file = folder / "config.json"
    changed = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


@pytest.mark.slow
def test_what_is_no_reward_model(learned: Path, tmp_path: Path):
    language_model, two_labels = saved_model(tmp_path / "lm"), tmp_path / "two"
    config = tiny_critic().config
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(two_labels)
    tiny_critic().save_pretrained(tmp_path / "family")
    as_llama(tmp_path / "family")
    for folder, message in (
        (language_model, r"Qwen2ForSequenceClassification with one label.*missing.*score.weight"),
        (two_labels, r"with one label.*mismatched.*score.weight"),
        (tmp_path / "family", r"LlamaForSequenceClassification .*unexpected.*q_proj.bias"),
        (tmp_path / "nothing", "there is no folder"),
    ):
        config = grpo_config(tmp_path / "run", reward=f"rm:{folder}")
        with pytest.raises(ValueError, match=message):
            nemorl.run(config, train=[{"prompt": "1"}])
    assert not (tmp_path / "run").exists()
