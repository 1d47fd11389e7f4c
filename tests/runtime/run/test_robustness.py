"""What a run keeps when something goes wrong in its midst, and that it goes on from there with the
numbers that it would have had.
"""

import os
import resource
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

import nemorl
from nemorl.runtime.algorithms import sft
from nemorl.runtime.run.saving import ExportCallback
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import RunDirectory, RunRecord
from nemorl.runtime.store.files import NotWritten
from nemorl.runtime.watch import curves
from nemorl.runtime.watch.callbacks import Callback
from tests.runtime.run.mishaps import FailsOnce
from tests.runtime.runs import (
    addition_rows,
    digits,
    grpo_config,
    numbers,
    of_phase,
    resumed,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer


class At(Callback):
    """Does something in a hook of a step."""

    def __init__(self, hook: str, step: int, action: Any) -> None:
        self.step, self.action = step, action
        setattr(self, hook, self.act)

    def act(self, trainer, step, *_):
        if step == self.step:
            self.action()


def fail() -> None:
    raise RuntimeError("a mishap")


def outcome(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Metrics but for times and their order, and the newest checkpoint's tensors."""
    lines = RunDirectory(folder).read_metrics()
    metrics = {(line["step"], line["phase"]): numbers(line) for line in lines}
    assert len(metrics) == len(lines)
    return metrics, load_file(checkpoint.latest(folder) / "policy" / "model.safetensors")


def assert_same(a: Path, b: Path) -> None:
    (metrics, tensors), (other_metrics, other_tensors) = outcome(a), outcome(b)
    assert metrics == other_metrics
    assert_same_tensors(tensors, other_tensors)


def assert_same_tensors(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def steps_of(folder: Path) -> list[int]:
    return list(checkpoint.present(folder))


PER_STEP = 24
OPTIONS: dict[str, Any] = {"save_period": 0, "val_period": 2}


@pytest.mark.parametrize(
    ("calls", "error", "missed"),
    [
        (2 * PER_STEP + 8 + 5, RuntimeError("the judge is out"), None),
        (2 * PER_STEP + 8 + 5, KeyboardInterrupt(), None),
        (2 * PER_STEP + 5, RuntimeError("the judge is out"), (2, "validation")),
    ],
)
def test_a_reward_that_raises_costs_no_step(tmp_path: Path, calls, error, missed):
    """In the rollout of step 3, or the validation before, which is not made up for; in step 4 the
    run is as if nothing had happened.
    """
    start(grpo_config(tmp_path / "straight", run=OPTIONS), validation=addition_rows(8))
    config = grpo_config(tmp_path / "run", run=OPTIONS)
    with pytest.raises(type(error)) as caught:
        start(config, validation=addition_rows(8), reward=FailsOnce(calls, error))
    assert steps_of(tmp_path / "run") == [2]
    note = f"has a checkpoint of step 2: resume from it with --run.dir {tmp_path / 'run'} --run.res"
    assert note in "".join(caught.value.__notes__)
    start(resumed(config), validation=addition_rows(8))
    (metrics, tensors), (found, others) = (outcome(tmp_path / name) for name in ("straight", "run"))
    assert found == {key: line for key, line in metrics.items() if key != missed}
    assert_same_tensors(tensors, others)


def test_dropout_of_a_failed_step_is_drawn_again(tmp_path: Path):
    """The random state in the checkpoint is that of the end of the last whole step."""
    options = {"attention_dropout": 0.3, "rows": addition_rows()}
    start(sft_config(tmp_path / "straight", run=OPTIONS), **options)
    config = sft_config(tmp_path / "run", run=OPTIONS)
    failing = At("on_step_begin", 3, lambda: (torch.rand(7), fail()))
    with pytest.raises(RuntimeError, match="a mishap"):
        start(config, callbacks=[failing], **options)
    start(resumed(config), **options)
    assert_same(tmp_path / "straight", tmp_path / "run")


@pytest.mark.parametrize(
    ("hook", "at", "saved"),
    [
        ("on_step_end", 3, 3),
        ("on_step_begin", 3, 2),
        ("on_validation_end", 4, 4),
        ("on_epoch_end", 1, 4),
    ],
)
def test_a_callback_that_raises_costs_no_step(tmp_path: Path, hook, at, saved):
    config = sft_config(tmp_path, run=OPTIONS, train_global_batch_size=20)
    with pytest.raises(RuntimeError, match="a mishap"):
        start(config, validation=addition_rows(8), callbacks=[At(hook, at, fail)])
    assert steps_of(tmp_path) == [saved]


def test_a_loss_that_is_not_a_number_leaves_the_weights(tmp_path: Path, monkeypatch):
    def broken(output, batch, **options):
        result = plain(output, batch, **options)
        calls.append(1)
        return replace(result, loss=result.loss * (float("nan") if len(calls) == 3 else 1.0))

    calls: list[int] = []
    plain = sft.loss_fn
    monkeypatch.setattr(sft, "loss_fn", broken)
    config = sft_config(tmp_path / "run", run={"save_period": 0})
    with pytest.raises(FloatingPointError, match="the loss of optimizer step 3 must be finite"):
        start(config)
    assert steps_of(tmp_path / "run") == [2]
    start(sft_config(tmp_path / "straight", run={"save_period": 0}))
    start(resumed(config))
    assert_same(tmp_path / "straight", tmp_path / "run")


def test_an_error_after_half_of_the_updates_of_a_step_goes_back_to_the_last_checkpoint(
    tmp_path: Path, monkeypatch
):
    from nemorl.parallel import accumulation

    calls: list[int] = []
    check = accumulation.require_finite

    def broken(loss, grad_norm, *, step):
        calls.append(1)
        check(loss * (float("inf") if len(calls) == 6 else 1.0), grad_norm, step=step)

    monkeypatch.setattr(accumulation, "require_finite", broken)
    config = grpo_config(tmp_path, run={"save_period": 1}, train_global_batch_size=12)
    with pytest.raises(FloatingPointError) as caught:
        start(config)
    assert steps_of(tmp_path) == [1, 2]
    assert "had begun, so the weights of step 2 are gone" in caught.value.__notes__[0]


WRITERS = {
    "the settings": (RunDirectory, "write_config", "config.yaml"),
    "the status of the run": (RunRecord, "write", "run.json"),
    "the tokenizer": (PreTrainedTokenizerFast, "save_pretrained", "tokenizer"),
    "the lengths of the data": (RunDirectory, "write_data", "data.json"),
    "the metrics": (RunDirectory, "append_metrics", "metrics.jsonl"),
    "the samples": (RunDirectory, "append_samples", "samples/steps_1-100.jsonl"),
    "a plot": (curves, "_save", "plots/loss.png"),
    "the model": (ExportCallback, "on_train_end", "hf"),
}


@pytest.mark.slow_cases("the samples")
@pytest.mark.parametrize("what", WRITERS)
def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch, what):
    """A limit on the size of files stands in for a full disk. What only shows is a warning."""
    owner, name, file = WRITERS[what]
    write, before = getattr(owner, name), resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*args: Any, **options: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            return write(*args, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(owner, name, full)
    expected = (
        rf"{what} could not be written to {tmp_path}/{file} \(.*[Tt]oo large.*GB are free there\):"
        " make room or give write access there, or name another place"
    )
    run = {"plots": True, "export": True}
    validation = {"validation": addition_rows(2)} if what == "the samples" else {}
    config = sft_config(tmp_path, steps=1, run=run)
    shows = what in ("the metrics", "the samples", "a plot")
    with (
        pytest.warns(UserWarning, match=expected)
        if shows
        else pytest.raises(NotWritten, match=expected)
    ):
        start(config, **validation)


def test_a_disk_that_is_full_at_a_checkpoint_ends_the_run_in_order(tmp_path: Path, monkeypatch):
    from nemorl.parallel.dtensor.backend import DTensorBackend

    save = DTensorBackend.save_checkpoint

    def full(self, path):
        if self.step == 2:
            raise OSError(28, "No space left on device")
        save(self, path)

    monkeypatch.setattr(DTensorBackend, "save_checkpoint", full)
    message = r"step_2 could not be written .*No space left on device.*GB are free there"
    with pytest.raises(checkpoint.CheckpointError, match=message) as caught:
        start(sft_config(tmp_path, run={"save_period": 1}))
    assert steps_of(tmp_path) == [1]
    assert "has a checkpoint of step 1: resume from it" in caught.value.__notes__[0]


@pytest.mark.slow_cases(but=["flipped-model"])
@pytest.mark.parametrize("file", ["model", "optimizer"])
@pytest.mark.parametrize("damage", ["flipped", "zeroed", "cut"])
def test_damage_that_is_met_while_loading_costs_a_checkpoint(
    tmp_path: Path, monkeypatch, file, damage
):
    config = sft_config(tmp_path / "run", steps=2, run={"save_period": 1})
    start(config)
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    path = tmp_path / "run" / "checkpoints" / "step_2" / "policy" / f"{file}.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[:-4]
    else:
        content[-4:] = bytes(4) if damage == "zeroed" else bytes(b ^ 1 for b in content[-4:])
    path.write_bytes(content)
    monkeypatch.setattr(checkpoint, "SMALL", 0)  # as of a larger model's files
    message = rf"step_2 is not used: .*{file}.*Trying an older one"
    with pytest.warns(UserWarning, match=message) as warned:
        start(resumed(config))
    assert sum("is not used" in str(each.message) for each in warned) == 1
    assert_same(tmp_path / "straight", tmp_path / "run")


SIGTERM_SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import nemorl
from nemorl.runtime.cli import main as cli
from nemorl.runtime.run import open_run
from nemorl.runtime.watch.callbacks import Callback
from tests.runtime.runs import sft_config, start

def stop():
    os.kill(os.getpid(), signal.Signals[sys.argv[3]])

class Stop(Callback):
    def on_step_begin(self, trainer, step):
        if step == 3 and sys.argv[2] == "begin":
            stop()

plain, calls = torch.optim.AdamW.step, []

def update(self, *args, **kwargs):
    calls.append(1)
    if len(calls) == 3 and sys.argv[2] == "update":
        stop()
    return plain(self, *args, **kwargs)

torch.optim.AdamW.step = update
def train(config):
    return start(sft_config(Path(config.run.dir), run={"save_period": 0}), callbacks=[Stop()])
nemorl.run  # which train calls
open_run.run, cli._require_inputs = train, print
sys.exit(cli.main(["sft", "--model.path", ".", "--data.train", "d", "--run.dir", sys.argv[1]]))
"""


@pytest.mark.slow_cases(but=["update-SIGTERM-3"])
@pytest.mark.parametrize(
    ("place", "name", "saved"),
    [("begin", "SIGTERM", 2), ("update", "SIGTERM", 3), ("update", "SIGINT", 3)],
)
def test_a_signal_saves_the_last_step(forked: Path, tmp_path: Path, place, name, saved):
    """Wherever it comes, no step is lost, and every step that is saved is on record."""
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    (tmp_path / "script.py").write_text(SIGTERM_SCRIPT)
    command = [forked / "python", str(tmp_path / "script.py"), str(folder), place, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.Signals[name], done.stderr
    word = {"SIGTERM": "terminated", "SIGINT": "interrupted"}[name]
    assert f"nemorl sft: {word}\n{folder} has a checkpoint of step {saved}: resume" in done.stderr
    assert steps_of(folder) == [saved]
    steps = [line["step"] for line in RunDirectory(folder).read_metrics()]
    assert steps == [*range(1, saved + 1)]
    assert not (folder / ".lock").exists()


def test_a_run_that_has_learned_enough_ends_and_stays_ended(tmp_path: Path):
    config = sft_config(tmp_path, steps=50, run={"stop_when": "loss < 3.0", "val_period": 40})
    result = start(config, validation=addition_rows(8))
    last = max(line["step"] for line in result.history)
    losses = [line["loss"] for line in of_phase(result, "train")]
    assert last < 50 and losses[-1] < 3.0 <= min(losses[:-1])
    assert [line["step"] for line in of_phase(result, "validation")] == [last]
    assert steps_of(tmp_path) == [last]
    again = start(resumed(config), validation=addition_rows(8))
    assert again.history == result.history


def test_the_best_checkpoint_is_kept_and_exported(tmp_path: Path):
    """The one with the lowest reward: early in a run that learns, and at no step of the period."""
    from transformers import AutoModelForCausalLM

    rules = {"metric": "val_reward", "higher_is_better": False, "keep_checkpoints": 1, "seed": 3}
    result = start(
        grpo_config(tmp_path / "run", run={"save_period": 2, "val_period": 1, **rules}),
        validation=addition_rows(8),
    )
    rewards = {line["step"]: line["reward"] for line in of_phase(result, "validation")}
    best = min(rewards, key=lambda step: rewards[step])
    assert best == 1 and steps_of(tmp_path / "run") == [1, 4]
    assert checkpoint.best(tmp_path / "run").name == f"step_{best}"
    saved = load_file(checkpoint.best(tmp_path / "run") / "policy" / "model.safetensors")
    for step in ("best", best):
        folder = nemorl.export(run=str(tmp_path / "run"), output=str(tmp_path / "out"), step=step)
        exported = AutoModelForCausalLM.from_pretrained(folder).named_parameters()
        assert all(torch.equal(saved[name], tensor) for name, tensor in exported)


@pytest.mark.parametrize("make", [grpo_config, sft_config])
def test_a_tokenizer_needs_no_token_to_pad_with(tmp_path: Path, make):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    given: dict[str, Any] = {"model": tiny_model(scale=2.0), "tokenizer": tokenizer}
    if make is grpo_config:
        given["reward"] = digits
    nemorl.run(make(tmp_path / "run", steps=2), train=addition_rows(), **given)
    start(make(tmp_path / "padded", steps=2))
    assert_same(tmp_path / "run", tmp_path / "padded")


def test_settings_that_cannot_be_read_are_no_reason_not_to_go_on(tmp_path: Path):
    config = sft_config(tmp_path, steps=1)
    start(config)
    (tmp_path / "config.yaml").write_text("no: setting of ours\n")
    with pytest.warns(UserWarning, match="changed settings: no is None, was 'setting of ours'"):
        start(resumed(config, max_num_steps=2))
    parallel = replace(config.parallel, param_dtype="float32")
    kept = replace(config, max_num_steps=2, parallel=parallel)
    assert nemorl.load_config(nemorl.SFTConfig, tmp_path / "config.yaml") == kept
