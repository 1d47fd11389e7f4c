"""The estimates behind `nemorl plan`, against real models: their sizes, their shards, the peaks of
their steps and the bytes that they send.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemorl.models import causal_lm
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.memory import (
    Memory,
    Workload,
    adapters,
    generation_memory,
    host_memory,
    saved_per_layer,
    trained_parameters,
    training_memory,
)
from nemorl.parallel.planner.model_shape import SUPPORTED, ModelShape, model_shape
from nemorl.parallel.planner.traffic import step_traffic
from tests.parallel.measured_steps import measure_steps
from tests.ranks import run_ranks
from tests.tiny_models import KINDS

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 4096,
}
SMALL = {**SIZES, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True, "max_position_embeddings": 512,
         "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
LLAMA_70B = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip

ODD = {"model_type": "qwen2", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 8,
       "num_key_value_heads": 8, "vocab_size": 1000}  # fmt: skip
"""Nothing of it divides by 1,024, so that every shard is rounded up."""


def small_folder(folder: Path, kind: str = "llama", **overrides: Any) -> tuple[Path, ModelShape]:
    """A folder with a configuration alone, and its sizes."""
    options = {**SMALL, **({"sliding_window": None} if kind == "mistral" else {}), **overrides}
    folder = folder / "-".join([kind, *map(str, overrides.values())])
    KINDS[kind][0](**options).save_pretrained(folder)
    return folder, model_shape(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": False}, {"attention_bias": True}, {"mlp_bias": True}],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_are_the_models(kind: str, overrides: dict[str, Any], tmp_path: Path):
    folder, shape = small_folder(tmp_path, kind, **overrides)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert shape.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    named = {
        name.removeprefix("model.layers.0."): tuple(p.shape)
        for name, p in model.named_parameters()
        if name.startswith("model.layers.0.")
    }
    assert {matrix.name: matrix.shape for matrix in shape.layer()} == named


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_configuration_does_not_say_is_as_in_transformers(kind: str):
    said = {
        "model_type": kind,
        **SIZES,
        "num_attention_heads": 64,
        **({"sliding_window": None} if kind == "mistral" else {}),
    }
    shape, config = model_shape(said), AutoConfig.for_model(**said)
    for name in ("num_key_value_heads", "tie_word_embeddings"):
        assert getattr(shape, name) == getattr(config, name), name
    assert shape.head_dim == (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def test_the_models_are_those_that_train():
    assert SUPPORTED == causal_lm.SUPPORTED


REFUSED = {
    "another kind": ({"model_type": "mamba"}, "must be one of llama.*'mamba'"),
    "a size that is missing": ({"vocab_size": None}, "must say its vocab_size"),
    "a window": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512},
        "full attention.*512",
    ),
    "a window by default": ({"model_type": "mistral"}, "full attention.*4096"),
    "layers of two types": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "full attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_train_are_refused(name: str):
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        model_shape({"model_type": "llama", **SIZES, **change})


def shards_of_1024(cases: list[tuple[dict[str, Any], ParallelPlan]]) -> list[int]:
    """Bytes of the parameters of rank 0 of 1,024, of models on the meta device."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nemorl.parallel.dtensor.build import on_meta, parameters_by_name, shard
    from nemorl.parallel.dtensor.mesh import World

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    found = []
    for sizes, plan in cases:
        model = on_meta(AutoConfig.for_model(**sizes))
        shard(model, World.of(plan, "cpu"))
        found.append(
            sum(parameter.to_local().nbytes for parameter in parameters_by_name(model).values())
        )
    return found


def test_the_shards_of_a_70_b_model_on_1024_devices():
    plans = [
        ParallelPlan(dp_shard=1024),
        ParallelPlan(dp_replicate=4, dp_shard=8, tp=8, cp=4),
        ParallelPlan(dp_shard=128, tp=8),
    ]
    cases = [(LLAMA_70B, plan) for plan in plans] + [(ODD, plans[-1])]
    (found,) = run_ranks(1, shards_of_1024, cases, process_group=False)
    assert found == [4 * model_shape(sizes).shard_parameters(plan) for sizes, plan in cases]
    assert found[0] == pytest.approx(4 * 70.55e9 / 1024, rel=1e-3)


