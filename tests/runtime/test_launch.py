"""What `nemorl.run` refuses before it starts, what it loads by name, and export."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nemorl
from tests.models import tiny_model, tiny_tokenizer
from tests.runtime.runs import addition_rows, grpo_config, sft_config, start


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    """A model folder and a file of rows."""
    tiny_model(scale=2.0).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in addition_rows()))
    return {"model": str(tmp_path / "model"), "rows": str(tmp_path / "rows.jsonl")}


def by_name(config, saved: dict[str, str]):
    data = replace(config.data, train=saved["rows"], validation=saved["rows"])
    return replace(config, model=nemorl.ModelConfig(path=saved["model"]), data=data)


@pytest.mark.parametrize("make", [grpo_config, sft_config])
def test_by_name_equals_by_object(make, saved, tmp_path: Path):
    config = replace(make(tmp_path / "a", steps=2), reward="contains_answer")
    named = nemorl.run(by_name(config, saved))
    given = start(replace(config, run=replace(config.run, dir=str(tmp_path / "b"))), validation=addition_rows(), reward="contains_answer")
    times = ("time", "seconds", "seconds_generate", "seconds_train", "tokens_per_second")
    assert [{k: v for k, v in line.items() if k not in times} for line in named.history] == [
        {k: v for k, v in line.items() if k not in times} for line in given.history
    ]


def test_export_of_a_checkpoint(saved, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    result = nemorl.run(by_name(grpo_config(tmp_path / "run", steps=2, run={"save_period": 1}, reward="contains_answer"), saved))
    for step in (1, None):
        folder = nemorl.export(nemorl.ExportConfig(run=str(tmp_path / "run"), output=str(tmp_path / f"out{step}"), step=step))
        exported = AutoModelForCausalLM.from_pretrained(folder)
        same = all(torch.equal(a, b) for a, b in zip(exported.parameters(), result.model.parameters(), strict=True))
        assert same is (step is None)
        assert nemorl.generate(nemorl.GenerateConfig(model=str(folder), prompt=("1+1=",), n=2, seed=0, device="cpu"))[1]["prompt"] == "1+1="
    with pytest.raises(ValueError, match=r"there is none for 7: there are step_1, step_2"):
        nemorl.export(nemorl.ExportConfig(run=str(tmp_path / "run"), output="x", step=7))
    with pytest.raises(ValueError, match="has no hf/ yet: nemorl export --run"):
        nemorl.generate(nemorl.GenerateConfig(model=str(tmp_path / "run"), prompt=("1",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, trainer=replace(c.trainer, backend="dtenser")), "unknown training backend 'dtenser'.*did you mean dtensor"),
        (lambda c: replace(c, generation=replace(c.generation, backend="vllmm")), "unknown generation backend 'vllmm'"),
        (lambda c: replace(c, reward="exact"), "reward must be one of"),
        (lambda c: replace(c, data=replace(c.data, train="no/rows.jsonl")), "no file 'no/rows.jsonl'"),
        (lambda c: replace(c, data=replace(c.data, train=None)), "data.train must name rows to train on"),
        (lambda c: replace(c, data=replace(c.data, prompt_column="question")), "prompt_column is 'question', but row 0"),
        (lambda c: replace(c, data=replace(c.data, max_total_sequence_length=7)), "max_length is 3"),
        (lambda c: replace(c, model=nemorl.ModelConfig(path="no/model")), "none could be loaded from 'no/model'"),
        (lambda c: replace(c, model=nemorl.ModelConfig()), "model.path must name a model folder"),
        (lambda c: replace(c, model=replace(c.model, chat_template="no/template.jinja")), "model.chat_template must be a Jinja template or a file"),
    ],
)
def test_refused_before_anything_is_trained(change, message, saved, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        nemorl.run(change(by_name(grpo_config(tmp_path / "run"), saved)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_folder_with_a_run_is_not_overwritten(saved, tmp_path: Path):
    config = by_name(sft_config(tmp_path / "run", steps=1), saved)
    nemorl.run(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="already holds one"):
        nemorl.run(config)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_finished_run_can_be_resumed_and_lengthened(saved, tmp_path: Path):
    config = by_name(sft_config(tmp_path / "run", steps=2), saved)
    nemorl.run(config)
    again = nemorl.run(replace(config, run=replace(config.run, resume=True)))
    assert [line["step"] for line in again.history if line["phase"] == "train"] == [1, 2]
    longer = nemorl.run(replace(config, run=replace(config.run, resume=True), max_num_steps=3))
    assert [line["step"] for line in longer.history if line["phase"] == "train"] == [1, 2, 3]


def test_the_resolved_config_starts_the_same_run(saved, tmp_path: Path):
    config = by_name(grpo_config(tmp_path / "run", steps=1), saved)
    nemorl.run(config)
    assert nemorl.load_config(nemorl.GRPOConfig, tmp_path / "run" / "config.yaml") == config
