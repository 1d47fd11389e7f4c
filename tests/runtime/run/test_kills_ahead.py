"""A run that samples ahead is killed at whatever moment, again and again: no prompt is lost or
doubled, as `tests/runtime/run/count_groups.py` counts from the run's own files.

Run as a script: FOLDER SEED-OF-THE-KILL (or none). `NEMORL_TIMES_KILLED` kills more often.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nemorl
from nemorl.rollout.environments.classes import ClassEnvironment
from tests.runtime.run import count_groups
from tests.runtime.run.test_asynchrony import Talk, ahead
from tests.runtime.runs import addition_rows
from tests.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[3]
TIMES_KILLED = int(os.environ.get("NEMORL_TIMES_KILLED", "4"))
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
COUNT = 3
"""Groups of a step."""


class KilledSoon(nemorl.Callback):
    """A signal to this process within a second, once there is a checkpoint to go on from: SIGKILL,
    and now and then SIGTERM or Ctrl-C, which end the run in order.
    """

    def __init__(self, seed: str) -> None:
        self.delay = random.Random(seed).uniform(0, 1.0)
        self.number = SIGNALS[int(seed) % len(SIGNALS)]

    def on_train_begin(self, trainer: nemorl.Run) -> None:
        if trainer.state.step:
            threading.Thread(target=self.kill, daemon=True).start()

    def on_checkpoint(self, trainer: nemorl.Run, step: int, path: Path) -> None:
        if step == 1:
            threading.Thread(target=self.kill, daemon=True).start()

    def kill(self) -> None:
        time.sleep(self.delay)
        os.kill(os.getpid(), self.number)


def main(folder: str, *seed: str) -> None:
    """Go on with the run, or begin it."""
    config = ahead(
        Path(folder),
        2,
        steps=10 * TIMES_KILLED,
        num_prompts_per_step=COUNT,
        generation=nemorl.GenerationConfig(max_new_tokens=6, max_batch_size=8),
        data=nemorl.DataConfig(max_total_sequence_length=60),
        run={"resume": "auto", "save_period": 1, "samples_per_step": 1000},
    )
    nemorl.run(
        config,
        model=tiny_model(scale=2.0),
        tokenizer=tiny_tokenizer(),
        train=addition_rows(),
        environment=ClassEnvironment(Talk),
        callbacks=[KilledSoon(each) for each in seed],
    )


def test_no_prompt_is_lost_or_doubled(forked: Path, tmp_path: Path):
    killed, seed, environment = 0, 0, {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [forked / "python", "-m", "tests.runtime.run.test_kills_ahead", tmp_path / "killed"]
    while killed < TIMES_KILLED:
        seed += 1
        done = subprocess.run(
            [*command, str(seed)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode, "it ended before it was killed so often"
        in_order = done.returncode in (128 + signal.SIGTERM, -signal.SIGINT, 130)
        in_order = in_order or "KeyboardInterrupt" in done.stderr
        assert in_order or done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
    main(str(tmp_path / "killed"))
    main(str(tmp_path / "straight"))
    found = count_groups.count(tmp_path / "killed")
    assert found["lost"] == found["doubled"] == found["untold"] == []
    assert found["steps"] == found["of"] == 10 * TIMES_KILLED
    straight = count_groups.count(tmp_path / "straight")
    assert found["prompts"] == straight["prompts"]


if __name__ == "__main__":
    main(*sys.argv[1:])
