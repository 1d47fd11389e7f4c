"""Names that settings have in other libraries: refused with ours, and shown in coming-from.md."""

import re
from collections.abc import Callable, Collection

NEMO_RL = {
    "grpo.num_prompts_per_step": "num_prompts_per_step",
    "grpo.num_generations_per_prompt": "num_generations_per_prompt",
    "grpo.max_num_steps": "max_num_steps",
    "grpo.max_num_epochs": "num_epochs (sft, dpo)",
    "grpo.normalize_rewards": "advantage.scale",
    "grpo.use_leave_one_out_baseline": "advantage.baseline",
    "grpo.use_dynamic_sampling": "dynamic_sampling",
    "grpo.overlong_filtering": "overlong.filter",
    "grpo.val_period": "run.val_period",
    "grpo.val_at_start": "run.val_at_start",
    "grpo.max_val_samples": "run.max_val_samples",
    "grpo.seed": "run.seed",
    "loss_fn.ratio_clip_min": "loss.clip_low",
    "loss_fn.ratio_clip_max": "loss.clip_high",
    "loss_fn.ratio_clip_c": "loss.dual_clip",
    "loss_fn.reference_policy_kl_penalty": "kl.coef",
    "loss_fn.token_level_loss": "reduction",
    "loss_fn.sequence_level_importance_ratios": "loss.name (gspo)",
    "policy.model_name": "model.path",
    "policy.tokenizer.name": "model.tokenizer",
    "policy.train_global_batch_size": "train_global_batch_size",
    "policy.train_micro_batch_size": "trainer.train_micro_batch_size",
    "policy.max_total_sequence_length": "data.max_total_sequence_length",
    "policy.max_grad_norm": "optimizer.max_grad_norm",
    "policy.precision": "parallel.param_dtype",
    "policy.sequence_packing.enabled": "trainer.sequence_packing",
    "policy.sequence_packing.train_mb_tokens": "trainer.micro_batch_tokens",
    "policy.dtensor_cfg.activation_checkpointing": "parallel.activation_checkpointing",
    "policy.dtensor_cfg.tensor_parallel_size": "parallel.tp",
    "policy.dtensor_cfg.context_parallel_size": "parallel.cp",
    "policy.dtensor_cfg.sequence_parallel": "parallel.sequence_parallel",
    "policy.dtensor_cfg.cpu_offload": "parallel.cpu_offload",
    "policy.dtensor_cfg.lora_cfg.dim": "lora.rank",
    "policy.dtensor_cfg.lora_cfg.alpha": "lora.alpha",
    "policy.dtensor_cfg.lora_cfg.dropout": "lora.dropout",
    "policy.dtensor_cfg.lora_cfg.target_modules": "lora.target_modules",
    "policy.optimizer.kwargs.lr": "optimizer.lr",
    "policy.scheduler": "optimizer.schedule, optimizer.warmup_steps, optimizer.min_lr_ratio",
    "policy.generation.max_new_tokens": "generation.max_new_tokens",
    "cluster.gpus_per_node": "parallel.dp_shard, times parallel.tp, parallel.cp and num_nodes",
    "data.train.data_path": "data.train",
    "data.train.input_key": "data.prompt_column",
    "data.train.output_key": "data.answer_column (sft: data.response_column)",
    "data.default.prompt_file": "data.prompt_template ({prompt} for {})",
    "data.default.system_prompt_file": "data.system_prompt",
    "env.math": "reward",
    "dpo.reference_policy_kl_penalty": "loss.beta",
    "dpo.sft_loss_weight": "sft_coef",
    "checkpointing.checkpoint_dir": "run.dir",
    "checkpointing.save_period": "run.save_period",
    "checkpointing.keep_top_k": "run.keep_checkpoints",
    "checkpointing.metric_name": "run.metric",
    "logger.wandb_enabled": "run.loggers",
    "logger.wandb.project": "run.project",
}
TRL = {
    "model_name_or_path": "model.path",
    "dataset_name": "data.train",
    "per_device_train_batch_size": "trainer.train_micro_batch_size or trainer.micro_batch_tokens",
    "gradient_accumulation_steps": (
        "train_global_batch_size: batch per device × accumulation × devices (GRPO: responses; SFT:"
        " sequences; DPO: pairs)"
    ),
    "num_generations": "num_generations_per_prompt",
    "generation_batch_size": "num_prompts_per_step: completions ÷ num_generations",
    "num_iterations": "num_updates_per_batch",
    "max_steps": "max_num_steps",
    "num_train_epochs": "num_epochs (sft, dpo)",
    "max_completion_length": "generation.max_new_tokens",
    "max_length": "data.max_total_sequence_length",
    "max_seq_length": "data.max_total_sequence_length",
    "packing": "trainer.sequence_packing",
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_ratio": "optimizer.warmup_steps",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "beta": "kl.coef (DPO: loss.beta)",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "loss_type": (
        "reduction: sequence_mean (grpo), token_mean (dapo, bnpo), constant (dr_grpo); or loss.name"
        " (cispo, DPO's)"
    ),
    "importance_sampling_level": "loss.name (gspo)",
    "scale_rewards": "advantage.scale",
    "reward_funcs": "reward",
    "mask_truncated_completions": "overlong.filter",
    "rpo_alpha": "sft_coef",
    "precompute_ref_log_probs": "reference",
    "peft_config": "lora.rank, lora.alpha, lora.dropout, lora.target_modules",
    "lora_r": "lora.rank",
    "use_peft": "lora.rank",
    "output_dir": "run.dir",
    "save_steps": "run.save_period",
    "save_total_limit": "run.keep_checkpoints",
    "eval_steps": "run.val_period",
    "eval_dataset": "data.validation",
    "resume_from_checkpoint": "run.resume",
    "bf16": "parallel.param_dtype bfloat16",
    "gradient_checkpointing": "parallel.activation_checkpointing",
    "fsdp": "parallel.dp_shard",
    "deepspeed": "parallel.dp_shard",
    "torch_compile": "parallel.compile",
    "report_to": "run.loggers",
    "use_vllm": "generation.backend vllm",
    "vllm_mode": "generation.colocated",
    "vllm_tensor_parallel_size": "generation.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "generation.engine",
}
VERL = {
    "data.train_files": "data.train",
    "data.val_files": "data.validation",
    "data.prompt_key": "data.prompt_column",
    "data.train_batch_size": "num_prompts_per_step",
    "data.max_prompt_length": "data.max_total_sequence_length, with the response",
    "data.max_response_length": "generation.max_new_tokens",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.use_remove_padding": "trainer.sequence_packing",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "parallel.activation_checkpointing",
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "actor_rollout_ref.model.lora_alpha": "lora.alpha",
    "actor_rollout_ref.rollout.name": "generation.backend",
    "actor_rollout_ref.rollout.n": "num_generations_per_prompt",
    "actor_rollout_ref.rollout.temperature": "generation.temperature",
    "actor_rollout_ref.rollout.top_p": "generation.top_p",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "generation.tensor_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generation.engine",
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "train_global_batch_size: in responses, not prompts"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.train_micro_batch_size",
    "actor_rollout_ref.actor.ppo_epochs": "num_updates_per_batch",
    "actor_rollout_ref.actor.use_dynamic_bsz": "trainer.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "parallel.dp_shard",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "trainer.offload_during_generation",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "trainer.offload_during_generation",
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "parallel.cpu_offload",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "parallel.cp",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "optimizer.warmup_steps",
    "actor_rollout_ref.actor.grad_clip": "optimizer.max_grad_norm",
    "actor_rollout_ref.actor.clip_ratio": "loss.clip_low, loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "loss.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "reduction",
    "actor_rollout_ref.actor.use_kl_loss": "kl.coef",
    "actor_rollout_ref.actor.kl_loss_coef": "kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "kl.estimator",
    "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
    "algorithm.adv_estimator": "advantage.baseline, or a preset",
    "algorithm.norm_adv_by_std_in_grpo": "advantage.scale",
    "algorithm.filter_groups.enable": "dynamic_sampling",
    "custom_reward_function.path": "reward (module:function)",
    "custom_reward_function.name": "reward (module:function)",
    "trainer.nnodes": "parallel.dp_shard, times parallel.tp and parallel.cp",
    "trainer.n_gpus_per_node": "parallel.dp_shard, times parallel.tp and parallel.cp",
    "trainer.total_training_steps": "max_num_steps",
    "trainer.total_epochs": "num_epochs (sft, dpo)",
    "trainer.test_freq": "run.val_period",
    "trainer.save_freq": "run.save_period",
    "trainer.default_local_dir": "run.dir",
    "trainer.project_name": "run.project",
    "trainer.logger": "run.loggers",
    "trainer.resume_mode": "run.resume",
}
LIBRARIES = {"NeMo RL": NEMO_RL, "TRL": TRL, "verl": VERL}
"""By library: what a name of theirs is here. The first of our keys is the one to write."""

