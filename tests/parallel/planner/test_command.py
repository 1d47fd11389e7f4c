"""`nemorl plan`: which plans it finds, in which order, and what it says where none fits."""

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.command import Planned, candidates, find_plans, print_plans, read_shape
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.cost import NODE_BANDWIDTH, RECOMPUTED
from nemorl.runtime.cli.main import main, parse

SIZES = {
    "7b": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064},
    "70b": {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with folders of configurations."""
    for name, sizes in SIZES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes))
    return tmp_path


def find(models: Path, name: str = "70b", **options: Any) -> Planned:
    return find_plans(PlanConfig(model=str(models / name), **options))


def test_every_plan_uses_all_gpus_and_suits_the_model(models: Path):
    found = find(models, gpus=16)
    plans = [candidate.plan for candidate in (*found.fitting, *found.too_large)]
    assert len(plans) == len(set(plans)) > 50
    shape = read_shape(str(models / "70b" / "config.json"))
    assert shape == read_shape(str(models / "70b"))
    for plan in plans:
        assert plan.num_ranks == 16 and plan.tp <= 8
        plan.check(shape)
    degrees = {(plan.dp_replicate, plan.dp_shard, plan.tp, plan.cp) for plan in plans}
    powers = (1, 2, 4, 8, 16)
    wanted = {
        (a, b, c, d)
        for a in powers
        for b in powers
        for c in powers[:-1]
        for d in powers
        if a * b * c * d == 16
    }
    assert degrees == wanted, "all, as each of them suits this model"


def test_fitting_plans_fit_and_come_by_time(models: Path):
    found = find(models, gpus=64, gpu_memory=60, reserve=0.2)
    assert found.fitting and found.too_large
    assert all(candidate.fullest.total <= 48e9 for candidate in found.fitting)
    assert all(candidate.fullest.total > 48e9 for candidate in found.too_large)
    times = [candidate.seconds for candidate in found.fitting]
    assert times == pytest.approx(sorted(times), rel=0.01)
    sizes = [candidate.fullest.total for candidate in found.too_large]
    assert sizes == sorted(sizes)


def test_filters(models: Path):
    options = {"tp": 2, "cp": 2, "dp_shard": 4, "dp_replicate": 1}
    found = find(
        models,
        gpus=16,
        **options,
        activation_checkpointing="full",
        cp_method="allgather",
        param_dtype="float32",
        cpu_offload=True,
    )
    (only,) = [candidate.plan for candidate in (*found.fitting, *found.too_large)]
    expected = ParallelPlan(
        **options, activation_checkpointing="full", cp_method="allgather", cpu_offload=True
    )
    assert only == expected


def test_recomputing_nothing_wins_where_there_is_room_and_everything_where_there_is_not(
    models: Path,
):
    roomy, tight = (
        find(models, "7b", gpus=8, seq_len=4096, gpu_memory=141),
        find(models, "7b", gpus=8, seq_len=32768, gpu_memory=80),
    )
    assert roomy.fitting[0].plan.activation_checkpointing == "none"
    on_whole_rows = [
        candidate.plan for candidate in tight.fitting if candidate.plan.model_ranks == 1
    ]
    assert on_whole_rows and all(plan.activation_checkpointing == "full" for plan in on_whole_rows)
    assert tight.fitting[0].plan.model_ranks > 1, (
        "splitting rows or layers costs less here than computing all of them twice"
    )


def test_what_does_not_divide_is_said(models: Path):
    found = find(models, "7b", gpus=8)
    assert any(
        "parallel.tp 8 does not divide the model's num_attention_heads 28" in reason
        for reason in found.refused
    )
    with pytest.raises(
        ValueError,
        match=r"gpus must allow a plan.*tp 8 does not divide the model's num_attention_heads 28",
    ):
        find(models, "7b", gpus=8, tp=8)


def test_ulysses_gives_way_to_gathering_where_heads_do_not_divide(models: Path):
    methods = {
        plan.cp: plan.cp_method
        for plan in candidates(PlanConfig(model="7b", gpus=8, tp=1), read_shape(str(models / "7b")))
    }
    assert methods == {1: "ulysses", 2: "ulysses", 4: "ulysses", 8: "allgather"}


def test_more_devices_with_the_same_batch_wait_less_but_send_no_less(models: Path):
    few, many = (
        find(
            models,
            gpus=gpus,
            batch_rows=256,
            tp=8,
            cp=1,
            dp_replicate=1,
            activation_checkpointing="full",
        )
        for gpus in (32, 256)
    )
    one, other = (found.fitting[0] for found in (few, many))
    assert one.micro_batches == 64 and other.micro_batches == 8
    assert math.isclose(one.traffic.tensor, 8 * other.traffic.tensor, rel_tol=1e-6)
    assert one.seconds > other.seconds
    assert one.seconds > one.traffic.tensor / NODE_BANDWIDTH


def test_a_generator_counts_where_it_fills_more_than_training(models: Path):
    without, beside = (
        find(models, gpus=16, gpu_memory=141, colocated_generation=colocated)
        for colocated in (False, True)
    )
    assert all(candidate.generation is None for candidate in without.fitting)
    assert beside.too_large[0].fullest.generation > 141e9, "one engine holds all 70 B weights"
    split = find(models, gpus=16, gpu_memory=141, colocated_generation=True, generation_tp=8)
    assert split.fitting and all(
        candidate.fullest.total >= candidate.training.total for candidate in split.fitting
    )


def test_the_command_prints_flags_that_a_run_takes(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "160")
    assert (
        main(
            [
                "plan",
                "--model",
                str(models / "70b"),
                "--gpus",
                "64",
                "--gpu-memory",
                "80",
                "--seq-len",
                "8192",
                "--show",
                "4",
            ]
        )
        == 0
    )
    output = capsys.readouterr().out
    assert "70.55 B parameters on 64 GPUs of 80 GB" in output and "1.00×" in output
    assert (
        len(re.findall(r"^ +\d+ +\d+ +\d+ +\d+ +(?:full|none|selective) ", output, re.MULTILINE))
        == 4
    )
    flags = output.strip().splitlines()[-1]
    config = parse("sft", ["--model.path", "m", "--data.train", "d", *flags.split()])
    best = find(models, gpus=64, gpu_memory=80, seq_len=8192).fitting[0].plan
    assert (
        config.parallel == best
        and config.trainer.packed_row_tokens == 8192
        and config.trainer.train_micro_batch_size == 1
    )


@pytest.mark.parametrize("how", RECOMPUTED)
def test_flags_say_all_of_a_plan(models: Path, how: Any):
    found = find(
        models,
        "7b",
        gpus=1,
        gpu_memory=2000,
        activation_checkpointing=how,
        cpu_offload=how == "selective",
    )
    config = parse(
        "sft", ["--model.path", "m", "--data.train", "d", *found.fitting[0].flags.split()]
    )
    assert config.parallel == found.fitting[0].plan
    assert config.runtime.launcher == ("processes" if how == "selective" else "auto"), (
        "selective checkpointing needs a rank"
    )


def test_where_nothing_fits_the_smallest_are_shown(
    models: Path, capsys: pytest.CaptureFixture[str]
):
    assert (
        main(
            [
                "plan",
                "--model",
                str(models / "70b"),
                "--gpus",
                "8",
                "--gpu-memory",
                "80",
                "--show",
                "2",
            ]
        )
        == 2
    )
    shown = capsys.readouterr()
    assert re.search(
        r"gpu_memory must hold a plan, but it is 80, of which 72.0 GB may be used: the smallest"
        r" needs 1\d\d\.\d GB",
        shown.err,
    )
    assert "--cpu-offload" in shown.err and "full" in shown.out
    config = PlanConfig(
        model=str(models / "70b"),
        gpus=8,
        gpu_memory=141,
        colocated_generation=True,
        generation_sequences=4096,
    )
    with pytest.raises(
        ValueError, match=r"try several of --generation-sequences, --generation-tp, .* together$"
    ):
        print_plans(config, find_plans(config))


BAD = {
    "no model": (
        ["--model", "no/folder", "--gpus", "8"],
        "model must be a folder, a config.json or a name on the hub",
    ),
    "a broken file": (["--model", "bad.json", "--gpus", "8"], "model must have a config.json"),
    "another kind": (["--model", "mamba.json", "--gpus", "8"], "must be one of llama"),
    "no GPUs": (["--model", "70b", "--gpus", "0"], "gpus must be at least 1"),
    "no memory": (
        ["--model", "70b", "--gpus", "8", "--gpu-memory", "0"],
        "gpu_memory must be positive",
    ),
    "a degree that does not divide": (
        ["--model", "70b", "--gpus", "8", "--cp", "3"],
        "cp must divide the 8 GPUs, but it is 3",
    ),
    "degrees that do not multiply": (
        ["--model", "70b", "--gpus", "8", "--cp", "4", "--dp-shard", "4"],
        "the degrees given do not multiply to a divisor of 8",
    ),
    "too wide for a machine": (
        ["--model", "70b", "--gpus", "16", "--tp", "16"],
        "tp must be at most the 8 GPUs",
    ),
    "engines that are not there": (
        ["--model", "70b", "--gpus", "8", "--generation-tp", "2"],
        "generation_tp needs colocated_generation",
    ),
    "LoRA with tp": (
        ["--model", "70b", "--gpus", "8", "--lora-rank", "8", "--tp", "2"],
        "lora_rank must be 0 with tp above 1, but it is 8",
    ),
    "targets without LoRA": (
        ["--model", "70b", "--gpus", "8", "--lora-target-modules", "q_proj"],
        "lora_target_modules needs lora_rank",
    ),
    "no such target": (
        [
            "--model",
            "70b",
            "--gpus",
            "8",
            "--lora-rank",
            "8",
            "--lora-target-modules",
            "q_proj",
            "wq",
        ],
        (
            "lora_target_modules must be of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,"
            " down_proj, but it is 'wq'"
        ),
    ),
    "main memory that nothing takes": (
        ["--model", "70b", "--gpus", "8", "--host-memory", "512"],
        "host_memory needs cpu_offload",
    ),
    "no main memory": (
        ["--model", "70b", "--gpus", "8", "--host-memory", "0", "--cpu-offload"],
        "host_memory must be positive",
    ),
    "all in reserve": (["--model", "70b", "--gpus", "8", "--reserve", "1"], "reserve must lie in"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings(
    name: str, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(models)
    Path("bad.json").write_text("{")
    Path("mamba.json").write_text('{"model_type": "mamba"}')
    flags, message = BAD[name]
    assert main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err


def test_it_needs_no_torch(models: Path):
    code = f"""
import sys
from nemorl.runtime.cli.main import main
assert main(["plan", "--model", {str(models / "7b")!r}, "--gpus", "8"]) == 0
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "options", [{}, {"cpu_offload": True}, {"lora_rank": 16}, {"seq_len": 131072}], ids=str
)
def test_the_table_fits_80_columns(options: dict[str, Any], models: Path):
    output = shown(models, "7b", width=80, gpus=8, **options)
    (rule,) = [line for line in output.splitlines() if line.startswith("───")]
    assert len(rule) <= 80 and "…" not in output
    sentences = [line for line in output.splitlines() if not line.startswith("--")]
    assert max(map(len, sentences)) <= 80


