"""Every key of NeMo RL's configurations is carried over, reported, or known not to matter."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemorl.runtime.cli import main as cli
from nemorl.runtime.config.tree import from_dict, leaves, load_config
from nemorl.runtime.config.yaml_io import dump, read
from nemorl.runtime.start.registry import ALGORITHMS
from nemorl.runtime.store.directory import read_lines
from tests.tiny_models import tiny_model, tiny_tokenizer
from tools import from_nemo_rl
from tools.from_nemo_rl import RENAMED, UNBOUNDED, as_yaml, flatten, translate

FILES = Path(__file__).parent / "nemo_rl"


def flat_settings(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of a file as dotted keys, after our own config has accepted them; the notes."""
    algorithm, settings, notes = translate(file)
    from_dict(ALGORITHMS[algorithm].config, settings)
    return dict(flatten(settings)), notes


def test_grpo():
    settings, notes = flat_settings(FILES / "grpo.yaml")
    assert settings.pop("model.chat_template").startswith("{% for")
    assert settings.pop("optimizer.min_lr_ratio") == pytest.approx(0.1)
    assert settings == {
        "num_prompts_per_step": 16,
        "num_generations_per_prompt": 8,
        "max_num_steps": 500,
        "train_global_batch_size": 64,
        "advantage.name": "group",
        "advantage.baseline": "leave_one_out",
        "advantage.scale": "leave_one_out_std",
        "loss.name": "clipped",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "loss.dual_clip": 3.0,
        "kl.coef": 0.02,
        "kl.estimator": "k3",
        "kl.gradient": "score",
        "reduction": "token_mean",
        "reward": "math",
        "off_policy.mode": "truncate",
        "off_policy.max": 4.0,
        "dynamic_sampling": True,
        "max_sampling_rounds": 6,
        "overlong.buffer": 0.25,
        "overlong.penalty": 0.5,
        "overlong.filter": True,
        "model.path": "Qwen/Qwen2.5-0.5B",
        "model.chat_template_kwargs": {"enable_thinking": False},
        "trainer.sequence_packing": True,
        "trainer.micro_batch_tokens": 1024,
        "parallel.param_dtype": "bfloat16",
        "parallel.activation_checkpointing": "full",
        "parallel.cpu_offload": False,
        "parallel.dp_shard": 4,
        "parallel.tp": 2,
        "parallel.sequence_parallel": False,
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.dropout": 0.05,
        "optimizer.lr": 2e-6,
        "optimizer.weight_decay": 0.05,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.98,
        "optimizer.eps": 1e-7,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 60,  # 30 rollout batches of two updates each
        "optimizer.max_grad_norm": 0.5,
        "generation.backend": "vllm",
        "generation.num_replicas": 8,
        "generation.max_new_tokens": 256,
        "generation.temperature": 0.9,
        "generation.top_p": 0.95,
        "generation.engine.gpu_memory_utilization": 0.6,
        "generation.stop_strings": ["</answer>"],
        "data.train": "questions.jsonl",
        "data.validation": "held_out.jsonl",
        "data.prompt_column": "question",
        "data.answer_column": "solution",
        "data.chat": True,
        "data.max_total_sequence_length": 512,
        "data.too_long": "drop",
        "data.shuffle": True,
        "run.dir": "results/mine",
        "run.seed": 7,
        "run.val_period": 20,
        "run.val_at_start": True,
        "run.max_val_samples": 64,
        "run.save_period": 25,
        "run.keep_checkpoints": 3,
        "run.metric": "val_accuracy",
        "run.higher_is_better": True,
        "run.loggers": ["tensorboard", "wandb"],
        "run.project": "mine",
    }
    assert notes == {
        "policy.max_total_sequence_length": "prompts over 256 tokens are left out, not answered"
        " more briefly",
        "policy.scheduler": "the warm-up starts at 1/60 of the rate instead of 0.1 of it",
        "made_up.key": "3: no counterpart here",
    }


def test_sft():
    settings, notes = flat_settings(FILES / "sft.yaml")
    assert settings == {
        "num_epochs": 2,
        "max_num_steps": 60,
        "train_global_batch_size": 32,
        "model.path": "meta-llama/Llama-3.2-1B",
        "model.tokenizer": "other/tokenizer",
        "trainer.train_micro_batch_size": 1,
        "trainer.sequence_packing": False,
        "parallel.param_dtype": "bfloat16",
        "parallel.tp": 1,
        "parallel.dp_shard": 16,
        # torch's defaults, where theirs leaves them out
        "optimizer.lr": 5e-6,
        "optimizer.weight_decay": 0.01,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.max_grad_norm": None,
        "data.train": "nvidia/OpenMathInstruct-2",
        "data.split": "train_1M",
        "data.held_out": 0.05,
        "data.prompt_column": "problem",
        "data.response_column": "generated_solution",
        "data.chat": True,
        "data.max_total_sequence_length": 512,
        "data.too_long": "drop",
        "data.shuffle": True,
        "run.dir": "results/sft",
        "run.seed": 3,
        "run.val_period": 10,
        "run.val_at_start": True,
        "run.max_val_samples": 128,
        "run.save_period": 0,
        "run.keep_checkpoints": 2,
        "run.metric": "val_loss",
        "run.higher_is_better": False,
        "run.loggers": ["tensorboard"],
    }
    assert notes == {}