ALONE = {
    "float32": ("llama", ParallelPlan(), Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128)),
    "full checkpointing": ("llama", ParallelPlan(activation_checkpointing="full"), Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128)),
    "bfloat16": ("qwen2", ParallelPlan(param_dtype="bfloat16"), Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128)),
    "packed": ("qwen3", ParallelPlan(), Workload(rows=2, seq_len=256, logprob_chunk=128)),
    "one micro-batch": ("mistral", ParallelPlan(), Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128, accumulates=False)),
    "short rows": ("llama", ParallelPlan(), Workload(rows=1, seq_len=64, packed=False, logprob_chunk=64)),
    "entropy and reference": ("llama", ParallelPlan(), Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128, entropy_gradient=True,
                                                                 keep_reference=True)),
    "LoRA": ("llama", ParallelPlan(), Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128, lora_rank=8, keep_reference=True)),
    "LoRA, bfloat16, full": ("qwen2", ParallelPlan(param_dtype="bfloat16", activation_checkpointing="full"),
                             Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128, lora_rank=8)),
    "LoRA of some layers, bfloat16": ("llama", ParallelPlan(param_dtype="bfloat16"), Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128,
                                                                                             lora_rank=8, lora_targets=("q_proj", "v_proj"))),
    "LoRA, packed": ("qwen3", ParallelPlan(), Workload(rows=2, seq_len=256, logprob_chunk=128, lora_rank=8)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_the_peak_of_one_process(name: str, tmp_path: Path):
    kind, plan, work = ALONE[name]
    folder, shape = small_folder(tmp_path, kind)
    peak, sent = measure_steps(folder, plan, work, 2 if work.accumulates else 1)
    assert training_memory(shape, plan, work).total == pytest.approx(peak, rel=0.15)
    assert sent == 0 == step_traffic(shape, plan, work).total


def on_ranks(cases: list[tuple[Path, ParallelPlan, Workload, int]]) -> list[tuple[int, int]]:
    return [measure_steps(*case) for case in cases]


WORK = Workload(rows=2, seq_len=256, packed=False, logprob_chunk=128)
LORA = replace(WORK, lora_rank=8)
SPREAD = {
    "FSDP2": ("llama", ParallelPlan(dp_shard=2), WORK),
    "FSDP2, full": ("llama", ParallelPlan(dp_shard=2, activation_checkpointing="full"), WORK),
    "FSDP2, selective, bfloat16": (
        "qwen2",
        ParallelPlan(dp_shard=2, activation_checkpointing="selective", param_dtype="bfloat16"),
        WORK,
    ),
    "FSDP2 of wide layers": (
        "mistral",
        ParallelPlan(dp_shard=2),
        Workload(rows=1, seq_len=64, packed=False, logprob_chunk=64),
    ),
    "HSDP": ("llama", ParallelPlan(dp_replicate=2, dp_shard=1), WORK),
    "TP": ("llama", ParallelPlan(dp_shard=1, tp=2), WORK),
    "TP, full": ("llama", ParallelPlan(dp_shard=1, tp=2, activation_checkpointing="full"), WORK),
    "TP, selective, packed": (
        "qwen3",
        ParallelPlan(dp_shard=1, tp=2, activation_checkpointing="selective"),
        Workload(rows=2, seq_len=256, logprob_chunk=128),
    ),
    "TP without SP": ("llama", ParallelPlan(dp_shard=1, tp=2, sequence_parallel=False), WORK),
    "CP": ("llama", ParallelPlan(dp_shard=1, cp=2), WORK),
    "CP by gathering": ("llama", ParallelPlan(dp_shard=1, cp=2, cp_method="allgather"), WORK),
    "offload": ("llama", ParallelPlan(dp_shard=2, cpu_offload=True), WORK),
    "offload of wide layers": (
        "mistral",
        ParallelPlan(dp_shard=2, cpu_offload=True),
        Workload(rows=1, seq_len=64, packed=False, logprob_chunk=64),
    ),
    "LoRA": ("llama", ParallelPlan(dp_shard=2), LORA),
    "LoRA of wide layers": (
        "mistral",
        ParallelPlan(dp_shard=2),
        Workload(rows=1, seq_len=64, packed=False, logprob_chunk=64, lora_rank=8),
    ),
    "LoRA, selective, bfloat16": (
        "qwen2",
        ParallelPlan(dp_shard=2, activation_checkpointing="selective", param_dtype="bfloat16"),
        LORA,
    ),
    "LoRA, HSDP": ("llama", ParallelPlan(dp_replicate=2, dp_shard=1), LORA),
    "LoRA, CP": ("llama", ParallelPlan(dp_shard=1, cp=2), LORA),
    "LoRA, offload": ("llama", ParallelPlan(dp_shard=2, cpu_offload=True), LORA),
}


RARELY = ["FSDP2, selective, bfloat16", "HSDP", "TP, selective, packed", "TP without SP", "CP by gathering", "offload of wide layers",
          "LoRA of wide layers", "LoRA, HSDP", "LoRA, CP", "LoRA, offload"]  # fmt: skip
USUALLY = [name for name in SPREAD if name not in RARELY]


@pytest.mark.parametrize(
    "names", [USUALLY, pytest.param(RARELY, marks=pytest.mark.slow)], ids=["usual", "rare"]
)
def test_the_peaks_of_two_ranks_and_what_they_send(names: list[str], tmp_path: Path):
    wide = {"hidden_size": 512, "intermediate_size": 1024, "tie_word_embeddings": False}
    options = {
        name: wide if "wide" in name else {"tie_word_embeddings": "packed" not in name}
        for name in names
    }
    folders = {name: small_folder(tmp_path, SPREAD[name][0], **options[name]) for name in names}
    measured = run_ranks(2, on_ranks, [(folders[name][0], *SPREAD[name][1:], 2) for name in names])[
        0
    ]
    for name, (peak, sent) in zip(names, measured, strict=True):
        _, plan, work = SPREAD[name]
        shape = folders[name][1]
        # Here the devices are the CPU's cores: what is kept in main memory counts, too, and is not
        # pinned.
        estimate = training_memory(shape, plan, work).total + host_memory(
            shape, plan, work, pinned=False
        )
        expected = step_traffic(shape, plan, work, micro_batches=2).total
        print(
            f"{name}: memory {estimate / 1e6:.2f} MB, measured {peak / 1e6:.2f}; sent"
            f" {expected / 1e6:.2f} MB, counted {sent / 1e6:.2f}"
        )
        assert estimate == pytest.approx(peak, rel=0.15), name
        assert expected == pytest.approx(sent, rel=0.15), name


def test_what_shards_and_what_does_not():
    shape, work = model_shape(LLAMA_70B), Workload(seq_len=8192)
    one, four = (training_memory(shape, ParallelPlan(dp_shard=degree), work) for degree in (2, 8))
    assert (
        four.optimizer * 4 == one.optimizer
        and four.activations == one.activations
        and four.gathered == one.gathered
    )
    split, whole = (
        saved_per_layer(shape, ParallelPlan(tp=8, sequence_parallel=parallel), work)
        for parallel in (True, False)
    )
    assert split < whole < saved_per_layer(shape, ParallelPlan(dp_shard=2), work)
    offloaded = training_memory(shape, ParallelPlan(dp_shard=8, cpu_offload=True), work)
    assert (
        offloaded.parameters == offloaded.gradients == offloaded.optimizer == 0 < offloaded.gathered
    )


def test_what_offloading_takes_of_main_memory():
    shape, work, plan = (
        model_shape(LLAMA_70B),
        Workload(seq_len=8192),
        ParallelPlan(dp_shard=8, cpu_offload=True),
    )
    assert host_memory(shape, replace(plan, cpu_offload=False), work) == 0
    shard = 4 * shape.shard_parameters(plan)
    assert host_memory(shape, plan, work, pinned=False) == 4 * shard
    assert host_memory(shape, plan, replace(work, keep_reference=True), pinned=False) == 5 * shard
    adapted = host_memory(
        shape, plan, replace(work, lora_rank=16, keep_reference=True), pinned=False
    )
    assert shard < adapted < 1.02 * shard, "the reference is the model without its adapters"
    # A shard of [1024, 8192] numbers is a power of two as it is, one of [3584, 8192] is rounded up
    # from 117 MB to 134.
    pinned = host_memory(shape, plan, work)
    assert 4 * shard < pinned < 6 * shard
    feed_forward = 3 * 80 * 4 * 3584 * 8192
    assert pinned - 4 * shard == pytest.approx(2 * feed_forward * (4096 / 3584 - 1), rel=0.2)


def test_adapters_are_those_that_peft_makes(tmp_path: Path):
    from nemorl.parallel.config import LoRAConfig
    from nemorl.parallel.dtensor.lora import add_adapters

    for kind, targets in (("llama", ()), ("qwen3", ("q_proj", "down_proj"))):
        folder, shape = small_folder(tmp_path, kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        add_adapters(model, LoRAConfig(rank=8, target_modules=targets))
        trained = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        work = Workload(seq_len=8, lora_rank=8, lora_targets=targets)
        assert sum(rows * columns for rows, columns in trained.values()) == trained_parameters(
            shape, ParallelPlan(), work
        )
        first = sorted(shape for name, shape in trained.items() if ".layers.0." in name)
        assert first == sorted(matrix.shape for matrix in adapters(shape, work))


def test_a_generator_takes_weights_and_a_cache():
    shape, plan = model_shape(LLAMA_70B), ParallelPlan(dp_shard=64)
    memory = generation_memory(
        shape, plan, Workload(seq_len=1), tokens=1000, tensor_parallel_size=8
    )
    assert memory.generation == 2 * shape.num_parameters() // 8 + 2 * 80 * 128 * 2 * 1000
    assert memory.optimizer == 8 * shape.shard_parameters(plan) and memory.activations == 0
    assert Memory(parameters=1, generation=2).total == 3


def test_rows_are_padded_to_what_the_plan_can_split():
    work, plan = Workload(rows=2, seq_len=10), ParallelPlan(tp=2, cp=2)
    assert work.width(plan) == 16 and work.tokens(plan) == 2 * 16 // 2
    assert work.tokens(ParallelPlan(tp=2, sequence_parallel=False)) == 20
