"""Translate a NeMo RL configuration (GRPO, SFT or DPO): python tools/from_nemo_rl.py FILE > OURS.

Prints our YAML, with what trains differently as comments at the end; a file that can't be trained
here is refused. `defaults` and ${interpolations} are followed. Keys were read off NeMo RL's
examples/configs and their recipes.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from string import Formatter
from typing import Any

from nemorl.checks import require
from nemorl.data.prompts import parts_of
from nemorl.data.sources import has_splits
from nemorl.runtime.config.tree import construct, layer, nested
from nemorl.runtime.config.yaml_io import dump, read
from nemorl.runtime.start.registry import get_algorithm

Flat = Mapping[str, Any]
"""All of their settings by dotted key."""
Settings = dict[str, Any]
"""Our dotted keys and their values; the key "note" holds what changes nevertheless."""
Rule = Callable[[Any, Flat], Settings | str]
"""From a value and all of their settings to ours, or to the reason why there are none."""


class Blocker(str):
    """The reason why a file can't be trained here, and what to do."""


RENAMED = {
    "num_prompts_per_step": "num_prompts_per_step",
    "num_generations_per_prompt": "num_generations_per_prompt",
    "max_num_epochs": "num_epochs",
    "use_dynamic_sampling": "dynamic_sampling",
    "dynamic_sampling_max_gen_batches": "max_sampling_rounds",
    "val_at_start": "run.val_at_start",
    "max_val_samples": "run.max_val_samples",
    "seed": "run.seed",
    "reference_policy_kl_penalty": "loss.beta",  # of section dpo
    "preference_average_log_probs": "loss.average_logprobs",
    "loss_fn.reference_policy_kl_type": "kl.estimator",
    "checkpointing.checkpoint_dir": "run.dir",
    "policy.model_name": "model.path",
    "policy.tokenizer.chat_template_kwargs": "model.chat_template_kwargs",
    "policy.train_global_batch_size": "train_global_batch_size",
    "policy.logprob_chunk_size": "trainer.logprob_chunk",
    "policy.sequence_packing.enabled": "trainer.sequence_packing",
    "policy.dtensor_cfg.tensor_parallel_size": "parallel.tp",
    "policy.dtensor_cfg.context_parallel_size": "parallel.cp",
    "policy.dtensor_cfg.cpu_offload": "parallel.cpu_offload",
    "policy.megatron_cfg.tensor_model_parallel_size": "parallel.tp",
    "policy.megatron_cfg.pipeline_model_parallel_size": "parallel.pp",
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size": "parallel.vpp",
    **{
        f"policy.megatron_cfg.{name}": f"parallel.{name}"
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    },
    "policy.megatron_cfg.context_parallel_size": "parallel.cp",
    "policy.megatron_cfg.expert_model_parallel_size": "parallel.ep",
    "policy.dtensor_cfg.lora_cfg.dim": "lora.rank",
    "policy.dtensor_cfg.lora_cfg.alpha": "lora.alpha",
    "policy.dtensor_cfg.lora_cfg.dropout": "lora.dropout",
    "policy.generation.temperature": "generation.temperature",
    "policy.generation.top_p": "generation.top_p",
    "policy.generation.stop_token_ids": "generation.stop_token_ids",
    "policy.generation.stop_strings": "generation.stop_strings",
    "data.shuffle": "data.shuffle",
}
"""Keys of the same meaning. The algorithm's own section is not named."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "grpo:max_num_epochs": ((1,), "grpo counts steps here: set max_num_steps"),
    "async_grpo.enabled": (
        (False, None),
        Blocker("set it to false, and add async.max_staleness to what is written"),
    ),
    "adv_estimator.name": (
        ("grpo", "reinforce_plus_plus"),
        Blocker("advantages are grpo's or reinforce_plus_plus'"),
    ),
    "reward_shaping.mode": (
        ("response_length", None),
        Blocker("rewards are shaped by response_length"),
    ),
    "seq_logprob_error_threshold": (
        (None,),
        "responses are not dropped by their error; gap.stop ends the run, off_policy.mode"
        " sequence_mask drops responses with an odd ratio",
    ),
    "preference_loss_weight": ((1,), "it is 1 here; scale optimizer.lr and sft_coef instead"),
    "loss_fn.kl_input_clamp_value": ((20, None), "log-ratios are clamped to ±20"),
    "loss_fn.kl_output_clamp_value": ((10, None), "the penalty is clamped to ±10 per token"),
    "checkpointing.checkpoint_must_save_by": ((None,), "an interrupted run saves and resumes"),
    "policy.megatron_cfg.expert_tensor_parallel_size": (
        (1, None),
        "experts are whole with parallel.ep above 1, and split by tp without",
    ),
    "policy.megatron_cfg.pipeline_model_parallel_layout": (
        (None,),
        "stages are as equal as can be, or set parallel.num_layers_in_first_pipeline_stage and"
        " ..._last_...",
    ),
    "policy.megatron_cfg.num_layers_per_virtual_pipeline_stage": (
        (None,),
        "set parallel.vpp to the model's num_hidden_layers divided by pp and by this number",
    ),
    "policy.megatron_cfg.layernorm_epsilon": ((None,), "it is that of the model's config.json"),
    "policy.megatron_cfg.fp8_cfg.enabled": ((False, None), "it trains in policy.precision"),
    "policy.megatron_cfg.peft.enabled": (
        (False, None),
        Blocker("adapters are trained by dtensor_cfg alone: set it to false, or use lora_cfg"),
    ),
    "policy.megatron_cfg.optimizer.optimizer": (
        ("adam",),
        Blocker("the optimizer is AdamW; choose adam"),
    ),
    "policy.megatron_cfg.optimizer.fp16": (
        (False, None),
        Blocker("precision is float32 or bfloat16; choose one of them"),
    ),
    "policy.megatron_cfg.optimizer.params_dtype": (
        ("float32", None),
        "the optimizer has parameters in float32",
    ),
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": (
        (False, None),
        "the optimizer's state stays on the devices",
    ),
    "policy.hf_config_overrides": (
        ({}, None),
        Blocker("a model is used as its config.json says: change that in a copy of the model"),
    ),
    "policy.dtensor_cfg.expert_parallel_size": (
        (1, None),
        "experts are divided as other parameters are: by FSDP2, and among the ranks of parallel.tp",
    ),
    "policy.dtensor_cfg.custom_parallel_plan": (
        (None,),
        Blocker("how layers are split follows from tensor_parallel_size: remove it"),
    ),
    "policy.dtensor_cfg.lora_cfg.exclude_modules": (
        ([], None),
        "list the layers that get an adapter as lora.target_modules",
    ),
    "policy.dtensor_cfg.lora_cfg.lora_A_init": (
        ("kaiming",),
        "adapters start from PEFT's initialization (Kaiming)",
    ),
    "policy.generation.vllm_cfg.kv_cache_dtype": (
        ("auto", None),
        "name it in generation.engine to sample with it",
    ),
    "data.add_eos": ((True,), "the end token is always trained on"),
    "data.add_bos": ((True,), "special tokens are the tokenizer's own"),
    "logger.swanlab_enabled": ((False, None), "loggers are tensorboard, wandb and mlflow"),
}
"""Keys whose listed values are what nemorl does anyway; others are reported, with this reason.
"grpo:" marks a key that means something else in the other algorithms."""

SECTIONS = {
    "async_rl": "remove it, and add async.max_staleness to what is written",
    "value": "nemorl grpo has no critic; a script may train one (docs/extending.md)",
    "teacher": "there is no distillation in grpo, sft and dpo",
    "on_policy_distillation": "there is no distillation in grpo, sft and dpo",
    "reward_penalties": "write penalties as a reward of your own, and remove it",
    "token_capture": "episodes of NeMo Gym are not supported; remove it",
}
"""Sections that select another kind of training, unless they are off."""

NEUTRAL = re.compile(
    r"val_(batch_size|global_batch_size|micro_batch_size|at_end)|batch_multiplier"
    r"|async_grpo\..*"
    r"|calculate_advantages_on_gpu|skip_reference_policy_logprobs_calculation"
    r"|reward_(shaping|scaling)\..*|loss_fn\.(force_on_policy_ratio|seq_logprob_error_in_loss)"
    r"|checkpointing\.(save_consolidated|save_optimizer|model_save_format|resume_if_exists)"
    r"|policy\.(generation_batch_size|logprob_batch_size|make_sequence_length_divisible_by)"
    r"|policy\.(offload_optimizer_for_logprob|activation_checkpointing_enabled)"
    r"|policy\.tokenizer\.is_tokenizer_processor"
    r"|policy\.(sequence_packing|dynamic_batching|optimizer\.kwargs)\..*"
    r"|policy\.dtensor_cfg\.(enabled|_v2|automodel_kwargs|env_vars\..*|clear_cache_every_n_steps)"
    r"|policy\.dtensor_cfg\.lora_cfg\.(enabled|match_all_linear|use_triton|dropout_position)"
    r"|policy\.megatron_cfg\.(converter_type|empty_unused_memory_level|env_vars\..*|.*_fusion)"
    r"|policy\.megatron_cfg\.(defer_fp32_logits|use_gloo_process_groups|moe_per_layer_logging)"
    r"|policy\.megatron_cfg\.moe_(enable_deepep|token_dispatcher_type|shared_expert_overlap)"
    r"|policy\.megatron_cfg\.moe_router_(dtype|bias_update_rate)"
    r"|policy\.megatron_cfg\.optimizer\.(bf16|sgd_momentum|min_lr|use_.*|optimizer_offload_fraction)"
    r"|policy\.megatron_cfg\.distributed_data_parallel_config\..*"
    r"|policy\.megatron_cfg\.(fp8_cfg|peft)\..*"
    r"|policy\.generation\.(max_new_tokens|vllm_kwargs)"
    r"|policy\.generation\.(vllm_cfg|sglang_cfg|mcore_generation_config|colocated)\..*"
    r"|data\.(max_input_seq_length|num_workers|add_generation_prompt|_override_)"
    r"|data\.(train|validation|default|val_data_paths)(\..*)?"
    r"|data\.(train_data_path|val_data_path|train_split|val_split)"
    r"|env\..*|logger\..*|cluster\..*"
)
"""Keys that other rules read, or without bearing on what is trained."""

HUB: dict[str, tuple[str, str, dict[str, str]]] = {
    "openmathinstruct2": (
        "nvidia/OpenMathInstruct-2",
        "train_1M",
        {"input_key": "problem", "output_key": "expected_answer"},
    ),
    "deepscaler": (
        "agentica-org/DeepScaleR-Preview-Dataset",
        "train",
        {"input_key": "problem", "output_key": "answer"},
    ),
    "aime2024": (
        "HuggingFaceH4/aime_2024",
        "train",
        {"input_key": "problem", "output_key": "answer"},
    ),
    "tulu3sftmixture": ("allenai/tulu-3-sft-mixture", "train", {"chat_key": "messages"}),
    "tulu3preference": ("allenai/llama-3.1-tulu-3-8b-preference-mixture", "train", {}),
}
"""Data sets that NeMo RL knows by name: hub name, default split and columns. Rows of the others are
put together by its code."""
COLUMNS = {
    "input_key": "data.prompt_column",
    "prompt_key": "data.prompt_column",
    "output_key": "data.response_column",
    "chat_key": "data.messages_column",
    "chosen_key": "data.chosen_column",
    "rejected_key": "data.rejected_column",
}
PROMPTS = {"prompt_file": "data.prompt_template", "system_prompt_file": "data.system_prompt"}
IN_DATASETS = (
    *(*COLUMNS, *PROMPTS),
    *("dataset_name", "dataset_type", "data_path", "split", "subset", "processor", "env_name"),
    *("split_validation_size", "seed"),
)
"""Keys of a data set that are read; others are reported."""

VALIDATED = (
    *("run.metric", "run.higher_is_better"),
    *("run.val_period", "run.val_at_start", "run.max_val_samples"),
)
"""Settings that need rows to validate on."""

ENGINE = ("gpu_memory_utilization", "enforce_eager")
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
"""torch's defaults."""
MEGATRONS_ADAMW = {
    **{"lr": 1e-3, "weight_decay": 1e-2},
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8},
}
"""Megatron's defaults; it has none of the rate."""
UNBOUNDED = 1e6
PER_STEP = ("prompts_per_step", "generations_per_prompt")


