"""NeMo RL's configurations in our words: every key is either honoured, reported with a reason, or
known to have no bearing.
"""

from pathlib import Path
from typing import Any

import pytest

from nemorl.runtime.cli import main as cli
from nemorl.runtime.cli.import_config import Imported, import_config
from nemorl.runtime.cli.import_rules import RULES
from nemorl.runtime.config.tree import dotted_keys, load_config
from nemorl.runtime.start.registry import ALGORITHMS

FILES = Path(__file__).parent / "nemo_rl"


def config_of(imported: Imported, tmp_path: Path) -> Any:
    path = tmp_path / "ours.yaml"
    path.write_text(imported.to_yaml())
    return load_config(ALGORITHMS[imported.algorithm].config, path)


def test_grpo(tmp_path: Path) -> None:
    imported = import_config(FILES / "grpo.yaml")
    config = config_of(imported, tmp_path)
    assert (
        config.num_prompts_per_step,
        config.num_generations_per_prompt,
        config.max_num_steps,
        config.train_global_batch_size,
    ) == (16, 8, 500, 64)
    assert (config.advantage.baseline, config.advantage.scale) == (
        "leave_one_out",
        "leave_one_out_std",
    )
    assert (
        config.loss.name,
        config.loss.clip_low,
        config.loss.clip_high,
        config.loss.dual_clip,
    ) == ("clipped", 0.2, 0.28, 3.0)
    assert (config.kl.coef, config.kl.estimator, config.kl.gradient, config.reduction) == (
        0.02,
        "k3",
        "pathwise",
        "token_mean",
    )
    assert (config.off_policy.mode, config.off_policy.max) == ("truncate", 4.0)
    assert (config.dynamic_sampling, config.max_sampling_rounds) == (True, 6)
    assert (config.overlong.buffer, config.overlong.penalty, config.overlong.filter) == (
        0.25,
        0.5,
        True,
    )
    assert (config.model.path, config.model.tokenizer, config.model.chat_template_kwargs) == (
        "Qwen/Qwen2.5-0.5B",
        None,
        {"enable_thinking": False},
    )
    assert config.model.chat_template.startswith("{% for")
    assert (
        config.trainer.train_micro_batch_size,
        config.trainer.sequence_packing,
        config.trainer.micro_batch_tokens,
    ) == (None, True, 1024)
    plan = config.parallel
    assert (plan.param_dtype, plan.activation_checkpointing, plan.cpu_offload) == (
        "bfloat16",
        "full",
        False,
    )
    assert (plan.dp_replicate, plan.dp_shard, plan.tp, plan.cp, plan.sequence_parallel) == (
        1,
        4,
        2,
        1,
        False,
    )
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (16, 32, 0.05)
    optimizer = config.optimizer
    assert (
        optimizer.lr,
        optimizer.weight_decay,
        optimizer.beta1,
        optimizer.beta2,
        optimizer.eps,
    ) == (2e-6, 0.05, 0.9, 0.98, 1e-7)
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.max_grad_norm) == (
        "cosine",
        30,
        0.5,
    )
    assert optimizer.min_lr_ratio == pytest.approx(0.1)
    generation = config.generation
    assert (
        generation.backend,
        generation.max_new_tokens,
        generation.temperature,
        generation.top_p,
    ) == ("vllm", 256, 0.9, 0.95)
    assert (generation.tensor_parallel_size, generation.max_model_len, generation.engine) == (
        1,
        512,
        {"gpu_memory_utilization": 0.6},
    )
    assert generation.stop_strings == ("</answer>",)
    assert (config.data.train, config.data.validation, config.data.prompt_column) == (
        "questions.jsonl",
        "held_out.jsonl",
        "question",
    )
    assert (config.data.answer_column, config.data.max_total_sequence_length) == ("solution", 512)
    run = config.run
    assert (run.dir, run.seed, run.val_period, run.val_at_start, run.max_val_samples) == (
        "results/mine",
        7,
        20,
        True,
        64,
    )
    assert (run.save_period, run.keep_checkpoints, run.metric, run.higher_is_better) == (
        25,
        3,
        "val_accuracy",
        True,
    )
    assert (run.loggers, run.project) == (("tensorboard", "wandb"), "mine")
    assert set(imported.notes) == {"policy.scheduler", "env.math.num_workers", "made_up.key"}
    assert imported.notes["made_up.key"] == "3: no counterpart here"


def of_plan(file: Path, dtensor: str, cluster: str, more: str = "") -> Imported:
    file.write_text(
        f"sft: {{}}\npolicy: {{dtensor_cfg: {{enabled: true, {dtensor}}}{more}}}\ncluster:"
        f" {{{cluster}}}\n"
    )
    return import_config(file)


