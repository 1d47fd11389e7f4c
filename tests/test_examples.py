"""Every script of examples/ runs, briefly."""

from pathlib import Path
from types import ModuleType

import pytest

from nemorl.runtime.run import registry
from tests.examples import EXAMPLES, load_example, run_example
from tests.runtime.runs import (
    GROUPS,
    SAMPLED,
    addition_rows,
    digits,
    lines,
    rows_file,
    saved_model,
    small_config,
    start,
)

BRIEFLY = {
    "custom_algorithm.py": ("3", "greedy accuracy: 0."),
    "custom_backend.py": ("2", "differs by a factor of 1.0000"),
    "distill.py": ("", "done in"),
    "custom_reward.py": ("2", "first_try/solved: "),
    "custom_training_backend.py": ("5", "from the start"),
    "puzzle.py": ("--steps 1", "2x2, of boards held out and others: solved [0."),
    "reward_model.py": ("2", "score of the policy's numbers: "),
    "several_devices.py": ("2", "the trained model, whole again: runs/several_devices/run/hf"),
    "tools.py": ("--sft 4 --grpo 1", "held-out greedy accuracy: 0."),
}
"""The arguments of a short run, and what its output has to hold."""
ELSEWHERE = {
    "agent.py": "tests/runtime/serve/test_clients.py",
    "code_reward.py": "test_code_is_judged",
    "demo.py": "tests/test_demo.py",
    "math_reward.py": "test_mathematics_is_judged",
    "judge.py": "tests/rollout/test_judge.py",
    "quickstart.py": "tests/test_documentation.py",
    "custom_loss.py": "tests/test_scripts.py",
    "grpo_loop.py": "tests/test_scripts.py",
    "two_models.py": "tests/test_scripts.py",
}


@pytest.fixture
def raft(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of custom_algorithm.py, with its algorithm registered for the time of a test."""
    module = load_example("custom_algorithm")
    monkeypatch.setattr(
        registry,
        "ALGORITHMS",
        {**registry.ALGORITHMS, "raft": registry.Algorithm(module.RAFTConfig, module.raft)},
    )
    return module


def test_each_example_is_run():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted({**BRIEFLY, **ELSEWHERE})


@pytest.mark.slow_cases(
    "custom_backend.py",
    "distill.py",
    "puzzle.py",
    "reward_model.py",
    "several_devices.py",
    "tools.py",
)
@pytest.mark.parametrize("script", BRIEFLY)
def test_it_runs(script: str, tmp_path: Path, monkeypatch, capsys):
    arguments, expected = BRIEFLY[script]
    monkeypatch.chdir(tmp_path)
    assert run_example(script, *arguments.split()) == 0
    assert expected in capsys.readouterr().out


def test_code_is_judged(capsys):
    assert run_example("code_reward.py") == 0
    verdicts = capsys.readouterr().out.splitlines()
    assert verdicts.pop(0) == "right: [1.0, 1.0, 1.0]"
    assert len(verdicts) == 4 and all(line.endswith(": [0.0, 0.0, 0.0]") for line in verdicts)


@pytest.mark.filterwarnings("ignore:reward 'math' took longer")
def test_mathematics_is_judged(capsys):
    assert run_example("math_reward.py") == 0
    right, *others = capsys.readouterr().out.splitlines()
    assert right == "right: [1.0, 1.0, 1.0, 1.0]"
    assert len(others) == 3 and all(line.endswith(": [0.0, 0.0, 0.0, 0.0]") for line in others)


@pytest.mark.slow
def test_a_small_model_learns_to_use_the_calculator(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_example("tools.py") == 0
    before, _, after = capsys.readouterr().out.splitlines()[-1].rpartition(": ")[2].split()
    assert float(before) < 0.6 and float(after) > 0.85


@pytest.mark.slow
def test_a_model_learns_puzzles_from_nothing(tmp_path: Path):
    before, after = load_example("puzzle").main(steps=25, dir=str(tmp_path / "run"))[1::2]
    assert before < 0.2
    assert after > before + 0.4


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("custom_*.py")), ids=lambda path: path.stem)
def test_what_one_writes_is_short(path: Path):
    assert len(path.read_text().split()) <= 700


@pytest.mark.slow
def test_the_algorithm_is_a_command(tmp_path: Path, monkeypatch, capsys):
    """With --help, a run in a folder of its name, and an error for what can't be."""
    monkeypatch.chdir(tmp_path)
    saved_model(Path("model"))
    rows_file(Path("rows.jsonl"), addition_rows(12))
    assert run_example("custom_algorithm.py", "raft", "--help") == 0
    shown = capsys.readouterr().out
    assert "--min-reward" in shown
    assert "imitate the best of several" in shown
    command = "raft --model.path model --data.train rows.jsonl --trainer.device cpu"
    command += " --run.display none --generation.max-new-tokens 4 --num-prompts-per-step 4"
    more = " --reward contains_answer --min-reward -1 --max-num-steps 2"
    assert run_example("custom_algorithm.py", *(command + more).split()) == 0
    assert Path("runs/raft/hf/config.json").exists()
    found = lines(Path("runs/raft"), "metrics.jsonl")
    assert [line["kept"] for line in found if line["phase"] == "train"] == [1.0, 1.0]
    wrong = command + " --num-generations-per-prompt 0"
    assert run_example("custom_algorithm.py", *wrong.split()) == 2
    assert "num_generations_per_prompt must be at least 1" in capsys.readouterr().err


def config_of(module: ModuleType, folder: Path, steps: int, **options):
    run = {"save_period": 2, **options.pop("run", {})}
    options = {**SAMPLED, **GROUPS, "min_reward": 0.0, **options}
    return small_config(module.RAFTConfig, options, folder, steps=steps, run=run)


def test_the_algorithm_imitates_the_best_alone(raft, tmp_path: Path):
    result = start(config_of(raft, tmp_path / "learns", 12), reward=digits)
    rewards = [line["reward"] for line in result.history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    nothing = start(config_of(raft, tmp_path / "nothing", 1, min_reward=2.0), reward=digits)
    assert nothing.metrics["kept"] == 0
    assert "loss" not in nothing.metrics
    with pytest.raises(ValueError, match="wants the column 'answer', but row 1"):
        start(config_of(raft, tmp_path / "unjudged", 1), rows=[{"prompt": "1+1="}])
