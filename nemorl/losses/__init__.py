"""The mathematics of docs/numerics.md: pure functions of tensors, for log-probabilities, losses,
advantages, weights and metrics. Others use the names below: `from nemorl.losses import clipped`.
`advantages`, `kl` and `distillation` are modules: `from nemorl.losses.kl import kl`.
"""

from nemorl.losses import advantages, distillation, kl
from nemorl.losses.advantages import (
    at_last_token,
    dr_grpo,
    gae,
    gdpo,
    grpo,
    length_adaptive_lambda,
    max_rl,
    nemo_grpo,
    opd,
    pass_at_k,
    reinforce_plus_plus,
    rloo,
    to_tokens,
    whiten,
)
from nemorl.losses.baselines import group_advantages
from nemorl.losses.distillation import distillation_topk
from nemorl.losses.importance import importance_weights, sampler_gap
from nemorl.losses.kl import divergence, full_kl
from nemorl.losses.logprobs import (
    LogprobKind,
    LogprobKindError,
    Logprobs,
    entropy,
    filter_logits,
    flat_linear_logprobs,
    linear_token_logprobs,
    require_same_support,
    token_logprobs,
    token_logprobs_and_entropy,
)
from nemorl.losses.masks import (
    constant_weights,
    group_mean_weights,
    sequence_mean_weights,
    token_mean_weights,
)
from nemorl.losses.policy import cispo, clipped, gspo, gspo_token, on_policy, reinforce
from nemorl.losses.preference import (
    bradley_terry,
    dpo,
    hinge,
    ipo,
    kto,
    orpo,
    sequence_logprobs,
    simpo,
)
from nemorl.losses.rewards import (
    informative_groups,
    overlong_filter,
    overlong_penalty,
    scale_rewards,
    stop_properly,
)
from nemorl.losses.supervised import nll
from nemorl.losses.terms import entropy_bonus, kl_loss, positive_nll
from nemorl.losses.types import LossOutput, Max, Mean, Metric, Metrics, Min, Sum, finalize, merge
from nemorl.losses.value import explained_variance, value_loss
from nemorl.losses.vocab_parallel import (
    vocab_parallel_linear_logprobs,
    vocab_parallel_token_logprobs,
)

__all__ = [
    "LogprobKind",
    "LogprobKindError",
    "Logprobs",
    "LossOutput",
    "Max",
    "Mean",
    "Metric",
    "Metrics",
    "Min",
    "Sum",
    "advantages",
    "at_last_token",
    "bradley_terry",
    "cispo",
    "clipped",
    "constant_weights",
    "distillation",
    "distillation_topk",
    "divergence",
    "dpo",
    "dr_grpo",
    "entropy",
    "entropy_bonus",
    "explained_variance",
    "filter_logits",
    "finalize",
    "flat_linear_logprobs",
    "full_kl",
    "gae",
    "gdpo",
    "group_advantages",
    "group_mean_weights",
    "grpo",
    "gspo",
    "gspo_token",
    "hinge",
    "importance_weights",
    "informative_groups",
    "ipo",
    "kl",
    "kl_loss",
    "kto",
    "length_adaptive_lambda",
    "linear_token_logprobs",
    "max_rl",
    "merge",
    "nemo_grpo",
    "nll",
    "on_policy",
    "opd",
    "orpo",
    "overlong_filter",
    "overlong_penalty",
    "pass_at_k",
    "positive_nll",
    "reinforce",
    "reinforce_plus_plus",
    "require_same_support",
    "rloo",
    "sampler_gap",
    "scale_rewards",
    "sequence_logprobs",
    "sequence_mean_weights",
    "simpo",
    "stop_properly",
    "to_tokens",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "token_mean_weights",
    "value_loss",
    "vocab_parallel_linear_logprobs",
    "vocab_parallel_token_logprobs",
    "whiten",
]