VALUES = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp32": "float32", "32-true": "float32"}
"""Values that have another name here."""

COMMON = {"name", "path", "enabled", "enable", "n", "math", "logger"}


def settings_in(text: str) -> list[str]:
    """Return what may be keys in the words of a table.

    >>> settings_in("kl.coef (DPO: loss.beta)")
    ['kl.coef', 'DPO', 'loss.beta']
    """
    return re.findall(r"\w+(?:\.\w+)*", text)


def our_name(name: str, known: Collection[str]) -> tuple[str, str] | None:
    """Return the key of `known` that another library's name stands for, and a sentence about it;
    None where none does. The last part of a name is enough, unless it is a common word.

    >>> our_name("beta", ["kl.coef", "optimizer.lr"])
    ('kl.coef', "TRL's beta is kl.coef (DPO: loss.beta) here")
    """
    same: list[Callable[[str], bool]] = [lambda theirs: theirs == name]
    if _last(name) not in COMMON:
        same.append(lambda theirs: _last(theirs) == _last(name))
    for matches in same:
        for library, table in LIBRARIES.items():
            for theirs in filter(matches, table):
                for key in settings_in(table[theirs]):
                    if key in known:
                        return key, f"{library}'s {theirs} is {table[theirs]} here"
    return None


def _last(name: str) -> str:
    return name.rpartition(".")[2]
