"""Rows: policy losses, KL, off-policy corrections, the critic's loss."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemorl.losses import (
    cispo,
    clipped,
    constant_weights,
    gmpo,
    gspo,
    importance_weights,
    kl_loss,
    log_ratio_penalty,
    on_policy,
    reinforce,
    sampler_gap,
    sapo,
    sequence_mean_weights,
    token_mean_weights,
    value_loss,
)
from oracle.batches import INF, TOKENS, Sequences
from oracle.compare import Row
from oracle.peers import load, statements, trainer


def ours(loss: Any, weights: Any = token_mean_weights, **options: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        return loss(b.logprobs, b.prev, b.advantages, weights(b.mask), **options).loss

    return run


def verl(name: str, mode: str = "token-mean", **options: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        core = load("verl.trainer.ppo.core_algos")
        config = core.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **options)
        loss = core.get_policy_loss_fn(name)
        return loss(b.prev, b.logprobs, b.advantages, b.mask.double(), mode, config)[0]

    return run


def trl(loss_type: str, level: str = "token", loss: Any = None, **options: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        grpo = load("trl.trainer.grpo_trainer").GRPOTrainer
        self = trainer(
            loss_type=loss_type,
            importance_sampling_level=level,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            _entropy_bonus_enabled=False,
            max_completion_length=TOKENS,
            **{"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, **options},
        )
        self.args.delta = options.get("delta")
        self.args.use_bias_correction_kl = options.get("unbiased", False)
        self.args.sapo_temperature_pos, self.args.sapo_temperature_neg = 1.0, 1.05
        zeros = torch.zeros_like(b.logprobs)
        self._get_per_token_logps_and_entropies = lambda *_, **__: (b.logprobs, zeros, None)
        ids, mask = torch.zeros_like(b.mask, dtype=torch.long), b.mask.double()
        inputs = {
            "prompt_ids": ids,
            "prompt_mask": ids,
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": b.advantages,
            "old_per_token_logps": None if options.get("on_policy") else b.prev,
            "ref_per_token_logps": b.reference,
            "num_items_in_batch": mask.sum(),
        }
        return (loss or grpo._compute_loss)(self, None, inputs)

    return run


def one_advantage(loss: Any) -> Any:
    """Of answers whose tokens have the first one's advantage."""
    return lambda b: loss(replace(b, advantages=b.advantages[:, :1].expand_as(b.advantages)))


