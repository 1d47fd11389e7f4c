"""Runs that sample ahead with engines of their own: requests live across steps and deaths."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl.runtime.run.loop import Step
from tests.ray_session import ray_cpus
from tests.runtime.engines.shared import CACHE, shared_replicas, small_model
from tests.runtime.runs import addition_rows, ahead, digits, of_phase, prove
from tests.tiny_models import tiny_tokenizer

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]
STEPS = 6


class Harm(nemorl.Callback):
    """A replica's process is killed after the second step."""

    def on_step_end(self, trainer: nemorl.Run, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            generator: Any = trainer.generator
            os.kill(generator._engines.running()[0].place.pid, signal.SIGKILL)


def run(folder: Path, staleness: int, *callbacks: Any, **options: Any) -> nemorl.TrainResult:
    generation = {
        **{"backend": "vllm", "num_replicas": 2, "colocated": False, "engine": CACHE},
        **{"max_new_tokens": 40, "max_batch_size": 8, "timeout_s": 10.0},
        "log_dir": str(folder / "logs"),
        **options.pop("generation", {}),
    }
    config = ahead(
        folder,
        staleness,
        steps=STEPS,
        generation=nemorl.GenerationConfig(**generation),
        data=nemorl.DataConfig(max_total_sequence_length=60),
        **options,
    )
    ray_cpus()
    with shared_replicas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nemorl.run(
            config,
            model=small_model(scale=2.0),
            tokenizer=tiny_tokenizer(),
            train=addition_rows(),
            reward=digits,
            callbacks=callbacks,
        )


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_replicas_sample_while_the_trainer_steps(
    in_flight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    versions, sample = list[set[int]](), Step.sample

    def noting(self: Step, *args: Any, **options: Any) -> Any:
        found = sample(self, *args, **options)
        turns = [turn for each in found.conversations for turn in each.turns]
        versions.extend({*turn.completion.policy_versions} for turn in turns)
        return found

    monkeypatch.setattr(Step, "sample", noting)
    found = of_phase(run(tmp_path, 2, in_flight=in_flight), "train")
    prove(tmp_path, STEPS)
    oldest = max(line["staleness/max"] for line in found)
    assert oldest <= 2 and (oldest > 0 or in_flight == "abort")
    assert versions and all(versions)
    assert in_flight == "keep" or {*map(len, versions)} == {1}, "a response of one version each"


def test_a_replica_that_is_lost_loses_no_prompt(tmp_path: Path):
    """Its requests are answered by the other, with the weights that are newest then."""
    found = of_phase(run(tmp_path, 2, Harm()), "train")
    prove(tmp_path, STEPS)
    assert max(line["staleness/max"] for line in found) <= 2
    assert sum(line["generation/replica_0/restarts"] for line in found) >= 1