def test_dpo():
    settings, notes = flat_settings(FILES / "dpo.yaml")
    assert notes == {}
    assert (
        settings.items()
        >= {
            "loss.beta": 0.05,
            "loss.average_logprobs": True,
            "sft_coef": 0.1,
            "sft_reduction": "sequence_mean",
            "train_global_batch_size": 128,
            "data.prompt_column": "context",
            "data.chosen_column": "good",
            "data.rejected_column": "bad",
            "data.chat": True,
        }.items()
    )


def test_a_recipe_builds_on_its_defaults():
    settings, _ = flat_settings(FILES / "recipe.yaml")
    assert (
        settings.items()
        >= {
            "num_generations_per_prompt": 4,
            "num_prompts_per_step": 16,
            "loss.name": "gspo",
            "loss.clip_high": 0.28,
            "reduction": "sequence_mean",
        }.items()
    )


MEGATRON: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    # grpo-llama3.2-1b-instruct-1n8g-megatron
    "alone on eight GPUs": (
        {
            "grpo.num_prompts_per_step": 32,
            "grpo.num_generations_per_prompt": 16,
            "policy.train_global_batch_size": 512,
            "policy.megatron_cfg.optimizer.min_lr": 5e-7,
            "policy.megatron_cfg.scheduler.lr_warmup_iters": 50,
            "policy.megatron_cfg.scheduler.lr_warmup_init": 5e-7,
            "policy.megatron_cfg.freeze_moe_router": True,  # of a model that has none
            "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32": False,
            "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce": True,
            "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather": True,
        },
        {
            "parallel.dp_shard": 8,
            "parallel.reduce_dtype": "bfloat16",
            "parallel.overlap_grad_reduce": True,
            "parallel.overlap_param_gather": True,
            "optimizer.lr": 5e-6,
            "optimizer.beta2": 0.999,
            "optimizer.warmup_steps": 50,
            "optimizer.max_grad_norm": 1.0,
        },
        {
            "policy.megatron_cfg.scheduler": "the warm-up starts at 1/50 of the rate instead of at"
            " 5e-07"
        },
    ),
    # grpo-qwen3-30ba3b-8n8g-megatron
    "experts": (
        {
            "policy.model_name": "Qwen/Qwen3-30B-A3B",
            "cluster.num_nodes": 8,
            "policy.megatron_cfg.tensor_model_parallel_size": 4,
            "policy.megatron_cfg.pipeline_model_parallel_size": 4,
            "policy.megatron_cfg.expert_model_parallel_size": 4,
            "policy.megatron_cfg.sequence_parallel": True,
            "policy.megatron_cfg.freeze_moe_router": True,
            "policy.megatron_cfg.env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "some"},
            "policy.megatron_cfg.optimizer.lr": 3e-7,
        },
        {
            **{"parallel.tp": 4, "parallel.pp": 4, "parallel.ep": 4, "parallel.dp_shard": 4},
            "parallel.sequence_parallel": True,
            "optimizer.lr": 3e-7,
        },
        {"policy.megatron_cfg.freeze_moe_router": "True: routers are trained, too"},
    ),
    # grpo-moonlight-16ba3b-4n8g-megatron
    "stages of unequal length": (
        {
            "policy.megatron_cfg.pipeline_model_parallel_size": 4,
            "policy.megatron_cfg.virtual_pipeline_model_parallel_size": 2,
            "policy.megatron_cfg.num_layers_in_first_pipeline_stage": 6,
            "policy.megatron_cfg.pipeline_model_parallel_layout": "Ett|(tt|)*2L",
            "policy.megatron_cfg.moe_token_dispatcher_type": "flex",
            "policy.megatron_cfg.expert_model_parallel_size": 2,
            "policy.megatron_cfg.moe_router_load_balancing_type": "aux_loss",
            "policy.megatron_cfg.activation_checkpointing": True,
        },
        {
            **{"parallel.pp": 4, "parallel.vpp": 2, "parallel.dp_shard": 2},
            "parallel.num_layers_in_first_pipeline_stage": 6,
            "parallel.activation_checkpointing": "full",
        },
        {
            "policy.megatron_cfg.pipeline_model_parallel_layout": "'Ett|(tt|)*2L': stages are as",
            "policy.megatron_cfg.moe_router_load_balancing_type": "'aux_loss': experts are",
        },
    ),
    # dpo-llama3.1-8b-instruct-4n8g-megatron: a decay to the rate itself is none
    "a rate that stays": (
        {
            "policy.megatron_cfg.tensor_model_parallel_size": 2,
            "policy.megatron_cfg.sequence_parallel": False,
            "policy.megatron_cfg.optimizer.min_lr": 5e-6,
            "policy.megatron_cfg.scheduler.lr_decay_style": "linear",
            "policy.megatron_cfg.scheduler.lr_decay_iters": 1_000_000_000,
        },
        {"parallel.tp": 2, "parallel.sequence_parallel": False, "parallel.dp_shard": 4},
        {},
    ),
    "a rate that falls": (
        {
            "policy.megatron_cfg.optimizer.min_lr": 1.25e-6,
            "policy.megatron_cfg.scheduler.lr_decay_style": "cosine",
            "policy.megatron_cfg.scheduler.lr_decay_iters": 500,
            "policy.megatron_cfg.context_parallel_size": 2,
        },
        {
            "optimizer.schedule": "cosine",
            "optimizer.min_lr_ratio": 0.25,
            "parallel.cp": 2,
            "parallel.dp_shard": 4,
        },
        {},
    ),
    # sft-llama3.1-8b-1n8g-megatron keeps the sections of the other backend, which count for nothing
    "what is dtensor's": (
        {
            "policy.max_grad_norm": 0.5,
            "policy.dtensor_cfg.tensor_parallel_size": 8,
            "policy.dtensor_cfg.sequence_parallel": True,
            "policy.optimizer.name": "torch.optim.SGD",
            "policy.scheduler.name": "StepLR",
        },
        {"parallel.dp_shard": 8, "optimizer.lr": 5e-6, "optimizer.max_grad_norm": 1.0},
        {},
    ),
}
"""What a recipe says besides `of_megatron`, by dotted key; settings; how notes begin."""