def when(ours: str, setting: Any = None) -> Rule:
    """Carry a value (or `setting` in its place) over if it is neither null, 0, false nor empty."""
    return lambda value, flat: {ours: setting or value} if value else {}


RULES: dict[str, Rule] = {
    "overlong_filtering": when("overlong.filter"),
    "sft_loss_weight": when("sft_coef"),
    "sft_average_log_probs": lambda value, flat: (
        {"sft_reduction": "sequence_mean"} if value and flat.get("dpo.sft_loss_weight") else {}
    ),
    "val_period": lambda value, flat: {"run.val_period": max(value or 0, 0)},
    "loss_fn.token_level_loss": lambda value, flat: {
        "reduction": "token_mean" if value else "sequence_mean"
    },
    "checkpointing.keep_top_k": lambda value, flat: {"run.keep_checkpoints": value or 1_000_000},
    "policy.tokenizer.name": lambda value, flat: (
        {} if value in (None, flat.get("policy.model_name")) else {"model.tokenizer": value}
    ),
    # null is no template there, "default" the tokenizer's
    "policy.tokenizer.chat_template": lambda value, flat: (
        {} if value == "default" else {"model.chat_template": value or "passthrough"}
    ),
    "policy.dtensor_cfg.activation_checkpointing": when(
        "parallel.activation_checkpointing", "full"
    ),
    **{
        f"policy.megatron_cfg.distributed_data_parallel_config.{name}": when(f"parallel.{name}")
        for name in ("overlap_grad_reduce", "overlap_param_gather")
    },
    "policy.megatron_cfg.activation_checkpointing": when(
        "parallel.activation_checkpointing", "full"
    ),
    "policy.megatron_cfg.pipeline_dtype": lambda value, flat: (
        {}
        if value in (None, flat.get("policy.precision"))
        else "stages send each other policy.precision"
    ),
    "policy.dtensor_cfg.lora_cfg.target_modules": when("lora.target_modules"),
    "policy.generation.top_k": lambda value, flat: (
        {"generation.top_k": value} if (value or 0) > 0 else {}
    ),
    "policy.generation.vllm_cfg.precision": lambda value, flat: (
        {}
        if value in (None, flat.get("policy.precision"))
        else "the engine computes in policy.precision"
    ),
    "logger.wandb.project": lambda value, flat: (
        {"run.project": value} if flat.get("logger.wandb_enabled") else {}
    ),
}


