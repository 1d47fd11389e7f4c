"""Sampling that goes on while the trainer steps, against the synchronous run, in turns.

    python benchmarks/asynchrony.py [--reward] [--small]

Speed: GRPO by two replicas of vLLM, each on a core of its own, on responses of geometric length.
Tokens per second, seconds of a step, of them the trainer's wait for samples, and the share of the
time in which replicas did not compute, over the steps in which all runs are in full swing. With
--reward: what the embedded engine's runs of each K have learned after the same number of samples,
for several seeds. Each run is a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from common import command, load_tokenizer, quiet, save_model

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 3600.0
"""How long a run may take."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is trained."""

    reward: bool = False
    """Compare rewards instead of speed."""
    staleness: tuple[int, ...] = (0, 1, 2, 4)
    """Each K (async.max_staleness); 0 is the synchronous run."""
    rounds: int = 3
    """How often each K is run, in turns."""
    steps: int = 24
    """Steps of a run. Of them max(K) + 2 at the start and max(K) at the end are not counted."""
    prompts: int = 8
    """Groups of a step."""
    size: int = 4
    """Responses of a group."""
    longest: int = 384
    """Tokens of the longest response."""
    stops: int = 5
    """Tokens of 512 that end a response: the mean length is about 512 / stops."""
    hidden: int = 128
    """Width of the model, which has four layers and heads of a quarter of it."""
    replicas: int = 2
    """Engines."""
    concurrent: int = 64
    """Responses that an engine decodes at a time."""
    threads: int = os.cpu_count() or 1
    """Of the trainer, in each run; a replica has one."""
    seeds: int = 3
    """Runs of each K with --reward."""
    learning_steps: int = 500
    """Their steps, of 144 responses each."""
    lr: float = 1e-4
    """Their learning rate."""
    off_policy: str = "auto"
    """Their correction for stale samples (off_policy.mode)."""


def train_speed(folder: Path, options: Options, staleness: int, seed: int) -> None:
    """Train with vLLM, in a run directory named after K and the round."""
    import nemorl

    config = nemorl.GRPOConfig(
        data=nemorl.DataConfig(max_total_sequence_length=16 + options.longest),
        generation=nemorl.GenerationConfig(
            backend="vllm",
            colocated=False,  # engines go on while the trainer steps
            num_replicas=options.replicas,
            max_batch_size=options.concurrent,
            max_new_tokens=options.longest,
            stop_token_ids=tuple(range(2, 2 + options.stops)),
            engine={"kv_cache_memory_bytes": 1 << 28},
        ),
        optimizer=nemorl.OptimizerConfig(lr=1e-7),  # lengths stay as they are
        num_prompts_per_step=options.prompts,
        num_generations_per_prompt=options.size,
        max_num_steps=options.steps,
        entropy_coef=None,
        **sections(folder, "speed", folder / "model", staleness, seed),
    )
    rows = [{"prompt": f"t{i} t{i + 1}", "answer": ""} for i in range(20, 500)]
    tokenizer = load_tokenizer(folder / "model")
    nemorl.run(
        config,
        tokenizer=tokenizer,
        train=rows,
        reward=lambda prompt, response: float(len(response) % 2),
    )


def train_reward(folder: Path, options: Options, staleness: int, seed: int) -> None:
    """Train a model that knows nothing to count on from a digit: 3+1= is followed by 4567. The
    reward is the share of right digits.
    """
    import nemorl

    sys.path.insert(0, str(EXAMPLES))
    from quickstart import save_model, save_tokenizer

    made = folder / f"model-{seed}"
    if not made.exists():
        save_model(made, save_tokenizer(made), seed=seed)
    rows = [
        {"prompt": f"{i}+1=", "answer": "".join(str((i + j) % 10) for j in range(1, 5))}
        for i in range(9)
    ]

    def right(prompt: str, response: str, answer: str) -> float:
        return mean(a == b for a, b in zip(response.ljust(4), answer, strict=True))

    config = nemorl.GRPOConfig(
        data=nemorl.DataConfig(max_total_sequence_length=16),
        generation=nemorl.GenerationConfig(max_new_tokens=4, ignore_eos=True, max_batch_size=48),
        optimizer=nemorl.OptimizerConfig(lr=options.lr),
        off_policy=nemorl.OffPolicyConfig(mode=options.off_policy),
        num_prompts_per_step=9,
        num_generations_per_prompt=16,
        max_num_steps=options.learning_steps,
        **sections(folder, "reward", made, staleness, seed),
    )
    nemorl.run(config, train=rows, reward=right)


def sections(folder: Path, kind: str, model: Path, staleness: int, seed: int) -> dict[str, Any]:
    """Return the sections of the configuration that all runs share."""
    import nemorl

    directory = folder / f"{kind}-{staleness}-{seed}"
    return {
        "model": nemorl.ModelConfig(path=str(model)),
        "async_": nemorl.AsyncConfig(max_staleness=staleness),
        "trainer": nemorl.TrainerConfig(device="cpu"),
        "run": nemorl.RunConfig(
            dir=str(directory), seed=seed, display="none", plots=False, loggers=(), export=False
        ),
    }


