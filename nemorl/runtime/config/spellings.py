"""Names that settings have in other libraries and that people try: refused with ours, or with what
to do where nothing here is like it. coming-from.md shows them.
"""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from nemorl.checks import closest


class Absent(NamedTuple):
    """What has no setting here."""

    today: str
    """What is not there, and what to do instead."""
    page: str
    """Page and heading in docs/ that shows it."""


TOOLS = Absent(
    "tools are the methods of a class, rollout.environment (in Python: environment_factory)",
    "environments.md#tools",
)
QUANTIZED = Absent(
    "weights are quantized under LoRA alone, to 4 bits (lora.quantize); parallel.param_dtype"
    " bfloat16 and parallel.cpu_offload take less memory, too",
    "parallelism.md#memory",
)
FLOAT16 = Absent("set parallel.param_dtype to bfloat16 or float32", "parallelism.md#memory")
CRITIC = Absent(
    "nemorl grpo compares the responses of a group (advantage.baseline) and has no critic; a loop"
    ' of your own may train one, run.backend(…, head="scalar")',
    "extending.md#several-models",
)
REWARD_MODEL = Absent(
    "serve the model, and give nemorl.RewardServer(url=…) as the reward", "judge.md#a-reward-model"
)
TEACHER = Absent(
    "there is no command for distillation; write a loop with a teacher beside the model,"
    " run.backend(…, trains=False)",
    "extending.md#several-models",
)
NEMO_FILE = Absent(
    "sections have other names here; tools/from_nemo_rl.py translates a whole file",
    "coming-from.md#from-nemo-rl",
)
VERL_FILE = Absent(
    "sections have other names here; the page lists them", "coming-from.md#from-verl"
)
PRIME_FILE = Absent(
    "sections have other names here; the page lists them", "coming-from.md#from-prime-rl"
)
FIXED_REFERENCE = Absent(
    "the reference stays the initial model, which kl.coef keeps near", "grpo.md#presets"
)
ASSISTANT_ONLY = Absent(
    "the assistant's messages and responses are trained on, always, and nothing else",
    "data.md#which-tokens-are-trained-on",
)

