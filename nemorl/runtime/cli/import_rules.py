"""NeMo RL's keys and what they are here: the table behind `nemorl import-config`, and behind
docs/coming-from.md.

Read off examples/configs/{grpo_math_1B,sft,dpo}.yaml of NeMo RL and its later additions.
"""

import math
from collections.abc import Mapping
from typing import Any

from nemorl.runtime.cli.import_config import PARTIAL_WARM_UP, Note, Rule, Same, Settings, Unneeded

Flat = Mapping[str, Any]


def advantage(value: Any, flat: Flat) -> Settings:
    """grpo.normalize_rewards with grpo.use_leave_one_out_baseline."""
    leave_one_out = bool(flat.get("grpo.use_leave_one_out_baseline"))
    deviation = "leave_one_out_std" if leave_one_out else "group_std"
    return {
        "advantage.name": "group",
        "advantage.baseline": "leave_one_out" if leave_one_out else "group_mean",
        "advantage.scale": deviation if flat.get("grpo.normalize_rewards") else "none",
    }


def policy_loss(value: Any, flat: Flat) -> Settings | Note:
    """The choice among our losses: every key of loss_fn that has to do with it leads here."""
    if flat.get("loss_fn.disable_ppo_ratio"):
        return {"loss.name": "reinforce"}
    low, high = flat.get("loss_fn.ratio_clip_min"), flat.get("loss_fn.ratio_clip_max")
    clip = {
        f"loss.{name}": bound
        for name, bound in (("clip_low", low), ("clip_high", high))
        if bound is not None
    }
    if flat.get("loss_fn.use_cispo"):
        return {"loss.name": "cispo", **clip}
    if flat.get("loss_fn.sequence_level_importance_ratios"):
        return {"loss.name": "gspo", **clip}
    dual = flat.get("loss_fn.ratio_clip_c")
    return {
        "loss.name": "clipped",
        **clip,
        **({"loss.dual_clip": dual} if dual is not None else {}),
    }


def reduction(value: Any, flat: Flat) -> Settings:
    """loss_fn.token_level_loss."""
    return {"reduction": "token_mean" if value else "sequence_mean"}


def off_policy(value: Any, flat: Flat) -> Settings | Note:
    """loss_fn.use_importance_sampling_correction, with its truncation."""
    if not flat.get("loss_fn.use_importance_sampling_correction"):
        return {}
    bound = flat.get("loss_fn.truncated_importance_sampling_ratio")
    kind = flat.get("loss_fn.truncated_importance_sampling_type") or "tis"
    lower = flat.get("loss_fn.truncated_importance_sampling_ratio_min")
    mode = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": "sequence_mask"}.get(kind)
    if mode is None:
        return Note(
            f"{kind!r}: no such correction here (off_policy.mode: truncate, mask, sequence_mask)"
        )
    settings: Settings = {"off_policy.mode": mode}
    if mode == "sequence_mask":
        settings["off_policy.level"] = "geometric"
    if lower is not None:
        settings["off_policy.min"] = lower
    if bound is None:
        return {
            **settings,
            "(note)": "unbounded there; here the weights are truncated at off_policy.max (2.0)",
        }
    return {**settings, "off_policy.max": bound}


def steps(value: Any, flat: Flat) -> Settings | Note:
    """max_num_steps of a million means "as the epochs say"."""
    if value is None or value >= 1_000_000:
        return Note(
            f"{value!r} stands for no limit: set max_num_steps (or num_epochs, where there is one)"
        )
    return {"max_num_steps": value}


def grpo_epochs(value: Any, flat: Flat) -> Settings | Note:
    """GRPO counts its steps."""
    return {} if value == 1 else Note(f"{value!r}: grpo counts steps here; set max_num_steps")


def clip_gradient(value: Any, flat: Flat) -> Settings:
    """0 and null switch clipping off there."""
    return {"optimizer.max_grad_norm": value or None}


def optimizer_name(value: Any, flat: Flat) -> Settings | Note:
    """AdamW is the only one."""
    return (
        {}
        if str(value).rpartition(".")[2] == "AdamW"
        else Note(f"{value!r}: the optimizer is AdamW here")
    )