def test_a_narrow_terminal_costs_no_column(models: Path):
    output = shown(models, "70b", width=40, gpus=64, seq_len=8192, show=1)
    (row,) = [line for line in output.splitlines() if "×" in line]
    assert re.search(r"^ +1 +64 +1 +1 +full ", row) and "…" not in output


def shown(models: Path, name: str, *, width: int, **options: Any) -> str:
    """What `print_plans` prints."""
    output = io.StringIO()
    config = PlanConfig(model=str(models / name), **options)
    print_plans(config, find_plans(config), Console(file=output, width=width))
    return output.getvalue()


def test_main_memory_is_that_of_a_machine(models: Path):
    few, many = (
        find(
            models, gpus=gpus, cpu_offload=True, dp_shard=gpus, activation_checkpointing="full"
        ).fitting[0]
        for gpus in (4, 16)
    )
    shape = read_shape(str(models / "70b"))
    assert few.host == pytest.approx(16 * shape.num_parameters(), rel=0.1), (
        "four GPUs of one machine"
    )
    assert many.host == pytest.approx(16 * shape.num_parameters() / 2, rel=0.1), "eight of sixteen"
    replicated = find(
        models,
        gpus=8,
        cpu_offload=True,
        dp_replicate=2,
        dp_shard=4,
        activation_checkpointing="full",
    ).fitting[0]
    assert replicated.host == pytest.approx(2 * few.host, rel=0.01), (
        "each copy of the model is there"
    )
    assert "host" in shown(
        models, "70b", width=80, gpus=8, cpu_offload=True
    ) and "host" not in shown(models, "70b", width=80, gpus=64)


