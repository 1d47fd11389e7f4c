"""`nemorl plan`: which plans it finds, in which order, and what it says where none fits."""

import re
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from nemorl.parallel.backends import LIMITS, OwnLimits
from nemorl.parallel.plan import ParallelPlan, TrainingTraits
from nemorl.parallel.planner import command
from nemorl.parallel.planner.command import (
    RECOMPUTED,
    Candidate,
    Sent,
    candidates,
    find_plans,
    ranked,
)
from nemorl.parallel.planner.config import OpenPlan
from nemorl.parallel.planner.memory import Memory
from nemorl.runtime.cli.main import main, parse
from nemorl.runtime.config.tree import dump_yaml
from tests.parallel.planner.plans import best, config_of, find, models, read_once, shown

__all__ = ["models"]
ENGINES: dict[str, Any] = {"generation__backend": "vllm"}
MEGATRON: dict[str, Any] = {"trainer__backend": "megatron"}


def run_with(said: str, algorithm: str = "sft") -> Any:
    """The configuration of a run with the flags in the last line."""
    flags = said.strip().splitlines()[-1].split()
    return parse(algorithm, ["--model.path", "m", "--data.train", "d", *flags])


def of(how: Any = "none", *, size: int = 60, slow: float = 100, sent: float = 500, **plan: Any):
    """A plan with a checkpointing, GB, and GB that it sends."""
    made, fullest = ParallelPlan(activation_checkpointing=how, **plan), Memory(parameters=size)
    return Candidate(plan=made, fullest=fullest, sent=sent, slow=slow)


RULE = {
    "what fits comes before what does not": (of("full", slow=900), of(size=81)),
    "of what does not fit the smallest": (of("full", size=81), of(size=82)),
    "less recomputation comes before fewer bytes": (of(slow=900), of("selective", slow=1)),
    "selective recomputes less than full": (of("selective", slow=900), of("full", slow=1)),
    "fewer bytes over the slow link": (of(slow=100, sent=900), of(slow=111, sent=500)),
    "within 10 % fewer bytes in all": (of(slow=110, sent=499), of(slow=100, sent=500)),
    "fewer ways to split": (of(size=70, tp=2), of(tp=2, cp=2)),
    "then the smallest": (of(size=60), of(size=61)),
}


@pytest.mark.parametrize("clause", RULE)
def test_plans_are_ranked_by_the_rule(clause: str):
    first, second = RULE[clause]
    assert ranked([first, second], room=80) == ranked([second, first], room=80) == [first, second]


def test_what_leaves_a_machine():
    """Of a ring's ranks on one machine one sends to the next; an exchange goes to all others."""
    ring, crossing = Sent(64, 1, 64), Sent(64, 1, 6)
    assert ring.slow(8) == 8 and Sent(64, 8, 8).slow(8) == 64 and Sent(64, 1, 8).slow(8) == 0
    assert Sent(63, 1, 64, exchanged=True).slow(8) == 56
    assert crossing.slow(8) == 32, "groups of six begin in one machine and end in the next"
    assert Sent(64, 4, 4).slow(8) == 32, "every second stage of four devices is on the next"


def test_every_plan_uses_all_gpus_and_suits_the_model(models: Path):
    found = find(models, gpus=16, gpu_memory=100, reserve=0.2)
    assert all(each.fullest.total <= 80e9 for each in found.fitting)
    assert all(each.fullest.total > 80e9 for each in found.too_large)
    both = (*found.fitting, *found.too_large)
    assert ranked(reversed(both), room=80e9) == list(both)
    plans = [candidate.plan for candidate in both]
    assert len(plans) == len(set(plans)) > 50
    for plan in plans:
        plan.check(found.step.model.config)
    degrees = {(plan.dp_replicate, plan.dp_shard, plan.tp, plan.cp) for plan in plans}
    powers = (1, 2, 4, 8, 16)
    wanted = {each for each in product(powers, repeat=4) if prod(each) == 16 and each[2] <= 8}
    assert degrees == wanted


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


