"""The estimates behind `nemorl plan`, against real models and measured steps."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from nemorl.models.adapters import live_tensors
from nemorl.models.capabilities import TESTED
from nemorl.models.causal_lm import on_meta
from nemorl.models.tiny import tiny_config
from nemorl.parallel.config import LoRAConfig, OptimizerConfig
from nemorl.parallel.dtensor import mesh
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.command import find_plans, traffic
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import ENGINE, PlannedStep, engine_memory
from nemorl.parallel.planner.model_shape import ModelShape, model_shape, read_shape
from nemorl.parallel.planner.sharing import host_of, moments_of, stages_of, states_of
from nemorl.runtime.cli.api import from_keywords
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.measured_steps import measure_steps
from tests.parallel.ways import set_up
from tests.ranks import run_ranks
from tests.tiny_models import EXPERTS, KINDS

NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "vocab_size",
)
Plan = partial(ParallelPlan, param_dtype="float32")
SIZES = dict(zip(NAMES, (128, 512, 4, 8, 4096), strict=True))
SMALL = {
    **SIZES,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA_70B = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    **dict(zip(NAMES, (8192, 28672, 80, 64, 128256), strict=True)),
}
ODD = {
    "model_type": "qwen2",
    "num_key_value_heads": 8,
    **dict(zip(NAMES, (96, 200, 2, 8, 1000), strict=True)),
}
MOE = ODD | {"model_type": "qwen3_moe", "num_experts": 16, "head_dim": 12, "num_hidden_layers": 2}
"""Nothing of it divides by 1,024, so that every shard is rounded up."""


def small_folder(folder: Path, kind: str = "llama", **overrides: Any) -> tuple[Path, ModelShape]:
    """A folder with a configuration alone, and its sizes."""
    options = {**SMALL, **({"sliding_window": None} if kind == "mistral" else {})}
    options |= {"num_local_experts": 8, "num_experts_per_tok": 2} if kind in EXPERTS else {}
    options |= {"moe_intermediate_size": 192} if kind == "qwen3_moe" else {}
    options |= overrides
    folder = folder / "-".join([kind, *map(str, overrides.values())])
    {**KINDS, **EXPERTS}[kind][0](**options).save_pretrained(folder)
    return folder, read_shape(str(folder))


def shape_of(sizes: dict[str, Any]) -> ModelShape:
    return model_shape(CONFIG_MAPPING[sizes["model_type"]](**sizes))


def workload(**options: Any) -> PlanConfig:
    """Settings by the last part of their names, as `nemorl.train` takes them."""
    return from_keywords(PlanConfig, "plan", {"gpus": 1, **options})


@pytest.mark.filterwarnings("ignore:with .* rows are not packed")
@pytest.mark.parametrize("kind", json.loads(TESTED.read_bytes())["types"])
def test_every_tested_family_is_planned_with_all_its_parameters(kind: str, tmp_path: Path):
    config = tiny_config(CONFIG_MAPPING[kind]())
    config.save_pretrained(tmp_path)
    found = find_plans(workload(model__path=str(tmp_path), gpus=2, seq_len=64))
    shape, whole = found.step.model, {}
    model = on_meta(config)
    for name, parameter in model.named_parameters():
        inner = name.partition(".layers.")[2].partition(".")[2]
        whole[inner or name] = whole.get(inner or name, 0) + parameter.numel()
    assert shape.num_parameters == sum(each.numel() for each in model.parameters())
    sizes = dict.fromkeys(whole, 0)
    for count, each in shape.all():
        sizes[each.name] += count * each.size
    assert sizes == whole and shape.tied == bool(model.config.tie_word_embeddings)
    plans = [each.plan for each in found.fitting]
    assert ParallelPlan(dp_shard=2, param_dtype="bfloat16") in plans
    mixture = shape.num_experts > 0
    assert (shape.active_parameters < shape.num_parameters) == mixture


def shards_of_1024(cases: list[tuple[dict[str, Any], ParallelPlan]]) -> list[int]:
    """Bytes of the parameters of rank 0 of 1,024, of models on the meta device."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nemorl.parallel.dtensor.build import shard

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    found = []
    for sizes, plan in cases:
        model = on_meta(AutoConfig.for_model(**sizes))
        shard(model, mesh.join(plan, "cpu"))
        found.append(sum(tensor.to_local().nbytes for tensor in live_tensors(model).values()))
    return found


