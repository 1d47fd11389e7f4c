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
from nemorl.parallel.config import (
    BackendConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)
from nemorl.parallel.dtensor import mesh
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.command import find_plans
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.megatron import Stage
from nemorl.parallel.planner.memory import ENGINE, Step, engine_memory, saved_of
from nemorl.parallel.planner.model_shape import ModelShape, model_shape, read_shape
from nemorl.parallel.planner.sharing import host_of
from nemorl.parallel.planner.traffic import traffic
from nemorl.runtime.cli.api import from_keywords
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.measured_steps import measure_steps
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

    from nemorl.parallel.dtensor.build import on_meta, shard

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    found = []
    for sizes, plan in cases:
        model = on_meta(AutoConfig.for_model(**sizes))
        shard(model, mesh.join(plan, "cpu"))
        found.append(sum(tensor.to_local().nbytes for tensor in live_tensors(model).values()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 80])
def test_the_shards_of_a_70_b_model_on_1024_devices(layers: int):
    plans = [
        Plan(dp_shard=1024),
        Plan(dp_replicate=4, dp_shard=8, tp=8, cp=4),
        Plan(dp_shard=128, tp=8),
    ]
    sizes = LLAMA_70B | {"num_hidden_layers": layers}
    cases = [(sizes, plan) for plan in plans] + [(ODD, plans[-1])]
    cases += [(MOE, plan) for plan in plans[1:]]
    (found,) = run_ranks(1, shards_of_1024, cases, process_group=False)
    assert found == [4 * Step(shape_of(sizes), plan, WORK).whole_shard for sizes, plan in cases]
    if layers == 80:
        assert found[0] == pytest.approx(4 * 70.55e9 / 1024, rel=1e-3)


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
    "short rows": ("mistral", Plan(), SHORT),
    "entropy and reference": (
        "llama",
        Plan(),
        replace(WORK, entropy=True, keep_reference=True),
    ),
    "LoRA": ("llama", Plan(), replace(LORA, keep_reference=True)),
    "LoRA, bfloat16, full": ("qwen2", replace(FULL, param_dtype="bfloat16"), LORA),
    "LoRA of some layers, bfloat16": (
        "llama",
        BFLOAT16,
        replace(LORA, lora=replace(RANK, target_modules=("q_proj", "v_proj"))),
    ),
    "LoRA, packed": ("qwen3", Plan(), replace(PACKED, lora=RANK)),
    "experts": ("mixtral", Plan(), WORK),
    "experts, full": ("qwen3_moe", FULL, WORK),
    "experts, LoRA": ("qwen3_moe", Plan(), LORA),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_peak_of_one_process(name: str, tmp_path: Path):
    kind, plan, work = ALONE[name]
    folder, shape = small_folder(tmp_path, kind)
    peak, sent = measure_steps(folder, plan, work)
    step = Step(shape, plan, work)
    assert step.training_memory().total == pytest.approx(peak, rel=0.15)
    assert sent == 0 == traffic(step)[0]


def on_ranks(cases: list[tuple[Path, ParallelPlan, PlanConfig]]) -> list[tuple[int, int]]:
    return [measure_steps(*case) for case in cases]