NEMO_RL: dict[str, str | Absent] = {
    "grpo.num_prompts_per_step": "num_prompts_per_step",
    "grpo.num_generations_per_prompt": "num_generations_per_prompt",
    "grpo.max_num_steps": "max_num_steps",
    "grpo.max_num_epochs": "num_epochs (grpo counts rollout batches: max_num_steps)",
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
    "grpo.async_grpo.enabled": "async.max_staleness",
    "grpo.async_grpo.max_trajectory_age_steps": "async.max_staleness",
    "grpo.async_grpo.in_flight_weight_updates": "async.in_flight",
    "async_rl": "async.max_staleness",
    "grpo.max_rollout_turns": "rollout.max_turns",
    "grpo.batch_multiplier": "max_sampling_rounds",
    "policy.dtensor_cfg.enabled": "trainer.backend dtensor",
    "policy.megatron_cfg.enabled": "trainer.backend megatron",
    "policy.generation.vllm_cfg.tensor_parallel_size": "generation.tensor_parallel_size",
    "policy.generation.vllm_cfg.pipeline_parallel_size": "generation.pipeline_parallel_size",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "generation.engine",
    "policy.generation.colocated.enabled": "generation.colocated",
    **dict.fromkeys(
        ("grpo", "policy", "loss_fn", "env", "cluster", "checkpointing", "logger"), NEMO_FILE
    ),
}
TRL: dict[str, str | Absent] = {
    "model_name_or_path": "model.path",
    "dataset_name": "data.train (eval: data.validation)",
    "per_device_train_batch_size": "trainer.train_micro_batch_size or trainer.micro_batch_tokens",
    "gradient_accumulation_steps": (
        "train_global_batch_size: batch per device × accumulation × devices (GRPO: responses; SFT:"
        " sequences; DPO: pairs)"
    ),
    "num_generations": "num_generations_per_prompt (eval, generate: n)",
    "generation_batch_size": "num_prompts_per_step: completions ÷ num_generations",
    "num_iterations": "num_updates_per_batch",
    "max_steps": "max_num_steps",
    "num_train_epochs": "num_epochs (grpo counts rollout batches: max_num_steps)",
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
    "vllm_importance_sampling_correction": "off_policy.mode",
    "vllm_importance_sampling_mode": "off_policy.mode, off_policy.level",
    "vllm_importance_sampling_clip_min": "off_policy.min",
    "vllm_importance_sampling_clip_max": "off_policy.max",
    "scale_rewards": "advantage.scale",
    "reward_funcs": "reward (in Python: reward_fn)",
    "mask_truncated_completions": "overlong.filter",
    "rpo_alpha": "sft_coef",
    "precompute_ref_log_probs": "reference",
    "peft_config": "lora.rank, lora.alpha, lora.dropout, lora.target_modules",
    "lora_r": "lora.rank",
    "use_peft": "lora.rank",
    "output_dir": "run.dir (export, report: output)",
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
    "train_dataset": "data.train",
    "dataset_config": "data.train: NAME:CONFIGURATION",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.validation_split",
    "processing_class": "model.tokenizer",
    "chat_template_path": "model.chat_template",
    "max_prompt_length": "data.max_total_sequence_length, with the response",
    "steps_per_generation": "train_global_batch_size: responses of a rollout batch ÷ steps",
    "generation_kwargs": "generation.engine",
    "cliprange": "loss.clip_low, loss.clip_high",
    "simpo_gamma": "loss.margin",
    "desirable_weight": "loss.desirable_coef",
    "undesirable_weight": "loss.undesirable_coef",
    "lora_target_modules": "lora.target_modules",
    "logging_dir": "run.dir",
    "logging_steps": "run.display: every step is logged",
    "log_completions": "run.samples_per_step",
    "num_completions_to_print": "run.samples_per_step",
    "eval_strategy": "run.val_period",
    "eval_on_start": "run.val_at_start",
    "save_strategy": "run.save_period",
    "metric_for_best_model": "run.metric",
    "greater_is_better": "run.higher_is_better",
    "use_liger_kernel": "trainer.logprob_chunk: never all logits are in memory",
    "use_liger_loss": "trainer.logprob_chunk: never all logits are in memory",
    "full_determinism": "trainer.deterministic",
    "dtype": "parallel.param_dtype",
    "tools": TOOLS,
    "max_tool_calling_iterations": "rollout.max_turns",
    "environment_factory": "rollout.environment (in Python: environment_factory)",
    "rollout_func": "rollout.environment: an episode",
    "fp16": FLOAT16,
    "load_in_4bit": "lora.quantize",
    "load_in_8bit": QUANTIZED,
    "quantization_config": QUANTIZED,
    "value_model": CRITIC,
    "vf_coef": CRITIC,
    "reward_model": REWARD_MODEL,
    "ref_model": FIXED_REFERENCE,
    "sync_ref_model": FIXED_REFERENCE,
    "assistant_only_loss": ASSISTANT_ONLY,
    "completion_only_loss": ASSISTANT_ONLY,
    "teacher_model": TEACHER,
    "repetition_penalty": Absent(
        "a penalty would sample from another policy than the one that is trained;"
        " generation.temperature, top_k, top_p and min_p are there",
        "numerics.md#log-probabilities-carry-the-distribution-they-were-computed-under",
    ),
    "optim": "optimizer.name",
    "args": Absent(
        "settings are keyword arguments of nemorl.train, or of a trainer's from_pretrained",
        "coming-from.md#from-trl",
    ),
    "data_collator": Absent(
        "batches are made here; rows come from files, lists or a DataModule",
        "data.md#where-rows-come-from",
    ),
    "formatting_func": "data.prompt_template",
    "compute_metrics": Absent(
        "a callback adds to the metrics, and a reward judges validation", "extending.md#a-callback"
    ),
    "push_to_hub": Absent(
        "a run writes the model to its folder hf/; upload that yourself", "configuration.md#run"
    ),
}
VERL: dict[str, str | Absent] = {
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
    "trainer.total_epochs": "num_epochs (grpo counts rollout batches: max_num_steps)",
    "trainer.test_freq": "run.val_period",
    "trainer.save_freq": "run.save_period",
    "trainer.default_local_dir": "run.dir",
    "trainer.project_name": "run.project",
    "trainer.logger": "run.loggers",
    "trainer.resume_mode": "run.resume",
    "trainer.experiment_name": "run.dir",
    "trainer.val_before_train": "run.val_at_start",
    "trainer.max_actor_ckpt_to_keep": "run.keep_checkpoints",
    "data.filter_overlong_prompts": "data.too_long",
    "data.truncation": "data.too_long",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "optimizer.schedule",
    "actor_rollout_ref.actor.use_torch_compile": "parallel.compile",
    "algorithm.use_kl_in_reward": "advantage.kl_coef, of advantage reinforce_plus_plus",
    "algorithm.kl_ctrl.kl_coef": "advantage.kl_coef, of advantage reinforce_plus_plus",
    "algorithm.filter_groups.max_num_gen_batches": "max_sampling_rounds",
    "actor_rollout_ref.rollout.multi_turn.enable": "rollout.environment",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "rollout.max_turns",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": TOOLS,
    "actor_rollout_ref.rollout.mode": "generation.backend vllm: requests run side by side",
    "async_training.staleness_threshold": "async.max_staleness (counts steps)",
    "async_training.partial_rollout": "async.in_flight",
    "algorithm.rollout_correction.rollout_is": "off_policy.mode, off_policy.level",
    "algorithm.rollout_correction.rollout_is_threshold": "off_policy.max",
    "critic": CRITIC,
    "algorithm.lam": CRITIC,
    "reward_model.path": REWARD_MODEL,
    "actor_rollout_ref": VERL_FILE,
    "algorithm": VERL_FILE,
    "custom_reward_function": VERL_FILE,
}
PRIME_RL: dict[str, str | Absent] = {
    "model.name": "model.path",
    "seq_len": "data.max_total_sequence_length",
    "orchestrator.batch_size": "num_prompts_per_step: rollouts ÷ rollouts per example",
    "orchestrator.rollouts_per_example": "num_generations_per_prompt",
    "orchestrator.group_size": "num_generations_per_prompt",
    "orchestrator.oversampling_factor": "max_sampling_rounds",
    "orchestrator.sampling.max_tokens": "generation.max_new_tokens",
    "orchestrator.train.sampling.max_completion_tokens": "generation.max_new_tokens",
    "orchestrator.sampling.temperature": "generation.temperature",
    "orchestrator.eval.interval": "run.val_period",
    "trainer.optim.lr": "optimizer.lr",
    "trainer.optim.weight_decay": "optimizer.weight_decay",
    "trainer.optim.max_norm": "optimizer.max_grad_norm",
    "trainer.scheduler.type": "optimizer.schedule",
    "trainer.loss.type": "loss.name",
    "trainer.loss.kl_tau": "off_policy.penalty",
    "trainer.loss.dppo_mask_low": "off_policy.probability_bounds",
    "trainer.loss.dppo_mask_high": "off_policy.probability_bounds",
    "trainer.model.ac": "parallel.activation_checkpointing",
    "trainer.model.ac_offloading": "parallel.activation_checkpointing",
    "trainer.model.ep": "parallel.ep, with trainer.backend megatron",
    "trainer.model.cp": "parallel.cp",
    "ckpt.interval": "run.save_period",
    "ckpt.keep_last": "run.keep_checkpoints",
    "ckpt.resume_step": "run.resume",
    "wandb.project": "run.project",
    "wandb.name": "run.dir",
    "inference.parallel.tp": "generation.tensor_parallel_size",
    "inference.parallel.dp": "generation.num_replicas",
    "inference.vllm.tensor_parallel_size": "generation.tensor_parallel_size",
    "deployment.num_train_gpus": "parallel.dp_shard",
    "deployment.num_infer_gpus": "generation.num_replicas",
    "trainer_gpu_ids": "parallel.dp_shard",
    "inference_gpu_ids": "generation.num_replicas",
    "max_async_level": "async.max_staleness",
    "async_level": "async.max_staleness",
    "max_off_policy_steps": "async.max_staleness",
    "max_inflight_rollouts": "generation.max_batch_size",
    "orchestrator.env": Absent(
        "give a class with turns or tools (rollout.environment), or a reward", "environments.md"
    ),
    "orchestrator": PRIME_FILE,
    "inference": PRIME_FILE,
    "ckpt": PRIME_FILE,
    "deployment": PRIME_FILE,
}
WORDS: dict[str, str | Absent] = {
    "kl": "kl.coef",
    "no_kl": "kl.coef 0",
    **dict.fromkeys(("kl_beta", "kl_coeff", "kl_penalty", "init_kl_coef"), "kl.coef"),
    **dict.fromkeys(("clip_eps", "clip_epsilon", "clip_range"), "loss.clip_low, loss.clip_high"),
    **dict.fromkeys(("entropy_bonus", "ent_coef"), "entropy_coef"),
    **dict.fromkeys(("clip_grad", "gradient_clipping"), "optimizer.max_grad_norm"),
    **dict.fromkeys(("lora", "lora_rank", "adapter"), "lora.rank"),
    "batch_size": (
        "train_global_batch_size (sequences of an optimizer step), num_prompts_per_step (grpo:"
        " prompts of a rollout), or trainer.train_micro_batch_size (of a forward pass)"
    ),
    "global_batch_size": "train_global_batch_size",
    "rollout_batch_size": "num_prompts_per_step",
    "mini_batch_size": "train_global_batch_size",
    "micro_batch_size": "trainer.train_micro_batch_size",
    **dict.fromkeys(
        ("group_size", "n", "num_rollouts", "num_samples", "n_samples_per_prompt", "rollouts"),
        "num_generations_per_prompt (eval, generate: n)",
    ),
    **dict.fromkeys(
        ("samples_per_prompt", "generations_per_prompt"),
        "num_generations_per_prompt (eval, generate: n)",
    ),
    "prompts_per_step": "num_prompts_per_step",
    **dict.fromkeys(
        ("epochs", "max_epochs", "n_epochs"),
        "num_epochs (grpo counts rollout batches: max_num_steps)",
    ),
    "num_epochs": "max_num_steps: grpo counts rollout batches",
    **dict.fromkeys(("steps", "num_steps", "total_steps", "train_steps"), "max_num_steps"),
    **dict.fromkeys(("reward_fn", "reward_func", "reward_function", "rewards"), "reward"),
    **dict.fromkeys(("max_tokens", "max_response_len", "max_gen_len"), "generation.max_new_tokens"),
    **dict.fromkeys(
        ("context_length", "max_seq_len", "max_len", "sequence_length"),
        "data.max_total_sequence_length",
    ),
    **dict.fromkeys(("train_file", "train_data", "dataset"), "data.train (eval: data.validation)"),
    **dict.fromkeys(("eval_file", "eval_data", "val_data", "test_data"), "data.validation"),
    **dict.fromkeys(("label_key", "answer_key"), "data.answer_column"),
    "apply_chat_template": "data.chat",
    "template": "data.prompt_template",
    "system": "data.system_prompt",
    **dict.fromkeys(("model_name", "model_path", "base_model"), "model.path"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "optimizer.schedule"),
    "warmup": "optimizer.warmup_steps",
    **dict.fromkeys(("precision", "torch_dtype"), "parallel.param_dtype"),
    "mixed_precision": "parallel.param_dtype bfloat16",
    **dict.fromkeys(
        ("num_gpus", "n_gpus", "devices", "num_processes", "world_size"),
        "gpus (of plan), parallel.dp_shard",
    ),
    **dict.fromkeys(("gpus", "dp", "ddp"), "parallel.dp_shard"),
    **dict.fromkeys(("tp_size", "tensor_parallel"), "parallel.tp"),
    **dict.fromkeys(("pp_size", "pipeline_parallel"), "parallel.pp"),
    **dict.fromkeys(("cp_size", "sp_size", "context_parallel"), "parallel.cp"),
    "gpu_memory_utilization": "generation.engine",
    "vllm": "generation.backend vllm",
    "name": "run.dir",
    **dict.fromkeys(("offload", "offload_optimizer"), "trainer.offload_during_generation"),
    **dict.fromkeys(("out_dir", "save_dir"), "run.dir (export, report: output)"),
    **dict.fromkeys(("output", "run_name", "experiment_name", "exp_name"), "run.dir"),
    "checkpoint_dir": "run.dir",
    **dict.fromkeys(
        ("save_every", "save_interval", "save_freq", "checkpoint_every"), "run.save_period"
    ),
    **dict.fromkeys(("eval_every", "eval_interval", "eval_freq"), "run.val_period"),
    **dict.fromkeys(("wandb", "use_wandb", "tensorboard"), "run.loggers"),
    "wandb_project": "run.project",
    "early_stopping": "run.stop_when",
    "random_seed": "run.seed",
    **dict.fromkeys(
        ("asynchronous", "async_train", "staleness", "max_head_offpolicyness"),
        "async.max_staleness",
    ),
    "use_decoupled_loss": "off_policy.mode (decoupled where batches have several updates)",
    **dict.fromkeys(("turns", "multi_turn", "max_tool_calls"), "rollout.max_turns"),
    **dict.fromkeys(("quantization", "fp8"), QUANTIZED),
    "qlora": "lora.quantize",
    **dict.fromkeys(("value_coef", "gae_lambda"), CRITIC),
    **dict.fromkeys(("teacher", "distill"), TEACHER),
    "reward_model_path": REWARD_MODEL,
}
"""What people try who come from nowhere in particular."""
LIBRARIES = {"NeMo RL": NEMO_RL, "TRL": TRL, "verl": VERL, "prime-rl": PRIME_RL, "": WORDS}
"""By library: what a name of theirs is here. The first of our keys is the one to write."""

