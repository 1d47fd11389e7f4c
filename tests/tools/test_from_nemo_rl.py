"""Every key of NeMo RL's configurations is carried over, noted, known not to matter, or refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.runtime.cli import main as cli
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.config.tree import load_config
from nemorl.runtime.store.directory import read_lines
from tests.runtime.runs import saved_model
from tools import from_nemo_rl
from tools.from_nemo_rl import as_yaml, translate

GRPO = """
grpo:
  num_prompts_per_step: 16
  num_generations_per_prompt: 8
  max_num_steps: 500
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 20
  seed: 7
  async_grpo: {enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: true}
  reward_shaping: {enabled: true, overlong_buffer_length: 64, overlong_buffer_penalty: 0.5}
loss_fn: {reference_policy_kl_penalty: 0.02, token_level_loss: true, ratio_clip_max: 0.28,
          use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 4.0}
checkpointing: {enabled: true, metric_name: "val:accuracy", keep_top_k: 3, save_period: 25}
policy:
  model_name: some/model
  tokenizer: {name: "${policy.model_name}", chat_template: default}
  train_global_batch_size: 64
  train_micro_batch_size: 2
  max_total_sequence_length: 512
  hf_config_overrides: {router_aux_loss_coef: 0.001}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, activation_checkpointing: true}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 2.0e-6, betas: [0.9, 0.98]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 30}}
    - {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 470, eta_min: 2.0e-7}}
  generation:
    backend: vllm
    max_new_tokens: 256
    vllm_cfg: {gpu_memory_utilization: 0.6}
    colocated: {enabled: false, resources: {gpus_per_node: 2}}
data:
  max_input_seq_length: 256
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05}
  default: {env_name: math, prompt_file: cot.txt}
env: {math: {num_workers: 8}}
cluster: {gpus_per_node: 8}
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "cot.txt").write_text("In {{}}: {}!")
    (tmp_path / "base.yaml").write_text(GRPO)
    return tmp_path / "theirs.yaml"