SHARDED, TP, CP = Plan(dp_shard=2), Plan(tp=2), Plan(cp=2)
HSDP, OFFLOAD = Plan(dp_replicate=2), replace(SHARDED, cpu_offload=True)
SELECTIVE = {"activation_checkpointing": "selective", "param_dtype": "bfloat16"}
USUAL = {
    "TP, full": ("llama", replace(FULL, tp=2), WORK),
    "CP": ("llama", CP, WORK),
    "offload": ("llama", OFFLOAD, WORK),
    "LoRA, selective, bfloat16": ("qwen2", replace(SHARDED, **SELECTIVE), LORA),
}
RARE = {
    "FSDP2": ("llama", SHARDED, WORK),
    "FSDP2, full": ("llama", replace(FULL, dp_shard=2), WORK),
    "TP": ("llama", TP, WORK),
    "LoRA": ("llama", SHARDED, LORA),
    "FSDP2 of wide layers": ("mistral", SHARDED, SHORT),
    "FSDP2, selective, bfloat16": ("qwen2", replace(SHARDED, **SELECTIVE), WORK),
    "HSDP": ("llama", HSDP, WORK),
    "TP, selective, packed": ("qwen3", replace(TP, activation_checkpointing="selective"), PACKED),
    "TP without SP": ("llama", replace(TP, sequence_parallel=False), WORK),
    "CP by gathering": ("llama", replace(CP, cp_method="allgather"), WORK),
    "offload of wide layers": ("mistral", OFFLOAD, SHORT),
    "LoRA of wide layers": ("mistral", SHARDED, replace(SHORT, lora=RANK)),
    "LoRA, HSDP": ("llama", HSDP, LORA),
    "LoRA, CP": ("llama", CP, LORA),
    "LoRA, TP": ("llama", TP, LORA),
    "LoRA, TP without SP": ("llama", replace(TP, sequence_parallel=False), LORA),
    "LoRA, offload": ("llama", OFFLOAD, LORA),
    "experts, FSDP2": ("qwen3_moe", SHARDED, WORK),
    "experts, TP": ("qwen3_moe", TP, WORK),
    "experts, CP": ("mixtral", CP, WORK),
}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [USUAL, RARE], ids=["usual", "rare"])
def test_the_peaks_of_two_ranks_and_what_they_send(cases: dict[str, Any], tmp_path: Path):
    wide = {"hidden_size": 512, "intermediate_size": 1024, "tie_word_embeddings": False}
    folders = {}
    for name, (kind, *_) in cases.items():
        options = wide if "wide" in name else {"tie_word_embeddings": "packed" not in name}
        folders[name] = small_folder(tmp_path, kind, **options)
    work = [(folders[name][0], plan, work) for name, (_, plan, work) in cases.items()]
    measured = run_ranks(2, on_ranks, work)[0]
    for (name, (_, plan, work)), (peak, sent) in zip(cases.items(), measured, strict=True):
        rows = 2 * work.micro_batch_rows * plan.data_ranks
        step = Step(folders[name][1], plan, replace(work, batch_rows=rows))
        # The devices are the CPU's cores: what is kept in main memory counts, and is not pinned.
        memory = step.training_memory().total + host_of(step)
        assert memory == pytest.approx(peak, rel=0.15), name
        assert traffic(step)[0] == pytest.approx(sent, rel=0.15), name


def on_megatron(work: PlanConfig) -> PlanConfig:
    return replace(work, trainer=replace(work.trainer, backend="megatron"))