VALUES = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp32": "float32", "32-true": "float32"}
"""Values that have another name here."""

COMMON = {"name", "path", "enabled", "enable", "n", "math", "logger", "type", "interval", "mode"}
"""Last parts of names that say little without what stands before them."""

PAGES = {
    "reward": "grpo.md#rewards",
    "train_global_batch_size": "sft.md#the-batch",
    "num_epochs": "configuration.md#nemorl-sft",
    "sft_coef": "configuration.md#nemorl-dpo",
    "reference": "dpo.md#the-reference",
    "n": "data.md#validation",
    "output": "sft.md#validation",
    "gpus": "parallelism.md#which-plan",
}
"""Where settings in no section are explained; GRPO's own have one page."""


def settings_in(text: str) -> list[str]:
    """Return what may be keys in the words of a table: the first, those with a dot or _, and those
    after a colon or comma.

    >>> settings_in("kl.coef (DPO: loss.beta)"), settings_in("data.train (eval: data.validation)")
    (['kl.coef', 'loss.beta'], ['data.train', 'data.validation'])
    """
    return re.findall(r"(?:^|(?<=[:,] ))[\w.]+|\w+[._][\w.]+", text)


def advice(
    name: str,
    known: Collection[str],
    *,
    command: str,
    near: Collection[str],
    write: Callable[[str], str] = str,
) -> str:
    """Return the end of an error about a name that no setting has: what it stands for in another
    library, else the setting that was misspelled, else what its section stands for, else nothing.
    A misspelling is more likely than what another library has and this command has not.

    Args:
        known: our keys that can be written; `write` returns how.
        command: what has them.
        near: names of settings that may have been misspelled.

    >>> advice("beta", ["kl.coef"], command="grpo", near=["optimizer.beta1"])
    ": TRL's beta is kl.coef (DPO: loss.beta); write kl.coef (docs/configuration.md#kl)"
    >>> advice("kl.coeff", ["kl.coef"], command="grpo", near=["kl.coef"])
    '; did you mean kl.coef?'
    """
    entry, hint = _entry(name, known), closest(name, near)
    if entry and (not hint or isinstance(entry[2], Absent) or _key(entry[2], known)):
        return f": {_sentence(*entry, known, command, write)}"
    if hint:
        return hint
    *sections, last = name.split(".")
    theirs = {_last(each) for table in LIBRARIES.values() for each in table} - COMMON
    if hint := closest(last, sorted(theirs)):
        word = hint.rpartition(" ")[2].removesuffix("?")
        return f"{hint} {meaning_of(word, known, command, write)}"
    meanings = (meaning_of(section, known, command, write) for section in reversed(sections))
    return next((f": {found}" for found in meanings if found), "")


