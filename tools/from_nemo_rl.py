"""Translate a NeMo RL configuration (GRPO, SFT or DPO): python tools/from_nemo_rl.py FILE > OURS.

Prints our YAML, with every key that could not be carried over, and the reason, as comments at the
end. `defaults` and ${interpolations} are followed. Keys were read off NeMo RL's
examples/configs/{grpo_math_1B,sft,dpo}.yaml and later additions.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemorl.checks import require
from nemorl.runtime.config.tree import construct, layer
from nemorl.runtime.config.yaml_io import dump, read
from nemorl.runtime.start.registry import GENERATION_BACKENDS, get_algorithm

Settings = dict[str, Any]
"""Our dotted keys and their values; the key "note" holds what changes nevertheless."""
Rule = Callable[[Any, Mapping[str, Any]], Settings | str]
"""From a value and all of their settings to ours, or to the reason why there are none."""

RENAMED = {
    "num_prompts_per_step": "num_prompts_per_step",
    "num_generations_per_prompt": "num_generations_per_prompt",
    "max_num_epochs": "num_epochs",
    "use_dynamic_sampling": "dynamic_sampling",
    "dynamic_sampling_max_gen_batches": "max_sampling_rounds",
    "reward_shaping.overlong_buffer_penalty": "overlong.penalty",
    "val_period": "run.val_period",
    "val_at_start": "run.val_at_start",
    "max_val_samples": "run.max_val_samples",
    "seed": "run.seed",
    "reference_policy_kl_penalty": "loss.beta",  # of section dpo
    "preference_average_log_probs": "loss.average_logprobs",
    "loss_fn.reference_policy_kl_penalty": "kl.coef",
    "loss_fn.reference_policy_kl_type": "kl.estimator",
    "checkpointing.checkpoint_dir": "run.dir",
    "checkpointing.keep_top_k": "run.keep_checkpoints",
    "checkpointing.save_period": "run.save_period",
    "policy.model_name": "model.path",
    "policy.tokenizer.chat_template": "model.chat_template",
    "policy.tokenizer.chat_template_kwargs": "model.chat_template_kwargs",
    "policy.train_global_batch_size": "train_global_batch_size",
    "policy.logprob_chunk_size": "trainer.logprob_chunk",
    "policy.max_total_sequence_length": "data.max_total_sequence_length",
    "policy.optimizer.kwargs.lr": "optimizer.lr",
    "policy.optimizer.kwargs.weight_decay": "optimizer.weight_decay",
    "policy.optimizer.kwargs.eps": "optimizer.eps",
    "policy.sequence_packing.enabled": "trainer.sequence_packing",
    "policy.dtensor_cfg.tensor_parallel_size": "parallel.tp",
    "policy.dtensor_cfg.context_parallel_size": "parallel.cp",
    "policy.dtensor_cfg.cpu_offload": "parallel.cpu_offload",
    "policy.dtensor_cfg.lora_cfg.dim": "lora.rank",
    "policy.dtensor_cfg.lora_cfg.alpha": "lora.alpha",
    "policy.dtensor_cfg.lora_cfg.dropout": "lora.dropout",
    "policy.generation.temperature": "generation.temperature",
    "policy.generation.top_p": "generation.top_p",
    "policy.generation.stop_token_ids": "generation.stop_token_ids",
    "policy.generation.stop_strings": "generation.stop_strings",
    "data.shuffle": "data.shuffle",
    "grpo:data.output_key": "data.answer_column",
}
"""Keys of the same meaning. The algorithm's own section is not named; "grpo:" marks a key that
means something else in the other algorithms."""
for _place in ("", "train.", "default."):
    for _theirs, _ours in {
        "input_key": "data.prompt_column",
        "prompt_key": "data.prompt_column",
        "output_key": "data.response_column",
        "chat_key": "data.messages_column",
        "chosen_key": "data.chosen_column",
        "rejected_key": "data.rejected_column",
    }.items():
        RENAMED[f"data.{_place}{_theirs}"] = _ours
    RENAMED[f"grpo:data.{_place}output_key"] = "data.answer_column"

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_rollout_turns": ((1,), "conversations of several turns are not supported yet"),
    "grpo:max_num_epochs": ((1,), "grpo counts steps here; set max_num_steps"),
    "batch_multiplier": ((1,), "dynamic sampling samples as many prompts as are missing"),
    "seq_logprob_error_threshold": (
        (None,),
        "responses are not dropped by their error; gap.stop ends the run, off_policy.mode"
        " sequence_mask drops responses with an odd ratio",
    ),
    "reward_scaling.enabled": ((False,), "scale rewards in the reward function"),
    "val_at_end": ((True, False), ""),
    "async_grpo.enabled": ((False,), "generation and training take turns so far"),
    "preference_loss_weight": ((1,), "it is 1 here; scale optimizer.lr and sft_coef instead"),
    "loss_fn.force_on_policy_ratio": ((False, None), "with one update per batch the ratio is 1"),
    "checkpointing.enabled": (
        (True,),
        "checkpoints are always written; run.save_period: 0 writes only the last one",
    ),
    "checkpointing.model_save_format": (("safetensors", None), "checkpoints are safetensors"),
    "checkpointing.checkpoint_must_save_by": ((None,), "an interrupted run saves and resumes"),
    "policy.offload_optimizer_for_logprob": ((False,), "optimizer state stays on its device"),
    "policy.dtensor_cfg.custom_parallel_plan": (
        (None,),
        "how layers are split follows from parallel.tp",
    ),
    "policy.dtensor_cfg.lora_cfg.dropout_position": (("pre",), "dropout precedes the adapter"),
    "policy.megatron_cfg.enabled": (
        (False, None),
        "there is no Megatron backend yet; the model trains through dtensor",
    ),
    "policy.generation.vllm_cfg.pipeline_parallel_size": (
        (1,),
        "an engine is split by tensor_parallel_size alone",
    ),
    "policy.generation.vllm_cfg.expert_parallel_size": (
        (1,),
        "an engine is split by tensor_parallel_size alone",
    ),
    "data.add_eos": ((True,), "the end token is always trained on"),
    "data.add_bos": ((True,), "special tokens are the tokenizer's own"),
    "logger.swanlab_enabled": ((False, None), "loggers are tensorboard, wandb and mlflow"),
}
"""Keys whose listed values are what nemorl does anyway; others are reported, with this reason."""

UNNEEDED = re.compile(
    r"reward_shaping\.(enabled|max_response_length)|val_(batch_size|batches|global_batch_size"
    r"|micro_batch_size)|loss_fn\.seq_logprob_error_in_loss|checkpointing\.save_consolidated"
    r"|policy\.(generation_batch_size|logprob_batch_size|make_sequence_length_divisible_by)"
    r"|policy\.optimizer\.kwargs\.(foreach|fused)|policy\.(sequence_packing|dynamic_batching)\..*"
    r"|policy\.dtensor_cfg\.(enabled|_v2|automodel_kwargs.*|env_vars.*)"
    r"|policy\.dtensor_cfg\.lora_cfg\.(enabled|match_all_linear|use_triton)"
    r"|policy\.generation\.(vllm_cfg|colocated)\..*|data\.validation\.dataset_name"
    r"|data\.(max_input_seq_length|num_workers|add_generation_prompt)|logger\..*"
)
"""Keys without bearing on the numbers."""

SWITCHES = {
    "policy.megatron_cfg": "enabled",
    "policy.dtensor_cfg.lora_cfg": "enabled",
    "policy.sequence_packing": "enabled",
    "policy.dynamic_batching": "enabled",
    "grpo.async_grpo": "enabled",
    "grpo.reward_shaping": "enabled",
    "grpo.reward_scaling": "enabled",
}
"""Sections that count only where their switch is on."""

RULES: dict[str, Rule] = {}
ENGINE = ("gpu_memory_utilization", "enforce_eager", "kv_cache_dtype")
PARTIAL_WARM_UP = "warm-up starts at 0 instead of a share of the learning rate"


def rule(*keys: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(keys, function))
        return function

    return register


def when(key: str, ours: str, setting: Any = None) -> None:
    """Carry a value (or `setting` in its place) over if it is neither null, 0, false nor empty."""
    RULES[key] = lambda value, flat: {ours: setting or value} if value else {}


when("overlong_filtering", "overlong.filter")
when("sft_loss_weight", "sft_coef")
when("loss_fn.use_on_policy_kl_approximation", "kl.gradient", "importance")
when("policy.dtensor_cfg.activation_checkpointing", "parallel.activation_checkpointing", "full")
when("policy.dtensor_cfg.lora_cfg.target_modules", "lora.target_modules")
for _theirs, _ours in {
    "train.data_path": "train",
    "train_data_path": "train",
    "validation.data_path": "validation",
    "val_data_path": "validation",
    "train.split": "split",
    "train_split": "split",
    "validation.split": "validation_split",
    "val_split": "validation_split",
}.items():
    when(f"data.{_theirs}", f"data.{_ours}")


@rule("normalize_rewards", "use_leave_one_out_baseline")
def advantage(value: Any, flat: Mapping[str, Any]) -> Settings:
    loo = flat.get("grpo.use_leave_one_out_baseline")
    scale = "leave_one_out_std" if loo else "group_std"
    return {
        "advantage.name": "group",
        "advantage.baseline": "leave_one_out" if loo else "group_mean",
        "advantage.scale": scale if flat.get("grpo.normalize_rewards") else "none",
    }


@rule(
    *(f"loss_fn.ratio_clip_{which}" for which in ("min", "max", "c")),
    "loss_fn.sequence_level_importance_ratios",
    "loss_fn.use_cispo",
    "loss_fn.disable_ppo_ratio",
)
def policy_loss(value: Any, flat: Mapping[str, Any]) -> Settings:
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


@rule("loss_fn.token_level_loss")
def reduction(value: Any, flat: Mapping[str, Any]) -> Settings:
    return {"reduction": "token_mean" if value else "sequence_mean"}


@rule("sft_average_log_probs")
def sft_reduction(value: Any, flat: Mapping[str, Any]) -> Settings:
    return {"sft_reduction": "sequence_mean"} if value and flat.get("dpo.sft_loss_weight") else {}


@rule(
    "loss_fn.use_importance_sampling_correction",
    *(f"loss_fn.truncated_importance_sampling_{what}" for what in ("ratio", "ratio_min", "type")),
)
def off_policy(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    if not flat.get("loss_fn.use_importance_sampling_correction"):
        return {}
    theirs = "loss_fn.truncated_importance_sampling_"
    kind, low, high = (flat.get(theirs + what) for what in ("type", "ratio_min", "ratio"))
    modes = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": "sequence_mask"}
    if (kind or "tis") not in modes:
        return f"{kind!r}: no such correction here (off_policy.mode: {', '.join(modes.values())})"
    settings: Settings = {"off_policy.mode": modes[kind or "tis"]}
    if kind == "seq-mask-tis":
        settings["off_policy.level"] = "geometric"
    if low is not None:
        settings["off_policy.min"] = low
    unbounded = "unbounded there; here the weights are truncated at off_policy.max (2.0)"
    return settings | ({"note": unbounded} if high is None else {"off_policy.max": high})


@rule("max_num_steps")
def steps(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    if value is None or value >= 1_000_000:
        return f"{value!r} stands for no limit: set max_num_steps (or num_epochs, if there is one)"
    return {"max_num_steps": value}


@rule("reward_shaping.overlong_buffer_length")
def overlong_buffer(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    """Tokens there, a share of the longest response here."""
    shaping = flat.get("grpo.reward_shaping.max_response_length")
    longest = shaping or flat.get("policy.generation.max_new_tokens")
    if not longest:
        return f"{value!r}: needs grpo.reward_shaping.max_response_length"
    return {"overlong.buffer": value / longest}


@rule("checkpointing.metric_name")
def metric(value: Any, flat: Mapping[str, Any]) -> Settings:
    """val:accuracy and val_reward are val_accuracy and val_reward; train:loss is loss."""
    if value is None or not flat.get("checkpointing.keep_top_k"):
        return {}
    phase, _, name = str(value).rpartition(":")
    name = name.removeprefix("validation-default_").removeprefix("val_")
    return {"run.metric": name if phase == "train" else f"val_{name}"}


@rule("checkpointing.higher_is_better")
def higher_is_better(value: Any, flat: Mapping[str, Any]) -> Settings:
    return {"run.higher_is_better": value} if flat.get("checkpointing.metric_name") else {}


@rule("policy.tokenizer.name")
def tokenizer(value: Any, flat: Mapping[str, Any]) -> Settings:
    return {} if value == flat.get("policy.model_name") else {"model.tokenizer": value}


@rule("policy.max_grad_norm")
def clip_gradient(value: Any, flat: Mapping[str, Any]) -> Settings:
    return {"optimizer.max_grad_norm": value or None}


@rule("policy.optimizer.name")
def optimizer(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    known = str(value).endswith("AdamW")
    return {} if known else f"{value!r}: the optimizer is AdamW here"


@rule("policy.optimizer.kwargs.betas")
def betas(value: Any, flat: Mapping[str, Any]) -> Settings:
    return {"optimizer.beta1": value[0], "optimizer.beta2": value[1]}


@rule("policy.scheduler")
def scheduler(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    """A list of torch schedulers and their milestones."""
    settings: Settings = {}
    lr = flat.get("policy.optimizer.kwargs.lr")
    for part in value or []:
        name, options = str(part.get("name", "")).rpartition(".")[2], part.get("kwargs") or {}
        start, end = options.get("start_factor", 1 / 3), options.get("end_factor", 1.0)
        if name == "LinearLR" and end >= start:
            warmup = options.get("total_iters", 5)
            settings |= {"optimizer.warmup_steps": warmup, "note": PARTIAL_WARM_UP}
        elif name == "LinearLR":
            settings |= {"optimizer.schedule": "linear", "optimizer.min_lr_ratio": end}
        elif name == "CosineAnnealingLR":
            settings["optimizer.schedule"] = "cosine"
            settings["note"] = "the cosine ends at the run's last step here"
            if lr and options.get("eta_min"):
                settings["optimizer.min_lr_ratio"] = options["eta_min"] / lr
        elif name not in ("ConstantLR", "", "None"):
            return f"{name}: schedules are constant, linear and cosine, each with a warm-up"
    return settings


@rule("policy.precision")
def precision(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    known = {"float32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
    if value not in known:
        return f"{value!r}: precision is float32 or bfloat16 here"
    return {"parallel.param_dtype": known[value]}


@rule("policy.train_micro_batch_size")
def micro_batch_size(value: Any, flat: Mapping[str, Any]) -> Settings:
    """Only without a budget of tokens."""
    budgets = ("sequence_packing", "dynamic_batching")
    if value is None or any(flat.get(f"policy.{budget}.enabled") for budget in budgets):
        return {}
    return {"trainer.train_micro_batch_size": value}


@rule("policy.sequence_packing.train_mb_tokens", "policy.dynamic_batching.train_mb_tokens")
def micro_batch_tokens(value: Any, flat: Mapping[str, Any]) -> Settings:
    longest = int(flat.get("policy.max_total_sequence_length") or 0)
    return {"trainer.micro_batch_tokens": max(int(value), longest)}


@rule("policy.dtensor_cfg.sequence_parallel")
def sequence_parallel(value: Any, flat: Mapping[str, Any]) -> Settings:
    """Only with tensor parallelism, where it is on here by default."""
    split = (flat.get("policy.dtensor_cfg.tensor_parallel_size") or 1) > 1
    return {"parallel.sequence_parallel": value} if split else {}


@rule("cluster.gpus_per_node", "cluster.num_nodes")
def devices(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    """What tensor and context parallelism leave of the devices goes to FSDP."""
    if flat.get("policy.generation.colocated.enabled") is False:
        return f"{value!r}: some of them generate; set parallel.dp_shard for those that train"
    total = (flat.get("cluster.gpus_per_node") or 1) * (flat.get("cluster.num_nodes") or 1)
    sizes = (f"policy.dtensor_cfg.{kind}_parallel_size" for kind in ("tensor", "context"))
    split = math.prod(flat.get(size) or 1 for size in sizes)
    if total % split:
        return (
            f"{value!r}: tensor · context parallelism of {split} does not divide the {total}"
            " devices; set parallel.dp_shard"
        )
    return {"parallel.dp_shard": total // split} if total > split else {}


@rule("policy.generation.backend")
def generation_backend(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    if value in GENERATION_BACKENDS:
        return {"generation.backend": value}
    return f"{value!r}: no such backend here ({', '.join(GENERATION_BACKENDS)}); torch is used"


@rule("policy.generation.max_new_tokens")
def max_new_tokens(value: Any, flat: Mapping[str, Any]) -> Settings:
    longest = flat.get("policy.max_total_sequence_length")
    if longest is None or value < longest:
        return {"generation.max_new_tokens": value}
    note = f"{value} leaves no room for a prompt within {longest}: half of it is used"
    return {"generation.max_new_tokens": longest // 2, "note": note}


@rule("policy.generation.top_k")
def top_k(value: Any, flat: Mapping[str, Any]) -> Settings:
    return {"generation.top_k": value} if value and value > 0 else {}


def of_vllm(key: str, ours: str, default: Any = None) -> None:
    RULES[f"policy.generation.{key}"] = lambda value, flat: (
        {ours: value}
        if flat.get("policy.generation.backend") == "vllm" and value not in (None, default)
        else {}
    )


of_vllm("colocated.enabled", "generation.colocated", True)
of_vllm("vllm_cfg.tensor_parallel_size", "generation.tensor_parallel_size", 1)
of_vllm("vllm_cfg.max_model_len", "generation.max_model_len")


@rule("policy.generation.vllm_kwargs", *(f"policy.generation.vllm_cfg.{name}" for name in ENGINE))
def engine_arguments(value: Any, flat: Mapping[str, Any]) -> Settings:
    if flat.get("policy.generation.backend") != "vllm":
        return {}
    given = {name: flat.get(f"policy.generation.vllm_cfg.{name}") for name in ENGINE}
    given = {name: argument for name, argument in given.items() if argument is not None}
    given |= flat.get("policy.generation.vllm_kwargs") or {}
    return {"generation.engine": given} if given else {}


@rule("data.train.dataset_name", "data.dataset_name", "data.default.dataset_name")
def dataset_name(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    generic = ("ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "openai_format")
    if value in (*generic, None):
        return {}
    return f"{value!r}: built into NeMo RL; give its file or hub name as data.train"


@rule(*(f"logger.{name}_enabled" for name in ("tensorboard", "wandb", "mlflow")))
def loggers(value: Any, flat: Mapping[str, Any]) -> Settings:
    names = ("tensorboard", "wandb", "mlflow")
    on = [name for name in names if flat.get(f"logger.{name}_enabled")]
    return {"run.loggers": on} if value else {}


@rule("logger.wandb.project")
def project(value: Any, flat: Mapping[str, Any]) -> Settings:
    return {"run.project": value} if flat.get("logger.wandb_enabled") else {}


def translate(path: str | Path) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the algorithm, our settings (nested), and the reasons for keys not carried over.

    Raises ValueError for a file that can't be read or has none of the sections grpo, sft, dpo.
    """
    tree = with_defaults(Path(path))
    found = [name for name in ("grpo", "sft", "dpo") if isinstance(tree.get(name), Mapping)]
    require(
        len(found) == 1,
        str(path),
        "must hold one of the sections grpo, sft, dpo",
        ", ".join(map(str, tree)) or "nothing",
        "only NeMo RL's configurations of these can be translated",
    )
    flat = {key: resolved(tree, key, value, path) for key, value in flatten(tree)}
    settings: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for key, value in flat.items():
        result = translated(found[0], key, value, flat)
        if isinstance(result, str):
            notes[key] = result
            continue
        if "note" in result:
            notes[key] = result.pop("note")
        for ours, setting in result.items():
            section, _, name = ours.rpartition(".")
            (settings.setdefault(section, {}) if section else settings)[name] = setting
    cls = get_algorithm(found[0]).config
    complete = layer(cls, {}, settings)
    if not complete["model"]["path"]:
        notes.setdefault("policy.model_name", "not given: add --model.path")
    if not complete["data"]["train"]:
        notes.setdefault("data.train.data_path", "not a file or hub name: add --data.train")
    try:
        construct(cls, complete)
    except ValueError as error:
        notes["(all)"] = f"needs a change before it runs: {error}"
    return found[0], settings, notes


