"""Every key of NeMo RL's configurations is carried over, reported, or known not to matter."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemorl.runtime.config.tree import dotted_keys, from_dict, load_config
from nemorl.runtime.start.registry import ALGORITHMS
from tools import from_nemo_rl
from tools.from_nemo_rl import RENAMED, flatten, translate

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
        "reduction": "token_mean",
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
        "optimizer.warmup_steps": 30,
        "optimizer.max_grad_norm": 0.5,
        "generation.backend": "vllm",
        "generation.max_new_tokens": 256,
        "generation.temperature": 0.9,
        "generation.top_p": 0.95,
        "generation.max_model_len": 512,
        "generation.engine.gpu_memory_utilization": 0.6,
        "generation.stop_strings": ["</answer>"],
        "data.train": "questions.jsonl",
        "data.validation": "held_out.jsonl",
        "data.prompt_column": "question",
        "data.answer_column": "solution",
        "data.max_total_sequence_length": 512,
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
    assert set(notes) == {"policy.scheduler", "env.math.num_workers", "made_up.key"}
    assert notes["made_up.key"] == "3: no counterpart here"


def test_sft():
    settings, notes = flat_settings(FILES / "sft.yaml")
    assert (
        settings.items()
        >= {
            "num_epochs": 2,
            "max_num_steps": 60,
            "run.val_at_start": True,
            "model.tokenizer": "other/tokenizer",
            "trainer.train_micro_batch_size": 1,
            "run.metric": "val_loss",
            "run.higher_is_better": False,
            "optimizer.max_grad_norm": None,
        }.items()
    )
    assert set(notes) == {
        "checkpointing.enabled",
        "policy.precision",
        "policy.megatron_cfg.enabled",
        "policy.megatron_cfg.tensor_model_parallel_size",
        "policy.optimizer.name",
        "data.dataset_name",
        "data.train.data_path",
    }


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
            "8: tensor · context parallelism of 3 does not divide the 8 devices; set"
            " parallel.dp_shard",
        ),
        (
            "tensor_parallel_size: 2",
            EIGHT,
            ", generation: {backend: vllm, colocated: {enabled: false}}",
            {"tp": 2},
            "8: some of them generate; set parallel.dp_shard for those that train",
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


def test_values_that_only_null_can_have(tmp_path: Path):
    file = tmp_path / "theirs.yaml"
    key = "grpo.seq_logprob_error_threshold"
    file.write_text("grpo: {seq_logprob_error_threshold: 2.0}\n")
    assert "gap.stop" in translate(file)[2][key]
    file.write_text("grpo: {seq_logprob_error_threshold: null}\n")
    assert key not in translate(file)[2]


def test_every_key_leads_to_one_of_ours():
    configs = [algorithm.config for algorithm in ALGORITHMS.values()]
    ours = {key for config in configs for key, own in dotted_keys(config).items() if own}
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