def history(folder: Path, kind: str, options: Options, staleness: int, seed: int) -> list[Any]:
    """Run in a process of its own, and return the metrics of its steps."""
    asked = {"folder": str(folder), "options": asdict(options), "kind": kind}
    done = subprocess.run(
        [sys.executable, __file__, "run", json.dumps(asked), str(staleness), str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the run of K = {staleness} failed:\n{done.stderr[-4000:]}")
    lines = (folder / f"{kind}-{staleness}-{seed}" / "metrics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["phase"] == "train"]


@dataclass(frozen=True)
class Speed:
    """A run's steps, of those that count."""

    tokens_per_s: float
    step_s: float
    wait_s: float
    train_s: float
    engines_idle: float
    mean_age: float
    most_age: float


def speed_of(lines: Sequence[dict[str, Any]], options: Options) -> Speed:
    """Return the speed over the steps before which and after which sampling is at full length: none
    begins at the end for steps that do not come.
    """
    most = max(options.staleness)
    counted = lines[most + 2 : len(lines) - most]
    seconds = sum(line["seconds"] for line in counted)
    busy = 0.0
    for line in counted:
        for rank in range(options.replicas):
            name = f"generation/replica_{rank}"
            if rate := line.get(f"{name}/tokens_per_second"):  # a share of the time with requests
                busy += line[f"{name}/busy"] * line[f"{name}/tokens"] / rate
    tokens = sum(line["tokens_per_second"] * line["seconds"] for line in counted)
    return Speed(
        tokens_per_s=tokens / seconds,
        step_s=seconds / len(counted),
        wait_s=mean(line["seconds_generate"] for line in counted),
        train_s=mean(line["seconds_train"] for line in counted),
        engines_idle=1 - busy / (options.replicas * seconds),
        mean_age=mean(line["staleness/mean"] for line in counted),
        most_age=max(line["staleness/max"] for line in counted),
    )


def speed(options: Options, folder: Path) -> None:
    save_model(folder / "model", hidden=options.hidden, positions=max(512, 16 + options.longest))
    found: dict[int, list[Speed]] = {k: [] for k in options.staleness}
    for number in range(options.rounds):
        for k in options.staleness:
            found[k].append(speed_of(history(folder, "speed", options, k, number), options))
    print(
        f"{options.prompts} x {options.size} responses a step, {options.replicas} replicas,"
        f" medians of {options.rounds} runs"
    )
    columns = ("tokens/s", "s/step", "wait", "train", "idle", "age", "oldest", "times as fast")
    print("    K" + "".join(f"{name:>10}" for name in columns[:-1]) + f"{columns[-1]:>15}")
    for k, runs in found.items():

        def middle(value: Callable[[Speed], float], runs: list[Speed] = runs) -> float:
            return median(map(value, runs))

        first = found[options.staleness[0]]
        pairs = zip(first, runs, strict=True)
        ratio = median(ahead.tokens_per_s / sync.tokens_per_s for sync, ahead in pairs)
        print(
            f"{k:>5}{middle(lambda x: x.tokens_per_s):10.0f}{middle(lambda x: x.step_s):10.3f}"
            f"{middle(lambda x: x.wait_s):10.3f}{middle(lambda x: x.train_s):10.3f}"
            f"{middle(lambda x: x.engines_idle):10.0%}{middle(lambda x: x.mean_age):10.2f}"
            f"{middle(lambda x: x.most_age):10.0f}{ratio:15.2f}"
        )


def reward(options: Options, folder: Path) -> None:
    """Print the mean reward of the steps up to each third of the run, for each K over the seeds."""
    length = options.learning_steps
    ends = sorted({max(1, length // 3), max(1, 2 * length // 3), length})
    wide = max(1, length // 10)
    found: dict[int, list[list[float]]] = {k: [] for k in options.staleness}
    for seed in range(options.seeds):
        for k in options.staleness:
            lines = history(folder, "reward", options, k, seed)
            rewards = [line["reward"] for line in lines]
            found[k].append([mean(rewards[max(0, end - wide) : end]) for end in ends])
    print(f"reward, mean of {wide} steps, over {options.seeds} seeds: mean ± standard deviation")
    print("    K" + "".join(f"{f'to step {end}':>18}" for end in ends) + "   each seed at the end")
    for k, runs in found.items():
        texts = [
            f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0.0:.3f}"
            for values in zip(*runs, strict=True)
        ]
        last = "  ".join(f"{each[-1]:.3f}" for each in runs)
        print(f"{k:>5}" + "".join(f"{text:>18}" for text in texts) + f"   {last}", flush=True)


def main(options: Options) -> None:
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        (reward if options.reward else speed)(options, Path(folder))


def run(asked: str, staleness: str, seed: str) -> None:
    """Train in this process."""
    given = json.loads(asked)
    train = {"speed": train_speed, "reward": train_reward}[given["kind"]]
    quiet()
    train(Path(given["folder"]), Options(**given["options"]), int(staleness), int(seed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        import nemorl  # noqa: F401  before torch

        run(*sys.argv[2:])
    else:
        small = {"staleness": (0, 1), "rounds": 1, "steps": 5, "prompts": 4, "size": 2}
        small |= {"longest": 48, "hidden": 128, "seeds": 1, "learning_steps": 3}
        command(main, Options, **small)
