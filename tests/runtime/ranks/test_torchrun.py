"""Ranks that torchrun has started: what users see of a job."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from nemorl.runtime.ranks.rank import signals_held
from tests.examples import write_example_files
from tests.ranks import held_port
from tests.runtime.runs import addition_rows, lines, preference_rows, rows_file, saved_model
from tests.runtime.workers.processes import soon_gone
from tests.tiny_models import tiny_model


def torchrun(forked: Path, *program: str) -> tuple[int, str]:
    """The exit code of a job of two processes, and what it printed."""
    python = str(forked / "python")
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}
    done = subprocess.run(
        [*command, *program], capture_output=True, text=True, timeout=300, env=environment
    )
    return done.returncode, done.stdout + done.stderr


def job(forked: Path, what: str, folder: Path) -> tuple[int, str]:
    return torchrun(forked, "-m", "tests.runtime.ranks.job", what, str(folder))


def test_the_others_obey_rank_zero(forked: Path, model_folder: Path):
    code, text = job(forked, "everything", model_folder)
    assert code == 0, text
    assert text.count("did everything") == 2
    assert "result of run 0" in text and "result of run 1" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_grpo_with_an_engine_on_the_machine_of_rank_zero(forked: Path, tmp_path: Path):
    """As examples/cluster/torchrun.sh starts it, with a Ray of this run."""
    write_example_files(tmp_path)
    tiny_model(hidden_size=128, head_dim=32).save_pretrained(tmp_path / "model")
    (tmp_path / "digits.py").write_text(
        "def digits(prompt, response):\n    return sum(c.isdigit() for c in response) / 4\n"
    )
    code, text = torchrun(forked, "-m", "nemorl", "grpo", *shlex.split(
        f"--model.path {tmp_path}/model --data.train {tmp_path}/questions.jsonl"
        f" --reward {tmp_path}/digits.py:digits --run.dir {tmp_path}/run --run.resume=auto"
        " --max-num-steps 2 --num-prompts-per-step 2 --num-generations-per-prompt 2"
        " --trainer.device cpu --run.display none --run.no-plots --generation.max-new-tokens 4"
        " --generation.backend vllm --generation.num-replicas 1"
    ), "--generation.engine", '{"kv_cache_memory_bytes": 67108864}')  # fmt: skip
    assert code == 0, text
    assert "Ray's object store (object_store: " in (tmp_path / "run" / "log.jsonl").read_text()
    found = lines(tmp_path / "run", "metrics.jsonl")
    steps = [line for line in found if line["phase"] == "train"]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["token_mult_prob_error"] < 1 + 1e-4 for line in steps)
    assert len({line["entropy"] for line in steps}) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layout"),
    [("sft", ""), ("dpo --lora.rank 4 --lora.dropout 0", "--parallel.tp 2")],
)
def test_two_torchruns_give_the_numbers_of_one_process(
    forked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, layout: str
):
    """As on two machines, with two processes each."""
    monkeypatch.chdir(tmp_path)
    saved_model(Path("model"), scale=1.0)
    rows = preference_rows() if options.startswith("dpo") else addition_rows()
    rows_file(Path("rows.jsonl"), rows)
    train = f"-m nemorl {options} --model.path model --data.train rows.jsonl --max-num-steps 2"
    train += " --trainer.device cpu --run.no-plots --run.display none --run.dir "
    with held_port() as held:
        meeting = (
            "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-id mine"
            f" --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{held.getsockname()[1]} "
        )
        commands = [f"{meeting}{train}two {layout}"] * 2 + [f"{train}one"]
        jobs = [
            subprocess.Popen(
                [forked / "python", *command.split()],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(forked / "python")},
            )
            for command in commands
        ]
        said = [job.communicate(timeout=600)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], said
    two, one = (
        [line["loss"] for line in lines(Path(name), "metrics.jsonl")] for name in ("two", "one")
    )
    assert len(one) == 2 and two == pytest.approx(one, abs=1e-5)


KILLED = r"Signal 9 \(SIGKILL\)|exitcode *: -9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raising_alone", r"ZeroDivisionError: only here"),
        ("killed", KILLED),
        pytest.param("asleep", r"(?i)time[d ]*out", marks=pytest.mark.slow),
        ("between_calls", r"ArithmeticError: of the loop"),
        ("leader_killed", KILLED),
    ],
)
def test_any_error_ends_the_job_and_all_processes(
    forked: Path, model_folder: Path, what: str, reason: str
):
    code, text = job(forked, what, model_folder)
    assert code == 1 and re.search(reason, text) and "ChildFailedError" in text, text
    pids = {int(pid) for pid in re.findall(r"(?m)^process (\d+)$", text)}
    assert len(pids) == 2 and soon_gone(*pids)


class Handled(Exception):
    """What a handler raises."""


def test_a_signal_waits_until_rank_zero_has_done_its_part():
    """Else the others would wait for it in a collective, while it goes on to save."""
    came: list[int] = []

    def handle(number, frame):
        came.append(number)
        raise Handled

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(Handled), signals_held():
            for number in (signal.SIGTERM, signal.SIGTERM):
                signal.raise_signal(number)
            assert came == []
        assert came == [signal.SIGTERM]
        assert {signal.getsignal(number) for number in before} == {handle}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
