"""A loop as a script goes on with the same numbers after a SIGKILL, without a line of its own."""

import subprocess
from pathlib import Path

import pytest

from tests.examples import load_example, visiting
from tests.killed_script import start


def weights(folder: Path) -> dict[str, dict[str, bytes]]:
    """The bytes of each model in the last checkpoint, by name."""
    return {
        model.name: {file.name: file.read_bytes() for file in model.glob("*.safetensors")}
        for model in (folder / "checkpoints" / "step_4").iterdir()
        if model.is_dir()
    }


@pytest.mark.slow
def test_a_killed_script_of_two_models_goes_on(forked: Path, tmp_path: Path):
    with visiting():
        lessons = load_example("quickstart").demonstration(tmp_path)

    def flags(run: str) -> list[str]:
        short = ["--max-num-steps=4", "--run.save-period=1", "--run.display=none"]
        return [*lessons, f"--run.dir={tmp_path / run}", *short, "--run.export=false"]

    whole = start("two_models", flags("whole"))
    command = [forked / "python", "-m", "tests.killed_script", "two_models", "3", *flags("killed")]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -9, killed.stderr
    resumed = start("two_models", [*flags("killed"), "--run.resume=true"])
    assert [line["step"] for line in whole if line["phase"] == "train"] == [1, 2, 3, 4]
    models = [weights(tmp_path / run) for run in ("whole", "killed")]
    assert len(models[0]) == 2 and resumed == whole and models[0] == models[1]