@pytest.mark.slow
def test_the_shards_of_a_70_b_model_on_1024_devices():
    one, split = Plan(dp_shard=1024), Plan(dp_replicate=4, dp_shard=8, tp=8, cp=4)
    cases = [(LLAMA_70B, one), (LLAMA_70B, split), (ODD, Plan(dp_shard=128, tp=8)), (MOE, split)]
    (found,) = run_ranks(1, shards_of_1024, cases, process_group=False)
    assert found == [
        4 * PlannedStep(shape_of(sizes), plan, WORK).whole_shard for sizes, plan in cases
    ]


WORK = workload(train_micro_batch_size=2, seq_len=256, sequence_packing=False, logprob_chunk=128)
PACKED = replace(WORK, trainer=replace(WORK.trainer, sequence_packing=True))
SHORT = workload(seq_len=64, sequence_packing=False, logprob_chunk=64)
RANK = LoRAConfig(rank=8)
LORA = replace(WORK, lora=RANK)
BFLOAT16 = ParallelPlan(param_dtype="bfloat16")
FULL = Plan(activation_checkpointing="full")

ALONE = {
    "float32": ("llama", Plan(), WORK),
    "full checkpointing": ("llama", FULL, WORK),
    "bfloat16": ("qwen2", BFLOAT16, WORK),
    "packed": ("qwen3", Plan(), PACKED),
    "entropy and reference": (
        "llama",
        Plan(),
        replace(WORK, entropy=True, keep_reference=True),
    ),
    "LoRA": ("llama", Plan(), replace(LORA, keep_reference=True)),
    "LoRA, bfloat16, full": ("qwen2", replace(FULL, param_dtype="bfloat16"), LORA),
    "experts": ("mixtral", Plan(), WORK),
    "experts, LoRA": ("qwen3_moe", Plan(), LORA),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_peak_of_one_process(name: str, tmp_path: Path):
    kind, plan, work = ALONE[name]
    folder, shape = small_folder(tmp_path, kind)
    peak, sent = measure_steps(folder, plan, work)
    step = PlannedStep(shape, plan, work)
    assert step.training_memory().total == pytest.approx(peak, rel=0.15)
    assert sent == 0 == traffic(step)[0]


def on_ranks(cases: list[Any]) -> list[tuple[int, int]]:
    return [measure_steps(*case) for case in cases]


def measured_twice(cases: list[Any]) -> list[list[Any]]:
    """Return for each of two ranks its lower peak of two, and what it sends, in each case."""
    both = [run_ranks(2, on_ranks, cases) for _ in range(2)]
    return [list(map(min, one, other)) for one, other in zip(*both, strict=True)]


SHARDED, TP, CP = Plan(dp_shard=2), Plan(tp=2), Plan(cp=2)
HSDP, OFFLOAD = Plan(dp_replicate=2), replace(SHARDED, cpu_offload=True)
SELECTIVE = {"activation_checkpointing": "selective", "param_dtype": "bfloat16"}
SPREAD = {
    "TP, full": ("llama", replace(FULL, tp=2), WORK),
    "CP": ("llama", CP, WORK),
    "offload": ("llama", OFFLOAD, WORK),
    "LoRA, selective, bfloat16": ("qwen2", replace(SHARDED, **SELECTIVE), LORA),
    "FSDP2": ("llama", SHARDED, WORK),
    "TP": ("llama", TP, WORK),
    "LoRA": ("llama", SHARDED, LORA),
    "FSDP2, selective, bfloat16": ("qwen2", replace(SHARDED, **SELECTIVE), WORK),
    "HSDP": ("llama", HSDP, WORK),
    "TP, selective, packed": ("qwen3", replace(TP, activation_checkpointing="selective"), PACKED),
    "CP by gathering": ("llama", replace(CP, cp_method="allgather"), WORK),
    "LoRA, TP": ("llama", TP, LORA),
    "experts, FSDP2": ("qwen3_moe", SHARDED, WORK),
    "experts, TP": ("qwen3_moe", TP, WORK),
    "experts, CP": ("mixtral", CP, WORK),
}


@pytest.mark.slow
def test_the_peaks_of_two_ranks_and_what_they_send(tmp_path: Path):
    folders = {
        name: small_folder(tmp_path, kind, tie_word_embeddings="packed" not in name)
        for name, (kind, *_) in SPREAD.items()
    }
    work = [(folders[name][0], plan, work) for name, (_, plan, work) in SPREAD.items()]
    measured = measured_twice(work)[0]
    for (name, (_, plan, work)), (peak, sent) in zip(SPREAD.items(), measured, strict=True):
        rows = 2 * work.micro_batch_rows * plan.data_ranks
        step = PlannedStep(folders[name][1], plan, replace(work, batch_rows=rows))
        memory = step.training_memory().total + host_of(step)
        assert memory == pytest.approx(peak, rel=0.15), name
        assert traffic(step)[0] == pytest.approx(sent, rel=0.15), name


def on_megatron(work: PlanConfig) -> PlanConfig:
    return replace(work, trainer=replace(work.trainer, backend="megatron"))


MEGATRON = on_megatron(WORK)
PP = Plan(dp_shard=1, pp=2)
STAGES = {
    "PP, untied": ("llama", PP, MEGATRON),
    "PP, bfloat16": ("qwen2", replace(PP, param_dtype="bfloat16"), MEGATRON),
    "VPP": ("llama", replace(PP, vpp=2), MEGATRON),
    "TP": ("llama", replace(TP, dp_shard=1), MEGATRON),
    "DP": ("llama", SHARDED, MEGATRON),
    "EP": ("qwen3_moe", replace(SHARDED, ep=2), MEGATRON),
    "PP, mlp": (
        "qwen3",
        replace(PP, activation_checkpointing="selective", recompute_modules=("mlp",)),
        MEGATRON,
    ),
    "EP, moe": (
        "qwen3_moe",
        replace(
            SHARDED,
            ep=2,
            activation_checkpointing="selective",
            recompute_modules=("core_attn", "moe"),
        ),
        MEGATRON,
    ),
    "VPP, bfloat16, full": (
        "llama",
        replace(PP, vpp=2, param_dtype="bfloat16", activation_checkpointing="full"),
        MEGATRON,
    ),
    "PP, packed, reference": ("qwen3", PP, replace(on_megatron(PACKED), keep_reference=True)),
    "TP without SP": ("llama", replace(TP, sequence_parallel=False), MEGATRON),
    "CP": ("llama", CP, MEGATRON),
    "experts, TP": ("qwen3_moe", replace(TP, dp_shard=1), MEGATRON),
    "EP, TP": ("mixtral", replace(TP, dp_shard=1, ep=2), MEGATRON),
}


@pytest.mark.slow
def test_the_peaks_of_megatrons_stages_and_what_they_send(tmp_path: Path):
    folders, work = {}, []
    for name, (kind, plan, task) in STAGES.items():
        folders[name] = small_folder(tmp_path, kind, tie_word_embeddings="untied" not in name)
        work.append((folders[name][0], plan, task))
    measured = measured_twice(work)
    for number, (name, (_, plan, task)) in enumerate(STAGES.items()):
        rows = 2 * task.micro_batch_rows * plan.data_ranks
        stages = stages_of(PlannedStep(folders[name][1], plan, replace(task, batch_rows=rows)))
        for rank, found in enumerate(measured):
            stage, (peak, sent) = stages[rank if plan.pp > 1 else 0], found[number]
            assert stage.training_memory().total == pytest.approx(peak, rel=0.15), (name, rank)
            assert traffic(stage)[0] == pytest.approx(sent, rel=0.1), (name, rank)


SHARED = {
    "FSDP2": ("llama", SHARDED, WORK),
    "TP": ("qwen3", TP, WORK),
    "megatron, DP": ("llama", SHARDED, MEGATRON),
    "megatron, PP": ("qwen2", replace(PP, param_dtype="bfloat16"), MEGATRON),
}
MODELS = ("policy", "teacher", "critic")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_the_peaks_of_several_models_on_the_same_devices(name: str, tmp_path: Path):
    kind, plan, task = SHARED[name]
    folder, shape = small_folder(tmp_path, kind)
    cases = [(folder, plan, task, models) for models in (MODELS, MODELS[1:2], MODELS[2:])]
    measured = measured_twice(cases)
    task = replace(task, batch_rows=2 * task.micro_batch_rows * plan.data_ranks)
    shapes = {"teacher": shape, "critic": read_shape(str(folder), "scalar")}
    step = PlannedStep(shape, plan, task, beside=shapes)
    for rank, ((both, _), (teacher, _), (critic, _)) in enumerate(measured):
        stage = rank if plan.pp > 1 else 0
        totals = [moment.total for moment in moments_of(step)][3 * stage :][:3]
        assert max(totals) == pytest.approx(both, rel=0.1)
        for model, peak, rel in (("teacher", teacher, 0.3), ("critic", critic, 0.1)):
            alone = stages_of(step.models[model])[stage].training_memory().total
            assert alone == pytest.approx(peak, rel=rel), model


def test_several_models_on_the_same_devices_add_up():
    """The critic has no head, and of the teacher nothing trains."""
    plan, work, config = Plan(dp_shard=64), workload(gpus=64), LLAMA_70B
    shape, critic = (model_shape(CONFIG_MAPPING["llama"](**config), x) for x in ("lm", "scalar"))
    n, trained = shape.num_parameters, 2 * shape.num_parameters - 8192 * 128256
    kept = states_of(PlannedStep(shape, plan, work, beside={"teacher": shape, "critic": critic}))
    near = partial(pytest.approx, rel=1e-4)  # the critic's new head is whole on each device
    assert kept.parameters == near(4 * (trained + n) / 64)
    assert kept.gradients == near(4 * trained / 64) and kept.optimizer == near(8 * trained / 64)


def test_what_a_step_of_8_billion_parameters_sends():
    sizes = zip(NAMES, (4096, 14336, 32, 32, 128256), strict=True)
    shape, sent = shape_of({**LLAMA_70B, **dict(sizes)}), []
    for plan in (Plan(dp_shard=8), Plan(dp_shard=4, tp=2)):
        work = workload(seq_len=8192, batch_rows=plan.data_ranks)
        sent.append(round(traffic(PlannedStep(shape, plan, work))[0] / 1e9))
    assert sent == [82, 53]


@pytest.mark.parametrize("kind, targets", [("llama", ()), ("qwen3", ("q_proj", "down_proj"))])
def test_adapters_are_those_that_peft_makes(kind: str, targets: tuple[str, ...], tmp_path: Path):
    from nemorl.parallel.dtensor.lora import add_adapters

    folder, shape = small_folder(tmp_path, kind)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    add_adapters(model, LoRAConfig(rank=8, target_modules=targets))
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    work = workload(seq_len=8, lora__rank=8, target_modules=targets)
    step = PlannedStep(shape, Plan(), work)
    numbers = sum(rows * columns for rows, columns in trained.values())
    assert numbers == step.trained() == step.adapter_parameters()
    first = sorted(sizes for name, sizes in trained.items() if ".layers.0." in name)
    assert first == sorted(matrix.shape for matrix in step.adapters(shape.layers[0]))


@pytest.mark.parametrize(
    ("kind", "rank"), [("llama", 0), ("llama", 8), ("mixtral", 0), ("qwen3_moe", 0)]
)
@pytest.mark.parametrize("name", ["adamw", "muon", "adamw8bit"])
def test_states_of_optimizers_are_as_large_as_said(name: str, kind: str, rank: int, tmp_path: Path):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    folder, shape = small_folder(tmp_path, kind)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    backend = set_up(model, optimizer={"name": name}, lora={"rank": rank})
    backend.train_step(random_batch([9, 5]), nll_loss)
    states = (x for each in backend.optimizer.state.values() for x in each.values() if x.ndim)
    work = workload(seq_len=8, optimizer=OptimizerConfig(name=name), lora__rank=rank)
    planned = PlannedStep(shape, Plan(), work).states().optimizer
    assert planned == pytest.approx(sum(each.nbytes for each in states), rel=0.01)


def test_a_generator_takes_weights_and_a_cache():
    shape, plan = shape_of(LLAMA_70B), Plan(dp_shard=64, param_dtype="bfloat16")
    engine = {"generation__backend": "vllm", "tensor_parallel_size": 8}
    for pp in (1, 2):
        work = workload(gpus=64, seq_len=1, pipeline_parallel_size=pp, **engine)
        step = PlannedStep(shape, plan, work)
        cache = 2 * 80 // pp * 128 * 2 * 1000
        assert engine_memory(step, 1000) == 2 * (shape.num_parameters // (8 * pp)) + cache + ENGINE
    memory = step.generation_memory(step.states(), generation=7)
    assert memory.generation == 7 and memory.optimizer == 8 * step.whole_shard


def test_a_generator_has_the_device_while_the_model_is_offloaded():
    """But for the largest weight, which is handed over in float32."""
    shape, plan = shape_of(LLAMA_70B), Plan(dp_shard=8)
    options = {"generation__backend": "vllm", "tensor_parallel_size": 8, "keep_reference": True}
    beside = PlannedStep(shape, plan, workload(gpus=8, **options))
    alone = replace(beside, work=workload(gpus=8, offload_during_generation=True, **options))
    one, other = (step.generation_memory(step.states()) for step in (beside, alone))
    assert other.total == 4 * 8192 * max(28672, shape.vocab_size)
    shard = 4 * beside.whole_shard
    assert one.total == 4 * shard, "parameters, the frozen copy and the optimizer"
    assert host_of(beside) == 0 and host_of(alone) == 4 * shard
    away = replace(alone, plan=replace(plan, cpu_offload=True))
    assert host_of(away) == 5 * shard, "gradients as well"
