"""`nemorl plan`: which plans it finds, in which order, and what it says where none fits."""

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemorl.parallel.backends import LIMITS, OwnLimits
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.command import (
    Candidate,
    Planned,
    candidates,
    find_plans,
    print_plans,
    read_shape,
)
from nemorl.parallel.planner.config import OpenPlan, PlanConfig
from nemorl.parallel.planner.cost import RECOMPUTED
from nemorl.parallel.planner.megatron import Stage, telling_stages
from nemorl.parallel.planner.memory import Step
from nemorl.parallel.planner.model_shape import SIZES
from nemorl.parallel.planner.timing import Times
from nemorl.parallel.traits import TrainingTraits
from nemorl.runtime.cli.api import from_keywords
from nemorl.runtime.cli.main import main, parse
from nemorl.runtime.config.tree import dump_yaml

MODELS = {
    "7b": ("qwen2", 4, (3584, 18944, 28, 28, 152064)),
    "70b": ("llama", 8, (8192, 28672, 80, 64, 128256)),
    "30b-a3b": ("qwen3_moe", 4, (2048, 6144, 48, 32, 151936)),
    "8x7b": ("mixtral", 8, (4096, 14336, 32, 32, 32000)),
}


ENGINES: dict[str, Any] = {"generation__backend": "vllm"}
MEGATRON: dict[str, Any] = {"trainer__backend": "megatron"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with folders of configurations."""
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, kv_heads, sizes) in MODELS.items():
        config = {"model_type": kind, "num_key_value_heads": kv_heads}
        config |= {"head_dim": 128} if kind == "qwen3_moe" else {}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(
            json.dumps(config | dict(zip(SIZES, sizes, strict=True)))
        )
    return folder


def config_of(models: Path, name: str = "70b", **options: Any) -> PlanConfig:
    """Settings by the last part of their names, as `nemorl.train` takes them."""
    return from_keywords(PlanConfig, "plan", {"model__path": str(models / name), **options})


def find(models: Path, name: str = "70b", **options: Any) -> Planned:
    return find_plans(config_of(models, name, **options))


def best(models: Path, name: str = "70b", **options: Any) -> Candidate:
    return find(models, name, **options).fitting[0]


def shown(models: Path, name: str, *, width: int = 80, **options: Any) -> str:
    """What `print_plans` prints."""
    output = io.StringIO()
    config = config_of(models, name, **options)
    print_plans(config, find_plans(config), Console(file=output, width=width))
    return output.getvalue()


def run_with(flags: str, algorithm: str = "sft") -> Any:
    """The configuration of a run with these flags."""
    return parse(algorithm, ["--model.path", "m", "--data.train", "d", *flags.split()])


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
    wanted = {each for each in product(powers, repeat=4) if prod(each) == 16 and each[2] <= 8}
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
    options: dict[str, Any] = {
        **{"tp": 2, "cp": 2, "dp_shard": 4, "dp_replicate": 1},
        "activation_checkpointing": "full",
        "cp_method": "allgather",
        "param_dtype": "float32",
        "cpu_offload": True,
    }
    found = find(models, gpus=16, **options)
    (only,) = [candidate.plan for candidate in (*found.fitting, *found.too_large)]
    assert only == ParallelPlan(**options)


def test_recomputing_nothing_wins_where_there_is_room_and_everything_where_there_is_not(
    models: Path,
):
    roomy = best(models, "7b", gpus=8, seq_len=4096, gpu_memory=141).plan
    assert roomy.activation_checkpointing == "none"
    tight = [each.plan for each in find(models, "7b", gpus=8, seq_len=32768).fitting]
    on_whole_rows = [plan for plan in tight if plan.model_ranks == 1]
    assert on_whole_rows and all(plan.activation_checkpointing == "full" for plan in on_whole_rows)
    assert tight[0].model_ranks > 1, "splitting costs less here than computing all twice"


def test_what_does_not_divide_is_said(models: Path):
    problem = "parallel.tp 8 does not divide the model's num_attention_heads 28"
    assert any(problem in reason for reason in find(models, "7b", gpus=8).refused)
    with pytest.raises(ValueError, match=rf"gpus must allow a plan.*{problem}"):
        find(models, "7b", gpus=8, tp=8)


def test_ulysses_gives_way_to_gathering_where_heads_do_not_divide(models: Path):
    plans = candidates(config_of(models, "7b", gpus=8, tp=1), read_shape(str(models / "7b")))
    methods = {plan.cp: plan.cp_method for plan in plans}
    assert methods == {1: "ulysses", 2: "ulysses", 4: "ulysses", 8: "allgather"}


def test_more_devices_with_the_same_batch_wait_less_but_send_no_less(models: Path):
    options: dict[str, Any] = {"batch_rows": 256, "tp": 8, "cp": 1, "dp_replicate": 1}
    one, other = (
        best(models, gpus=gpus, activation_checkpointing="full", **options) for gpus in (32, 256)
    )
    assert math.isclose(one.traffic.tensor, 8 * other.traffic.tensor, rel_tol=1e-6)
    assert one.seconds > other.seconds
    assert one.seconds > one.traffic.tensor / 450e9


def test_a_generator_counts_where_it_fills_more_than_training(models: Path):
    options: dict[str, Any] = {"gpus": 16, "gpu_memory": 141}
    beside = find(models, **options, **ENGINES)
    assert beside.too_large[0].fullest.generation > 141e9, "one engine holds all 70 B weights"
    alone = find(models, **options).fitting
    assert not any(each.fullest.generation for each in alone)
    without = {each.plan: each.fullest.total for each in alone}
    split = find(models, **options, **ENGINES, tensor_parallel_size=8).fitting
    assert split and all(each.fullest.total >= without[each.plan] for each in split)


def test_the_command_prints_flags_that_a_run_takes(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "160")
    flags = "--gpus 64 --gpu-memory 80 --seq-len 8192 --show 4"
    assert main(["plan", "--model", str(models / "70b"), *flags.split()]) == 0
    output = capsys.readouterr().out
    assert "70.55 B parameters on 64 GPUs of 80 GB" in output and "1.00×" in output
    row = r"^ +\d+ +\d+ +\d+ +\d+ +(?:full|none|selective) "
    assert len(re.findall(row, output, re.MULTILINE)) == 4
    config = run_with(output.strip().splitlines()[-1])
    assert config.parallel == best(models, gpus=64, gpu_memory=80, seq_len=8192).plan
    assert config.trainer.packed_row_tokens == 8192
    assert config.trainer.train_micro_batch_size == 1


@pytest.mark.parametrize("how", RECOMPUTED)
def test_flags_say_all_of_a_plan(models: Path, how: Any):
    options = {"activation_checkpointing": how, "cpu_offload": how == "selective"}
    found = best(models, "7b", gpus=1, gpu_memory=2000, **options)
    config = run_with(found.flags)
    assert config.parallel == found.plan
    assert config.parallel.needs_ranks == (how == "selective")


def test_where_nothing_fits_the_smallest_are_shown(
    models: Path, capsys: pytest.CaptureFixture[str]
):
    flags = "--gpus 8 --gpu-memory 80 --show 2"
    assert main(["plan", "--model", str(models / "70b"), *flags.split()]) == 2
    output = capsys.readouterr()
    assert "full" in output.out
    message = (
        r"gpu_memory must hold a plan, but it is 80, of which 72.0 GB may be used: the smallest"
        r" needs 1\d\d\.\d GB \(.*\); try --parallel.cpu-offload, --lora.rank 16,"
    )
    assert re.search(message, output.err)
    flags += " --trainer.backend megatron"
    assert main(["plan", "--model", str(models / "70b"), *flags.split()]) == 2
    assert re.search(r"; try more --gpus, or a shorter --seq-len \(", capsys.readouterr().err)


BAD = {
    "--model no/folder": "model.path must be a folder with a Hugging Face model or a hub name",
    "--model bad.json": "'bad.json' could not be loaded",
    "--model mamba.json": "must be one of llama",
    "--gpus 0": "gpus must be at least 1",
    "--gpu-memory 0": "gpu_memory must be positive",
    "--cp 3": "the degrees given do not multiply to a divisor of 8, with tp within 8",
    "--cp 4 --dp-shard 4": "the degrees given do not multiply to a divisor of 8",
    "--gpus 16 --tp 16": "do not multiply to a divisor of 16, with tp within 8 and",
    "--gpus 24 --tp 6": "do not multiply to a divisor of 24, with tp within 8 and a divisor of it",
    "--tensor-parallel-size 2": "generation.tensor_parallel_size is not for torch, which computes",
    "--generation.backend vllm --tensor-parallel-size 3": "must divide the 8 GPUs, but it is 3",
    "--offload-during-generation": "trainer.offload_during_generation needs engines on these GPUs",
    "--offload-during-generation --generation.backend vllm --no-colocated": "needs engines on",
    "--offload-during-generation --generation.backend vllm --cpu-offload": (
        "trainer.offload_during_generation is not for parallel.cpu_offload"
    ),
    "--target-modules q_proj": "lora.target_modules needs lora.rank",
    "--lora.rank 8 --target-modules q_proj wq": "must be of q_proj, k_proj, v_proj, o_proj,",
    "--lora.rank 8 --lora.dropout 0.1": "unknown setting --lora.dropout: plan does not use it",
    "--reserve 1": "reserve must lie in",
    "--pp 2": "parallel.pp 2 is for trainer.backend megatron",
    "--vpp 2": "and a pipeline if there is vpp",
    "--trainer.backend megatron --vpp 2 --pp 1": "and a pipeline if there is vpp",
    "--trainer.backend megatron --vpp 2 --gpus 1": "and a pipeline if there is vpp",
    "--trainer.backend megatron --vpp 41": "parallel.pp 2 · vpp 41 has more stages than the model'",
    "--trainer.backend megatron --num-layers-in-first-pipeline-stage 3 --vpp 2": (
        "parallel.num_layers_in_first_pipeline_stage must be a multiple of parallel.vpp, which is 2"
    ),
    "--trainer.backend megatron --num-layers-in-last-pipeline-stage 80": (
        "parallel.num_layers_in_last_pipeline_stage 80 leave 0 of the model's num_hidden_layers 80"
    ),
    "--trainer.backend megaton": "unknown training backend 'megaton'; did you mean megatron?",
    "--ep 2": "parallel.ep 2 is for mixtures of experts",
    "--trainer.backend megatron --ep 2": "parallel.ep 2 is for mixtures of experts",
    "--model 8x7b": "trainer.backend must be megatron for mixtral, a mixture of experts, whose",
    "--model 8x7b --trainer.backend megatron --ep 16 --gpus 16": "parallel.ep 16 does not divide",
    "--trainer.backend megatron --lora.rank 8": "lora.rank must be 0 with trainer.backend megatron",
    "--trainer.backend megatron --dp-replicate 2": "parallel.dp_replicate must be 1 with trainer.b",
    "--trainer.backend megatron --cpu-offload": "parallel.cpu_offload must be off with trainer.b",
    "--trainer.backend megatron --pp 81 --gpus 81": "parallel.pp 81 has more stages than the model",
    "--trainer.backend megatron --pp 2 --vpp 41": "parallel.pp 2 · vpp 41 has more stages than",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_settings(
    flags: str, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(models)
    Path("bad.json").write_text("{")
    Path("mamba.json").write_text('{"model_type": "mamba"}')
    assert main(["plan", "--model", "70b", "--gpus", "8", *flags.split()]) == 2
    assert BAD[flags] in capsys.readouterr().err


def test_a_registered_backend_is_planned_by_its_traits(
    models: Path, monkeypatch: pytest.MonkeyPatch
):
    class Mine:
        traits = TrainingTraits(pipelines=True, shards="optimizer")

    options: dict[str, Any] = {"trainer__backend": "mine", "gpus": 16, "gpu_memory": 2000, "pp": 4}
    monkeypatch.setitem(LIMITS, "mine", OwnLimits(Mine))
    assert all(each.plan.pp == 4 for each in find(models, **options).fitting)
    assert "--trainer.backend mine" in shown(models, "70b", width=200, **options)
    with pytest.raises(ValueError, match="ep 2 is for mixtures of experts"):
        find(models, **options | {"ep": 2})
    with pytest.raises(ValueError, match=r"cpu_offload must be off with trainer\.backend mine"):
        find(models, **options | {"cpu_offload": True})


def test_a_file_for_training_is_a_workload(models: Path, tmp_path: Path):
    """Degrees that it leaves at their defaults are free; code that it names is of no interest."""
    run = run_with(
        "--parallel.tp 2 --trainer.micro-batch-tokens 9000 --lora.rank 0 --parallel.compile"
        " --generation.backend vllm --reward mine:fn"
        " --optimizer.lr 1 --parallel.param-dtype bfloat16",
        "grpo",
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(run) + "environment: {seal: 00}\n")
    flags = ["--model", str(models / "7b"), "--gpus", "16", "--config", str(path)]
    config = parse("plan", flags)
    asked = OpenPlan(tp=2, param_dtype="bfloat16", compile=True)
    assert config.parallel == asked and config.engines and config.micro_batch_rows == 2
    found = find_plans(config)
    plans = [each.plan for each in (*found.fitting, *found.too_large)]
    assert {plan.tp for plan in plans} == {2} and len({plan.cp for plan in plans}) > 1
    assert all(plan.compile for plan in plans)
    path.write_text("parallel: {tpp: 2}\n")
    with pytest.raises(ValueError, match=r"line 1: unknown key parallel\.tpp"):
        parse("plan", flags)


def test_a_plan_takes_all_of_a_runs_parallel_settings():
    names = [{each.name for each in fields(kind)} for kind in (OpenPlan, ParallelPlan)]
    assert names[0] == names[1]


def test_packed_rows_are_as_wide_as_the_trainer_makes_them(models: Path):
    wide, two = (
        config_of(models, gpus=8, **options)
        for options in (
            {"micro_batch_tokens": 8192},
            {"micro_batch_tokens": 8192, "packed_row_tokens": 4096},
        )
    )
    assert (wide.row_tokens, wide.micro_batch_rows) == (8192, 1)
    assert (two.row_tokens, two.micro_batch_rows) == (4096, 2)
    assert config_of(models, gpus=8, seq_len=512).row_tokens == 512


def test_it_needs_no_torch(models: Path):
    code = f"""
import sys
from nemorl.runtime.cli.main import main
assert main(["plan", "--model", {str(models / "7b")!r}, "--gpus", "8"]) == 0
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"cpu_offload": True}, {"lora__rank": 16}, {"seq_len": 131072}),
        *({**MEGATRON}, {**MEGATRON, "name": "30b-a3b", "gpus": 64}),
    ],
    ids=str,
)
def test_the_table_fits_80_columns(options: dict[str, Any], models: Path):
    output = shown(models, **{"name": "7b", "gpus": 8, **options})
    (rule,) = [line for line in output.splitlines() if line.startswith("───")]
    assert len(rule) <= 80 and "…" not in output
    sentences = [line for line in output.splitlines() if not line.startswith("--")]
    assert max(map(len, sentences)) <= 80


