"""What the section `data` and the chat template's settings do to a run."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl.data import messages
from nemorl.data.rows import RowOrder, split_rows
from nemorl.runtime.cli import main as cli
from nemorl.runtime.config.tree import dump_yaml, load_config
from nemorl.runtime.run.data import read_data
from tests.runtime.runs import (
    addition_rows,
    grpo_config,
    resumed,
    rows_file,
    samples_at,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

TEMPLATE = "{% for m in messages %}{% if shout %}a{% endif %}{{ m.content }}{% endfor %}"


def letters(count: int, letter: str) -> list[dict[str, Any]]:
    return [
        {"prompt": letter * (1 + n % 5) + "=", "response": "1", "answer": "1", "number": n}
        for n in range(count)
    ]


class Module:
    def train_rows(self):
        return addition_rows(30)

    def validation_rows(self):
        return addition_rows(5)


def test_a_mixture_meets_its_weights_and_resumes_where_it_stopped(tmp_path: Path):
    rows = [letters(30, "a"), letters(6, "b")]
    options: dict[str, Any] = {
        "num_prompts_per_step": 10,
        "num_generations_per_prompt": 2,
        "run": {"samples_per_step": 20},
        "data": nemorl.DataConfig(max_total_sequence_length=32, weights=(1.0, 3.0)),
    }
    start(grpo_config(tmp_path / "whole", steps=4, **options), rows=rows)
    parted = grpo_config(tmp_path / "parted", steps=2, **options)
    start(parted, rows=rows)
    start(resumed(parted, max_num_steps=4), rows=rows)
    seen = {
        name: [
            line["columns"] for step in range(1, 5) for line in samples_at(tmp_path / name, step)
        ]
        for name in ("whole", "parted")
    }
    assert seen["whole"] == seen["parted"]
    everything = [*rows[0], *rows[1]]
    wanted = [
        everything[i] for i in RowOrder(sizes=(30, 6), weights=(1.0, 3.0), seed=0).take(0, 40)
    ]
    assert seen["whole"] == [row for row in wanted for _ in range(2)]
    assert sum(row["prompt"][0] == "b" for row in wanted) > 20


def test_files_of_a_mixture_come_from_the_command_line(tmp_path: Path):
    files = [rows_file(tmp_path / f"{letter}.jsonl", letters(3, letter)) for letter in "ab"]
    config = cli.parse(
        "sft", ["--model.path", "m", "--data.train", *files, "--data.weights", "1", "3"]
    )
    assert (config.data.train, config.data.weights) == (tuple(files), (1.0, 3.0))
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(nemorl.SFTConfig, tmp_path / "config.yaml") == config
    rows, _ = read_data(config.data)
    assert [(row["prompt"][0], row.source) for row in rows] == [("a", 0)] * 3 + [("b", 1)] * 3


@pytest.mark.parametrize("held_out", [0.25, 10])
def test_held_out_rows_are_validated_on_and_not_trained_on(held_out, tmp_path: Path):
    rows = [{**row, "number": n} for n, row in enumerate(addition_rows(40))]
    data = nemorl.DataConfig(max_total_sequence_length=32, held_out=held_out)
    assert read_data(data, train=rows, seed=5) == split_rows(rows, validation=10, seed=5)
    result = start(sft_config(tmp_path, steps=2, data=data), rows=rows)
    assert result.metrics["val_loss"] > 0
    found = json.loads(result.paths.data.read_text())
    assert (found["train"]["count"], found["validation"]["count"]) == (30, 10)


def test_a_data_module_brings_its_own_validation_rows(tmp_path: Path):
    train, validation = read_data(nemorl.DataConfig(), train=Module())
    assert (len(train), len(validation)) == (30, 5)
    assert len(read_data(nemorl.DataConfig(), train=Module(), validation=addition_rows(3))[1]) == 3
    several = [rows_file(tmp_path / "a.jsonl", letters(2, "a")), Module()]
    _, validation = read_data(nemorl.DataConfig(), train=addition_rows(3), validation=several)
    assert [row.source for row in validation] == [0, 0, 1, 1, 1, 1, 1]


def test_lengths_are_shown_and_kept(tmp_path: Path, capsys):
    rows = [*addition_rows(20), {"prompt": "1" * 30, "response": "2"}]
    data = nemorl.DataConfig(max_total_sequence_length=16, too_long="drop")
    with pytest.warns(UserWarning, match="examples: 20 sequences kept"):
        result = start(
            sft_config(tmp_path / "shown", steps=1, data=data, run={"display": "plain"}), rows=rows
        )
    assert "train: 1 over the limit of 16 tokens (1 left out)" in capsys.readouterr().out
    found = json.loads(result.paths.data.read_text())
    assert [found["train"][name] for name in ("count", "max", "num_dropped")] == [20, 6, 1]


def test_prompts_leave_room_for_the_response(tmp_path: Path):
    rows = [*addition_rows(20), {"prompt": "1" * 30, "answer": "2"}]
    data = nemorl.DataConfig(max_total_sequence_length=20, too_long="truncate")
    with pytest.warns(UserWarning, match="prompts: .*1 truncated"):
        result = start(grpo_config(tmp_path, steps=1, data=data), rows=rows)
    found = json.loads(result.paths.data.read_text())["train"]
    assert (found["limit"], found["max"], found["num_truncated"]) == (16, 16, 1)


def test_template_arguments_reach_the_tokens_and_the_exported_tokenizer(tmp_path: Path):
    from transformers import AutoTokenizer

    rows = [{"prompt": [{"role": "user", "content": "b"}], "answer": "1"}] * 8
    for shout, wanted in ((True, "ab"), (False, "b")):
        model = nemorl.ModelConfig(chat_template=TEMPLATE, chat_template_kwargs={"shout": shout})
        config = grpo_config(tmp_path / str(shout), steps=1, model=model)
        result = start(config, rows=rows, scale=1.0)
        assert json.loads(result.paths.data.read_text())["train"]["max"] == len(wanted)
        kept = AutoTokenizer.from_pretrained(tmp_path / str(shout) / "tokenizer")
        assert kept.apply_chat_template(rows[0]["prompt"], tokenize=False) == wanted


@pytest.mark.slow_cases("grpo", "dpo", "eval")
@pytest.mark.parametrize("command", ["sft", "grpo", "dpo", "generate", "eval", "data inspect"])
def test_every_command_makes_the_same_prompt_of_a_string(command, tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] + m.content }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().save_pretrained(tmp_path / "model")
    row = {"q": "2", "answer": "4", "response": "4", "chosen": "4", "rejected": "5"}
    rows, model = rows_file(tmp_path / "rows.jsonl", [row] * 2), str(tmp_path / "model")
    tokenized: list[str] = []
    encode = messages._ids
    monkeypatch.setattr(
        messages, "_ids", lambda t, s, **o: [tokenized.append(s), encode(t, s, **o)][1]
    )

    run = ["--max-num-steps", "1", "--device", "cpu", "--run.no-export", "--no-plots"]
    data = {
        "eval": ["--validation", rows, "--max-new-tokens", "2"],
        "generate": ["--prompt", "2", "--max-new-tokens", "2", "--seed", "1"],
        "data inspect": ["--data.train", rows, "--kind", "prompt"],
    }.get(command, ["--data.train", rows, "--run.dir", str(tmp_path / "run"), *run])

    def texts(*flags: str) -> list[str]:
        tokenized.clear()
        assert cli.main([*command.split(), "--model", model, *data, *flags]) == 0
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return tokenized

    template = ["--data.prompt-template", "{q}+2="]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = texts(*template, "--data.system-prompt", "add", "--chat")
        assert any(text.startswith("sadd u2+2= ") for text in found)
        assert "2+2=" in texts(*template)
        assert len([each for each in said if "prompts are strings" in str(each.message)]) == 1