def betas(value: Any, flat: Flat) -> Settings:
    """Two numbers in a list."""
    return {"optimizer.beta1": value[0], "optimizer.beta2": value[1]}


def scheduler(value: Any, flat: Flat) -> Settings | Note:
    """A list of torch schedulers and their milestones."""
    settings: Settings = {}
    note = ""
    lr = flat.get("policy.optimizer.kwargs.lr")
    for part in value or []:
        name, options = str(part.get("name", "")).rpartition(".")[2], part.get("kwargs") or {}
        if name == "LinearLR" and options.get("end_factor", 1.0) >= options.get(
            "start_factor", 1 / 3
        ):
            settings["optimizer.warmup_steps"] = options.get("total_iters", 5)
            note = PARTIAL_WARM_UP
        elif name == "CosineAnnealingLR":
            settings["optimizer.schedule"] = "cosine"
            if lr and options.get("eta_min"):
                settings["optimizer.min_lr_ratio"] = options["eta_min"] / lr
            note = "the cosine ends at the run's last step here"
        elif name == "LinearLR":
            settings |= {
                "optimizer.schedule": "linear",
                "optimizer.min_lr_ratio": options.get("end_factor", 1.0),
            }
        elif name not in ("ConstantLR", "", "None"):
            return Note(
                f"{name}: schedules here are constant, linear and cosine, each with a warm-up"
            )
    return {**settings, "(note)": note} if note else settings