def test_a_narrow_terminal_costs_no_column(models: Path):
    output = shown(models, "70b", width=40, gpus=64, seq_len=8192, show=1)
    (row,) = [line for line in output.splitlines() if "×" in line]
    assert re.search(r"^ +1 +32 +2 +1 +selective ", row) and "…" not in output


def test_main_memory_is_that_of_a_machine(models: Path):
    options: dict[str, Any] = {"cpu_offload": True, "activation_checkpointing": "full"}
    few, many = (best(models, gpus=gpus, dp_shard=gpus, **options) for gpus in (4, 16))
    size = 16 * read_shape(str(models / "70b")).num_parameters()
    assert few.host == pytest.approx(size, rel=0.1), "four GPUs of one machine"
    assert many.host == pytest.approx(size / 2, rel=0.1), "eight of sixteen"
    replicated = best(models, gpus=8, dp_replicate=2, dp_shard=4, **options)
    assert replicated.host == pytest.approx(2 * few.host, rel=0.01), "each copy of the model"
    assert "host" in shown(models, "70b", gpus=8, cpu_offload=True)
    assert "host" not in shown(models, "70b", gpus=64)


def test_offloading_leaves_engines_room(models: Path):
    options: dict[str, Any] = {"gpus": 8, **ENGINES}
    said = shown(models, "7b", offload_during_generation=True, **options)
    assert "--trainer.offload-during-generation" in said and "host" in said
    # Without it an engine has no room for a single sequence.
    options |= {"gpu_memory": 30, "activation_checkpointing": "full"}
    assert find(models, "7b", offload_during_generation=True, **options).fitting
    options["offload_during_generation"] = False
    with pytest.raises(ValueError, match=r"try --parallel.cpu.* --trainer.offload-.*, a larger"):
        shown(models, "7b", **options)