def rule(*keys: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(keys, function))
        return function

    return register


@rule(
    *("normalize_rewards", "use_leave_one_out_baseline"),
    *("adv_estimator.normalize_rewards", "adv_estimator.use_leave_one_out_baseline"),
    *("adv_estimator.minus_baseline", "loss_fn.use_kl_in_reward"),
)
def advantage(value: Any, flat: Flat) -> Settings:
    def option(name: str) -> Any:
        return flat.get(f"grpo.adv_estimator.{name}", flat.get(f"grpo.{name}"))

    if option("name") == "reinforce_plus_plus":
        penalty = flat.get("loss_fn.reference_policy_kl_penalty") or 0.0
        return {
            "advantage.name": "reinforce_plus_plus",
            "advantage.group_baseline": bool(option("minus_baseline")),
            "advantage.ddof": 0,  # of the variance over the batch
            "advantage.kl_coef": penalty if flat.get("loss_fn.use_kl_in_reward") else 0.0,
        }
    loo = option("use_leave_one_out_baseline")
    scale = "leave_one_out_std" if loo else "group_std"
    return {
        "advantage.name": "group",
        "advantage.baseline": "leave_one_out" if loo else "group_mean",
        "advantage.scale": scale if option("normalize_rewards") else "none",
    }


@rule("loss_fn.reference_policy_kl_penalty", "loss_fn.use_on_policy_kl_approximation")
def kl(value: Any, flat: Flat) -> Settings:
    coef = flat.get("loss_fn.reference_policy_kl_penalty")
    if not coef or flat.get("loss_fn.use_kl_in_reward"):
        return {}
    sampled = flat.get("loss_fn.use_on_policy_kl_approximation")
    if not sampled:
        return {"kl.coef": coef, "kl.gradient": "score"}
    note = "the gradient differs from NeMo RL's where its clamps act: docs/coming-from.md"
    return {"kl.coef": coef, "kl.gradient": "importance", "note": note}


@rule(
    *(f"loss_fn.ratio_clip_{which}" for which in ("min", "max", "c")),
    "loss_fn.sequence_level_importance_ratios",
    "loss_fn.use_cispo",
    "loss_fn.disable_ppo_ratio",
)
def policy_loss(value: Any, flat: Flat) -> Settings:
    if flat.get("loss_fn.disable_ppo_ratio"):
        return {"loss.name": "reinforce"}
    cispo = flat.get("loss_fn.use_cispo")
    gspo = flat.get("loss_fn.sequence_level_importance_ratios")
    name = "cispo" if cispo else "gspo" if gspo else "clipped"
    clips = {"clip_low": "min", "clip_high": "max"}
    if name == "clipped":
        clips["dual_clip"] = "c"
    given = {ours: flat.get(f"loss_fn.ratio_clip_{theirs}") for ours, theirs in clips.items()}
    return {"loss.name": name} | {
        f"loss.{ours}": bound for ours, bound in given.items() if bound is not None
    }


@rule(
    "loss_fn.use_importance_sampling_correction",
    *(f"loss_fn.truncated_importance_sampling_{what}" for what in ("ratio", "ratio_min", "type")),
)
def off_policy(value: Any, flat: Flat) -> Settings | str:
    if not flat.get("loss_fn.use_importance_sampling_correction"):
        return {}
    theirs = "loss_fn.truncated_importance_sampling_"
    kind, low, high = (flat.get(theirs + what) for what in ("type", "ratio_min", "ratio"))
    modes = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": "sequence_mask"}
    if (kind or "tis") not in modes:
        return Blocker(f"corrections are {', '.join(modes)}; choose one of them")
    settings: Settings = {"off_policy.mode": modes[kind or "tis"]}
    if kind == "seq-mask-tis":
        settings["off_policy.level"] = "geometric"
    if low is not None and kind in ("icepop", "seq-mask-tis"):
        settings["off_policy.min"] = low
    return settings | {"off_policy.max": UNBOUNDED if high is None else high}