def precision(value: Any, flat: Flat) -> Settings | Note:
    """float32 or bfloat16."""
    known = {"float32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
    return (
        {"parallel.param_dtype": known[value]}
        if value in known
        else Note(f"{value!r}: precision is float32 or bfloat16 here")
    )


def sequence_parallel(value: Any, flat: Flat) -> Settings:
    """Only with tensor parallelism, where it is on here unless given."""
    return (
        {"parallel.sequence_parallel": value}
        if (flat.get("policy.dtensor_cfg.tensor_parallel_size") or 1) > 1
        else {}
    )


def devices(value: Any, flat: Flat) -> Settings | Note:
    """cluster.gpus_per_node · cluster.num_nodes, of which tensor and context parallelism leave the
    rest to FSDP.
    """
    if flat.get("policy.generation.colocated.enabled") is False:
        return Note(
            f"{value!r}: some of them generate; set parallel.dp_shard to what is left for training"
        )
    total = (flat.get("cluster.gpus_per_node") or 1) * (flat.get("cluster.num_nodes") or 1)
    of_one = math.prod(
        flat.get(f"policy.dtensor_cfg.{kind}_parallel_size") or 1 for kind in ("tensor", "context")
    )
    if total % of_one:
        return Note(
            f"{value!r}: tensor · context parallelism of {of_one} does not divide the {total}"
            " devices; set parallel.dp_shard"
        )
    return {"parallel.dp_shard": total // of_one} if total > of_one else {}


def micro_batch_tokens(value: Any, flat: Flat) -> Settings:
    """train_mb_tokens replaces the number of rows."""
    return {
        "trainer.micro_batch_tokens": max(
            int(value), int(flat.get("policy.max_total_sequence_length") or 0)
        )
    }


def micro_batch_size(value: Any, flat: Flat) -> Settings:
    """Only without a token budget."""
    budget = flat.get("policy.sequence_packing.enabled") or flat.get(
        "policy.dynamic_batching.enabled"
    )
    return {} if budget or value is None else {"trainer.train_micro_batch_size": value}


def max_new_tokens(value: Any, flat: Flat) -> Settings:
    """There the prompt may eat into it; here there must be room for a prompt."""
    longest = flat.get("policy.max_total_sequence_length")
    if longest is None or value < longest:
        return {"generation.max_new_tokens": value}
    return {
        "generation.max_new_tokens": longest // 2,
        "(note)": f"{value} leaves no room for a prompt within {longest}: half of it is taken",
    }


def generation_backend(value: Any, flat: Flat) -> Settings | Note:
    """By its name, where we have it."""
    from nemorl.runtime.start.registry import GENERATION_BACKENDS

    if value in GENERATION_BACKENDS:
        return {"generation.backend": value}
    return Note(
        f"{value!r}: no such backend here (there are {', '.join(GENERATION_BACKENDS)}); the"
        " embedded one is taken"
    )


def of_vllm(ours: str, unless: Any = None) -> Rule:
    """A setting of the engine, which counts only where vLLM generates; one that equals `unless` is
    its default here, too.
    """

    def rule(value: Any, flat: Flat) -> Settings:
        return (
            {}
            if flat.get("policy.generation.backend") != "vllm" or value in (None, unless)
            else {ours: value}
        )

    return rule


def engine_arguments(value: Any, flat: Flat) -> Settings:
    """policy.generation.vllm_cfg and vllm_kwargs: arguments of vLLM under its own names."""
    given = {name: flat.get(f"policy.generation.vllm_cfg.{name}") for name in ENGINE_ARGUMENTS}
    more = flat.get("policy.generation.vllm_kwargs") or {}
    arguments = {name: argument for name, argument in given.items() if argument is not None} | dict(
        more
    )
    return (
        {"generation.engine": arguments}
        if arguments and flat.get("policy.generation.backend") == "vllm"
        else {}
    )


ENGINE_ARGUMENTS = ("gpu_memory_utilization", "enforce_eager", "kv_cache_dtype")


def tokenizer(value: Any, flat: Flat) -> Settings:
    """Only one that isn't the model's own."""
    return {} if value == flat.get("policy.model_name") else {"model.tokenizer": value}


def path(which: str) -> Rule:
    """A file, or a data set of the hub."""

    def rule(value: Any, flat: Flat) -> Settings | Note:
        return {f"data.{which}": value} if value else {}

    return rule


def dataset_name(value: Any, flat: Flat) -> Settings | Note:
    """The built-in sets are named by what they do there; files and hub names come as data_path."""
    generic = (
        "ResponseDataset",
        "PreferenceDataset",
        "BinaryPreferenceDataset",
        "openai_format",
        None,
    )
    return (
        {}
        if value in generic
        else Note(
            f"{value!r}: a data set built into NeMo RL; give its file or hub name as data.train"
        )
    )


def environments(value: Any, flat: Flat) -> Note:
    """What rewards."""
    return Note("environments are rewards here: --reward math, exact_match or module:function")


def logger(name: str) -> Rule:
    """wandb_enabled and its like."""

    def rule(value: Any, flat: Flat) -> Settings:
        on = [
            other
            for other in ("tensorboard", "wandb", "mlflow")
            if flat.get(f"logger.{other}_enabled")
        ]
        return {"run.loggers": on} if value else {}

    return rule


def metric(value: Any, flat: Flat) -> Settings | Note:
    """val:accuracy and val_reward are val_accuracy and val_reward; train:loss is loss."""
    if value is None or not flat.get("checkpointing.keep_top_k"):
        return {}
    phase, _, name = str(value).rpartition(":")
    name = name.removeprefix("validation-default_").removeprefix("val_")
    return {"run.metric": name if phase == "train" else f"val_{name}"}


def keep_top_k(value: Any, flat: Flat) -> Settings:
    """How many checkpoints stay."""
    return {} if value is None else {"run.keep_checkpoints": value}


def sft_term(value: Any, flat: Flat) -> Settings:
    """0 is no term."""
    return {"sft_coef": value} if value else {}


def overlong(value: Any, flat: Flat) -> Settings:
    """overlong_filtering."""
    return {"overlong.filter": True} if value else {}


def overlong_buffer(value: Any, flat: Flat) -> Settings | Note:
    """Tokens there, a share of the longest response here."""
    longest = flat.get("grpo.reward_shaping.max_response_length") or flat.get(
        "policy.generation.max_new_tokens"
    )
    return (
        {"overlong.buffer": value / longest}
        if longest
        else Note(f"{value!r}: needs grpo.reward_shaping.max_response_length beside it")
    )


RULES: dict[str, Rule] = {
    # the algorithm's section; "grpo:" marks a rule of one algorithm
    "num_prompts_per_step": "num_prompts_per_step",
    "num_generations_per_prompt": "num_generations_per_prompt",
    "max_rollout_turns": Same((1,), "conversations of several turns are not supported yet"),
    "grpo:max_num_epochs": grpo_epochs,
    "max_num_epochs": "num_epochs",
    "max_num_steps": steps,
    "normalize_rewards": advantage,
    "use_leave_one_out_baseline": advantage,
    "use_dynamic_sampling": "dynamic_sampling",
    "dynamic_sampling_max_gen_batches": "max_sampling_rounds",
    "batch_multiplier": Same(
        (1, 1.0), "dynamic sampling asks for as many prompts as are missing here"
    ),
    "overlong_filtering": overlong,
    "seq_logprob_error_threshold": Same(
        (None,),
        "responses are not left out by their error; gap.stop ends the run, off_policy.mode"
        " sequence_mask drops those with an odd ratio",
    ),
    "reward_shaping.enabled": Unneeded(),
    "reward_shaping.overlong_buffer_length": overlong_buffer,
    "reward_shaping.overlong_buffer_penalty": "overlong.penalty",
    "reward_shaping.max_response_length": Unneeded(),
    "reward_scaling.enabled": Same((False,), "scale rewards in the reward function"),
    "val_period": "run.val_period",
    "val_at_start": "run.val_at_start",
    "val_at_end": Same((True, False), "validation at the end always takes place"),
    "max_val_samples": "run.max_val_samples",
    "val_batch_size": Unneeded(),
    "val_batches": Unneeded(),
    "val_global_batch_size": Unneeded(),
    "val_micro_batch_size": Unneeded(),
    "seed": "run.seed",
    "async_grpo.enabled": Same((False,), "generation and training take turns so far"),
    "reference_policy_kl_penalty": "loss.beta",  # dpo's own section
    "preference_average_log_probs": "loss.average_logprobs",
    "sft_average_log_probs": lambda value, flat: (
        {"sft_reduction": "sequence_mean"} if value and flat.get("dpo.sft_loss_weight") else {}
    ),
    "preference_loss_weight": Same(
        (1, 1.0), "the preference loss has weight 1; scale optimizer.lr and sft_coef instead"
    ),
    "sft_loss_weight": sft_term,
    # the loss
    "loss_fn.reference_policy_kl_penalty": "kl.coef",
    "loss_fn.reference_policy_kl_type": "kl.estimator",
    "loss_fn.ratio_clip_min": policy_loss,
    "loss_fn.ratio_clip_max": policy_loss,
    "loss_fn.ratio_clip_c": policy_loss,
    "loss_fn.sequence_level_importance_ratios": policy_loss,
    "loss_fn.use_cispo": policy_loss,
    "loss_fn.disable_ppo_ratio": policy_loss,
    "loss_fn.token_level_loss": reduction,
    "loss_fn.use_on_policy_kl_approximation": lambda value, flat: (
        {"kl.gradient": "importance"} if value else {}
    ),
    "loss_fn.use_importance_sampling_correction": off_policy,
    "loss_fn.truncated_importance_sampling_ratio": off_policy,
    "loss_fn.truncated_importance_sampling_ratio_min": off_policy,
    "loss_fn.truncated_importance_sampling_type": off_policy,
    "loss_fn.seq_logprob_error_in_loss": Unneeded(),
    "loss_fn.force_on_policy_ratio": Same(
        (False, None), "with one update per batch the ratio is 1 anyway"
    ),
    # checkpoints
    "checkpointing.enabled": Same(
        (True,), "checkpoints are always written; run.save_period: 0 writes only the last one"
    ),
    "checkpointing.checkpoint_dir": "run.dir",
    "checkpointing.metric_name": metric,
    "checkpointing.higher_is_better": lambda value, flat: (
        {"run.higher_is_better": value} if flat.get("checkpointing.metric_name") else {}
    ),
    "checkpointing.keep_top_k": keep_top_k,
    "checkpointing.save_period": "run.save_period",
    "checkpointing.model_save_format": Same(("safetensors", None), "checkpoints are safetensors"),
    "checkpointing.save_consolidated": Unneeded(),
    "checkpointing.checkpoint_must_save_by": Same(
        (None,), "no time limit: an interrupted run saves and can be resumed"
    ),
    # model, batch and optimizer
    "policy.model_name": "model.path",
    "policy.tokenizer.name": tokenizer,
    "policy.tokenizer.chat_template": "model.chat_template",
    "policy.tokenizer.chat_template_kwargs": "model.chat_template_kwargs",
    "policy.train_global_batch_size": "train_global_batch_size",
    "policy.train_micro_batch_size": micro_batch_size,
    "policy.generation_batch_size": Unneeded(),
    "policy.logprob_batch_size": Unneeded(),
    "policy.logprob_chunk_size": "trainer.logprob_chunk",
    "policy.max_total_sequence_length": "data.max_total_sequence_length",
    "policy.precision": precision,
    "policy.max_grad_norm": clip_gradient,
    "policy.make_sequence_length_divisible_by": Unneeded(),
    "policy.offload_optimizer_for_logprob": Same(
        (False,), "the optimizer's state stays on its device"
    ),
    "policy.optimizer.name": optimizer_name,
    "policy.optimizer.kwargs.lr": "optimizer.lr",
    "policy.optimizer.kwargs.weight_decay": "optimizer.weight_decay",
    "policy.optimizer.kwargs.betas": betas,
    "policy.optimizer.kwargs.eps": "optimizer.eps",
    "policy.optimizer.kwargs.foreach": Unneeded(),
    "policy.optimizer.kwargs.fused": Unneeded(),
    "policy.scheduler": scheduler,
    "policy.sequence_packing.enabled": "trainer.sequence_packing",
    "policy.sequence_packing.train_mb_tokens": micro_batch_tokens,
    "policy.dynamic_batching.enabled": Unneeded(),
    "policy.dynamic_batching.train_mb_tokens": micro_batch_tokens,
    "policy.dtensor_cfg.activation_checkpointing": lambda value, flat: (
        {"parallel.activation_checkpointing": "full"} if value else {}
    ),
    "policy.dtensor_cfg.tensor_parallel_size": "parallel.tp",
    "policy.dtensor_cfg.context_parallel_size": "parallel.cp",
    "policy.dtensor_cfg.sequence_parallel": sequence_parallel,
    "policy.dtensor_cfg.cpu_offload": "parallel.cpu_offload",
    "policy.dtensor_cfg.custom_parallel_plan": Same(
        (None,), "how layers are split follows from parallel.tp"
    ),
    "policy.dtensor_cfg.enabled": Unneeded(),
    "policy.dtensor_cfg._v2": Unneeded(),
    "policy.dtensor_cfg.lora_cfg.enabled": Unneeded(),
    "policy.dtensor_cfg.lora_cfg.dim": "lora.rank",
    "policy.dtensor_cfg.lora_cfg.alpha": "lora.alpha",
    "policy.dtensor_cfg.lora_cfg.dropout": "lora.dropout",
    "policy.dtensor_cfg.lora_cfg.target_modules": lambda value, flat: (
        {"lora.target_modules": value} if value else {}
    ),
    "policy.dtensor_cfg.lora_cfg.match_all_linear": Unneeded(),
    "policy.dtensor_cfg.lora_cfg.use_triton": Unneeded(),
    "policy.dtensor_cfg.lora_cfg.dropout_position": Same(
        ("pre",), "dropout comes before the adapter, as in PEFT"
    ),
    "policy.megatron_cfg.enabled": Same(
        (False, None), "the Megatron backend is not there yet; the model trains through dtensor"
    ),
    # generation
    "policy.generation.backend": generation_backend,
    "policy.generation.max_new_tokens": max_new_tokens,
    "policy.generation.temperature": "generation.temperature",
    "policy.generation.top_p": "generation.top_p",
    "policy.generation.top_k": lambda value, flat: (
        {"generation.top_k": value} if value and value > 0 else {}
    ),
    "policy.generation.stop_token_ids": "generation.stop_token_ids",
    "policy.generation.stop_strings": "generation.stop_strings",
    "policy.generation.colocated.enabled": of_vllm("generation.colocated", unless=True),
    "policy.generation.vllm_cfg.tensor_parallel_size": of_vllm(
        "generation.tensor_parallel_size", unless=1
    ),
    "policy.generation.vllm_cfg.pipeline_parallel_size": Same(
        (1,), "an engine is split over devices by tensor_parallel_size alone"
    ),
    "policy.generation.vllm_cfg.expert_parallel_size": Same(
        (1,), "an engine is split over devices by tensor_parallel_size alone"
    ),
    "policy.generation.vllm_cfg.max_model_len": of_vllm("generation.max_model_len"),
    **{f"policy.generation.vllm_cfg.{name}": engine_arguments for name in ENGINE_ARGUMENTS},
    "policy.generation.vllm_kwargs": engine_arguments,
    # data
    "data.shuffle": "data.shuffle",
    "data.train.data_path": path("train"),
    "data.train_data_path": path("train"),
    "data.validation.data_path": path("validation"),
    "data.val_data_path": path("validation"),
    "data.train.split": "data.split",
    "data.train_split": "data.split",
    "data.validation.split": "data.validation_split",
    "data.val_split": "data.validation_split",
    "data.train.dataset_name": dataset_name,
    "data.dataset_name": dataset_name,
    "data.default.dataset_name": dataset_name,
    "data.validation.dataset_name": Unneeded(),
    **{
        f"data.{place}{theirs}": ours
        for place in ("", "train.", "default.")
        for theirs, ours in (
            ("input_key", "data.prompt_column"),
            ("prompt_key", "data.prompt_column"),
            ("output_key", "data.response_column"),
            ("chat_key", "data.messages_column"),
            ("chosen_key", "data.chosen_column"),
            ("rejected_key", "data.rejected_column"),
        )
    },
    "grpo:data.output_key": "data.answer_column",
    "grpo:data.train.output_key": "data.answer_column",
    "grpo:data.default.output_key": "data.answer_column",
    "data.max_input_seq_length": Unneeded(),
    "data.num_workers": Unneeded(),
    "data.add_eos": Same((True,), "the end token is always trained on"),
    "data.add_bos": Same((True,), "special tokens are the tokenizer's own"),
    "data.add_generation_prompt": Unneeded(),
    # logging
    "logger.log_dir": Unneeded(),
    "logger.num_val_samples_to_print": Unneeded(),
    "logger.wandb_enabled": logger("wandb"),
    "logger.tensorboard_enabled": logger("tensorboard"),
    "logger.mlflow_enabled": logger("mlflow"),
    "logger.swanlab_enabled": Same((False, None), "loggers are tensorboard, wandb and mlflow"),
    "logger.monitor_gpus": Unneeded(),
    "logger.wandb.project": lambda value, flat: (
        {"run.project": value} if flat.get("logger.wandb_enabled") else {}
    ),
    "cluster.gpus_per_node": devices,
    "cluster.num_nodes": devices,
}

OPTIONAL_SECTIONS = {
    "policy.megatron_cfg": "policy.megatron_cfg.enabled",
    "policy.dtensor_cfg.lora_cfg": "policy.dtensor_cfg.lora_cfg.enabled",
    "policy.sequence_packing": "policy.sequence_packing.enabled",
    "policy.dynamic_batching": "policy.dynamic_batching.enabled",
    "grpo.async_grpo": "grpo.async_grpo.enabled",
    "grpo.reward_shaping": "grpo.reward_shaping.enabled",
    "grpo.reward_scaling": "grpo.reward_scaling.enabled",
    "logger.wandb": "logger.wandb_enabled",
    "logger.tensorboard": "logger.tensorboard_enabled",
    "logger.mlflow": "logger.mlflow_enabled",
    "logger.swanlab": "logger.swanlab_enabled",
}
"""Sections that count only where their switch is on."""

PREFIXES: dict[str, Rule] = {
    "policy.generation.vllm_cfg.": Unneeded(),
    "policy.generation.colocated.": Unneeded(),
    "policy.sequence_packing.": Unneeded(),
    "policy.dynamic_batching.": Unneeded(),
    "policy.dtensor_cfg.automodel_kwargs": Unneeded(),
    "policy.dtensor_cfg.env_vars": Unneeded(),
    "logger.gpu_monitoring.": Unneeded(),
    "logger.": Unneeded(),
    "env.": environments,
}
"""Keys that begin so and have no rule of their own."""