def test_what_does_not_divide_is_said(models: Path):
    problem = "parallel.tp 8 does not divide the model's num_attention_heads 28"
    assert any(problem in reason for reason in find(models, "7b", gpus=8).refused)
    with pytest.raises(ValueError, match=rf"gpus must allow a plan.*{problem}"):
        find(models, "7b", gpus=8, tp=8)


def test_ulysses_gives_way_to_gathering_where_heads_do_not_divide(models: Path):
    plans = candidates(config_of(models, "7b", gpus=8, tp=1), read_once(str(models / "7b")))
    methods = {plan.cp: plan.cp_method for plan in plans}
    assert methods == {1: "ulysses", 2: "ulysses", 4: "ulysses", 8: "allgather"}


def test_a_generator_counts_where_it_fills_more_than_training(models: Path):
    options: dict[str, Any] = {"gpus": 16, "gpu_memory": 141}
    beside = find(models, **options, **ENGINES)
    assert beside.too_large[0].fullest.generation > 141e9, "one engine holds all 70 B weights"
    alone = find(models, **options).fitting
    assert not any(each.fullest.generation for each in alone)
    without = {each.plan: each.fullest.total for each in alone}
    split = find(models, **options, **ENGINES, tensor_parallel_size=8).fitting
    assert split and all(each.fullest.total >= without[each.plan] for each in split)


def test_other_models_take_room_beside_the_policy(models: Path):
    options: dict[str, Any] = {"gpus": 8, "dp_replicate": 1, "cp": 1}
    more = options | {"teacher": str(models / "70b"), "critic": str(models / "7b")}
    found = find(models, "7b", **more).fitting
    alone = {each.plan: each.fullest.total for each in find(models, "7b", **options).fitting}
    for each in found:
        assert each.apart["critic"] < each.apart["policy"] == alone[each.plan]
        assert each.apart["policy"] < each.fullest.total < sum(each.apart.values())
    assert len(alone) > len(found) > 0
    with pytest.raises(ValueError, match="tp 7 does not divide the model's num_attention_heads 64"):
        find(models, "7b", **more | {"gpus": 7, "gpus_per_node": 7, "tp": 7})
    with pytest.raises(ValueError, match=r"smallest .* GPUs of its own for each model, more"):
        shown(models, "7b", **more | {"gpus": 4})


def test_the_command_prints_flags_that_a_run_takes(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "160")
    flags = "--gpus 64 --gpu-memory 80 --seq-len 8192"
    assert main(["plan", "--model", str(models / "70b"), *flags.split()]) == 0
    output = capsys.readouterr().out
    assert "70.55 B parameters on 64 GPUs of 80 GB" in output
    config = run_with(output)
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


