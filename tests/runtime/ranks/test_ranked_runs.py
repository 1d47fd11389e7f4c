"""Whole runs of a model that is spread over ranks: the numbers are those of one process."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import nemorl
from nemorl.runtime.cli import main as cli
from nemorl.runtime.config.grpo import OnlineConfig
from nemorl.runtime.config.tree import dump_yaml
from tests.ray_session import ray_cpus
from tests.runtime.engines.shared import CACHE, shared_replicas
from tests.runtime.runs import (
    addition_rows,
    digits,
    grpo_config,
    lines,
    numbers,
    of_phase,
    ppo_config,
    preference_rows,
    rows_file,
    saved_model,
    sft_config,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("ray")

ROOT = Path(__file__).parents[3]
STEPS = 5
COMMON = [
    "--trainer.device",
    "cpu",
    "--run.display",
    "none",
    "--data.max-total-sequence-length",
    "32",
    "--max-num-steps",
    str(STEPS),
    "--run.loggers",
    "--run.save-period",
    "2",
    "--run.no-plots",
]
BRIEF = ["--generation.max-new-tokens", "4", "--optimizer.lr", "1e-2"]
COMMANDS = {
    "sft": ["sft", *COMMON, *BRIEF, "--train-global-batch-size", "16"],
    "grpo": [
        "grpo",
        *COMMON,
        *BRIEF,
        "--reward",
        "contains_answer",
        "--num-prompts-per-step",
        "6",
        "--num-generations-per-prompt",
        "4",
        "--kl.coef",
        "0.02",
    ],
    "ppo": [
        "ppo",
        *COMMON,
        *BRIEF[:2],
        "--reward",
        "contains_answer",
        "--num-prompts-per-step",
        "16",
        "--train-global-batch-size",
        "8",
        "--critic.warmup-steps",
        "1",
        "--optimizer.lr",
        "1e-3",
        "--critic.lr",
        "1e-3",
        "--run.samples-per-step",
        "16",
    ],
    "distill": [
        "distill",
        *COMMON,
        *BRIEF,
        "--num-prompts-per-step",
        "8",
        "--distillation",
        "top_k",
        "--distillation.top-k",
        "8",
        "--optimizer.lr",
        "1e-3",
    ],
    "dpo": ["dpo", *COMMON, "--train-global-batch-size", "16", "--optimizer.lr", "1e-3"],
    "rm": ["rm", *COMMON, "--train-global-batch-size", "16", "--optimizer.lr", "1e-3"],
}
ROWS = {"dpo": "pairs.jsonl", "rm": "pairs.jsonl"}
"""What an algorithm trains on where it is not rows.jsonl."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose numbers 2 divides, and its rows."""
    folder = tmp_path_factory.mktemp("ranked")
    sizes = {"vocab_size": 48, "num_key_value_heads": 4, "hidden_size": 128, "head_dim": 32}
    saved_model(folder / "model", **sizes)
    saved_model(folder / "teacher", seed=1, **sizes)
    rows_file(folder / "rows.jsonl", addition_rows())
    rows_file(folder / "pairs.jsonl", preference_rows())
    return folder


def in_one_process(algorithm: str, place: Path) -> Path:
    """The folder of a run by dtensor in this process."""
    if not (folder := place / algorithm).exists():
        assert cli.main(arguments(algorithm, place, folder)) == 0
    return folder


def arguments(algorithm: str, place: Path, folder: Path, *more: str) -> list[str]:
    teacher = ["--teacher.model", str(place / "teacher")] if algorithm == "distill" else []
    return [
        *COMMANDS[algorithm],
        *teacher,
        "--model.path",
        str(place / "model"),
        "--data.train",
        (rows := str(place / ROWS.get(algorithm, "rows.jsonl"))),
        "--data.validation",
        rows,
        "--run.max-val-samples",
        "8",
        "--run.dir",
        str(folder),
        *more,
    ]