def test_sequences_without_room_in_the_cache_wait_as_in_a_run(
    models: Path, monkeypatch: pytest.MonkeyPatch
):
    """Plans that a run accepts fit: what its engines need is room for one sequence."""
    few, many = (
        find(models, "7b", gpus=8, **MEGATRON, **ENGINES, seq_len=8192, max_batch_size=size)
        for size in (1, 4096)
    )
    assert {each.plan for each in few.fitting} == {each.plan for each in many.fitting}
    assert many.fitting and all(each.sharing for each in many.fitting)

    class Stays:  # without the method offload
        traits = LIMITS["megatron"].traits

        def empty_cache(self) -> None: ...

    monkeypatch.setitem(LIMITS, "stays", OwnLimits(Stays))
    options: dict[str, Any] = {"trainer__backend": "stays", **ENGINES, "seq_len": 131072}
    said = shown(models, "7b", width=400, gpus=8, **options)
    assert "don't fit together, but the trainer can't be offloaded here: sequences wait" in said


def test_groups_of_tp_stay_on_one_machine(models: Path):
    found = find(models, gpus=24, gpu_memory=2000)
    degrees = {each.plan.tp for each in (*found.fitting, *found.too_large)}
    assert degrees == {1, 2, 4, 8}
    one = find(models, "7b", gpus=6, gpus_per_node=8, gpu_memory=2000, tp=2).fitting
    assert one, "a part of a machine"