BAD = {
    "--model no/folder": "model.path must be a folder with a Hugging Face model or a hub name",
    "--model bad.json": "'bad.json' could not be loaded",
    "--model mamba.json": "the model's type must be one that transformers has, but it is 'mumba'",
    "--gpus 24 --tp 6": "do not multiply to a divisor of 24, with tp a divisor of 8",
    "--generation.backend vllm --tensor-parallel-size 3": "must divide the 8 GPUs, but it is 3",
    "--offload-during-generation": "trainer.offload_during_generation needs engines on these GPUs",
    "--lora.rank 8 --target-modules q_proj wq": "must name linear layers, but it is 'wq'",
    "--lora.rank 8 --lora.dropout 0.1": "unknown setting --lora.dropout: plan does not use it",
    "--reserve 1": "reserve must lie in",
    "--model 8x7b --ep 2": "parallel.ep 2 is for trainer.backend megatron",
    "--trainer.backend megatron --lora.rank 8": "lora.rank must be 0 with trainer.backend megatron",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_settings(
    flags: str, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(models)
    monkeypatch.setattr(command, "read_shape", read_once)
    Path("bad.json").write_text("{")
    Path("mamba.json").write_text('{"model_type": "mumba"}')
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
    with pytest.raises(ValueError, match=r"cpu_offload must be off with trainer\.backend mine"):
        find(models, **options | {"cpu_offload": True})


def test_a_file_for_training_is_a_workload(models: Path, tmp_path: Path):
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


def test_packed_rows_are_as_wide_as_the_trainer_makes_them(models: Path):
    wide = config_of(models, gpus=8, micro_batch_tokens=8192)
    two = config_of(models, gpus=8, micro_batch_tokens=8192, packed_row_tokens=4096)
    assert (wide.row_tokens, wide.micro_batch_rows) == (8192, 1)
    assert (two.row_tokens, two.micro_batch_rows) == (4096, 2)


@pytest.mark.parametrize("width", [80, 40])
def test_the_table_fits_80_columns_and_a_narrow_terminal_costs_none(models: Path, width: int):
    said = shown(models, "30b-a3b", gpus=8, tp=2, pp=2, width=width, **MEGATRON)
    (rule,) = (line for line in said.splitlines() if line.startswith("───"))
    assert len(rule) <= 80 and "…" not in said


def test_main_memory_is_that_of_a_machine(models: Path):
    options: dict[str, Any] = {"cpu_offload": True, "activation_checkpointing": "full"}
    few, many = (best(models, gpus=gpus, dp_shard=gpus, **options) for gpus in (4, 16))
    size = 16 * read_once(str(models / "70b")).num_parameters
    assert few.host == pytest.approx(size, rel=0.01)
    assert many.host == pytest.approx(size / 2, rel=0.01), "eight GPUs of sixteen"
    assert "host" in shown(models, "70b", gpus=8, cpu_offload=True)


def test_adapters_leave_room(models: Path):
    assert not find(models, gpus=8).fitting
    targets = ("q_proj", "v_proj")
    output = shown(models, "70b", width=200, gpus=8, lora__rank=16, target_modules=targets)
    assert "32.8 M in adapters that train" in output
    lora = run_with(output).lora
    assert lora.rank == 16 and lora.target_modules == targets


def test_engines_come_with_their_settings(models: Path):
    output = shown(models, "7b", width=120, gpus=8, **ENGINES, tensor_parallel_size=2)
    engines = run_with(output, "grpo").generation
    assert engines.backend == "vllm" and engines.num_replicas == 4
    assert engines.tensor_parallel_size == 2


def test_pipelines_are_megatrons(models: Path):
    options: dict[str, Any] = {"gpus": 16, "gpu_memory": 300}
    assert {each.plan.pp for each in find(models, **options).fitting} == {1}
    interleaved = find(models, **MEGATRON, vpp=2, **options)
    degrees = {(each.plan.pp, each.plan.vpp) for each in interleaved.fitting}
    assert degrees == {(2, 2), (4, 2), (8, 2), (16, 2)}
    output = shown(models, "70b", width=120, pp=4, vpp=2, **MEGATRON, **options)
    plan = run_with(output).parallel
    assert (plan.pp, plan.vpp) == (4, 2)
    modules = find(models, **MEGATRON, recompute_modules=("core_attn", "mlp"), **options)
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
    assert run_with(output).parallel.ep == 8
    found = find(models, name, pp=1, tp=1, cp=1, **options).fitting
    by_ep = {e.plan.ep: e for e in found if e.plan.recomputes == "none"}
    assert by_ep[8].fullest.parameters < by_ep[2].fullest.parameters < by_ep[1].fullest.parameters
    assert by_ep[8].fullest.optimizer == pytest.approx(by_ep[1].fullest.optimizer, rel=1e-6)


def test_experts_on_dtensor_are_planned_and_divided_by_tp(models: Path):
    found = find(models, "30b-a3b", gpus=16, gpu_memory=2000, cp=1)
    alike = {each.plan.tp: each for each in found.fitting if each.plan.dp_replicate == 1}
    assert set(alike) == {1, 2, 4} and {each.plan.ep for each in found.fitting} == {1}
    sizes = [each.fullest.parameters for each in alike.values()]
    assert sizes == pytest.approx([sizes[0]] * 3, rel=0.01), "routers are whole on each"
