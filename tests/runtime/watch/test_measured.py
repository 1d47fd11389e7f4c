"""What a run says of its own cost, traces of its steps, and the determinism switch, end to end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nemorl
from tests.runtime.runs import TIMES, grpo_config, sft_config, start

COSTS = {"trainer/seconds", "trainer/memory_gb", "trainer/tflops_per_device"}


@pytest.mark.parametrize("make", [grpo_config, sft_config])
def test_every_step_tells_what_it_cost(make, tmp_path: Path):
    lines = start(make(tmp_path / "run", steps=2)).history
    assert len(lines) == 2
    for line in lines:
        assert line.keys() >= COSTS and all(line[name] > 0 for name in COSTS)
        assert ("trainer/mfu" in line) == ("gpu_memory_gb" in line) == torch.cuda.is_available()
        assert line["trainer/seconds"] < line["seconds"] and 0.05 < line["trainer/memory_gb"] < 100
        assert line["cpu_percent"] >= 0 and 0.01 < line["memory_gb"] < 100


def test_a_trace_in_the_run_s_folder(tmp_path: Path):
    result = start(sft_config(tmp_path / "run", steps=3, profile=nemorl.ProfileConfig(steps="2:3")))
    (trace,) = (result.paths.path / "profile").iterdir()
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert trace.name == "rank0_steps2-3.json" and "optimizer step 1" not in names
    assert {"optimizer step 2", "optimizer step 3"} <= names


def test_a_run_that_fails_leaves_the_trace_so_far(tmp_path: Path):
    asked = 0

    def reward(response: str) -> float:
        nonlocal asked
        asked += 1
        if asked > 2 * 24 + 3:
            raise KeyboardInterrupt
        return float(len(response))

    profile = nemorl.ProfileConfig(steps="2:9", dir=str(tmp_path / "traces"))
    config = grpo_config(tmp_path / "run", steps=9, profile=profile)
    with pytest.raises(KeyboardInterrupt):
        start(config, reward=reward)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["rank0_steps2-2.json"]
    start(sft_config(tmp_path / "next", steps=1))  # the profiler is free again


def test_deterministic_kernels_change_no_number_here_and_last_as_long_as_the_run(tmp_path: Path):
    seen = []

    def reward(response: str) -> float:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return sum(c.isdigit() for c in response) / 4

    trainer = nemorl.TrainerConfig(device="cpu", sequence_packing=True, deterministic=True)
    options = {"steps": 2, "loss": nemorl.GSPOLoss()}
    fixed = start(grpo_config(tmp_path / "fixed", trainer=trainer, **options), reward=reward)
    assert all(seen) and not torch.are_deterministic_algorithms_enabled()
    trainer = replace(trainer, deterministic=False)
    free = start(grpo_config(tmp_path / "free", trainer=trainer, **options), reward=reward)
    for name in fixed.metrics.keys() - set(TIMES):
        assert fixed.metrics[name] == free.metrics[name]