def trl_gmpo(b: Sequences) -> Tensor:
    gmpo_trainer = load("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer
    run = trl("gmpo", loss=gmpo_trainer._compute_loss, epsilon_low=0.4, epsilon_high=0.4)
    return run(replace(b, advantages=b.advantages[:, 0]))


def openrlhf(**options: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        loss = load("openrlhf.models.loss").PolicyLoss(**options)
        return loss(b.logprobs, b.prev, b.advantages, b.mask.double(), b.generation)[0]

    return run


def our_kl(estimator: str, **options: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        sampler = b.prev if options.get("gradient") == "importance" else None
        weights = token_mean_weights(b.mask)
        return kl_loss(
            b.logprobs, b.reference, weights, sampler, coef=1.0, estimator=estimator, **options
        ).loss

    return run


def verl_dro(b: Sequences) -> Tensor:
    return verl("dro", policy_loss=load("verl.workers.config").PolicyLossConfig(dro_beta=0.1))(b)


def verl_kl(estimator: str) -> Any:
    def run(b: Sequences) -> Tensor:
        core = load("verl.trainer.ppo.core_algos")
        values = core.kl_penalty(b.logprobs, b.reference, estimator)
        return core.agg_loss(values, b.mask.double(), "token-mean")

    return run


def openrlhf_kl(estimator: str, **options: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        models = load("openrlhf.models.utils")
        old = b.prev if options else None
        values = models.compute_approx_kl(b.logprobs, b.reference, old, estimator, **options)
        return models.masked_mean(values, b.mask)

    return run


def trl_kl(**options: Any) -> Any:
    """Its loss where all advantages are 0."""
    loss = trl("dapo", beta=1.0, **options)
    return lambda b: loss(replace(b, advantages=torch.zeros_like(b.advantages)))


def weights(**options: Any) -> Any:
    return lambda b: importance_weights(b.prev, b.generation, b.mask, **options)[0]


def kept(**bounds: Any) -> Any:
    """Which tokens have a weight."""
    return lambda b: (weights(max=INF, **bounds)(b) != 0).double()


def verl_weights(level: str, threshold: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        correction = load("verl.trainer.ppo.rollout_corr_helper")
        log_ratio, mask = b.prev - b.generation, b.mask.double()
        return correction.compute_rollout_correction_weights(log_ratio, mask, level, threshold)[0]

    return run


def verl_rejection(option: str, threshold: str) -> Any:
    def run(b: Sequences) -> Tensor:
        correction = load("verl.trainer.ppo.rollout_corr_helper")
        log_ratio, mask = b.prev - b.generation, b.mask.double()
        return correction.compute_rollout_rejection_mask(log_ratio, mask, option, threshold)[0]

    return run


def trl_weights(mode: str, low: float | None, high: float) -> Any:
    def run(b: Sequences) -> Tensor:
        grpo = load("trl.trainer.grpo_trainer").GRPOTrainer
        names = ("mode", "clip_min", "clip_max")
        found = statements(
            grpo._generate_and_score_completions,
            "if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask",
            {
                "self": trainer(
                    **{
                        f"vllm_importance_sampling_{name}": value
                        for name, value in zip(names, (mode, low, high), strict=True)
                    }
                ),
                "completion_mask": b.mask.double(),
                "tool_mask": None,
                "old_per_token_logps": b.prev,
                "sampling_per_token_logps": b.generation,
            },
        )
        return found.vllm_importance_sampling_ratio * b.mask

    return run


def corrected(**options: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        v = importance_weights(b.prev, b.generation, b.mask, **options)[0]
        loss = clipped(b.logprobs, b.prev, b.advantages, token_mean_weights(b.mask), v)
        return loss.loss

    return run


def gated(max: float, **bounds: Any) -> Any:
    """DPPO: the policy's ratio to the old one, truncated, is 0 where it left a trust region."""

    def run(b: Sequences) -> Tensor:
        v = importance_weights(
            b.logprobs, b.prev, b.mask, advantages=b.advantages, max=max, **bounds
        )[0]
        w = token_mean_weights(b.mask)
        return reinforce(b.logprobs, on_policy(b.logprobs), b.advantages, w, v).loss

    return run


def our_gap(b: Sequences) -> Tensor:
    return torch.tensor(sampler_gap(b.prev, b.generation, b.mask)["gen_kl_error"].finalize())


def verl_gap(b: Sequences) -> Tensor:
    correction = load("verl.trainer.ppo.rollout_corr_helper")
    found = correction.compute_offpolicy_metrics(b.prev, b.generation, b.mask.double())
    return torch.tensor(found["k3_kl"])


def our_dro(b: Sequences) -> Tensor:
    w = token_mean_weights(b.mask)
    pull = log_ratio_penalty(b.logprobs, b.prev, w, coef=0.05).loss
    return reinforce(b.logprobs, on_policy(b.logprobs), b.advantages, w).loss + pull


def our_value(clip: float | None) -> Any:
    return lambda b: (
        value_loss(b.values, b.old_values, b.returns, token_mean_weights(b.mask), clip=clip).loss
    )


def verl_value(b: Sequences) -> Tensor:
    core = load("verl.trainer.ppo.core_algos")
    return core.compute_value_loss(b.values, b.returns, b.old_values, b.mask.double(), 0.5)[0]


def openrlhf_value(clip: float | None) -> Any:
    def run(b: Sequences) -> Tensor:
        loss = load("openrlhf.models.loss").ValueLoss(clip)
        return loss(b.values, b.old_values, b.returns, b.mask.double())

    return run


def first_update(b: Sequences) -> Tensor:
    w = token_mean_weights(b.mask)
    return clipped(b.logprobs, on_policy(b.logprobs), b.advantages, w).loss


def constant(mask: Tensor) -> Tensor:
    return constant_weights(mask, length=TOKENS)


NO_DUAL = {"clip_ratio_c": 1e30}
WIDE = {"clip_low": 0.2, "clip_high": 0.2}
PLAIN = {"input_clamp": None, "output_clamp": None}
TOKEN = {"is_correction_level": "token"}
ROWS = [
    Row(
        "clipped, token_mean_weights",
        "verl",
        "vanilla, clip_ratio_c=1e30",
        ours(clipped),
        verl("vanilla", **NO_DUAL),
        notes=("empty",),
    ),
    Row(
        "clipped(dual_clip=3)",
        "verl",
        "vanilla",
        ours(clipped, dual_clip=3.0),
        verl("vanilla"),
        notes=("empty",),
    ),
    Row("clipped", "trl", "loss_type=dapo", ours(clipped), trl("dapo"), notes=("bound", "nan")),
    Row(
        "clipped(dual_clip=3)",
        "trl",
        "dapo, delta=3",
        ours(clipped, dual_clip=3.0),
        trl("dapo", delta=3.0),
        notes=("nan",),
    ),
    Row("clipped", "openrlhf", "PolicyLoss", ours(clipped), openrlhf(), notes=("empty", "nan")),
    Row(
        "clipped(dual_clip=3)",
        "openrlhf",
        "dual_clip=3",
        ours(clipped, dual_clip=3.0),
        openrlhf(dual_clip=3.0),
        notes=("empty", "nan"),
    ),
    Row(
        "clipped, on_policy",
        "trl",
        "dapo, no old logprobs",
        first_update,
        trl("dapo", on_policy=True),
        notes=("nan",),
    ),
    Row(
        "clipped, sequence_mean_weights",
        "verl",
        "seq-mean-token-mean",
        ours(clipped, sequence_mean_weights),
        verl("vanilla", "seq-mean-token-mean", **NO_DUAL),
        notes=("empty", "nan"),
    ),
    Row(
        "clipped, sequence_mean_weights",
        "trl",
        "loss_type=grpo",
        ours(clipped, sequence_mean_weights),
        trl("grpo"),
        notes=("rows", "bound", "nan"),
    ),
    Row(
        "clipped, sequence_mean_weights",
        "openrlhf",
        "token_level_loss=False",
        ours(clipped, sequence_mean_weights),
        openrlhf(token_level_loss=False),
        notes=("empty", "nan"),
    ),
    Row(
        "clipped, constant_weights",
        "verl",
        "seq-mean-token-sum-norm",
        ours(clipped, constant),
        verl("vanilla", "seq-mean-token-sum-norm", **NO_DUAL),
        notes=("empty", "rows", "nan"),
    ),
    Row(
        "clipped, constant_weights",
        "trl",
        "loss_type=dr_grpo",
        ours(clipped, constant),
        trl("dr_grpo"),
        notes=("bound", "nan"),
    ),
    Row(
        "gspo",
        "trl",
        "importance_sampling_level=sequence",
        ours(gspo, sequence_mean_weights, **WIDE),
        trl("grpo", "sequence"),
        notes=("rows", "bound", "nan"),
    ),
    Row(
        "gspo",
        "openrlhf",
        "policy_loss_type=gspo",
        ours(gspo, sequence_mean_weights, **WIDE),
        openrlhf(policy_loss_type="gspo"),
        notes=("empty", "bound", "nan"),
    ),
    Row(
        "gspo(token_gradient)",
        "verl",
        "loss_mode=gspo",
        ours(gspo, sequence_mean_weights, token_gradient=True, **WIDE),
        verl("gspo", "seq-mean-token-mean"),
        notes=("empty", "bound", "nan"),
    ),
    Row(
        "cispo(clip_low=0.2, clip_high=0.3)",
        "verl",
        "loss_mode=cispo",
        ours(cispo, clip_low=0.2, clip_high=0.3),
        verl("cispo", clip_ratio_high=0.3),
        notes=("empty", "nan"),
    ),
    Row(
        "cispo(clip_high=4)",
        "trl",
        "loss_type=cispo, epsilon_high=5",
        ours(cispo),
        trl("cispo", epsilon_high=5.0),
        notes=("nan",),
    ),
    Row(
        "sapo",
        "verl",
        "loss_mode=sapo",
        ours(sapo, sequence_mean_weights),
        verl("sapo"),
        notes=("empty", "nan"),
    ),
    Row(
        "sapo",
        "trl",
        "loss_type=sapo",
        ours(sapo, sequence_mean_weights),
        trl("sapo"),
        notes=("rows", "nan"),
    ),
    Row(
        "gmpo",
        "verl",
        "loss_mode=geo_mean",
        one_advantage(ours(gmpo, sequence_mean_weights)),
        one_advantage(verl("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)),
        notes=("rows", "bound", "nan"),
    ),
    Row(
        "gmpo",
        "trl",
        "GMPOTrainer",
        one_advantage(ours(gmpo, sequence_mean_weights)),
        trl_gmpo,
        notes=("rows", "bound", "empty", "nan"),
    ),
    Row("reinforce", "verl", "loss_mode=gpg", ours(reinforce), verl("gpg"), value=False),
    Row(
        "reinforce + log_ratio_penalty",
        "verl",
        "loss_mode=dro, dro_beta=0.1",
        our_dro,
        verl_dro,
        value=False,
        notes=("nan",),
    ),
    Row(
        "kl_loss, kl(estimator=k1)",
        "verl",
        "kl_loss_type=k1",
        our_kl("k1", **PLAIN),
        verl_kl("k1"),
        notes=("empty",),
    ),
    Row(
        "kl_loss, kl(estimator=k2)",
        "verl",
        "kl_loss_type=k2",
        our_kl("k2", **PLAIN),
        verl_kl("k2"),
        notes=("empty", "nan"),
    ),
    Row(
        "kl_loss, kl(estimator=k3)",
        "verl",
        "kl_loss_type=low_var_kl",
        our_kl("k3"),
        verl_kl("low_var_kl"),
        notes=("empty",),
    ),
    *(
        Row(
            f"kl_loss, kl(estimator={k}, input_clamp=None)",
            "openrlhf",
            f"kl_estimator={k}",
            our_kl(k, input_clamp=None),
            openrlhf_kl(k),
            notes=("empty", "nan"),
        )
        for k in ("k1", "k2", "k3")
    ),
    Row(
        "kl_loss, kl(k3, no clamps)",
        "trl",
        "beta=1",
        our_kl("k3", **PLAIN),
        trl_kl(),
        notes=("nan",),
    ),
    Row(
        "kl_loss, kl(k3, gradient=importance, no clamps)",
        "trl",
        "use_bias_correction_kl",
        our_kl("k3", gradient="importance", **PLAIN),
        trl_kl(unbiased=True),
        notes=("nan",),
    ),
    Row(
        "importance_weights(max=2)",
        "verl",
        "rollout_is=token",
        weights(),
        verl_weights("token", 2.0),
        notes=("empty", "sampler", "nan"),
    ),
    Row(
        "importance_weights(max=2)",
        "trl",
        "token_truncate",
        weights(),
        trl_weights("token_truncate", None, 2.0),
        notes=("sampler",),
    ),
    Row(
        "importance_weights(level=sequence)",
        "verl",
        "rollout_is=sequence",
        weights(level="sequence"),
        verl_weights("sequence", 2.0),
        notes=("empty", "sampler"),
    ),
    Row(
        "importance_weights(level=sequence)",
        "trl",
        "sequence_truncate",
        weights(level="sequence"),
        trl_weights("sequence_truncate", None, 2.0),
        notes=("sampler",),
    ),
    Row(
        "importance_weights(mode=mask)",
        "verl",
        "rollout_is_threshold=0.5_2",
        weights(mode="mask", min=0.5),
        verl_weights("token", "0.5_2.0"),
        notes=("empty", "dropped"),
    ),
    Row(
        "importance_weights(mode=mask)",
        "trl",
        "token_mask",
        weights(mode="mask", min=0.5),
        trl_weights("token_mask", 0.5, 2.0),
    ),
    Row(
        "importance_weights(level=sequence, mode=mask)",
        "trl",
        "sequence_mask",
        weights(level="sequence", mode="mask", min=0.5),
        trl_weights("sequence_mask", 0.5, 2.0),
        notes=("sampler",),
    ),
    Row(
        "importance_weights(token_bounds)",
        "verl",
        "rollout_rs=token_k1",
        kept(token_bounds=(0.8, 1.25)),
        verl_rejection("token_k1", "0.8_1.25"),
        notes=("empty",),
    ),
    Row(
        "importance_weights(geometric_bounds)",
        "verl",
        "rollout_rs=seq_mean_k1",
        kept(geometric_bounds=(0.8, 1.25)),
        verl_rejection("seq_mean_k1", "0.8_1.25"),
        notes=("empty", "sampler"),
    ),
    Row(
        "clipped, importance_weights(max=2)",
        "openrlhf",
        "token, clip",
        corrected(),
        openrlhf(
            is_correction_level="token",
            is_correction_mode="clip",
            is_correction_threshold=(0.0, 2.0),
        ),
        notes=("empty", "sampler", "nan"),
    ),
    Row(
        "clipped, importance_weights(mode=mask)",
        "openrlhf",
        "token, mask",
        corrected(mode="mask", min=0.5),
        openrlhf(is_correction_level="token", is_correction_threshold=(0.5, 2.0)),
        notes=("empty", "nan"),
    ),
    Row(
        "clipped, importance_weights(mode=sequence_mask)",
        "openrlhf",
        "seq, mask",
        corrected(mode="sequence_mask", min=0.8, max=1.25),
        openrlhf(is_correction_level="seq", is_correction_threshold=(0.8, 1.25)),
        notes=("empty", "sampler", "nan"),
    ),
    Row(
        "clipped, importance_weights(probability_bounds)",
        "openrlhf",
        "token, mask, tv",
        corrected(max=INF, probability_bounds=(0.1, 0.1)),
        openrlhf(**TOKEN, is_correction_gating="tv", is_correction_threshold=(0.0, 0.1)),
        notes=("empty", "nan"),
    ),
    Row(
        "reinforce, importance_weights(probability_bounds, advantages)",
        "verl",
        "loss_mode=dppo_tv",
        gated(3.0, probability_bounds=(0.1, 0.1)),
        verl("dppo_tv", clip_ratio_low=0.1, clip_ratio_high=0.1),
        notes=("nan",),
        value=False,
    ),
    Row(
        "reinforce, importance_weights(binary_kl_bounds, advantages)",
        "verl",
        "loss_mode=dppo_kl",
        gated(3.0, binary_kl_bounds=(0.05, 0.05)),
        verl("dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05),
        notes=("nan",),
        value=False,
    ),
    Row(
        "clipped, importance_weights(binary_kl_bounds)",
        "openrlhf",
        "token, mask, binary_kl",
        corrected(max=INF, binary_kl_bounds=(0.05, 0.05)),
        openrlhf(**TOKEN, is_correction_gating="binary_kl", is_correction_threshold=(0.0, 0.05)),
        notes=("empty", "nan"),
    ),
    Row(
        "clipped, importance_weights(mean_binary_kl)",
        "openrlhf",
        "seq, mask, binary_kl",
        corrected(max=INF, mean_binary_kl=0.05),
        openrlhf(
            is_correction_level="seq",
            is_correction_gating="binary_kl",
            is_correction_threshold=(0.0, 0.05),
        ),
        notes=("empty", "nan"),
    ),
    Row(
        "sampler_gap",
        "verl",
        "rollout_corr/k3_kl",
        our_gap,
        verl_gap,
        notes=("empty", "bound", "sampler"),
    ),
    Row(
        "value_loss(clip=0.5)",
        "verl",
        "cliprange_value=0.5",
        our_value(0.5),
        verl_value,
        leaf="values",
        notes=("empty", "nan"),
    ),
    *(
        Row(
            f"value_loss(clip={clip})",
            "openrlhf",
            f"ValueLoss({clip})",
            our_value(clip),
            openrlhf_value(clip),
            leaf="values",
            notes=("empty", "nan"),
        )
        for clip in (0.2, None)
    ),
]