def test_devices(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    sizes = "tensor_parallel_size: 2, context_parallel_size: 4"
    given = of_plan(
        file,
        f"{sizes}, sequence_parallel: true, cpu_offload: true",
        "gpus_per_node: 8, num_nodes: 4",
    )
    plan = config_of(given, tmp_path).parallel
    assert (
        plan.dp_shard,
        plan.tp,
        plan.cp,
        plan.sequence_parallel,
        plan.cpu_offload,
        plan.num_ranks,
    ) == (4, 2, 4, True, True, 32)
    assert not any(key.startswith(("cluster", "policy.dtensor_cfg")) for key in given.notes)
    assert (
        "parallel"
        not in of_plan(
            file, "activation_checkpointing: false", "gpus_per_node: 1, num_nodes: 1"
        ).settings
    )
    odd = of_plan(file, "tensor_parallel_size: 3", "gpus_per_node: 8")
    assert (
        odd.notes["cluster.gpus_per_node"]
        == "8: tensor · context parallelism of 3 does not divide the 8 devices; set"
        " parallel.dp_shard"
    )
    apart = of_plan(
        file,
        "tensor_parallel_size: 2",
        "gpus_per_node: 8",
        ", generation: {backend: vllm, colocated: {enabled: false}}",
    )
    assert (
        apart.settings["parallel"] == {"tp": 2}
        and "some of them generate" in apart.notes["cluster.gpus_per_node"]
    )
    assert (
        "follows from parallel.tp"
        in of_plan(file, "custom_parallel_plan: mine.plan", "").notes[
            "policy.dtensor_cfg.custom_parallel_plan"
        ]
    )


def test_a_filter_that_is_not_here_is_told(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "grpo: {seq_logprob_error_threshold: 2.0}\nloss_fn: {seq_logprob_error_in_loss: true}\n"
    )
    notes = import_config(file).notes
    assert (
        notes["grpo.seq_logprob_error_threshold"].startswith("2.0: ")
        and "gap.stop" in notes["grpo.seq_logprob_error_threshold"]
    )
    assert not any(key.startswith("loss_fn") for key in notes)
    file.write_text("grpo: {seq_logprob_error_threshold: null}\n")
    assert "grpo.seq_logprob_error_threshold" not in import_config(file).notes


def test_a_recipe_builds_on_its_defaults(tmp_path: Path) -> None:
    config = config_of(import_config(FILES / "recipe.yaml"), tmp_path)
    assert (config.num_generations_per_prompt, config.num_prompts_per_step) == (4, 16)
    assert (config.loss.name, config.loss.clip_high, config.reduction) == (
        "gspo",
        0.28,
        "sequence_mean",
    )


def test_sft(tmp_path: Path) -> None:
    imported = import_config(FILES / "sft.yaml")
    config = config_of(imported, tmp_path)
    assert (config.num_epochs, config.max_num_steps, config.run.val_at_start) == (2, 60, True)
    assert (config.model.tokenizer, config.trainer.train_micro_batch_size) == ("other/tokenizer", 1)
    assert (config.run.metric, config.run.higher_is_better, config.optimizer.max_grad_norm) == (
        "val_loss",
        False,
        None,
    )
    assert set(imported.notes) == {
        "checkpointing.enabled", "policy.precision", "policy.megatron_cfg.enabled", "policy.megatron_cfg.tensor_model_parallel_size",
        "policy.optimizer.name", "data.dataset_name", "data.train.data_path",
    }  # fmt: skip


def test_dpo(tmp_path: Path) -> None:
    imported = import_config(FILES / "dpo.yaml")
    config = config_of(imported, tmp_path)
    assert (
        config.loss.beta,
        config.loss.average_logprobs,
        config.sft_coef,
        config.sft_reduction,
    ) == (0.05, True, 0.1, "sequence_mean")
    assert (config.train_global_batch_size, config.data.prompt_column) == (128, "context")
    assert (config.data.chosen_column, config.data.rejected_column) == ("good", "bad")
    assert imported.notes == {}


def test_every_rule_leads_to_a_key_of_ours() -> None:
    ours = {
        key
        for algorithm in ALGORITHMS.values()
        for key, own in dotted_keys(algorithm.config).items()
        if own
    }
    assert {rule for rule in RULES.values() if isinstance(rule, str)} <= ours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ppo: {}\n", "must hold one of the sections grpo, sft, dpo, but it is 'ppo'"),
        ("grpo: {seed: '${nowhere.at}'}\n", "grpo.seed refers to nowhere.at, which is not there"),
        ("grpo: {seed: '${grpo.a}', a: '${grpo.seed}'}\n", "refers to itself"),
        ("defaults: this.yaml\ngrpo: {}\n", "must not lead back to the file itself"),
        ("grpo: [\n", "not valid YAML"),
    ],
)
def test_files_that_can_not_be(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "this.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        import_config(tmp_path / "this.yaml")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import-config", str(FILES / "grpo.yaml")]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.startswith("# nemorl grpo --config")
        and "# Not carried over, or not quite (3 keys):" in printed
    )
    output = tmp_path / "mine.yaml"
    assert cli.main(["import-config", str(FILES / "grpo.yaml"), "--output", str(output)]) == 0
    assert output.read_text() == printed
    assert "use it: nemorl grpo --config" in capsys.readouterr().out
    assert cli.parse("grpo", ["--config", str(output)]).run.project == "mine"