def translated(algorithm: str, key: str, value: Any, flat: Mapping[str, Any]) -> Settings | str:
    for section, switch in SWITCHES.items():
        switch = f"{section}.{switch}"
        if key.startswith(f"{section}.") and key != switch and not flat.get(switch):
            return {}
    name = key.removeprefix(f"{algorithm}.")
    for spelled in (f"{algorithm}:{name}", name):
        if spelled in RULES:
            return RULES[spelled](value, flat)
        if spelled in FIXED:
            values, reason = FIXED[spelled]
            return {} if value in values else f"{value!r}: {reason}"
        if spelled in RENAMED:
            return {} if value is None else {RENAMED[spelled]: value}
    if name.startswith("env."):
        return "environments are rewards here: --reward math, exact_match or module:function"
    if UNNEEDED.fullmatch(name) or value in (None, {}, []):
        return {}
    return f"{value!r}: no counterpart here"


def with_defaults(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    require(
        path.resolve() not in seen,
        "defaults",
        "must not lead back to the file itself",
        str(path),
        "remove the circle",
    )
    tree, _ = read(path)
    parents = tree.pop("defaults", [])
    for parent in reversed([parents] if isinstance(parents, str) else parents):
        tree = merged(with_defaults(path.parent / str(parent), (*seen, path.resolve())), tree)
    return tree


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **both}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and not str(key).endswith("_kwargs"):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def resolved(tree: Mapping[str, Any], key: str, value: Any, path: str | Path) -> Any:
    """The value with ${a.b}, ${.sibling}, ${mul:x,y} and ${div:x,y} replaced, innermost first."""
    if isinstance(value, list):
        return [resolved(tree, key, item, path) for item in value]
    if isinstance(value, Mapping):
        return {name: resolved(tree, key, item, path) for name, item in value.items()}
    for _ in range(50):
        match = REFERENCE.search(value) if isinstance(value, str) else None
        if match is None:
            return value
        found = looked_up(tree, key, match[1].strip(), path)
        value = found if match[0] == value else value.replace(match[0], str(found))
    raise ValueError(f"{path}: {key} refers to itself: {value!r}")


