"""Replicas of real engines: they share the work, follow the trainer's weights, and outlive the
deaths of their processes.
"""

import random
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest

from nemorl import OptimizerConfig
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.engines import replicas
from nemorl.runtime.engines.replicas import check_places
from nemorl.runtime.engines.weights import Place
from nemorl.runtime.watch.callbacks import Callback
from tests.ray_session import ray_cpus
from tests.runtime.engines.shared import CACHE, shared_replicas, small_model, vllm_backend
from tests.runtime.engines.toys import kill
from tests.runtime.runs import TIMES, grpo_config, start
from tests.tiny_models import random_prompts

pytestmark = pytest.mark.xdist_group("ray")

SIZES = {"hidden_size": 128, "head_dim": 32}
VLLM = GenerationConfig(
    backend="vllm", num_replicas=2, max_batch_size=64, max_new_tokens=16, engine=CACHE
)
PROMPTS = random_prompts(48, seed=2)
PARAMS = [SamplingParams(n=4, seed=i, max_new_tokens=40) for i in range(48)]


@pytest.mark.slow
def test_both_work_and_say_how_much():
    backend = vllm_backend(small_model(scale=3.0), num_replicas=2, max_batch_size=16)
    backend.metrics()
    completions = backend.generate(PROMPTS, PARAMS)
    measured = backend.metrics()
    assert sum(measured[f"replica_{rank}/tokens"] for rank in (0, 1)) == sum(
        len(c.token_ids) for c in completions
    )
    seconds = []
    for replica in ("replica_0", "replica_1"):  # how much each does is up to a busy machine
        tokens, busy, speed = (
            measured[f"{replica}/{name}"] for name in ("tokens", "busy", "tokens_per_second")
        )
        assert tokens > 0 and 0 < busy <= 1
        seconds.append(tokens / speed)
    assert seconds[0] == pytest.approx(seconds[1])
    assert backend.metrics()["replica_0/tokens"] == 0


class Kills(Callback):
    """A replica dies at a random moment of each of `count` steps, whatever it does."""

    def __init__(self, steps: int, count: int) -> None:
        self.draw = random.Random(0)
        self.steps = set(self.draw.sample(range(1, steps + 1), count))
        self.timers: list[threading.Timer] = []

    def on_step_begin(self, trainer, step) -> None:
        if step in self.steps:
            seconds, rank = self.draw.uniform(0, 0.2), self.draw.randrange(2)
            self.timers.append(threading.Timer(seconds, kill, [trainer.generator._engines, rank]))
            self.timers[-1].start()


def metrics_of_run(folder, *callbacks: Callback, steps: int) -> dict[str, float]:
    ray_cpus()
    with shared_replicas():
        config = grpo_config(
            folder,
            steps=steps,
            generation=VLLM,
            num_generations_per_prompt=8,
            optimizer=OptimizerConfig(lr=1e-3),
        )
        result = start(config, callbacks=callbacks, **SIZES)
    return {
        name: value
        for name, value in result.metrics.items()
        if name not in TIMES and not name.startswith("generation/")
    }


@pytest.mark.slow
def test_a_run_with_kills_at_random_times_ends_like_one_without(tmp_path):
    steps, count = 12, 9
    expected = metrics_of_run(tmp_path / "undisturbed", steps=steps)
    kills = Kills(steps, count)
    with pytest.warns(UserWarning, match="is started again"):
        assert metrics_of_run(tmp_path / "killed", kills, steps=steps) == pytest.approx(
            expected, rel=1e-3, abs=1e-5
        )
    for timer in kills.timers:
        timer.join()
    assert len(kills.timers) == count


GPU, OTHER, FAR, NONE = (
    Place(node, "host", 1, gpus)
    for node, gpus in [("node", ("0",)), ("node", ("1",)), ("other", ("0",)), ("other", ())]
)


@pytest.mark.parametrize(
    ("colocated", "trainer_gpus", "engines", "said"),
    [
        (False, 8, [OTHER], ""),
        (False, 8, [GPU], "true where a replica is on the trainer's GPU"),
        (False, 0, [GPU], ""),  # the loop's is nobody's where ranks are elsewhere
        (True, 1, [OTHER, GPU], ""),
        (True, 1, [FAR], "false where no replica is on the trainer's GPU"),
        (True, 2, [OTHER], ""),  # another of torchrun's ranks is there
        (True, 1, [NONE], ""),
    ],
)
def test_engines_take_turns_with_a_trainer_on_their_gpu_and_no_other(
    colocated, trainer_gpus, engines, said, monkeypatch
):
    config = replace(VLLM, colocated=colocated, trainer_gpus=trainer_gpus)
    monkeypatch.setattr(replicas, "own_place", lambda: GPU)
    refused = pytest.raises(ValueError, match=rf"generation\.colocated must be {said}")
    with refused if said else nullcontext():
        check_places(config, engines)