def test_each_module_that_is_recomputed_counts(models: Path):
    options: dict[str, Any] = {"gpus": 8, "gpu_memory": 2000, **MEGATRON}
    options |= {"tp": 1, "pp": 1, "cp": 1}
    for name, feeds in (("7b", "mlp"), ("30b-a3b", "moe")):
        attention, both, feed = (
            best(models, name, recompute_modules=modules, ep=1, **options)
            for modules in (("core_attn",), ("core_attn", feeds), (feeds,))
        )
        assert both.fullest.activations < feed.fullest.activations < attention.fullest.activations
        assert both.times.compute > feed.times.compute and feed.times.compute > 0
        assert both.times.compute > attention.times.compute


def test_what_a_step_moves_is_shown_if_asked(models: Path):
    marks = ("routes", "adapters", "merged")
    for name, options, said in (
        ("7b", {"gpus": 8}, ()),
        ("7b", {"gpus": 8, "lora__rank": 16}, ("adapters", "merged")),
        ("30b-a3b", {"gpus": 32, **MEGATRON}, ("routes",)),
        ("7b", {"gpus": 8, "cpu_offload": True}, ()),
    ):
        plans, moves = (shown(models, name, moves=on, **options) for on in (False, True))
        assert moves.startswith(plans.rstrip()) and "object_store" not in plans
        output = moves.removeprefix(plans)
        assert tuple(mark for mark in marks if mark in output) == said
        assert max(map(len, output.splitlines())) <= 80 and "…" not in output