def of_megatron(recipe: dict[str, Any]) -> dict[str, Any]:
    """A file with the sections that recipes have."""
    scheduler = {"lr_decay_style": "constant", "lr_warmup_iters": 0}
    decay = "${policy.megatron_cfg.optimizer.weight_decay}"
    flat = {
        "grpo.max_num_steps": 500,
        "policy.model_name": "some/model",
        "policy.precision": "bfloat16",
        "policy.megatron_cfg.enabled": True,
        "policy.megatron_cfg.pipeline_dtype": "${policy.precision}",
        "policy.megatron_cfg.apply_rope_fusion": True,
        "policy.megatron_cfg.moe_router_dtype": "fp64",
        "policy.megatron_cfg.optimizer": {"optimizer": "adam", "lr": 5e-6, "weight_decay": 0.1}
        | {"bf16": True, "params_dtype": "float32", "clip_grad": 1.0, "sgd_momentum": 0.9},
        "policy.megatron_cfg.scheduler": {**scheduler, "end_weight_decay": decay},
        "policy.megatron_cfg.fp8_cfg": {"enabled": False, "fp8": "e4m3"},
        "policy.megatron_cfg.peft": {"enabled": False, "dim": 8},
        "cluster.gpus_per_node": 8,
        "data.train.data_path": "rows.jsonl",
        **recipe,
    }
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = value
    return tree


@pytest.mark.parametrize("name", MEGATRON)
def test_recipes_for_megatron(name: str, tmp_path: Path):
    recipe, expected, notes = MEGATRON[name]
    (tmp_path / "theirs.yaml").write_text(json.dumps(of_megatron(recipe)))
    settings, found = flat_settings(tmp_path / "theirs.yaml")
    usual = {"parallel.param_dtype": "bfloat16", "optimizer.weight_decay": 0.1}
    expected = {"trainer.backend": "megatron", **usual, **expected}
    assert settings.items() >= expected.items()
    of_plan = {key for key in settings if key.startswith("parallel.")}
    assert of_plan <= expected.keys() | {"parallel.ep"}
    assert ("optimizer.schedule" in settings) == ("optimizer.schedule" in expected)
    assert found.keys() == notes.keys()
    assert all(found[key].startswith(text) for key, text in notes.items())


EIGHT = "gpus_per_node: 8"


@pytest.mark.parametrize(
    ("dtensor", "cluster", "more", "expected", "note"),
    [
        (
            "tensor_parallel_size: 2, context_parallel_size: 4, sequence_parallel: true",
            "gpus_per_node: 8, num_nodes: 4",
            "",
            {"dp_shard": 4, "tp": 2, "cp": 4, "sequence_parallel": True},
            None,
        ),
        ("activation_checkpointing: false", "gpus_per_node: 1, num_nodes: 1", "", {}, None),
        (
            "tensor_parallel_size: 3",
            EIGHT,
            "",
            {"tp": 3},
            "8: tensor · context parallelism of 3 does not divide the 8 that train",
        ),
        (
            "tensor_parallel_size: 2",
            EIGHT,
            ", generation: {colocated: {enabled: false, resources: {gpus_per_node: 2}}}",
            {"tp": 2, "dp_shard": 3},
            None,
        ),
    ],
)
def test_devices(
    dtensor: str, cluster: str, more: str, expected: dict, note: str | None, tmp_path: Path
):
    file = tmp_path / "theirs.yaml"
    policy = f"{{dtensor_cfg: {{enabled: true, {dtensor}}}{more}}}"
    file.write_text(f"sft: {{}}\npolicy: {policy}\ncluster: {{{cluster}}}\n")
    _, settings, notes = translate(file)
    assert settings.get("parallel", {}) == expected
    assert notes.get("cluster.gpus_per_node") == note
    assert not any(key.startswith("policy.dtensor_cfg") for key in notes)