def of(path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    """The settings and notes of a recipe that builds on GRPO."""
    path.write_text(f"defaults: base.yaml\n{text}")
    return translate(path)[1:]


def test_grpo(theirs: Path):
    settings, notes = of(theirs, "grpo: {val_at_start: true}")
    assert settings.pop("optimizer.min_lr_ratio") == pytest.approx(0.1)
    expected = {
        **{"num_prompts_per_step": 16, "train_global_batch_size": 64, "reduction": "token_mean"},
        **{"advantage.baseline": "leave_one_out", "advantage.scale": "leave_one_out_std"},
        **{
            "async.max_staleness": 2,
            "async.in_flight": "keep",
            "trainer.router_aux_loss_coef": 1e-3,
        },
        **{"kl.coef": 0.02, "kl.gradient": "score", "loss.clip_high": 0.28, "reward": "math"},
        **{"off_policy.mode": "truncate", "off_policy.max": 4.0, "overlong.buffer": 0.25},
        **{"trainer.micro_batch_tokens": 1024, "parallel.tp": 2, "parallel.dp_shard": 3},
        **{"optimizer.beta2": 0.98, "optimizer.weight_decay": 0.01, "optimizer.schedule": "cosine"},
        "optimizer.warmup_steps": 60,  # 30 rollout batches of two updates each
        **{"generation.colocated": False, "generation.num_replicas": 2, "data.held_out": 0.05},
        **{"data.train": "nvidia/OpenMathInstruct-2", "data.answer_column": "expected_answer"},
        **{"data.prompt_template": "In {{}}: {prompt}!", "data.chat": True},
        **{"data.max_total_sequence_length": 512, "generation.max_new_tokens": 256},
        **{"run.metric": "val_accuracy", "run.val_at_start": True, "run.seed": 7},
    }
    assert {key: settings.get(key) for key in expected} == expected
    assert notes == ["without a meaning here: env.math.num_workers"]


@pytest.mark.parametrize(
    ("text", "key", "value", "note"),
    [
        ("grpo: {async_grpo: null}\nasync_rl: {sampler: {name: windowed,"
         " max_staleness_versions: 3}}",
         "async.max_staleness", 3, "in their order"),
        ("loss_fn: {use_cispo: true}", "loss.name", "cispo", ""),
        ("loss_fn: {use_on_policy_kl_approximation: true}", "kl.gradient", "importance", "clamps"),
        ("grpo: {adv_estimator: {name: reinforce_plus_plus}}", "advantage.ddof", 0, ""),
        ("policy: {generation: {max_new_tokens: 512}}", "data.max_total_sequence_length", 768,
         "all"),
        ("policy: {generation: {backend: trtllm}}", "generation.backend", "vllm", "vLLM samples"),
        ("policy: {new: {enabled: false, size: 1}}", "policy.new", None, ""),
        ("policy: {megatron_cfg: {enabled: true, expert_model_parallel_size: 2, freeze_moe_router:"
         " true, scheduler: {lr_decay_style: constant, lr_warmup_iters: 5}},"
         " dtensor_cfg: {enabled: false}}", "optimizer.warmup_steps", 10, "routers are trained"),
        ("data: {train: {dataset_name: squad}}", "data.train", None, "put together by NeMo RL"),
    ],
)  # fmt: skip
def test_recipes(text: str, key: str, value: Any, note: str, theirs: Path):
    settings, notes = of(theirs, text)
    assert settings.get(key) == value
    assert bool(notes[:-1]) == bool(note) and note in "".join(notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("made_up: {key: 3}", "made_up.key 3: no such key is known"),
        ("grpo: {adv_estimator: {name: gdpo}}", "'gdpo': advantages are"),
        ("data: {default: {env_name: vlm}}", "'vlm': rewards are math"),
        ("policy: {hf_config_overrides: {a: 1}}", "copy of the model"),
        ("policy: {optimizer: {name: torch.optim.SGD}}", "AdamW"),
        ("policy: {scheduler: [{name: StepLR}]}", "constant, linear and cosine"),
        ("policy: {dtensor_cfg: {tensor_parallel_size: 4}}", "parallel.dp_shard must be"),
        ("data: {default: {prompt_file: ../secret.txt}}", "beside the recipe"),
        ("grpo: {seed: '${nowhere.at}'}", "nowhere"),
        ("grpo: {seed: '${grpo.a}', a: '${grpo.seed}'}", "recursion"),
        ("grpo: {seed: '${div:1,0}'}", "ZeroDivisionError"),
        ("sft: {}", "must hold one of grpo, sft, dpo"),
    ],
)
def test_what_is_refused(text: str, message: str, theirs: Path):
    (theirs.parent.parent / "secret.txt").write_text("secret")
    theirs.write_text(f"defaults: base.yaml\n{text}")
    with pytest.raises(ValueError, match=message):
        as_yaml(theirs)


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_what_it_writes_runs_as_it_stands(algorithm: str, tmp_path: Path):
    saved_model(tmp_path / "model")
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "input": "1+1=", "output": "2"}
    (tmp_path / "rows.jsonl").write_text(f"{row}\n".replace("'", '"') * 4)
    kind = {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "prompt"}
    policy = {"model_name": str(tmp_path / "model"), "precision": "float32", "max_grad_norm": 1.0}
    sizes = {"train_global_batch_size": 2, "train_micro_batch_size": 1}
    theirs = {
        algorithm: {"max_num_steps": 2, "max_num_epochs": 1},
        "policy": {**policy, **sizes, "tokenizer": {"chat_template": None}},
        "data": {"train": {"data_path": str(tmp_path / "rows.jsonl")}},
        "checkpointing": {"checkpoint_dir": str(tmp_path / "run"), "save_period": 1},
    }
    theirs["data"]["train"] |= kind if algorithm == "dpo" else {}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    (tmp_path / "ours.yaml").write_text(as_yaml(tmp_path / "theirs.yaml"))
    assert cli.main([algorithm, "--config", str(tmp_path / "ours.yaml")]) == 0
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")][-1] == 2


def test_the_command(theirs: Path):
    def call(file: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, from_nemo_rl.__file__, file]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    of(theirs, 'data_plane: {"a\\nloss: ./evil.py:f": 1}')
    printed = call(str(theirs)).stdout
    assert "\n# nemorl grpo --config" in printed
    theirs.with_name("ours.yaml").write_text(printed)
    assert load_config(GRPOConfig, theirs.with_name("ours.yaml")).async_.max_staleness == 2
    missing = call("no.yaml")
    assert missing.returncode == 1 and "can't read the config file no.yaml" in missing.stderr