def assert_alike(line: dict[str, Any], other: dict[str, Any]) -> None:
    assert line.pop("phase") == other.pop("phase")
    assert numbers(line) == pytest.approx(numbers(other), rel=1e-5, abs=1e-5)


def assert_as_in_one_process(algorithm: str, place: Path, folder: Path) -> None:
    """Metrics, responses, and what is exported."""
    alone = in_one_process(algorithm, place)
    ours, expected = (lines(run, "metrics.jsonl") for run in (folder, alone))
    for line, other in zip(ours, expected, strict=True):
        assert_alike(line, other)
    for path in (alone / "samples").iterdir():
        told = [
            [
                {name: line.get(name) for name in ("response", "chosen", "rejected")}
                for line in lines(run / "samples", path.name)
            ]
            for run in (alone, folder)
        ]
        assert told[0] == told[1]
    kind = AutoModelForSequenceClassification if algorithm == "rm" else AutoModelForCausalLM
    trained, whole = (
        kind.from_pretrained(run / "hf")(torch.arange(2, 40)[None]).logits
        for run in (folder, alone)
    )
    # Adam makes full steps of gradients that are but rounding.
    torch.testing.assert_close(trained, whole, rtol=1e-3, atol=1e-3)


def in_a_process(*command: Path | str, **variables: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name[:4] != "RAY_"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment |= variables
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_one_command_on_four_devices(forked: Path, place: Path, tmp_path: Path):
    """Its processes are gone with it; the copy that answers has the weights of each step."""
    done = in_a_process(
        forked / "nemorl",
        *arguments("grpo", place, tmp_path, "--parallel.tp", "2", "--parallel.dp-shard", "2"),
        "--runtime.oversubscribe",
    )
    assert done.returncode == 0, done.stderr
    assert_as_in_one_process("grpo", place, tmp_path)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        f"rank-{rank}.log" for rank in range(4)
    ]
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or ())
    ]


SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path
import nemorl

folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])

def die():
    while not (folder / "checkpoints" / "latest").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if len(sys.argv) > 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=die, daemon=True).start()
config = nemorl.load_config(nemorl.SFTConfig, sys.argv[1])
result = nemorl.run(config)
said = [result.metrics, len(result.history), str(result.paths.path), result.model is None]
Path(folder / f"rank-{rank}.json").write_text(json.dumps(said))
"""


def script_config(place: Path, tmp_path: Path) -> str:
    """The sft run's settings in a file, which a script is started with."""
    (tmp_path / "script.py").write_text(SCRIPT)
    config = nemorl.load_config(nemorl.SFTConfig, in_one_process("sft", place) / "config.yaml")
    run = replace(config.run, dir=str(tmp_path / "run"), display="plain")
    (tmp_path / "config.yaml").write_text(dump_yaml(replace(config, run=run)))
    return str(tmp_path / "script.py")


@pytest.mark.slow
def test_every_process_of_a_script_gets_the_result_and_a_killed_one_costs_nothing(
    forked: Path, place: Path, tmp_path: Path
):
    """torchrun starts all again, and the run continues from its last checkpoint. The first process
    alone writes and speaks.
    """
    script = script_config(place, tmp_path)
    command = f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 {script}"
    files = [str(tmp_path / "config.yaml"), str(tmp_path / "run")]
    python = str(forked / "python")
    done = in_a_process(python, *command.split(), *files, "deadly", PYTHON_EXEC=python)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done in") == 1, done.stdout
    assert_as_in_one_process("sft", place, tmp_path / "run")
    folder = tmp_path / "run"
    sessions = json.loads((folder / "run.json").read_text())["sessions"]
    assert len(sessions) == 2, "the death came too late"
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert results[0] == results[1]
    assert results[0][1:] == [STEPS + 1, str(folder), True]


@pytest.fixture(autouse=True)
def session(request: pytest.FixtureRequest) -> None:
    if "torchrun" not in request.node.name:
        ray_cpus()


VLLM: dict[str, Any] = {"backend": "vllm", "max_new_tokens": 4, "max_batch_size": 64}