def of(text: str, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings and notes of a file, without those that each of these files has."""
    (folder / "theirs.yaml").write_text(text)
    settings, notes = flat_settings(folder / "theirs.yaml")
    for key in ("model.path", "data.train"):
        notes.pop(key, None)
    return settings, notes


def test_values_that_are_off_default_or_neutral_make_no_note(tmp_path: Path):
    theirs = """
    grpo:
      max_num_epochs: 1
      max_rollout_turns: 1
      batch_multiplier: 1.5
      val_batch_size: 256
      val_period: -1
      seq_logprob_error_threshold: null
      adv_estimator: {name: grpo, normalize_rewards: true}
      reward_shaping: {enabled: false, stop_properly_penalty_coef: 0.5, mode: reasoning_length}
      reward_scaling: {enabled: true, target_max: 1.0}
      async_grpo: {enabled: false, in_flight_weight_updates: true}
    loss_fn:
      kl_input_clamp_value: 20.0
      kl_output_clamp_value: 10.0
      force_on_policy_ratio: true
      use_kl_in_reward: false
      use_importance_sampling_correction: false
      truncated_importance_sampling_type: new
    policy:
      precision: bfloat16
      generation:
        backend: vllm
        stop_strings: null
        vllm_kwargs: {}
        mcore_generation_config: {max_tokens: 16384}
        vllm_cfg: {async_engine: true, precision: bfloat16, kv_cache_dtype: auto}
      megatron_cfg: {enabled: false, tensor_model_parallel_size: 2, fp8_cfg: {enabled: true}}
      dtensor_cfg: {lora_cfg: {enabled: false, exclude_modules: [lm_head]}}
      new_feature: {enabled: false, path: some, sizes: [1]}
      another: {path: "", sizes: [], more: null, on: false}
    env:
      math: {num_workers: 8, math_verify_impl: hf_math_verify}
      other: {enabled: false, port: 1}
    data: {default: {env_name: math, processor: math_hf_data_processor}}
    checkpointing: {metric_name: null, keep_top_k: 3, model_save_format: null}
    """
    assert of(theirs, tmp_path)[1] == {}


@pytest.mark.parametrize(
    ("theirs", "key", "note"),
    [
        (
            "grpo: {seq_logprob_error_threshold: 2.0}",
            "grpo.seq_logprob_error_threshold",
            "2.0: .*gap.stop",
        ),
        ("loss_fn: {kl_output_clamp_value: 5}", "loss_fn.kl_output_clamp_value", "5: .*±10"),
        (
            "grpo: {reward_shaping: {enabled: true, stop_properly_penalty_coef: 0.0}}",
            "grpo.reward_shaping.enabled",
            "not multiplied by 0.0",
        ),
        ("policy: {new_feature: {enabled: true}}", "policy.new_feature.enabled", "no counterpart"),
        (
            "policy: {dtensor_cfg: {lora_cfg: {enabled: true, exclude_modules: [lm_head]}}}",
            "policy.dtensor_cfg.lora_cfg.exclude_modules",
            "lora.target_modules",
        ),
        ("grpo: {max_num_steps: 1000000}", "grpo.max_num_steps", "no limit: .* last epoch"),
        ("policy: {generation: {backend: sglang}}", "policy.generation.backend", "vLLM samples"),
        (
            "policy: {precision: bfloat16, generation: {vllm_cfg: {precision: fp8}}}",
            "policy.generation.vllm_cfg.precision",
            "'fp8': the engine computes in policy.precision",
        ),
        (
            "env: {math: {math_verify_impl: dapo_math_verify}}",
            "env.math.math_verify_impl",
            "as by math-verify",
        ),
        (
            "data: {train: {prompt_file: cot.txt}}",
            "data.prompt_file",
            "'cot.txt': no such file .* data.prompt_template",
        ),
        ("data: {train: {tool_key: tools}}", "data.train.tool_key", "no counterpart"),
        ("data: {system_key: system}", "data.system_key", "no counterpart"),
        (
            "data: {train: {data_path: a}, validation: {data_path: b, repeat: 16}}",
            "data.validation.repeat",
            "once, greedily",
        ),
    ],
)
def test_values_that_change_training_make_a_note(theirs: str, key: str, note: str, tmp_path: Path):
    if not theirs.startswith("grpo"):
        theirs += "\ngrpo: {}"
    assert re.search(note, of(theirs, tmp_path)[1][key])


@pytest.mark.parametrize(
    ("theirs", "blocker"),
    [
        ("grpo: {async_grpo: {enabled: true}}", r"grpo.async_grpo.enabled True: .*async.max_stal"),
        ("grpo: {adv_estimator: {name: gdpo}}", "adv_estimator.name 'gdpo': .*reinforce_plus_plus"),
        ("grpo: {max_rollout_turns: 5}\nenv: {sudoku: {}}", "max_rollout_turns 5: .*several turns"),
        ("grpo: {}\nenv: {reward_model: {enabled: true}}", "env.reward_model .*write it as one"),
        ("grpo: {}\nloss_fn: {use_importance_sampling_correction: true,"
         " truncated_importance_sampling_type: new}", "corrections are tis, icepop, seq-mask-tis"),
        ("sft: {}\npolicy: {megatron_cfg: {enabled: true}, dtensor_cfg: {enabled: true}}",
         "megatron_cfg.enabled True: dtensor_cfg is enabled, too"),
        ("sft: {}\npolicy: {megatron_cfg: {enabled: true, peft: {enabled: true, dim: 8}}}",
         "peft.enabled True: adapters are trained by dtensor_cfg"),
        ("sft: {}\npolicy: {megatron_cfg: {enabled: true, optimizer: {optimizer: sgd}}}",
         "'sgd': the optimizer is AdamW"),
        ("sft: {}\npolicy: {megatron_cfg: {enabled: true, optimizer: {fp16: true}}}",
         "fp16 True: precision is float32 or bfloat16"),
        ("sft: {}\npolicy: {megatron_cfg: {enabled: true, scheduler: {lr_decay_style: WSD}}}",
         "constant, linear and cosine"),
        ("sft: {}\npolicy: {precision: float16}", "policy.precision 'float16': .*bfloat16"),
        ("sft: {}\npolicy: {optimizer: {name: torch.optim.SGD}}", "'torch.optim.SGD': .*AdamW"),
        ("sft: {}\npolicy: {scheduler: {name: StepLR}}", "constant, linear and cosine"),
        ("sft: {}\npolicy: {hf_config_overrides: {a: 1}}", "change that in a copy of the model"),
        ("sft: {max_num_steps: soon}", "sft.max_num_steps, or a key beside it, .*but it is 'soon'"),
        ("sft: {}\ndata: [1]", "data, or a key beside it, must be as in NeMo RL's"),
        ("sft: {}\npolicy: {optimizer: {name: AdamW, kwargs: {lr: -1}}}", "optimizer.lr must be"),
        (
            "grpo: {num_prompts_per_step: 3, num_generations_per_prompt: 3}\n"
            "policy: {train_global_batch_size: 2}",
            "train_global_batch_size must divide",
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_trained_here_is_refused(theirs: str, blocker: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"theirs.yaml.*{blocker}"):
        of(theirs, tmp_path)


@pytest.mark.parametrize(
    ("total", "longest_prompt", "response", "ours", "note"),
    [
        (512, 128, 384, (512, 384), None),
        (512, 128, 256, (384, 256), None),
        (512, 512, 256, (512, 256), "prompts over 256 tokens are left out"),
        (512, 512, 512, (1024, 512), "responses may have 512 tokens also after a long prompt"),
        (512, 128, 1024, (640, 512), "responses may have 512 tokens"),
    ],
)
def test_lengths(
    total: int, longest_prompt: int, response: int, ours: tuple, note: str | None, tmp_path: Path
):
    """A prompt has what max_new_tokens leaves of the total: theirs may overlap, ours add up."""
    policy = f"max_total_sequence_length: {total}, generation: {{max_new_tokens: {response}}}"
    theirs = f"grpo: {{}}\npolicy: {{{policy}}}\ndata: {{max_input_seq_length: {longest_prompt}}}"
    settings, notes = of(theirs, tmp_path)
    keys = ("data.max_total_sequence_length", "generation.max_new_tokens")
    assert tuple(settings[key] for key in keys) == ours
    assert notes.get("policy.max_total_sequence_length", "").startswith(note or "")
    assert bool(notes) == bool(note)


@pytest.mark.parametrize(
    ("data", "expected", "keys"),
    [
        (
            "{train: {dataset_name: DeepScaler}, validation: {dataset_name: AIME2024}}",
            {
                "train": "agentica-org/DeepScaleR-Preview-Dataset",
                "split": "train",
                "validation": "HuggingFaceH4/aime_2024",
                "validation_split": "train",
                "prompt_column": "problem",
                "answer_column": "answer",
            },
            set(),
        ),
        (
            "{train: [{data_path: a.jsonl}, {data_path: org/b, split: all, subset: s}],"
            " default: {input_key: q, output_key: a}}",
            {
                "train": ["a.jsonl", "org/b:s"],
                "split": "all",
                "prompt_column": "q",
                "answer_column": "a",
            },
            set(),
        ),
        (
            "{train_data_path: a.jsonl, val_data_path: b.jsonl, train_split: train}",
            {
                "train": "a.jsonl",
                "validation": "b.jsonl",
                "prompt_column": "input",
                "answer_column": "output",
            },
            set(),
        ),
        (
            "{dataset_name: openai_format, train_data_path: a.jsonl, chat_key: turns,"
            " val_data_paths: {one: b.jsonl, two: c.jsonl}}",
            {
                "train": "a.jsonl",
                "validation": ["b.jsonl", "c.jsonl"],
                "messages_column": "turns",
            },
            set(),
        ),
        (
            "{dataset_name: OpenMathInstruct-2}",
            {
                "train": "nvidia/OpenMathInstruct-2",
                "split": "train_1M",
                "held_out": 0.05,
                "prompt_column": "problem",
                "answer_column": "expected_answer",
            },
            set(),
        ),
        ("{dataset_name: squad}", {}, {"data.train", "data.validation"}),
        (
            "{train: {data_path: a.jsonl, input_key: q}, validation: {data_path: b.jsonl,"
            " input_key: p}}",
            {
                "train": "a.jsonl",
                "validation": "b.jsonl",
                "prompt_column": "q",
                "answer_column": "output",
            },
            {"data.validation.columns"},
        ),
    ],
)
def test_data_sets(data: str, expected: dict, keys: set, tmp_path: Path):
    (tmp_path / "theirs.yaml").write_text(f"grpo: {{}}\npolicy: {{model_name: m}}\ndata: {data}\n")
    _, settings, notes = translate(tmp_path / "theirs.yaml")
    if "prompt_column" in expected:
        expected = expected | {"chat": True}
    assert settings.get("data", {}) == expected
    assert set(notes) == keys


@pytest.mark.parametrize(
    ("data", "ours", "note"),
    [
        ("{train: {data_path: a, system_prompt_file: kind.txt}, default:"
         " {prompt_file: examples/cot.txt}}",
         {"prompt_template": "In {{}}: {prompt}!", "system_prompt": "Be kind.", "chat": True}, ""),
        ("{dataset_name: openai_format, train_data_path: a, prompt_file: examples/cot.txt,"
         " system_prompt_file: kind.txt}", {"system_prompt": "Be kind."}, "prompts that are text"),
        ("{train: {data_path: a, prompt_file: kind.txt}}", {"chat": True}, "must name the column"),
        ("{train: {data_path: a, prompt_file: examples/cot.txt}, validation: {data_path: b}}",
         {"prompt_template": "In {{}}: {prompt}!", "chat": True}, "all sets have its text"),
    ],
)  # fmt: skip
def test_prompt_files(data: str, ours: dict, note: str, tmp_path: Path):
    folder = tmp_path / "examples" / "configs"
    folder.mkdir(parents=True)
    (tmp_path / "examples" / "cot.txt").write_text("In {{}}: {}!")
    (folder / "kind.txt").write_text("Be kind.")
    settings, notes = of(f"grpo: {{}}\ndata: {data}", folder)
    keys = ("prompt_template", "system_prompt", "chat")
    found = {key: settings.get(f"data.{key}") for key in keys}
    assert found == dict.fromkeys(keys) | ours
    assert bool(notes) == bool(note)
    assert not note or note in notes["data.prompt_file"]


def test_a_file_without_data_asks_for_them(tmp_path: Path):
    policy = (
        "sequence_packing: {enabled: true, train_mb_tokens: 256}, max_total_sequence_length: 64"
    )
    (tmp_path / "theirs.yaml").write_text(f"sft: {{}}\npolicy: {{{policy}}}\n")
    _, settings, notes = translate(tmp_path / "theirs.yaml")
    assert notes == dict.fromkeys(("model.path", "data.train"), "not given: name it")
    assert settings["trainer"] == {"sequence_packing": True, "micro_batch_tokens": 256}
    command = as_yaml(tmp_path / "theirs.yaml").splitlines()[0]
    assert command == "# nemorl sft --config THIS_FILE --model.path MODEL --data.train ROWS"


def test_reinforce_plus_plus_and_scaled_rewards(tmp_path: Path):
    theirs = """
    grpo: {adv_estimator: {name: reinforce_plus_plus, minus_baseline: true},
           reward_scaling: {enabled: true, target_min: -1.0}}
    loss_fn: {reference_policy_kl_penalty: 0.1, use_kl_in_reward: true,
              use_importance_sampling_correction: true}
    """
    settings, notes = of(theirs, tmp_path)
    assert notes == {} and settings == {
        "advantage.name": "reinforce_plus_plus",
        "advantage.group_baseline": True,
        "advantage.ddof": 0,
        "advantage.kl_coef": 0.1,
        "reward_weights": [2.0],
        "off_policy.mode": "truncate",
        "off_policy.max": UNBOUNDED,
    }


@pytest.mark.parametrize("name", ["/etc/hostname", "../../secret.txt", "link.txt", "secret.txt"])
def test_only_files_of_the_recipe_are_read(name: str, tmp_path: Path):
    folder = tmp_path / "examples" / "configs"
    folder.mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("the secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    settings, notes = of(
        f"grpo: {{}}\ndata: {{train: {{data_path: a, prompt_file: {name}}}}}", folder
    )
    assert "data.prompt_template" not in settings
    assert "no such file in the recipe's folder" in notes["data.prompt_file"]


def test_a_key_with_a_line_break_stays_a_comment(tmp_path: Path):
    keys = {"a\nloss: ./evil.py:f": 1, "b\x85c\u2028d\r": 2}
    (tmp_path / "theirs.yaml").write_text(json.dumps({"sft": {}, "odd": keys}))
    text = as_yaml(tmp_path / "theirs.yaml")
    assert yaml.safe_load(text) is None
    assert len(text.splitlines()) == 8


ATTACKS = {
    "references": (
        "sft: {}\n"
        + "a0: xxxxxxxxx\n"
        + "".join(f"a{i}: '{f'${{a{i - 1}}}' * 9}'\n" for i in range(1, 10)),
        "must expand to at most 100000 values",
    ),
    "references in lists": (
        "sft: {}\na0: [x]\n"
        + "".join(f"a{i}: {json.dumps([f'${{a{i - 1}}}'] * 9)}\n" for i in range(1, 10)),
        "must expand to at most 100000 values",
    ),
    "a long way": (
        "sft: {}\na0: x\n" + "".join(f"a{i}: '${{a{i - 1}}}'\n" for i in range(1, 90)),
        "through more than 50 references",
    ),
    "a list of references to itself": ("sft: {}\na: ['${a}']", "refers to itself"),
    "a list in a text": ("sft: {}\na: [1]\nb: 'x${a}'", "no single value"),
    "division by zero": ("sft: {seed: '${div:1,0}'}", "ZeroDivisionError"),
    "a number of a section": ("sft: {seed: '${mul:${a},2}'}\na: {b: 1}", "no single value"),
    "three numbers": ("sft: {seed: '${mul:1,2,3}'}", "two numbers"),
    "no numbers": ("sft: {seed: '${mul:a,b}'}", "could not convert"),
    "defaults: a number": ("sft: {}\ndefaults: 5", "must be a file or a list of files"),
    "defaults: a mapping": ("sft: {}\ndefaults: [{a: b}]", "must be a file or a list of files"),
    "defaults: a folder": ("sft: {}\ndefaults: .", "Is a directory"),
    "an environment": ("grpo: {}\nenv: {should_use_nemo_gym: true}", "env.should_use_nemo_gym"),
    "environments": ("grpo: {}\nenv: [math]", "must be"),
    "asynchrony": (
        "grpo: {}\nasync_rl: {sampler: {name: in_order}}",
        "async_rl remove it, and add async.max_staleness",
    ),
    "a critic": ("grpo: {}\nvalue: {model_name: m}", "value nemorl grpo has no critic"),
    "penalties": (
        "grpo: {}\nreward_penalties: {penalize_empty_final_answer: true}",
        "reward_penalties write penalties",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name: str, tmp_path: Path):
    text, reason = ATTACKS[name]
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(reason)):
        as_yaml(tmp_path / "theirs.yaml")


def test_sections_that_are_off_are_no_hindrance(tmp_path: Path):
    off = "token_capture: {enabled: false}\nreward_penalties: {a: false}\nasync_rl: null\n"
    assert of(f"grpo: {{}}\n{off}", tmp_path) == of("grpo: {}", tmp_path)


def test_defaults_end(tmp_path: Path):
    (tmp_path / "f0").write_text("sft: {}\n")
    for i in range(1, 15):
        (tmp_path / f"f{i}").write_text(f"defaults: [f{i - 1}, f{i - 1}, f{i - 1}]\n")
    with pytest.raises(ValueError, match="must lead to at most 100 files"):
        translate(tmp_path / "f14")


def test_importance_weighted_kl_is_noted(tmp_path: Path):
    theirs = (
        "grpo: {}\nloss_fn: {reference_policy_kl_penalty: 0.1, use_on_policy_kl_approximation: "
    )
    assert "kl.gradient" not in str(of(f"{theirs}false}}", tmp_path)[1])
    settings, notes = of(f"{theirs}true}}", tmp_path)
    assert settings["kl.gradient"] == "importance"
    assert any("gradient differs from NeMo RL's" in note for note in notes.values())


def theirs_in_full() -> dict[str, Any]:
    texts = [(FILES / name).read_text() for name in ("grpo.yaml", "sft.yaml", "dpo.yaml")]
    flat = {}
    for text in texts:
        flat |= dict(flatten(yaml.safe_load(text)))
    return flat


ODD = st.sampled_from(
    [None, True, 0, -1, 1e308, 10**30, "", "a\nb: c", "${a}", "${div:1,0}", [], [1]]
)
ODD |= st.sampled_from(
    [{}, {"a": None}, [{"name": 1}], ".nan", float("inf"), "~", "\u2028", [[{}]]]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.sampled_from(["grpo", "sft", "dpo"]),
    st.dictionaries(st.sampled_from([*theirs_in_full(), "defaults", "env", "data", "x\ny"]), ODD),
)
def test_odd_files_give_settings_or_one_line(tmp_path: Path, algorithm: str, flat: dict[str, Any]):
    """And the YAML that is written says what was translated, no more."""
    tree: dict[str, Any] = {algorithm: {}}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            inner = place.get(section)
            place[section] = place = inner if isinstance(inner, dict) else {}
        place[leaf] = value
    (tmp_path / "theirs.yaml").write_text(dump(tree))
    try:
        _, ours, _ = translate(tmp_path / "theirs.yaml")
    except ValueError:
        return
    (tmp_path / "ours.yaml").write_text(as_yaml(tmp_path / "theirs.yaml"))
    assert repr(read(tmp_path / "ours.yaml")[0]) == repr(json.loads(json.dumps(ours)))


TURNS = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {
        "row": {"input": "1+1=", "output": "2"},
        "dataset": {"dataset_name": "ResponseDataset", "env_name": "math"},
        "metric": "val:accuracy",
        "section": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "normalize_rewards": True,
            "use_leave_one_out_baseline": True,
            "max_val_samples": 2,
        },
        "env": {"math": {"num_workers": 8}},
        "loss_fn": {"reference_policy_kl_penalty": 0.01, "token_level_loss": True}
        | {"use_importance_sampling_correction": True, "ratio_clip_c": None},
    },
    "sft": {
        "row": {"messages": TURNS},
        "dataset": {"dataset_name": "openai_format"},
        "metric": "val:val_loss",
        "section": {"val_batches": 1, "val_global_batch_size": 2},
    },
    "dpo": {
        "row": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        "dataset": {"dataset_name": "BinaryPreferenceDataset"},
        "metric": "val:validation-default_loss",
        "section": {"reference_policy_kl_penalty": 0.05, "sft_loss_weight": 0.1},
    },
}


def small_file(algorithm: str, backend: str, folder: Path) -> dict[str, Any]:
    """A file of NeMo RL's keys for two steps of a tiny model, with its rows and its model."""
    tiny_model(hidden_size=128, head_dim=32).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    kind = dict(KINDS[algorithm])
    rows = {"data_path": str(folder / "rows.jsonl")}
    Path(rows["data_path"]).write_text(f"{json.dumps(kind.pop('row'))}\n" * 8)
    steps = {"max_num_steps": 2, "max_num_epochs": 1, "val_period": 1, "val_at_start": True}
    warm_up = {"start_factor": 1e-8, "end_factor": 1.0, "total_iters": 1}
    policy: dict[str, Any] = {
        "model_name": str(folder / "model"),
        "tokenizer": {"name": "${policy.model_name}", "chat_template": None},
        "train_global_batch_size": 2,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": 32,
        "precision": "float32",
        "sequence_packing": {
            "enabled": True,
            "train_mb_tokens": "${mul:${policy.max_total_sequence_length}, 2}",
        },
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 5e-6}},
        "scheduler": [{"name": "LinearLR", "kwargs": warm_up}, {"milestones": [1]}],
    }
    if backend:
        engine = {"enforce_eager": True, "tensor_parallel_size": 1, "max_model_len": 32}
        policy["generation"] = {"backend": backend, "max_new_tokens": 8, "vllm_cfg": engine}
    return {
        algorithm: {**steps, **kind.pop("section")},
        "data": {
            "max_input_seq_length": 16,
            "train": rows,
            "validation": rows,
            "default": kind.pop("dataset"),
        },
        "checkpointing": {"checkpoint_dir": str(folder / "run"), "save_period": 1}
        | {"metric_name": kind.pop("metric"), "keep_top_k": 3},
        "policy": policy,
        "logger": {"wandb_enabled": False, "tensorboard_enabled": False},
        "cluster": {"gpus_per_node": 1, "num_nodes": 1},
        **kind,
    }