def test_main_memory_is_judged_where_it_is_known(models: Path):
    options: dict[str, Any] = {"gpus": 8, "cpu_offload": True}
    roomy, tight = (
        find(models, **options, host_memory=2000),
        find(models, **options, host_memory=1000),
    )
    assert roomy.fitting and all(candidate.host <= 1800e9 for candidate in roomy.fitting)
    assert any(candidate.fullest.total <= 72e9 for candidate in roomy.too_large), (
        "two copies don't fit the main memory"
    )
    assert not tight.fitting
    with pytest.raises(
        ValueError,
        match=(
            r"host_memory must hold a plan, but it is 1000, of which 900.0 GB may be used: the"
            r" smallest needs 1\d\d\d.\d GB"
        ),
    ):
        print_plans(
            PlanConfig(model=str(models / "70b"), **options, host_memory=1000),
            tight,
            Console(file=io.StringIO()),
        )


def test_adapters_leave_room(models: Path):
    whole, adapted = find(models, gpus=8), find(models, gpus=8, lora_rank=16)
    assert not whole.fitting and adapted.fitting
    assert all(candidate.plan.tp == 1 for candidate in (*adapted.fitting, *adapted.too_large))
    output = shown(
        models, "70b", width=80, gpus=8, lora_rank=16, lora_target_modules=("q_proj", "v_proj")
    )
    assert "32.8 M in adapters that train" in output
    config = parse(
        "sft", ["--model.path", "m", "--data.train", "d", *output.strip().splitlines()[-1].split()]
    )
    assert config.lora.rank == 16 and config.lora.target_modules == ("q_proj", "v_proj")


