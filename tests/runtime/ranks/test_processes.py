"""Ranks as real processes of this machine, with real collectives between them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from nemorl.losses.types import finalize
from nemorl.runtime.run.errors import WorkerDied, WorkerError, WorkerTimeout
from tests.parallel.batches import random_batch
from tests.runtime.cluster.processes import alive, soon_gone
from tests.runtime.ranks import backends

BATCH = random_batch([3, 4])
SCRIPT = Path(__file__).with_name("driver.py")


@pytest.fixture(scope="module")
def trainer(trainers, tmp_path_factory: pytest.TempPathFactory):
    """Shared by the tests that leave it as it was."""
    return trainers(cpus_per_rank=1, logs=tmp_path_factory.mktemp("shared"))


def pids(trainer) -> list[int]:
    return [trainer._group.place(rank).pid for rank in range(2)]


def loss(metrics) -> float:
    return finalize(metrics)["loss"]


def test_every_rank_has_its_place(trainer):
    group = trainer._group
    found = [process_environment(pid) for pid in pids(trainer)]
    for rank, environment in enumerate(found):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert expected.items() <= environment.items() and environment["OMP_NUM_THREADS"] == "1"
    assert (
        found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]
        and found[0]["NEMORL_WORKER"] != found[1]["NEMORL_WORKER"]
    )
    own = trainer._call("environment")
    assert own["pid"] == pids(trainer)[0] and own["threads"] == 1 and own["cwd"] == str(Path.cwd())
    assert own["session"] == own["pid"] != os.getsid(0), "Ctrl-C in the terminal is not theirs"
    assert (
        group.place(1)
        .log.read_text(encoding="utf-8")
        .startswith(f"--- rank 1 of 2, process {pids(trainer)[1]} on ")
    )


def process_environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8", errors="replace")
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def test_a_call_goes_to_all_and_one_answer_comes_back(trainer):
    step, offset = trainer.step, 10
    assert (
        loss(trainer.train_step(BATCH, lambda rank, batch: rank + offset + len(batch.input_ids)))
        == 2 * (10 + 2) + 1
    )
    assert trainer.step == step + 1
    assert trainer.model.config.model_type == "qwen2" and {
        p.device.type for p in trainer.model.parameters()
    } == {"meta"}


def test_what_all_raise_is_raised_here_and_they_stay_usable(trainer):
    step = trainer.step
    with pytest.raises(
        FloatingPointError, match=r"^the loss must be finite, but it is nan on rank 0\n"
    ) as caught:
        trainer.train_step(BATCH, backends.raising)
    assert "in raising" in caught.value.__notes__[0] and trainer.step == step
    with pytest.raises(WorkerError, match=r"^Own: mine\n"):
        trainer.train_step(BATCH, backends.raising_own)
    with pytest.raises(RuntimeError, match=r"^no reference\n"):
        trainer.get_reference_logprobs(BATCH)
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3


def test_what_cannot_be_sent_is_told(trainer):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        trainer.train_step(BATCH, lambda rank, batch: lock.locked())
    with pytest.raises(TypeError, match="pickle"):
        trainer._call("lock")
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3


def test_weights_come_whole_and_may_be_left_at_any_point(trainer):
    trainer.train_step(BATCH, backends.rank_number)
    found = dict(trainer.export_weights())
    assert list(found) == [*(f"large.{i}" for i in range(8)), "total"]
    assert [float(found[f"large.{i}"].mean()) for i in range(8)] == list(range(0, 16, 2)), (
        "summed over both ranks, and none overwritten by a later bucket"
    )
    assert {tensor.dtype for _, tensor in trainer.export_weights(dtype=torch.bfloat16)} == {
        torch.bfloat16,
        torch.float32,
    }
    for _ in range(3):
        assert next(iter(trainer.export_weights()))[0] == "large.0"
    pairs = zip(trainer.export_weights(), trainer.export_weights(), strict=True)
    assert all(one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in pairs)
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3


def test_rank_zero_sends_its_weights_itself(trainer):
    def sums(weights):
        return os.getpid(), {name: (float(x.float().mean()), x.dtype) for name, x in weights}

    pid, found = trainer.send_weights(sums, dtype=torch.bfloat16)
    assert pid == pids(trainer)[0]
    assert [found[f"large.{i}"] for i in range(8)] == [(2.0 * i, torch.bfloat16) for i in range(8)]
    assert trainer.send_weights(next)[0] == "large.0"
    with pytest.raises(ZeroDivisionError):
        trainer.send_weights(lambda weights: 1 / 0)
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3


def test_weights_of_before_a_step_are_not_given_after_it(trainer):
    weights = trainer.export_weights()
    next(weights)
    trainer.train_step(BATCH, backends.rank_number)
    with pytest.raises(RuntimeError, match="before the trainer's next step"):
        next(weights)
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3


def test_checkpoints_are_found_from_anywhere(
    trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    step = trainer.step
    trainer.save_checkpoint(Path("saved"))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["rank-0", "rank-1"]
    trainer.train_step(BATCH, backends.rank_number)
    trainer.load_checkpoint(Path("saved"))
    assert trainer.step == step


def test_training_goes_on_while_another_thread_waits_for_a_checkpoint(trainer, tmp_path: Path):
    trainer.save_checkpoint(tmp_path)
    trainer.save_checkpoint(tmp_path / "background", background=True)
    waiting = threading.Thread(target=trainer.wait_for_checkpoint)
    waiting.start()
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3
    waiting.join(0.3)
    assert waiting.is_alive(), "it is not written yet"
    trainer.load_checkpoint(tmp_path)  # which is the sign to be done
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_call_that_was_interrupted_does_not_confuse_the_next(trainer):
    """As by a second Ctrl-C; whether the update has begun is not known, so it counts as begun."""
    step, answer = trainer.step, threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    answer.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.train_step(BATCH, lambda rank, batch: time.sleep(1.5) or 5)
    assert trainer.step == step + 1
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3 and trainer.step == step + 2


def test_a_killed_rank_is_named_and_the_others_are_ended(trainers):
    trainer = trainers()
    trainer.train_step(BATCH, backends.rank_number)
    children, before = trainer._call("spawn"), pids(trainer)
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        trainer.train_step(BATCH, backends.killed)
    assert time.monotonic() - start < 40 and (caught.value.rank, caught.value.pid) == (1, before[1])
    first = str(caught.value).splitlines()[0]
    assert (
        first.startswith(f"rank 1 (process {before[1]} on ")
        and ") died in train_step of optimizer step 2: it was killed by SIGKILL" in first
    )
    assert "rank-1.log and ends:" in first and alive(*before, *children) == [], (
        "nothing is left when the error comes"
    )
    with pytest.raises(
        RuntimeError, match=r"has no model: its ranks were ended: rank 1 .* died in train_step"
    ):
        trainer.save_checkpoint(Path("nowhere"))
    trainer.shutdown()


@pytest.mark.parametrize("what", ["stopped", "asleep"])
def test_a_rank_that_hangs_is_named_with_what_all_were_doing(trainers, what: str):
    trainer = trainers(timeout_s=2)
    before, start = pids(trainer), time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        trainer.train_step(BATCH, getattr(backends, what))
    assert time.monotonic() - start < 40 and alive(*before) == []
    lines = str(caught.value).splitlines()
    where = f"rank 1 (process {before[1]} on "
    assert (
        lines[0].startswith(where)
        and ") hung in train_step of optimizer step 1: no answer within 2 s (runtime.timeout_s)."
        in lines[0]
    )
    assert (
        f"rank 0 (process {before[0]} on " in lines[1]
        and "s in train_step, after 0 optimizer steps, at " in lines[1]
    )
    assert "torch/distributed/" in lines[1] and "backends.py" in lines[1]
    if what == "asleep":
        assert "training/backends.py:" in lines[2] and " asleep < " in lines[2]
    else:
        assert "its process is stopped (SIGSTOP or a debugger)" in lines[2]


def test_an_error_of_one_rank_alone_ends_all(trainers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nemorl.runtime.ranks.group.ALONE_S", 1.0)
    trainer = trainers()
    before = pids(trainer)
    with pytest.raises(ZeroDivisionError, match=r"^only here\n") as caught:
        trainer.train_step(BATCH, backends.raising_alone)
    assert (
        f"raised by rank 1 (process {before[1]} on " in caught.value.__notes__[1]
        and alive(*before) == []
    )


def test_a_setup_that_fails_leaves_no_process(trainers, tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"^seed must be a lucky number, but it is 13: take another\n"
    ):
        trainers(seed=13, logs=tmp_path / "logs")
    with pytest.raises(
        WorkerDied,
        match=(
            r"died in setup after 0 optimizer steps: it ended with exit code 3; its log is"
            r" .*rank-1.log and ends:"
        ),
    ) as caught:
        trainers(seed=666, logs=tmp_path / "logs")
    assert str(caught.value).endswith("\n  | what killed it")
    logs = [
        (tmp_path / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8") for rank in range(2)
    ]
    found = [
        int(line.split("process ")[1].split()[0])
        for log in logs
        for line in log.splitlines()
        if line.startswith("--- rank")
    ]
    assert len(found) >= 3 and alive(*found) == [], "a rank may be ended before it writes a word"


def test_shutdown_is_in_order_and_leaves_nothing(trainers, tmp_path: Path):
    trainer = trainers(logs=tmp_path)
    children, before = trainer._call("spawn"), pids(trainer)
    trainer.shutdown()
    assert alive(*before, *children) == []
    assert all(
        "shut down in order" in (tmp_path / f"rank-{rank}.log").read_text(encoding="utf-8")
        for rank in range(2)
    )
    with pytest.raises(RuntimeError, match="call setup"):
        _ = trainer.model
    trainer.shutdown()


def driver(what: str, model_folder: Path, tmp_path: Path) -> tuple[subprocess.Popen, list[int]]:
    """A process that drives two ranks, and their process ids and those of children of theirs."""
    command = [
        sys.executable,
        "-m",
        "tests.runtime.ranks.driver",
        what,
        str(model_folder),
        str(tmp_path / "logs"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    found = list(map(int, process.stdout.readline().split()))
    assert len(found) == 4 and alive(*found) == found
    return process, found


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_no_rank_outlives_a_driver_that_is_killed(model_folder: Path, tmp_path: Path, what: str):
    process, found = driver(what, model_folder, tmp_path)
    time.sleep(0.5)
    process.kill()
    process.wait()
    assert soon_gone(*found), "nor do children of ranks"


def test_ctrl_c_is_the_drivers_alone(model_folder: Path, tmp_path: Path):
    process, found = driver("busy", model_folder, tmp_path)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    output, _ = process.communicate(timeout=60)
    assert output.splitlines() == ["interrupted", "loss 3.0"], "the ranks are there still"
    assert process.returncode == 0 and soon_gone(*found)
    assert "KeyboardInterrupt" not in (tmp_path / "logs" / "rank-0.log").read_text(encoding="utf-8")