@pytest.mark.parametrize(
    ("algorithm", "backend"),
    [
        ("grpo", "hf"),
        pytest.param("grpo", "vllm", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]),
        ("sft", ""),
        ("dpo", ""),
    ],
)
def test_what_it_writes_runs_as_it_stands(algorithm: str, backend: str, tmp_path: Path):
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(json.dumps(small_file(algorithm, backend, tmp_path)))
    assert translate(theirs)[2] == {}
    ours.write_text(as_yaml(theirs))
    assert cli.main([algorithm, "--config", str(ours)]) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    steps = [(line["phase"], line["step"]) for line in lines]
    assert {("train", 1), ("train", 2)} <= set(steps)
    assert [step for phase, step in steps if phase != "train"] == [0, 1, 2]


def test_every_key_leads_to_one_of_ours():
    configs = [algorithm.config for algorithm in ALGORITHMS.values()]
    ours = {key for config in configs for key in leaves(config)}
    assert set(RENAMED.values()) <= ours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ppo: {}\n", "must hold one of the sections grpo, sft, dpo, but it is 'ppo'"),
        ("grpo: {seed: '${nowhere.at}'}\n", "grpo.seed refers to nowhere.at, which the file"),
        ("grpo: {seed: '${grpo.a}', a: '${grpo.seed}'}\n", "refers to itself"),
        ("defaults: this.yaml\ngrpo: {}\n", "must not lead back to the file itself"),
        ("grpo: [\n", "not valid YAML"),
    ],
)
def test_files_that_can_not_be_translated(text: str, message: str, tmp_path: Path):
    (tmp_path / "this.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        translate(tmp_path / "this.yaml")


def test_the_command(tmp_path: Path):
    def call(file: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, from_nemo_rl.__file__, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    printed = call(FILES / "grpo.yaml").stdout
    assert printed.startswith("# nemorl grpo --config")
    assert "# Not carried over, or not quite (3 keys):" in printed
    (tmp_path / "ours.yaml").write_text(printed)
    assert load_config(ALGORITHMS["grpo"].config, tmp_path / "ours.yaml").run.project == "mine"
    missing = call(Path("no.yaml"))
    assert missing.returncode == 1
    assert (
        missing.stderr == "error: can't read the config file no.yaml: No such file or directory\n"
    )