def ranked(make: Any, place: Path, folder: Path, **options: Any) -> Any:
    """A configuration; trainer, parallel and generation are given as mappings."""
    config = make(folder, steps=STEPS, run={"save_period": 2})
    sections: dict[str, Any] = {"model": {"path": str(place / "model")}, "trainer": {}, **options}
    sections["trainer"] = {"device": "cpu", **sections["trainer"]}
    made = {name: type(getattr(config, name))(**given) for name, given in sections.items()}
    return replace(config, **made)


def in_tests(config: Any, **options: Any) -> nemorl.TrainResult:
    reward = {"reward": digits} if isinstance(config, OnlineConfig) else {}
    return nemorl.run(config, train=addition_rows(), **reward, **options)


PLANS = {
    2: "--parallel.pp 2",
    4: "--parallel.pp 2 --parallel.tp 2 --runtime.oversubscribe",
}
"""By the number of processes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "plan"),
    [
        ("grpo", "--parallel.tp 2"),
        *(("grpo", PLANS[2]), ("sft", PLANS[2]), ("dpo", PLANS[2])),
        *(("grpo", PLANS[4]), ("sft", PLANS[4]), ("dpo", PLANS[4])),
        *(("rm", PLANS[2]), ("ppo", PLANS[2]), ("distill", PLANS[2]), ("ppo", "--parallel.tp 2")),
    ],
)
def test_megatron_gives_the_numbers_of_one_process(
    algorithm: str, plan: str, place: Path, tmp_path: Path
):
    """By one flag: every metric of five steps, samples and export."""
    flags = f"--trainer.backend megatron --trainer.micro-batch-tokens 128 {plan}"
    assert cli.main(arguments(algorithm, place, tmp_path, *flags.split())) == 0
    assert_as_in_one_process(algorithm, place, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp", "dp-shard", "cp"])
def test_a_reward_model_on_two_ranks_is_that_of_one(plan: str, place: Path, tmp_path: Path):
    flags = f"--parallel.{plan} 2 --trainer.sequence-packing".split()
    assert cli.main(arguments("rm", place, tmp_path, *flags)) == 0
    assert_as_in_one_process("rm", place, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["--parallel.dp-shard 2", "--parallel.tp 2 --critic.own-ranks --runtime.oversubscribe"]
)
def test_a_critic_on_the_policy_s_ranks_or_its_own(plan: str, place: Path, tmp_path: Path):
    assert cli.main(arguments("ppo", place, tmp_path, *plan.split())) == 0
    assert_as_in_one_process("ppo", place, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    ["--parallel.dp-shard 2", "--parallel.tp 2 --teacher.own-devices --runtime.oversubscribe"],
)
def test_a_teacher_on_the_student_s_ranks_or_its_own(plan: str, place: Path, tmp_path: Path):
    assert cli.main(arguments("distill", place, tmp_path, *plan.split())) == 0
    assert_as_in_one_process("distill", place, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["--parallel.tp 2", "--parallel.dp-shard 2"])
def test_the_ranks_that_train_generate(plan: str, place: Path, tmp_path: Path):
    """By another flag: the responses, and so the numbers, are those of one process."""
    flags = f"--trainer.backend megatron --generation.backend megatron {plan}".split()
    assert cli.main(arguments("grpo", place, tmp_path, *flags)) == 0
    assert_as_in_one_process("grpo", place, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run continues with changed settings")
@pytest.mark.parametrize(
    "ways",
    [
        ((1, "dtensor", {"tp": 2}), (3, "dtensor", {"dp_shard": 2}), (STEPS, "dtensor", {})),
        ((1, "dtensor", {}), (3, "megatron", {"pp": 2}), (STEPS, "dtensor", {"dp_shard": 2})),
    ],
)
def test_a_run_goes_on_with_another_plan_or_backend(ways: Any, place: Path, tmp_path: Path):
    """Every row comes once, in its turn."""
    lr = {"lr": 1e-2}
    straight = in_tests(ranked(sft_config, place, tmp_path / "straight", optimizer=lr))
    for steps, backend, plan in ways:
        trainer, folder = {"backend": backend}, tmp_path / "run"
        config = ranked(sft_config, place, folder, optimizer=lr, trainer=trainer, parallel=plan)
        run = replace(config.run, resume=steps > 1)
        result = in_tests(replace(config, run=run, max_num_steps=steps))
    for line, expected in zip(result.history, straight.history, strict=True):
        assert_alike(line, expected)


@pytest.fixture
def experts(place: Path, tmp_path: Path) -> Path:
    """The place of another model, a mixture of experts."""
    folder = tmp_path / "place"
    tiny_model("qwen3_moe", scale=2.0, vocab_size=48).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    shutil.copy(place / "rows.jsonl", folder)
    return folder


def assert_agreed(result: Any, most: float = 1 + 1e-4) -> list[dict[str, float]]:
    """Sampler and trainer, on every token; each step has trained. Return its lines."""
    found = of_phase(result, "train")
    assert len({line["grad_norm"] for line in found}) == STEPS
    assert all(line["token_mult_prob_error_max"] < most for line in found)
    return found


def transport_of(folder: Path) -> str:
    events = [line for line in lines(folder, "log.jsonl") if line["event"] == "weight_transport"]
    (said,) = [line["message"] for line in events]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
def test_experts_generate_and_learn(replay: bool, experts: Path, tmp_path: Path):
    """Sampler and trainer agree on every token, on replicas that share experts."""
    config = ranked(
        grpo_config,
        experts,
        tmp_path / "run",
        generation={"backend": "megatron", "max_new_tokens": 4},
        parallel={"dp_shard": 2, "ep": 2},
        trainer={"backend": "megatron", "router_replay": replay},
    )
    assert_agreed(in_tests(config))


@pytest.mark.parametrize(
    ("make", "backend", "plan"),
    [
        (grpo_config, "dtensor", {"dp_shard": 2}),
        pytest.param(ppo_config, "dtensor", {"dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param(grpo_config, "megatron", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param(grpo_config, "megatron", {"tp": 2, "pp": 2}, marks=pytest.mark.slow),
    ],
)
def test_vllm_beside_ranks(
    make: Any, backend: str, plan: dict[str, int], place: Path, tmp_path: Path
):
    """Its weights are the ranks', after every step: sampler and trainer agree on every token."""
    config = ranked(
        make,
        place,
        tmp_path / "run",
        generation=VLLM | {"engine": CACHE},
        parallel=plan,
        runtime={"oversubscribe": True},
        trainer={"backend": backend},
    )
    with shared_replicas():
        result = in_tests(config)
    assert_agreed(result)
    assert result.model is None
    said = transport_of(tmp_path / "run")
    assert said.endswith("Ray's object store (object_store: the others need GPUs)")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("colocated", "gpus", "transport"), [(True, 2, "cuda_ipc"), (False, 4, "nccl")]
)
def test_ranks_send_weights_from_gpu_to_gpu(
    colocated: bool, gpus: int, transport: str, place: Path, tmp_path: Path
):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    config = ranked(
        grpo_config,
        place,
        tmp_path / "run",
        generation=VLLM | {"num_replicas": 2, "colocated": colocated},
        parallel={"dp_shard": 2},
        trainer={"device": "cuda"},
    )
    assert_agreed(in_tests(config), 1.05)
    assert f"({transport}" in transport_of(tmp_path / "run")


@pytest.mark.slow
def test_vllm_applies_the_adapters_of_ranks(place: Path, tmp_path: Path):
    """Which are cut between them, and gathered for it alone after the first time."""
    config = ranked(
        grpo_config,
        place,
        tmp_path / "run",
        generation=VLLM | {"engine": CACHE, "adapter_rank": 4},
        lora={"rank": 4},
        parallel={"tp": 2},
        runtime={"oversubscribe": True},
    )
    with shared_replicas():
        last = assert_agreed(in_tests(config))[-1]
    assert last["generation/weights/proved"] == 2 * 7 * 2