def test_adapters_leave_room(models: Path):
    whole, adapted = find(models, gpus=8), find(models, gpus=8, lora__rank=16)
    assert not whole.fitting and adapted.fitting
    assert {each.plan.tp for each in adapted.fitting} >= {1, 2}
    targets = ("q_proj", "v_proj")
    output = shown(models, "70b", width=200, gpus=8, lora__rank=16, target_modules=targets)
    assert "32.8 M in adapters that train" in output
    config = run_with(output.strip().splitlines()[-1])
    assert config.lora.rank == 16 and config.lora.target_modules == targets


def test_frozen_matrices_take_two_thirds_of_the_time(models: Path):
    options: dict[str, Any] = {"gpus": 1, "gpu_memory": 2000, "batch_rows": 64}
    options["activation_checkpointing"] = "none"
    adapted, whole = best(models, lora__rank=8, **options), best(models, **options)
    assert 2 / 3 < adapted.seconds / whole.seconds < 3 / 4, "other kernels take as long"


def test_groups_that_do_not_divide_a_machine_lie_across(models: Path):
    """Six GPUs would begin in one machine of eight and end in the next."""

    def data(**options: Any) -> float:
        return best(models, "7b", gpus=12, cp=1, tp=1, **options).times.data

    across = data(dp_shard=6)
    assert data(dp_shard=4) < across and data(dp_shard=6, gpus_per_node=6) < across


def test_engines_come_with_their_settings(models: Path):
    output = shown(models, "7b", width=120, gpus=8, **ENGINES, tensor_parallel_size=2)
    engines = run_with(output.strip().splitlines()[-1], "grpo").generation
    assert engines.backend == "vllm" and engines.num_replicas == 4
    assert engines.tensor_parallel_size == 2 and engines.max_batch_size == 64