def looked_up(tree: Mapping[str, Any], key: str, reference: str, path: str | Path) -> Any:
    if reference.startswith(("mul:", "div:")):
        parts = reference[4:].split(",")
        left, right = (float(resolved(tree, key, part.strip(), path)) for part in parts)
        result = left * right if reference.startswith("mul:") else left / right
        return int(result) if result.is_integer() else result
    target = f"{key.rpartition('.')[0]}{reference}" if reference.startswith(".") else reference
    place: Any = tree
    for part in target.split("."):
        if not isinstance(place, Mapping) or part not in place:
            raise ValueError(
                f"{path}: {key} refers to {target}, which the file does not have: name the file"
                " with all its defaults"
            )
        place = place[part]
    return place


def as_yaml(path: str | Path) -> str:
    """Return the translation of a file as YAML, with its notes as comments at the end."""
    algorithm, settings, notes = translate(path)
    header = f"# nemorl {algorithm} --config THIS_FILE\n# from {path}, a NeMo RL configuration\n"
    if not notes:
        return header + dump(settings)
    width = max(map(len, notes))
    listed = "".join(f"#   {key:<{width}}  {reason}\n" for key, reason in notes.items())
    count = f"\n# Not carried over, or not quite ({len(notes)} keys):\n"
    return header + dump(settings) + count + listed


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    try:
        print(as_yaml(sys.argv[1]), end="")
    except ValueError as error:
        sys.exit(f"error: {error}")