def means_another(name: str, key: str) -> bool:
    """Return whether people who write a setting's last name alone want another setting.

    >>> means_another("steps", "profile.steps"), means_another("beta", "loss.beta")
    (True, False)
    """
    found = [table[name] for table in LIBRARIES.values() if name in table]
    return bool(found) and not any(_key(ours, [key]) for ours in found)


def in_a_table(name: str) -> bool:
    """Return whether the tables have a setting of another library by its whole name.

    >>> in_a_table("grpo.max_num_steps"), in_a_table("parallel.tp")
    (True, False)
    """
    return any(name in table for table in LIBRARIES.values())


def meaning_of(
    name: str, known: Collection[str], command: str, write: Callable[[str], str] = str
) -> str:
    """Return a sentence about what a name is in the tables, what to write and the page; nothing
    where they do not have it. The last part of a name is enough, unless it is a common word.

    >>> meaning_of("tools", [], "grpo")[-28:]
    '(docs/environments.md#tools)'
    """
    entry = _entry(name, known)
    return _sentence(*entry, known, command, write) if entry else ""


def _entry(name: str, known: Collection[str]) -> tuple[str, str, str | Absent] | None:
    """Return a library, its name and ours: the first with a key that can be written, if any."""
    last = _last(name)
    same: list[Callable[[str], bool]] = [lambda theirs: theirs == name]
    if last not in COMMON:
        same += [lambda theirs: theirs == last, lambda theirs: _last(theirs) == last]
    for matches in same:
        found = [
            (library, theirs, ours)
            for library, table in LIBRARIES.items()
            for theirs, ours in table.items()
            if matches(theirs)
        ]
        if found:
            return min(found, key=lambda each: not _key(each[2], known))
    return None


def _key(ours: str | Absent, known: Collection[str]) -> str:
    keys = [] if isinstance(ours, Absent) else settings_in(ours)
    return next((key for key in keys if key in known), "")


def _sentence(
    library: str,
    theirs: str,
    ours: str | Absent,
    known: Collection[str],
    command: str,
    write: Callable[[str], str],
) -> str:
    if isinstance(ours, Absent):
        return f"nemorl has no {theirs}: {ours.today} (docs/{ours.page})"
    who = f"{library}'s {theirs}" if library else theirs
    if key := _key(ours, known):
        return f"{who} is {ours}; write {write(key)} (docs/{page_of(key)})"
    key = settings_in(ours)[0]
    return f"{command} has no {key}, as {who} is called here (docs/{page_of(key)})"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def page_of(key: str) -> str:
    """Return the page that explains a setting.

    >>> page_of("optimizer.lr"), page_of("num_prompts_per_step")
    ('configuration.md#optimizer', 'configuration.md#nemorl-grpo')
    """
    section, dot, _ = key.partition(".")
    return PAGES.get(key, f"configuration.md#{section if dot else 'nemorl-grpo'}")