@rule("max_rollout_turns")
def turns(value: Any, flat: Flat) -> Settings | str:
    """A problem of mathematics has one turn however many are allowed."""
    if value in (1, None) or {key.split(".")[1] for key in flat if key[:4] == "env."} == {"math"}:
        return {}
    return Blocker(
        "environments of several turns are not translated: see docs/environments.md, or set it to 1"
    )


@rule("max_num_steps")
def steps(value: Any, flat: Flat) -> Settings:
    """Whichever of steps and epochs ends first there; GRPO knows steps only."""
    if value is None or value >= 1_000_000:
        if "grpo.max_num_steps" not in flat:
            return {}
        note = f"{value} stands for no limit: there the run ends with the last epoch; set it here"
        return {"max_num_steps": 1_000_000, "note": note}
    return {"max_num_steps": value}


@rule("val_batches")
def validation_rows(value: Any, flat: Flat) -> Settings:
    size = flat.get("sft.val_global_batch_size", flat.get("dpo.val_global_batch_size"))
    return {"run.max_val_samples": value * size} if size and value > 0 else {}


@rule("reward_scaling.enabled")
def reward_weight(value: Any, flat: Flat) -> Settings:
    """Advantages don't see what is added to every reward, only the scale."""

    def span(which: str) -> float:
        low, high = (flat.get(f"grpo.reward_scaling.{which}_{end}") for end in ("min", "max"))
        return float((1 if high is None else high) - (low or 0))

    scale = span("target") / span("source") if value else 1.0
    return {} if scale == 1 else {"reward_weights": [scale]}


@rule("reward_shaping.enabled")
def overlong(value: Any, flat: Flat) -> Settings | str:
    """A buffer of tokens there, a share of the longest response here."""

    def option(name: str) -> Any:
        return flat.get(f"grpo.reward_shaping.{name}")

    if not value:
        return {}
    factor = option("stop_properly_penalty_coef")
    if factor is not None:
        return f"rewards of truncated responses are not multiplied by {factor}: do it in a reward"
    longest = option("max_response_length") or 0
    response = flat.get("policy.generation.max_new_tokens") or longest
    settings = {
        "overlong.buffer": (option("overlong_buffer_length") or 0) / response,
        "overlong.penalty": option("overlong_buffer_penalty"),
    }
    note = f"the penalty is full at {response} tokens, not at {longest}"
    return settings if longest == response else settings | {"note": note}


@rule("checkpointing.enabled", "checkpointing.save_period")
def save_period(value: Any, flat: Flat) -> Settings:
    on = flat.get("checkpointing.enabled") is not False
    return {"run.save_period": (flat.get("checkpointing.save_period") or 0) if on else 0}


@rule("checkpointing.metric_name", "checkpointing.higher_is_better")
def metric(value: Any, flat: Flat) -> Settings:
    """val:accuracy and val_reward are val_accuracy and val_reward; train:loss is loss."""
    theirs = flat.get("checkpointing.metric_name")
    if theirs is None or not flat.get("checkpointing.keep_top_k"):
        return {}
    phase, _, name = str(theirs).rpartition(":")
    name = re.sub(r"^(validation-.*?_|val_)", "", name)
    settings: Settings = {"run.metric": name if phase == "train" else f"val_{name}"}
    higher = flat.get("checkpointing.higher_is_better")
    return settings if higher is None else settings | {"run.higher_is_better": higher}


@rule("policy.optimizer.name")
def optimizer(value: Any, flat: Flat) -> Settings | str:
    if not str(value).endswith(("AdamW", "FusedAdam")):
        return Blocker("only AdamW is translated; choose it, and set optimizer.name")
    given = {name: flat.get(f"policy.optimizer.kwargs.{name}") for name in ADAMW}
    chosen: Any = {name: ADAMW[name] if v is None else v for name, v in given.items()}
    beta1, beta2 = chosen.pop("betas")
    return {f"optimizer.{name}": setting for name, setting in chosen.items()} | {
        "optimizer.beta1": beta1,
        "optimizer.beta2": beta2,
    }