def test_pipelines_are_megatrons(models: Path):
    options: dict[str, Any] = {"gpus": 16, "gpu_memory": 300}
    found = find(models, **MEGATRON, **options)
    degrees = {each.plan.pp for each in (*found.fitting, *found.too_large)}
    assert degrees == {1, 2, 4, 8, 16} and found.fitting[0].plan.dp_replicate == 1
    assert {each.plan.pp for each in find(models, **options).fitting} == {1}
    interleaved = find(models, **MEGATRON, vpp=2, **options)
    degrees = {(each.plan.pp, each.plan.vpp) for each in interleaved.fitting}
    assert degrees == {(2, 2), (4, 2), (8, 2), (16, 2)}
    output = shown(models, "70b", width=120, pp=4, vpp=2, **MEGATRON, **options)
    config = run_with(output.strip().splitlines()[-1])
    assert (config.parallel.pp, config.parallel.vpp) == (4, 2)
    assert config.trainer.backend == "megatron"
    modules = find(models, **MEGATRON, recompute_modules=("core_attn", "mlp"), **options)
    assert {each.plan.activation_checkpointing for each in modules.fitting} == {"selective"}
    flags = "--parallel.recompute-modules core_attn mlp"
    assert all(flags in each.flags for each in modules.fitting)


@pytest.mark.parametrize(
    ("name", "whole", "active"), [("30b-a3b", 30.53, 3.35), ("8x7b", 46.70, 12.88)]
)
def test_experts_are_divided(name: str, whole: float, active: float, models: Path):
    """Sizes as the models' cards say them."""
    options: dict[str, Any] = {**MEGATRON, "gpus": 16, "gpu_memory": 2000}
    output = shown(models, name, width=120, ep=8, **options)
    assert f"{whole:.2f} B parameters ({active:.2f} B per token)" in output
    config = run_with(output.strip().splitlines()[-1])
    assert config.parallel.ep == 8 and config.trainer.backend == "megatron"
    found = find(models, name, pp=1, tp=1, cp=1, **options).fitting
    by_ep = {each.plan.ep: each for each in found}
    assert set(by_ep) == {1, 2, 4, 8} | ({16} if name != "8x7b" else set())
    assert by_ep[8].fullest.parameters < by_ep[2].fullest.parameters < by_ep[1].fullest.parameters
    assert by_ep[8].fullest.optimizer == pytest.approx(by_ep[1].fullest.optimizer, rel=1e-6)
    assert by_ep[1].traffic.experts == 0 < by_ep[2].traffic.experts < by_ep[8].traffic.experts


def test_a_pipeline_is_idle_while_it_fills_and_drains(models: Path):
    options: dict[str, Any] = {"gpus": 8, "pp": 8, **MEGATRON, "gpu_memory": 2000}

    def times(count: int, **more: Any) -> Times:  # of so many microbatches
        return best(models, batch_rows=count, **options, **more).times

    one, many = times(1), times(64)
    assert many.idle == pytest.approx(one.idle, rel=1e-6)
    assert many.total - one.total == pytest.approx(63 * one.idle / 7, rel=1e-6)
    assert one.idle == pytest.approx(7 / 8 * one.total, rel=0.05)
    assert times(64, vpp=2).idle == pytest.approx(one.idle / 2, rel=0.01)


def test_experts_are_divided_within_a_machine(models: Path):
    """As NeMo RL's recipe for 32 GPUs does (ep 8): one by one, experts want many tokens each, and
    tokens fast links.
    """
    plan = best(models, "30b-a3b", gpus=32, **MEGATRON).plan
    assert plan.ep == 8 and plan.tp <= 2
    options: dict[str, Any] = {**MEGATRON, "tp": 1, "cp": 1, "pp": 1, "gpu_memory": 2000}
    by_ep = {ep: best(models, "30b-a3b", gpus=32, ep=ep, **options).times for ep in (1, 8, 32)}
    assert by_ep[1].compute > 2 * by_ep[8].compute
    assert by_ep[32].experts > 2 * by_ep[8].experts


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("layers", [80, 94])
def test_telling_stages_are_the_fullest_and_the_busiest(models: Path, layers: int, vpp: int):
    shape = replace(read_shape(str(models / "70b")), num_hidden_layers=layers)
    for pp in (1, 2, 4, 8, 16):
        work = config_of(models, "70b", gpus=64, batch_rows=512, **MEGATRON)
        plan = ParallelPlan(pp=pp, vpp=vpp if pp > 1 else 1, dp_shard=64 // pp)
        step = Step(shape, plan.with_precision(accelerator=True), work)
        whole = [Stage(step, index) for index in range(pp)]
        for size in (
            lambda stage: stage.training_memory().total,
            lambda stage: stage.states().total,
            lambda stage: stage.traffic().total,
            lambda stage: stage.num_layers,
        ):
            assert max(map(size, telling_stages(step))) == max(map(size, whole))