MEGATRON = on_megatron(WORK)
PP = Plan(dp_shard=1, pp=2)
STAGES = {
    "PP": ("llama", PP, MEGATRON),
    "PP, untied": ("llama", PP, MEGATRON),
    "PP, bfloat16": ("qwen2", replace(PP, param_dtype="bfloat16"), MEGATRON),
    "VPP": ("llama", replace(PP, vpp=2), MEGATRON),
    "TP": ("llama", replace(TP, dp_shard=1), MEGATRON),
    "DP": ("llama", SHARDED, MEGATRON),
    "EP": ("qwen3_moe", replace(SHARDED, ep=2), MEGATRON),
}
RARE_STAGES = {
    "PP, full": ("llama", replace(PP, activation_checkpointing="full"), MEGATRON),
    "PP, selective": ("qwen3", replace(PP, activation_checkpointing="selective"), MEGATRON),
    "PP, mlp": (
        "qwen3",
        replace(PP, activation_checkpointing="selective", recompute_modules=("mlp",)),
        MEGATRON,
    ),
    "TP, mlp": (
        "llama",
        replace(
            TP,
            dp_shard=1,
            activation_checkpointing="selective",
            recompute_modules=("core_attn", "mlp"),
        ),
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
    "PP of short rows": ("mistral", PP, on_megatron(SHORT)),
    "TP without SP": ("llama", replace(TP, sequence_parallel=False), MEGATRON),
    "CP": ("llama", CP, MEGATRON),
    "CP, mlp": (
        "llama",
        replace(CP, activation_checkpointing="selective", recompute_modules=("mlp",)),
        MEGATRON,
    ),
    "experts, DP": ("mixtral", SHARDED, MEGATRON),
    "experts, TP": ("qwen3_moe", replace(TP, dp_shard=1), MEGATRON),
    "EP, TP": ("mixtral", replace(TP, dp_shard=1, ep=2), MEGATRON),
    "EP, bfloat16, packed": (
        "mixtral",
        replace(SHARDED, ep=2, param_dtype="bfloat16"),
        on_megatron(PACKED),
    ),
    "EP, full": (
        "qwen3_moe",
        replace(SHARDED, ep=2, activation_checkpointing="full"),
        MEGATRON,
    ),
    "experts, PP": ("mixtral", PP, MEGATRON),
    "DP, bfloat16, full": (
        "qwen2",
        replace(SHARDED, param_dtype="bfloat16", activation_checkpointing="full"),
        MEGATRON,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [STAGES, RARE_STAGES], ids=["usual", "rare"])
def test_the_peaks_of_megatrons_stages_and_what_they_send(cases: dict[str, Any], tmp_path: Path):
    folders, work = {}, []
    for name, (kind, plan, task) in cases.items():
        folders[name] = small_folder(tmp_path, kind, tie_word_embeddings="untied" not in name)
        work.append((folders[name][0], plan, task))
    measured = run_ranks(2, on_ranks, work)
    for number, (name, (_, plan, task)) in enumerate(cases.items()):
        rows = 2 * task.micro_batch_rows * plan.data_ranks
        step = Step(folders[name][1], plan, replace(task, batch_rows=rows))
        for rank, found in enumerate(measured):
            stage, (peak, sent) = Stage(step, rank if plan.pp > 1 else 0), found[number]
            where = f"{name}, rank {rank}"
            assert stage.training_memory().total == pytest.approx(peak, rel=0.15), where
            assert traffic(stage)[0] == pytest.approx(sent, rel=0.1), where


def test_what_shards_and_what_does_not():
    shape, work = shape_of(LLAMA_70B), workload(seq_len=8192)
    sharded = (Plan(dp_shard=degree) for degree in (2, 8))
    two, eight = (Step(shape, plan, work).training_memory() for plan in sharded)
    assert eight.optimizer * 4 == two.optimizer
    assert eight.activations == two.activations and eight.gathered == two.gathered
    plans = (Plan(tp=8), Plan(tp=8, sequence_parallel=False), Plan())
    (layer,) = shape.layers
    split, whole, alone = (saved_of(Step(shape, plan, work), layer) for plan in plans)
    assert split < whole < alone
    offloaded = Step(shape, Plan(dp_shard=8, cpu_offload=True), work).training_memory()
    assert offloaded.parameters == offloaded.gradients == offloaded.optimizer == 0
    assert offloaded.gathered > 0


def test_what_a_step_of_8_billion_parameters_sends():
    sizes = zip(NAMES, (4096, 14336, 32, 32, 128256), strict=True)
    shape, sent = shape_of({**LLAMA_70B, **dict(sizes)}), []
    for plan in (Plan(dp_shard=8), Plan(dp_shard=4, tp=2)):
        work = workload(seq_len=8192, batch_rows=plan.data_ranks)
        sent.append(round(traffic(Step(shape, plan, work))[0] / 1e9))
    assert sent == [82, 53]


def moved(cases: list[tuple[Path, ParallelPlan]]) -> list[int]:
    """Bytes that a rank of megatron offloads."""
    found = []
    for folder, plan in cases:
        backend = MegatronBackend()
        backend.setup(
            BackendConfig(
                model=ModelConfig(path=str(folder), from_scratch=True),
                trainer=TrainerConfig(device="cpu"),
                parallel=plan,
                keep_reference=True,
            )
        )
        backend.train_step(random_batch([9, 5, 7, 8]), nll_loss)
        backend.offload()
        found.append(sum(len(copy) for _, copy in backend._away._away.values()))
        backend.shutdown()
    return found


@pytest.mark.slow
def test_what_offloading_takes_of_main_memory_with_megatron(tmp_path: Path):
    work = on_megatron(workload(generation__backend="vllm", offload_during_generation=True))
    work = replace(work, keep_reference=True)
    half = {"param_dtype": "bfloat16"}
    plans = {
        "PP": ("llama", PP),
        "DP, bfloat16": ("llama", replace(SHARDED, **half)),
        "VPP, bfloat16": ("qwen2", replace(PP, vpp=2, **half)),
        "EP, bfloat16": ("qwen3_moe", replace(SHARDED, ep=2, **half)),
    }
    folders = {name: small_folder(tmp_path, kind) for name, (kind, _) in plans.items()}
    cases = [(folders[name][0], plan) for name, (_, plan) in plans.items()]
    found = run_ranks(2, moved, cases)
    for number, (name, (_, plan)) in enumerate(plans.items()):
        size = max(rank[number] for rank in found)
        step = Step(folders[name][1], plan, work)
        assert host_of(step) == pytest.approx(size, rel=0.02), name
        assert host_of(replace(step, work=MEGATRON)) == 0


@pytest.mark.parametrize("kind, targets", [("llama", ()), ("qwen3", ("q_proj", "down_proj"))])
def test_adapters_are_those_that_peft_makes(kind: str, targets: tuple[str, ...], tmp_path: Path):
    from nemorl.parallel.dtensor.lora import add_adapters

    folder, shape = small_folder(tmp_path, kind)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    add_adapters(model, LoRAConfig(rank=8, target_modules=targets))
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    work = workload(seq_len=8, lora__rank=8, target_modules=targets)
    step = Step(shape, Plan(), work)
    numbers = sum(rows * columns for rows, columns in trained.values())
    assert numbers == step.trained() == step.adapter_parameters()
    first = sorted(sizes for name, sizes in trained.items() if ".layers.0." in name)
    assert first == sorted(matrix.shape for matrix in step.adapters(shape.layers[0]))


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("name", ["adamw", "muon", "adamw8bit"])
def test_states_of_optimizers_are_as_large_as_said(name: str, rank: int, tmp_path: Path):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    folder, shape = small_folder(tmp_path, "llama")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    backend = DTensorBackend(model)
    config = BackendConfig(
        trainer=TrainerConfig(device="cpu"),
        optimizer=OptimizerConfig(name=name),
        lora=LoRAConfig(rank=rank),
    )
    backend.setup(config)
    backend.train_step(random_batch([9, 5]), nll_loss)
    states = (x for each in backend.optimizer.state.values() for x in each.values() if x.ndim)
    work = workload(seq_len=8, optimizer=config.optimizer, lora=config.lora)
    planned = Step(shape, Plan(), work).states().optimizer
    assert planned == pytest.approx(sum(each.nbytes for each in states), rel=0.01)


def test_a_generator_takes_weights_and_a_cache():
    shape, plan = shape_of(LLAMA_70B), Plan(dp_shard=64, param_dtype="bfloat16")
    engine = {"generation__backend": "vllm", "tensor_parallel_size": 8}
    ends = shape.vocab_size * shape.hidden_size
    for pp, weights in ((1, shape.num_parameters), (2, (ends + shape.num_parameters) // 2)):
        work = workload(gpus=64, seq_len=1, pipeline_parallel_size=pp, **engine)
        step = Step(shape, plan, work)
        cache = 2 * 80 // pp * 128 * 2 * 1000
        assert engine_memory(step, 1000) == 2 * (weights // 8) + cache + ENGINE
    memory = step.generation_memory(step.states(), generation=7)
    assert memory.generation == 7 and memory.optimizer == 8 * step.whole_shard


def test_a_generator_has_the_device_while_the_model_is_offloaded():
    """But for the largest weight, which is handed over in float32."""
    shape, plan = shape_of(LLAMA_70B), Plan(dp_shard=8)
    options = {"generation__backend": "vllm", "tensor_parallel_size": 8, "keep_reference": True}
    beside = Step(shape, plan, workload(gpus=8, **options))
    alone = replace(beside, work=workload(gpus=8, offload_during_generation=True, **options))
    one, other = (step.generation_memory(step.states()) for step in (beside, alone))
    assert other.total == 4 * 8192 * max(28672, shape.vocab_size)
    shard = 4 * beside.whole_shard
    assert one.total == 4 * shard, "parameters, the frozen copy and the optimizer"
    assert beside.training_memory() == alone.training_memory()
    assert host_of(beside) == 0 and host_of(alone) == 4 * shard
    away = replace(alone, plan=replace(plan, cpu_offload=True))
    assert host_of(away) == 5 * shard, "gradients as well"


def test_ranks_that_share_a_key_value_head_have_all_of_it():
    shape = shape_of(LLAMA_70B | {"num_key_value_heads": 4})
    work = on_megatron(workload(gpus=16, seq_len=8192))
    step = Step(shape, Plan(tp=8, cp=2), work)
    (q, kv, _), head = step.heads_width, shape.head_dim
    assert (q, kv) == (8 * head, head)
    assert step.kept_keys() == q, "repeated for each of cp"
    gathers = replace(step, plan=replace(step.plan, cp_method="allgather"))
    assert gathers.kept_keys() == 2 * kv


def test_rows_are_padded_to_what_the_plan_can_split():
    work = workload(train_micro_batch_size=2, seq_len=10)
    step = Step(shape_of(LLAMA_70B), Plan(tp=2, cp=2), work)
    assert step.width == 16 and step.tokens == 2 * 16 // 2
    assert replace(step, plan=Plan(tp=2, sequence_parallel=False)).tokens == 20