def updates_per_step(flat: Flat) -> int:
    """Return the optimizer steps on the responses of a step."""
    prompts, each = (flat.get(f"grpo.num_{what}", 1) for what in PER_STEP)
    return max(1, prompts * each // (flat.get("policy.train_global_batch_size") or 1))


def total_steps(flat: Flat) -> int | None:
    return next((flat[key] for key in flat if key.endswith(".max_num_steps")), None)


@rule("policy.scheduler")
def scheduler(value: Any, flat: Flat) -> Settings | str:
    """A list of torch schedulers and their milestones, or one: they count steps, not updates."""
    settings: Settings = {}
    lr = flat.get("policy.optimizer.kwargs.lr") or ADAMW["lr"]
    updates, total, warmup = updates_per_step(flat), total_steps(flat), 0
    for part in [value] if isinstance(value, Mapping) else value or []:
        name, options = str(part.get("name", "")).rpartition(".")[2], part.get("kwargs") or {}
        start, end = options.get("start_factor", 1 / 3), options.get("end_factor", 1.0)
        if name == "LinearLR" and end >= start:
            warmup = options.get("total_iters", 5)
            settings["optimizer.warmup_steps"] = steps = warmup * updates
            if steps and start > 0.01:
                settings["note"] = (
                    f"the warm-up starts at 1/{steps} of the rate instead of {start:g} of it"
                )
        elif name in ("LinearLR", "CosineAnnealingLR"):
            linear = name == "LinearLR"
            settings["optimizer.schedule"] = "linear" if linear else "cosine"
            settings["optimizer.min_lr_ratio"] = end if linear else options.get("eta_min", 0) / lr
            if warmup + options.get("total_iters" if linear else "T_max", 0) != total:
                settings["note"] = "the rate reaches its end when the run does here"
        elif name not in ("ConstantLR", "", "None"):
            return Blocker("schedules are constant, linear and cosine; choose one of them")
    return settings


@rule("policy.max_grad_norm", "policy.megatron_cfg.optimizer.clip_grad")
def clipping(value: Any, flat: Flat) -> Settings:
    own = "policy.megatron_cfg.optimizer.clip_grad"
    if flat.get("policy.megatron_cfg.enabled") and own in flat:
        value = flat[own]
    return {"optimizer.max_grad_norm": value or None}


@rule(*(f"policy.megatron_cfg.optimizer.{name}" for name in MEGATRONS_ADAMW))
def megatron_optimizer(value: Any, flat: Flat) -> Settings:
    given = {name: flat.get(f"policy.megatron_cfg.optimizer.{name}") for name in MEGATRONS_ADAMW}
    return {
        f"optimizer.{name.removeprefix('adam_')}": default if given[name] is None else given[name]
        for name, default in MEGATRONS_ADAMW.items()
    }


@rule("policy.megatron_cfg.scheduler")
def megatron_scheduler(value: Any, flat: Flat) -> Settings | str:
    """Counts steps, as the others do; the rate ends at the optimizer's min_lr."""
    options = value or {}
    lr, end = (
        flat.get(f"policy.megatron_cfg.optimizer.{name}") or 0.0 for name in ("lr", "min_lr")
    )
    style = options.get("lr_decay_style") or "linear"  # Megatron's own
    if style not in ("constant", "linear", "cosine"):
        return Blocker("schedules are constant, linear and cosine; choose one of them")
    settings: Settings = {}
    notes = []
    if warmup := options.get("lr_warmup_iters") or 0:
        settings["optimizer.warmup_steps"] = steps = warmup * updates_per_step(flat)
        if (start := options.get("lr_warmup_init") or 0.0) > 0.01 * lr:
            notes.append(f"the warm-up starts at 1/{steps} of the rate instead of at {start:g}")
    if style != "constant" and end < lr:
        settings["optimizer.schedule"] = style
        settings["optimizer.min_lr_ratio"] = end / lr
        if options.get("lr_decay_iters") not in (None, total_steps(flat)):
            notes.append("the rate reaches its end when the run does here")
    decay = flat.get("policy.megatron_cfg.optimizer.weight_decay")
    if any(options.get(f"{which}_weight_decay") not in (None, decay) for which in ("start", "end")):
        notes.append(f"weight decay is {decay} all the time")
    return settings | ({"note": "; ".join(notes)} if notes else {})


@rule("policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32")
def reduce_dtype(value: Any, flat: Flat) -> Settings:
    in_bfloat16 = precision(flat.get("policy.precision"), flat) == BFLOAT16
    return {"parallel.reduce_dtype": "bfloat16"} if in_bfloat16 and not value else {}


@rule("policy.megatron_cfg.freeze_moe_router", "policy.megatron_cfg.moe_router_load_balancing_type")
def routers(value: Any, flat: Flat) -> Settings | str:
    """Only in mixtures of experts; files name them for all models."""
    name = str(flat.get("policy.model_name"))
    split = (flat.get("policy.megatron_cfg.expert_model_parallel_size") or 1) > 1
    if value in (False, None, "none") or not (split or MIXTURE.search(name)):
        return {}
    if value is True:
        return "routers are trained, too"
    return "experts are balanced by Hugging Face's loss, if trainer.router_aux_loss_coef is above 0"


@rule("policy.precision")
def precision(value: Any, flat: Flat) -> Settings | str:
    known = {"float32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
    if value not in known:
        return Blocker("precision is float32 or bfloat16; choose one of them")
    return {"parallel.param_dtype": known[value]}


BFLOAT16 = {"parallel.param_dtype": "bfloat16"}
MIXTURE = re.compile(r"moe|mixtral|-a\d+b", re.IGNORECASE)
"""In the names of models with experts."""


@rule(
    "policy.train_micro_batch_size",
    *(f"policy.{budget}.train_mb_tokens" for budget in ("sequence_packing", "dynamic_batching")),
)
def micro_batch_size(value: Any, flat: Flat) -> Settings:
    """Only without a budget of tokens, which must hold the longest sequence."""
    for budget in ("sequence_packing", "dynamic_batching"):
        if flat.get(f"policy.{budget}.enabled"):
            tokens = flat.get(f"policy.{budget}.train_mb_tokens") or 0
            longest = lengths(None, flat)["data.max_total_sequence_length"]
            return {"trainer.micro_batch_tokens": max(int(tokens), longest)}
    size = flat.get("policy.train_micro_batch_size")
    return {} if size is None else {"trainer.train_micro_batch_size": size}


@rule("policy.max_total_sequence_length")
def lengths(value: Any, flat: Flat) -> Settings:
    """There, what is longer than max_input_seq_length (a prompt, a whole row in SFT and DPO) is not
    trained on, and a response has what a prompt leaves of the total. Here it has all of
    max_new_tokens, and a prompt the rest.
    """
    longest = int(flat.get("policy.max_total_sequence_length") or 2048)
    prompt = int(flat.get("data.max_input_seq_length") or longest)
    response = flat.get("policy.generation.max_new_tokens")
    settings: Settings = {"data.too_long": "drop"}
    if response is None:
        return settings | {"data.max_total_sequence_length": min(longest, prompt)}
    response = min(response, longest)
    total, note = prompt + response, ""
    if response == longest:
        note = f"responses may have {response} tokens also after a long prompt (total: {total})"
    elif total > longest:
        note = f"prompts over {longest - response} tokens are left out, not answered more briefly"
        total = longest
    settings["data.max_total_sequence_length"] = total
    return settings | {"generation.max_new_tokens": response} | ({"note": note} if note else {})


@rule("policy.dtensor_cfg.sequence_parallel", "policy.megatron_cfg.sequence_parallel")
def sequence_parallel(value: Any, flat: Flat) -> Settings:
    """Only with tensor parallelism, where it is on here by default."""
    return {"parallel.sequence_parallel": value} if degrees(flat)["tensor"] > 1 else {}


@rule("policy.megatron_cfg.enabled")
def backend(value: Any, flat: Flat) -> Settings | str:
    if value and flat.get("policy.dtensor_cfg.enabled"):
        return Blocker("dtensor_cfg is enabled, too: set one of them to false")
    return {"trainer.backend": "megatron"} if value else {}


def degrees(flat: Flat) -> dict[str, int]:
    """Return the devices that share rows, by kind of parallelism."""
    sizes = {kind: f"dtensor_cfg.{kind}_parallel_size" for kind in ("tensor", "context")}
    if flat.get("policy.megatron_cfg.enabled"):
        sizes = {
            kind: f"megatron_cfg.{kind}_{'' if kind == 'context' else 'model_'}parallel_size"
            for kind in ("tensor", "pipeline", "context")
        }
    return {kind: flat.get(f"policy.{size}") or 1 for kind, size in sizes.items()}


def devices(flat: Flat) -> tuple[int, int]:
    """Devices that train and devices that sample: the same ones, if colocated."""
    gpus, nodes = (flat.get(f"cluster.{what}") or 1 for what in ("gpus_per_node", "num_nodes"))
    if flat.get("policy.generation.colocated.enabled") is not False:
        return gpus * nodes, gpus * nodes
    own = "policy.generation.colocated.resources."
    sampling = (flat.get(f"{own}gpus_per_node") or gpus) * (flat.get(f"{own}num_nodes") or 1)
    return gpus * nodes - sampling, sampling


@rule("cluster.gpus_per_node")
def data_parallel(value: Any, flat: Flat) -> Settings | str:
    """What the others leave of the devices goes to data parallelism."""
    (total, _), sizes = devices(flat), degrees(flat)
    split = math.prod(sizes.values())
    if total < 1 or total % split:
        kinds = " · ".join(sizes)
        return f"{kinds} parallelism of {split} does not divide the {total} that train"
    return {"parallel.dp_shard": total // split} if total > split else {}


@rule("policy.generation.backend")
def engines(value: Any, flat: Flat) -> Settings | str:
    if value == "hf":
        return {"generation.backend": "torch"}
    if value == "megatron":
        return {"generation.backend": "megatron"}
    if value not in ("vllm", "sglang"):
        return Blocker("engines are vllm, megatron and hf; choose one of them")
    theirs = "policy.generation."
    size = flat.get(f"{theirs}vllm_cfg.tensor_parallel_size") or 1
    settings: Settings = {"generation.backend": "vllm"}
    if value == "sglang":
        size = flat.get(f"{theirs}sglang_cfg.gpus_per_server") or 1
        settings["note"] = "vLLM samples in its place"
    stages = flat.get(f"{theirs}vllm_cfg.pipeline_parallel_size") or 1
    replicas = devices(flat)[1] // (size * stages)
    if flat.get(f"{theirs}colocated.enabled") is False:
        settings["generation.colocated"] = False
    if size > 1:
        settings["generation.tensor_parallel_size"] = size
    if stages > 1:
        settings["generation.pipeline_parallel_size"] = stages
    if replicas > 1:
        settings["generation.num_replicas"] = replicas
    given = {name: flat.get(f"{theirs}vllm_cfg.{name}") for name in ENGINE}
    given = {name: argument for name, argument in given.items() if argument}
    given |= flat.get(f"{theirs}vllm_kwargs") or {}
    return settings | ({"generation.engine": given} if given else {})


@rule(*(f"logger.{name}_enabled" for name in ("tensorboard", "wandb", "mlflow")))
def loggers(value: Any, flat: Flat) -> Settings:
    names = ("tensorboard", "wandb", "mlflow")
    on = [name for name in names if flat.get(f"logger.{name}_enabled")]
    return {"run.loggers": on} if value else {}


def rewards(tree: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
    """Return the reward in the place of the environments that the data name, and notes."""
    environments = tree.get("env") or {}
    entries = [entry for part in as_datasets(data).values() for entry in part]
    entries.append(data.get("default") or {})
    used = {entry["env_name"] for entry in entries if entry.get("env_name")}
    settings: Settings = {}
    notes: dict[str, str] = {}
    for name, options in environments.items():
        options = {} if options is None else options
        if not isinstance(options, Mapping):  # should_use_nemo_gym: true
            if options:
                notes[f"env.{name}"] = Blocker(f"{options!r}: remove it, rewards are math here")
            continue
        if not options.get("enabled", name in (used or environments)):
            continue
        if name != "math" or options.get("verifier_type", "math") != "math":
            reason = "rewards are math and functions of your own; write it as one"
            notes[f"env.{name}"] = Blocker(f"{reason}, and remove this environment")
            continue
        settings["reward"] = "math"
        verifier = options.get("math_verify_impl") or "hf_math_verify"
        if verifier != "hf_math_verify":
            notes["env.math.math_verify_impl"] = f"{verifier!r}: answers are read as by math-verify"
    return settings, notes


def as_datasets(data: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the data sets of "train" and "validation", each with the defaults; also those of older
    files, which have one of each beside the other keys of `data`.
    """
    shared = {name: data[name] for name in IN_DATASETS if name in data}
    train = {"data_path": data.get("train_data_path"), "split": data.get("train_split")}
    paths = (data.get("val_data_paths") or {}).values()
    single = [data["val_data_path"]] if data.get("val_data_path") else []
    older = {"train": [train], "validation": [{"data_path": path} for path in (*single, *paths)]}
    name = shared.get("dataset_name")
    if not name and not train["data_path"]:
        older["train"] = []
    elif kind(name) in HUB:
        train["split_validation_size"] = 0.05
    elif not train["data_path"]:
        older["validation"] = [{}]
    found = {}
    for part in older:
        given = data.get(part) if "train" in data else older[part]
        listed = [given] if isinstance(given, Mapping) else given or []
        if part == "validation":
            shared = {**shared, "split": data.get("val_split")}
        merged = [{**shared, **(data.get("default") or {}), **_given(entry)} for entry in listed]
        found[part] = merged
    return found


def kind(name: Any) -> str:
    """Return a data set's name as HUB has it."""
    return re.sub(r"[-_]", "", str(name).lower())


def _given(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if value is not None}


def data_settings(
    algorithm: str, data: Mapping[str, Any], path: str | Path, *, passthrough: bool = False
) -> tuple[Settings, dict[str, str]]:
    """Return our settings for their data sets, and notes."""
    settings: Settings = {}
    notes: dict[str, str] = {}
    found = as_datasets(data)
    for part, entries in found.items():
        sources = []
        for entry in entries:
            source, split, columns = located(entry)
            for name, value in entry.items():
                reason = reported(name, value)
                if reason:
                    notes[f"data.{part}.{name}"] = reason
            if source is None:
                notes[f"data.{part}"] = (
                    f"{entry.get('dataset_name')!r}: its rows are put together by NeMo RL's code;"
                    " give a file or hub name"
                )
                continue
            sources.append(source)
            columns = columns | {name: entry[name] for name in COLUMNS if entry.get(name)}
            ours = {COLUMNS[name]: column for name, column in columns.items()}
            if algorithm == "grpo" and "data.response_column" in ours:
                ours["data.answer_column"] = ours.pop("data.response_column")
            ours["data.split" if part == "train" else "data.validation_split"] = split
            for key, value in _given(ours).items():
                if settings.setdefault(key, value) != value:
                    reason = f"{key} is {settings[key]!r} for all sets, not {value!r}"
                    notes[f"data.{part}.columns"] = reason
        if len(sources) == len(entries) and sources:
            settings[f"data.{part}"] = sources[0] if len(sources) == 1 else sources
    share = max((entry.get("split_validation_size") or 0 for entry in found["train"]), default=0)
    if share and found["validation"]:
        notes["data.train.split_validation_size"] = (
            "rows are held out only without a validation set"
        )
    elif share:
        settings["data.held_out"] = share
    entries = [entry for part in found.values() for entry in part]
    binary = any("Binary" in str(entry.get("dataset_name")) for entry in entries)
    texts = "data.prompt_column" in settings or (algorithm == "dpo" and binary)
    for name, ours in PROMPTS.items():
        files = [*dict.fromkeys(entry.get(name) for entry in entries)]
        for file in list(filter(None, files))[:1]:
            if len(files) > 1:
                notes[f"data.{name}"] = f"{file!r}: all sets have its text here, as {ours}"
            try:
                text = prompt_text(str(file), path, ours)
                if name == "prompt_file":
                    require(
                        texts, ours, "is for prompts that are text", text, "change the messages"
                    )
                    text = template_of(text)
                settings[ours] = text
            except (OSError, ValueError) as error:
                notes[f"data.{name}"] = f"{file!r}: {error}"
    if texts and (not passthrough or "data.system_prompt" in settings):
        settings["data.chat"] = True
    return settings, notes


def prompt_text(file: str, path: str | Path, ours: str) -> str:
    """Return the text of a file in the folder of the recipe, or in NeMo RL's folder `examples` that
    the recipe is in; NeMo RL names it from the folder above that one.
    """
    recipe = Path(path).resolve().parent
    examples = [each for each in (recipe, *recipe.parents) if each.name == "examples"][:1]
    for start, allowed in ((recipe, recipe), *((each.parent, each) for each in examples)):
        found = (start / file).resolve()
        if found.is_relative_to(allowed) and found.is_file():
            return found.read_text(encoding="utf-8")
    raise ValueError(f"no such file in the recipe's folder: give its text as {ours}")


def template_of(text: str) -> str:
    """Return a template that has {} for the prompt as one of ours."""
    ours = ""
    for before, name, *_ in Formatter().parse(text):
        ours += before.replace("{", "{{").replace("}", "}}")
        ours += "" if name is None else "{prompt}" if name in ("", "0") else f"{{{name}}}"
    parts_of(ours)  # or an error
    return ours


def located(entry: Mapping[str, Any]) -> tuple[str | None, str | None, dict[str, str]]:
    """Return the file or hub name of a data set, its split, and its columns by their keys."""
    path, name = entry.get("data_path"), str(entry.get("dataset_name") or "")
    split = entry.get("split")
    if path is None:
        hub, usual, columns = HUB.get(kind(name), (None, None, {}))
        return hub, split or usual, columns
    split = split if has_splits(path) else None
    path = f"{path}:{entry['subset']}" if entry.get("subset") else path
    if name == "openai_format":
        return path, split, {"chat_key": "messages"}
    if name.endswith("PreferenceDataset") or "dataset_type" in entry or "chosen_key" in entry:
        return path, split, {}
    return path, split, {"input_key": "input", "output_key": "output"}


def reported(name: str, value: Any) -> str:
    """Return what a key of a data set changes, or nothing."""
    if not value or name in IN_DATASETS:
        return ""
    if name == "repeat":
        return f"{value}: each row is answered once, greedily, in a validation"
    return f"{value!r}: no counterpart here"


def translate(path: str | Path) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the algorithm, our settings (nested), and the reasons for keys not carried over.

    Raises ValueError for a file that can't be read, has none of the sections grpo, sft, dpo, or
    can't be trained here.
    """
    try:
        return in_ours(path)
    except UNREADABLE as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} must be written as NeMo RL's own files are ({why}): correct it"
        ) from error


UNREADABLE = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError)
"""What odd values lead to."""


def in_ours(path: str | Path) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return what `translate` does; values of odd types raise what Python raises for them."""
    tree = with_defaults(Path(path))
    found = [name for name in ("grpo", "sft", "dpo") if isinstance(tree.get(name), Mapping)]
    require(
        len(found) == 1,
        str(path),
        "must hold one of the sections grpo, sft, dpo",
        ", ".join(map(str, tree)) or "nothing",
        "only NeMo RL's configurations of these can be translated",
    )
    algorithm = found[0]
    tree = resolved(tree, tree, "", path, count())
    flat = dict(flatten(tree))
    data = tree.get("data") or {}
    key, value = "data", data
    try:
        template = flat.get("policy.tokenizer.chat_template", "default")
        settings, notes = data_settings(algorithm, data, path, passthrough=template is None)
        if algorithm == "grpo":
            given, more = rewards(tree, data)
            settings, notes = settings | given, notes | more
        notes |= blocked(tree)
        for key, value in flat.items():
            result = translated(algorithm, key, value, flat)
            if isinstance(result, str):
                notes[key] = type(result)(f"{value!r}: {result}")
                continue
            if "note" in result:
                notes[key] = result.pop("note")
            settings |= result
    except UNREADABLE as error:
        raise ValueError(
            f"{path}: {key}, or a key beside it, must be as in NeMo RL's own files, but it is"
            f" {value!r} ({error}): correct it"
        ) from error
    blockers = "; ".join(f"{key} {why}" for key, why in notes.items() if isinstance(why, Blocker))
    if not {"data.validation", "data.held_out"} & {*settings, *notes}:
        settings = {key: setting for key, setting in settings.items() if key not in VALIDATED}
    ours = nested(settings)
    cls = get_algorithm(algorithm).config
    for key in ("model.path", "data.train"):
        if key not in settings:
            notes.setdefault(key, "not given: name it")
    try:
        if blockers:
            raise ValueError(blockers)
        construct(cls, layer(cls, {}, ours))
    except ValueError as error:
        raise ValueError(f"{path} can't be trained here: {error}") from error
    return algorithm, ours, notes


def blocked(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the reasons of sections that select another kind of training."""
    return {
        section: Blocker(why)
        for section, why in SECTIONS.items()
        if (found := tree.get(section)) and not off(found)
    }


def off(section: Any) -> bool:
    """Return whether a section is switched off: by `enabled`, or by each of its values."""
    if not isinstance(section, Mapping):
        return not section
    if "enabled" in section:
        return not section["enabled"]
    return all(value in (False, None) for value in section.values())


DTENSORS = ("policy.dtensor_cfg.", "policy.optimizer", "policy.scheduler")
"""Sections in whose place megatron_cfg has its own."""


def translated(algorithm: str, key: str, value: Any, flat: Flat) -> Settings | str:
    off = flat.get("policy.megatron_cfg.enabled") and key.startswith(DTENSORS)
    if off or any(flat.get(switch) in (False, None) for switch in switches(key, flat)):
        return {}
    name = key.removeprefix(f"{algorithm}.")
    for spelled in (f"{algorithm}:{name}", name):
        if spelled in RULES:
            return RULES[spelled](value, flat)
        if spelled in FIXED:
            values, reason = FIXED[spelled]
            return {} if value in values else reason
        if spelled in RENAMED:
            return {} if value is None else {RENAMED[spelled]: value}
    read = NEUTRAL.fullmatch(name) or name.removeprefix("data.") in IN_DATASETS
    return {} if read or not value else "no counterpart here"


def switches(key: str, flat: Flat) -> Iterator[str]:
    """Yield the switches of the sections that a key is in."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        switch = ".".join([*parts[:depth], "enabled"])
        if switch in flat and switch not in (key, "checkpointing.enabled"):
            yield switch


def with_defaults(
    path: Path, seen: tuple[Path, ...] = (), files: Iterator[int] | None = None
) -> dict[str, Any]:
    here, files = path.resolve(), files or count(1)
    require(
        here not in seen,
        "defaults",
        "must not lead back to the file itself",
        str(path),
        "remove the circle",
    )
    number = next(files)
    limit = f"must lead to at most {MAX_FILES} files"
    require(number <= MAX_FILES, "defaults", limit, str(path), "name each file once")
    tree, _ = read(path)
    parents = tree.pop("defaults", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    texts = isinstance(parents, list) and all(isinstance(each, str) for each in parents)
    require(texts, "defaults", "must be a file or a list of files", repr(parents), "correct it")
    for parent in reversed(parents):
        tree = merged(with_defaults(path.parent / parent, (*seen, here), files), tree)
    return tree


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    if over.get("_override_"):
        return dict(over)
    both = {
        key: merged(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **both}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        whole = str(key).endswith(("_kwargs", "_overrides", "scheduler"))
        if isinstance(value, Mapping) and value and not whole:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


MAX_FILES, MAX_REFERENCES, MAX_VALUES = 100, 50, 100_000
"""Of `defaults`; one through the other; that all of them expand to."""
REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def resolved(
    tree: Mapping[str, Any],
    value: Any,
    key: str,
    path: str | Path,
    steps: Iterator[int],
    depth: int = 0,
) -> Any:
    """The value with ${a.b}, ${.sibling}, ${mul:x,y} and ${div:x,y} replaced, innermost first."""
    if next(steps) > MAX_VALUES or (isinstance(value, str) and len(value) > MAX_VALUES):
        raise ValueError(
            f"{path}: references (${{…}}) must expand to at most {MAX_VALUES} values and characters"
            f" each, but {key} goes beyond: write values out"
        )
    if depth > MAX_REFERENCES:
        raise ValueError(
            f"{path}: {key} refers to itself, or through more than {MAX_REFERENCES} references:"
            f" {value!r:.80}"
        )
    if isinstance(value, list):
        return [resolved(tree, item, key, path, steps, depth) for item in value]
    if isinstance(value, Mapping):
        return {
            name: resolved(tree, item, f"{key}.{name}" if key else name, path, steps, depth)
            for name, item in value.items()
        }
    match = REFERENCE.search(value) if isinstance(value, str) else None
    if match is None:
        return value
    target, found = looked_up(tree, key, match[1].strip(), path)
    found = resolved(tree, found, target, path, steps, depth + 1)
    if match[0] == value:
        return found
    if isinstance(found, list | Mapping):
        raise ValueError(f"{path}: {key} puts {target}, which is no single value, into a text")
    text = value[: match.start()] + str(found) + value[match.end() :]
    return resolved(tree, text, key, path, steps, depth)


def looked_up(
    tree: Mapping[str, Any], key: str, reference: str, path: str | Path
) -> tuple[str, Any]:
    """Return the key and the value that a reference stands for."""
    if reference.startswith(("mul:", "div:")):
        parts = reference[4:].split(",")
        two = len(parts) == 2
        require(two, key, "must give mul and div two numbers", reference, "correct it")
        left, right = (float(part) for part in parts)
        require(left == left and right == right, key, "must be a number", reference, "correct it")
        result = left * right if reference.startswith("mul:") else left / right
        return key, int(result) if result.is_integer() else result
    target = f"{key.rpartition('.')[0]}{reference}" if reference.startswith(".") else reference
    place: Any = tree
    for part in target.removeprefix(".").split("."):
        if not isinstance(place, Mapping) or part not in place:
            raise ValueError(
                f"{path}: {key} refers to {target}, which the file does not have: name the file"
                " with all its defaults"
            )
        place = place[part]
    return target, place


def one_line(text: str) -> str:
    """Return a text without line breaks: a comment ends at one."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: repr(found[0])[1:-1], text)


def as_yaml(path: str | Path) -> str:
    """Return the translation of a file as YAML, with its notes as comments at the end."""
    algorithm, settings, notes = translate(path)
    asked = {
        "model.path": "MODEL",
        "data.train": "ROWS",
        "data.validation": "ROWS",
    }
    flags = "".join(f" --{key} {what}" for key, what in asked.items() if key in notes)
    text = f"# nemorl {algorithm} --config THIS_FILE{flags}\n"
    text += f"# from {one_line(str(path))}, of NeMo RL\n"
    text += dump(settings)
    if notes:
        text += f"\n# Not carried over, or not quite ({len(notes)} keys):\n"
    return text + "".join(f"#   {one_line(f'{key}  {reason}')}\n" for key, reason in notes.items())


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    try:
        print(as_yaml(sys.argv[1]), end="")
    except ValueError as error:
        sys.exit(one_line(f"error: {error}"))
