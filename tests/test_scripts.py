"""Loops as scripts go on with the same numbers after a SIGKILL, without a line of their own."""

import subprocess
from pathlib import Path

import pytest

from tests.examples import load_example, visiting
from tests.killed_script import start

TWO = ["--parallel.dp-shard=2"]
VLLM = ["--generation.backend=vllm", "--generation.num-replicas=1"]
TWO_UPDATES = ["--num-updates-per-batch=2"]
CASES = {
    "one device": ("grpo_loop", []),
    "two devices": ("grpo_loop", TWO),
    "vllm": ("grpo_loop", VLLM),
    "two devices and vllm": ("grpo_loop", TWO + VLLM),
    "a loss of one's own": ("custom_loss", TWO_UPDATES),
    "a loss of one's own on two devices": ("custom_loss", TWO_UPDATES + TWO),
    "a loss of one's own and vllm": ("custom_loss", TWO_UPDATES + VLLM),
    "two models": ("two_models", []),
    "two models on two devices": ("two_models", TWO),
    "two models on devices of their own": ("two_models", [*TWO, "--critic-own-ranks=true"]),
    "two models and vllm": ("two_models", VLLM),
}
FAST = ("one device", "two models")


def weights(folder: Path) -> dict[str, dict[str, bytes]]:
    """The bytes of each model in the last checkpoint, by name."""
    return {
        model.name: {file.name: file.read_bytes() for file in model.glob("*.safetensors")}
        for model in (folder / "checkpoints" / "step_4").iterdir()
        if model.is_dir()
    }


@pytest.mark.parametrize(
    "case",
    [
        n if n in ("one device", "two models") else pytest.param(n, marks=pytest.mark.slow)
        for n in CASES
    ],
)
def test_a_killed_script_goes_on(case: str, forked: Path, tmp_path: Path):
    name, more = CASES[case]
    with visiting():
        lessons = load_example("grpo_loop").demonstration(tmp_path)

    def flags(run: str) -> list[str]:
        short = ["--max-num-steps=4", "--run.save-period=1", "--run.display=none"]
        return [*lessons, f"--run.dir={tmp_path / run}", *short, "--run.export=false", *more]

    whole = start(name, flags("whole"))
    command = [forked / "python", "-m", "tests.killed_script", name, "3", *flags("killed")]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -9, killed.stderr
    resumed = start(name, [*flags("killed"), "--run.resume=true"])
    assert [line["step"] for line in whole if line["phase"] == "train"] == [1, 2, 3, 4]
    models = [found for run in ("whole", "killed") for found in [weights(tmp_path / run)]]
    assert len(models[0]) == len(models[1]) == (2 if name == "two_models" else 1)
    if "vllm" not in case:
        assert resumed == whole and models[0] == models[1]
    for line, other in zip(resumed, whole, strict=True):
        assert line["reward"] == other["reward"]
        assert line.get("loss", 0) == pytest.approx(other.get("loss", 0), abs=1e-5)