def test_frozen_matrices_take_two_thirds_of_the_time(models: Path):
    options: dict[str, Any] = {
        "gpus": 1,
        "gpu_memory": 2000,
        "activation_checkpointing": "none",
        "seq_len": 1024,
    }
    whole, adapted = (
        find(models, **options).fitting[0],
        find(models, **options, lora_rank=8).fitting[0],
    )
    assert 0.66 < adapted.seconds / whole.seconds < 0.7


def test_groups_that_do_not_divide_a_machine_lie_across(models: Path):
    best = find(models, "7b", gpus=12).fitting[0].plan
    assert (best.dp_replicate, best.dp_shard) == (
        3,
        4,
    ), "six GPUs would begin in one machine of eight and end in the next"
    assert find(models, "7b", gpus=12, gpus_per_node=6).fitting[0].plan.dp_shard == 6


def test_engines_come_with_their_settings(models: Path):
    output = shown(models, "7b", width=120, gpus=8, colocated_generation=True, generation_tp=2)
    config = parse(
        "grpo", ["--model.path", "m", "--data.train", "d", *output.strip().splitlines()[-1].split()]
    )
    engines = config.generation
    assert (
        engines.backend,
        engines.num_replicas,
        engines.tensor_parallel_size,
        engines.max_batch_size,
    ) == ("vllm", 4, 2, 64)


def test_what_is_advised_where_nothing_fits_helps(models: Path):
    options: dict[str, Any] = {"gpus": 8, "gpu_memory": 80}
    with pytest.raises(ValueError, match="try ") as error:
        shown(models, "70b", width=80, **options)
    advised = str(error.value).partition("try ")[2]
    assert re.fullmatch(
        r"--cpu-offload \(it takes 1194 GB of a machine's main memory\) or --lora-rank 16 or"
        r" --gpus 32",
        advised,
    )
    for change in ({"cpu_offload": True}, {"lora_rank": 16}, {"gpus": 32}):
        assert find(models, **{**options, **change}).fitting
    assert not find(models, gpus=16, gpu_memory=80).fitting
