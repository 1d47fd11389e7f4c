"""The command line from end to end: sft, grpo, resume, eval, generate, export on a tiny model."""

import json
from pathlib import Path

import pytest

from nemorl.runtime.cli.main import main
from nemorl.runtime.store.directory import read_lines
from tests.runtime.runs import addition_rows, rows_file, saved_model

QUIET = (
    "--run.display none --run.no-plots --trainer.device cpu --data.max-total-sequence-length 32"
    " --generation.max-new-tokens 4"
)
GREEDY = ["--prompt", "1+1=", "--temperature", "0", "--device", "cpu", "--json"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows, and a run of each kind."""
    folder = tmp_path_factory.mktemp("workplace")
    saved_model(folder / "model", scale=1.0)
    rows = [{**row, "question": row["prompt"]} for row in addition_rows()]
    rows_file(folder / "rows.jsonl", rows)
    (folder / "settings.yaml").write_text(
        "num_prompts_per_step: 4\nnum_generations_per_prompt: 3\nmax_num_steps: 9\nreward:"
        " contains_answer\n"
    )
    data = f"--data.train {folder}/rows.jsonl --data.validation {folder}/rows.jsonl {QUIET}"
    data += " --data.prompt-column question"
    sft = f"--model.path {folder}/model --run.dir {folder}/sft --optimizer.lr 1e-2 {data}"
    assert main(f"sft --max-num-steps 120 --train-global-batch-size 16 {sft}".split()) == 0
    grpo = f"--model.path {folder}/sft --run.dir {folder}/grpo --config {folder}/settings.yaml"
    assert main(f"grpo --preset dr_grpo {grpo} --max-num-steps 2 {data}".split()) == 0
    return folder


def steps(folder: Path) -> list[int]:
    lines = read_lines(folder / "metrics.jsonl")
    return [line["step"] for line in lines if line["phase"] == "train"]


def test_resume_by_naming_the_directory(workplace: Path):
    moved = (workplace / "grpo").rename(workplace / "moved")
    assert main(["grpo", "--run.dir", str(moved), "--run.resume", "--max-num-steps", "3"]) == 0
    assert steps(moved) == [1, 2, 3]
    assert not (workplace / "grpo").exists()


def test_generate(workplace: Path, capsys):
    (workplace / "prompts.txt").write_text("2+1=\n\n")
    prompts = ["--prompt", "1+1=", "--file", str(workplace / "prompts.txt")]
    flags = ["-n", "2", "--seed", "1", "--json", "--device", "cpu"]
    command = ["generate", "--model", str(workplace / "sft"), *prompts, *flags]
    assert main(command) == 0
    first = capsys.readouterr().out
    rows = [json.loads(line) for line in first.splitlines()]
    assert [row["prompt"] for row in rows] == ["1+1=", "1+1=", "2+1=", "2+1="]
    assert main(command) == 0
    assert capsys.readouterr().out == first
    command.remove("--json")
    assert main(command) == 0
    table = capsys.readouterr().out
    assert table.count("1+1=") == 1 and rows[0]["response"] in table


def test_precision_is_the_engines(workplace: Path, capsys):
    command = ["generate", "--model", str(workplace / "sft"), *GREEDY]
    answers = []
    for precision in ("float32", "bfloat16"):
        assert main([*command, "--param-dtype", precision]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["response"] == answers[1]["response"]
    assert 0 < abs(answers[0]["logprob"] - answers[1]["logprob"]) < 0.1


def test_a_plan_of_a_run_is_that_of_its_export(workplace: Path, capsys):
    plans = []
    for folder in ("sft", "sft/hf"):
        assert main(["plan", "--model", str(workplace / folder), "--gpus", "1"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] != ""


def test_export(workplace: Path, capsys):
    run, exported = (str(workplace / name) for name in ("sft", "exported"))
    assert main(["export", "--run", run, "--output", exported]) == 0
    assert main(["generate", "--model", exported, *GREEDY]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prompt"] == "1+1="
