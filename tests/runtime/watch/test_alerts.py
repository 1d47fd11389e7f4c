import warnings
from pathlib import Path

import pytest
import torch

import nemorl
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.alerts import REJECTED_STEPS, ResourceMeter, SignalWatch
from tests.runtime.runs import grpo_config, start
from tests.runtime.tiny import tiny_run


def test_steps_without_a_signal_are_warned_of_ever_more_rarely():
    learned = {"reward": 0.5, "reward_std": 0.5, "informative_groups": 1.0, "num_updates": 1.0}
    alike = learned | {"informative_groups": 0.0}  # a KL penalty updates all the same
    constant, filtered = alike | {"reward": 0.25, "reward_std": 0.0}, learned | {"num_updates": 0.0}
    steps = [learned, constant, alike, learned, filtered, filtered, *[constant] * 4]
    watch = SignalWatch()
    with pytest.warns(UserWarning, match="nothing to learn from.*Look at samples/") as caught:
        for step, metrics in enumerate(steps, start=1):
            watch.on_step_end(tiny_run(step=step), step, metrics)
    assert [str(warning.message).partition(",")[0] for warning in caught] == [
        "step 2: all responses had the reward 0.25",
        "step 3: all responses to each prompt had the same reward",
        "step 6: no token has an advantage (responses cut off and filtered",
        "step 10: all responses had the reward 0.25",
    ]
    assert ["num_updates 0" in str(warning.message) for warning in caught] == [0, 0, 1, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step .*nothing to learn from")
def test_a_run_whose_groups_are_all_rejected_ends(tmp_path: Path):
    options = {"dynamic_sampling": True, "max_sampling_rounds": 2}
    config = grpo_config(tmp_path, steps=REJECTED_STEPS + 4, **options)
    with pytest.raises(RuntimeError, match=f"rejected all groups of the last {REJECTED_STEPS} "):
        start(config, reward=lambda prompt, response: 1.0)
    metrics = RunDirectory(Path(config.run.dir)).metrics.read_text().splitlines()
    assert len(metrics) == REJECTED_STEPS


def test_only_steps_in_a_row_end_a_run():
    rejected, watch = {"groups_kept": 0.0}, SignalWatch()
    for step in range(1, 3 * REJECTED_STEPS):
        kept = {"groups_kept": float(step % REJECTED_STEPS == 0)}
        watch.on_step_end(tiny_run(step=step), step, kept)
    watch.rejected = REJECTED_STEPS - 1
    with pytest.raises(RuntimeError, match="dynamic_sampling rejected all groups"):
        watch.on_step_end(tiny_run(step=step), step, rejected)


def test_one_response_per_prompt_is_compared_with_none_of_its_group(tmp_path: Path):
    advantage = nemorl.GroupAdvantage(baseline="batch_mean", scale="batch_std")
    config = grpo_config(tmp_path, num_generations_per_prompt=1, advantage=advantage, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (line,) = start(config).history
    assert line["reward_std"] > 0 and "informative_groups" not in line


def test_memory_that_is_taken_is_seen():
    meter = ResourceMeter()
    before = meter.read()["memory_gb"]
    taken = torch.ones(50_000_000)
    assert meter.read()["memory_gb"] - before == pytest.approx(0.2, abs=0.05)
    del taken


def test_a_gpu_is_asked(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    assert (ResourceMeter().read()["gpu_memory_gb"], calls) == (3.0, ["reset"])
