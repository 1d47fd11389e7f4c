"""What losses refuse: an option of each function."""

import pytest
import torch

from nemorl.losses import (
    advantages,
    distillation,
    importance,
    kl,
    logprobs,
    masks,
    policy,
    preference,
    value,
)
from nemorl.losses.types import Mean, Sum, merge

ROW, ONE, MASK = torch.zeros(1, 3), torch.zeros(1), torch.ones(1, 3, dtype=torch.bool)
IDS, LOGITS = torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, 4)
GROUP = torch.tensor([1])
KINDS = logprobs.LogprobKind(), logprobs.LogprobKind(top_p=0.9, temperature=0.5)


def topk(ids: torch.Tensor, teacher: float = -1.0, **options):
    logprobs, weights = torch.full(ids.shape, -1.0), torch.tensor([[0.0, 0.5, 0.5]])
    return distillation.distillation_topk(
        logprobs, ROW, ids, torch.full(ids.shape, teacher), weights, **options
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantages.advantages(ONE, GROUP, baseline="mean"), "^baseline must be one of"),
        (lambda: advantages.advantages(ONE, GROUP, scale="std"), "^scale must be one of"),
        (
            lambda: advantages.advantages(ONE, GROUP, baseline="length_weighted"),
            "^lengths must be given with baseline='length_weighted'.*lengths missing",
        ),
        (lambda: advantages.gdpo(ONE[None], GROUP, weights=()), "one number per reward component"),
        (lambda: advantages.pass_at_k(ONE, GROUP, k=0), "k must be at least 1"),
        (lambda: topk(IDS[..., None], mix=2.0, direction="mixed"),
         r"mix must be in \[0, 1\] for 'mixed', but it is 2.0"),
        (lambda: topk(IDS[..., None], temperature=0.0), "temperature"),
        (lambda: topk(IDS[..., None], outside="ignore"), "^outside must be one of"),
        (lambda: topk(IDS[..., None][..., :0]), "target_ids must name at least one token"),
        (lambda: topk(torch.zeros(1, 3, 2).long()), "target_ids must differ at a token"),
        *((lambda x=x: topk(IDS[..., None], x), "^teacher_logprobs must be log-probabilities")
          for x in (float("nan"), float("-inf"), 1.0)),
        (lambda: topk(IDS[..., None], outside="zero", direction="mixed"),
         "^entropy must be given for outside='zero' in the direction 'mixed', but it is None"),
        (lambda: importance.importance_weights(ROW, ROW, MASK, min=3.0), r"\(min, max\) must be"),
        (lambda: importance.importance_weights(ROW, ROW, MASK, token_bounds=(3.0, 2.0)),
         r"^token_bounds must be 0 <= low <= high"),
        (lambda: importance.importance_weights(ROW, ROW, MASK, probability_bounds=(-0.1, 0.2)),
         "^probability_bounds must both be at least 0"),
        (lambda: importance.importance_weights(ROW, ROW, MASK, binary_kl_bounds=(-0.1, 0.2)),
         "^binary_kl_bounds must both be at least 0"),
        (lambda: importance.importance_weights(ROW, ROW, MASK, mean_binary_kl=-0.1),
         "^mean_binary_kl must be at least 0"),
        (lambda: kl.kl(ROW, ROW, MASK, gradient="importance"), "^generation_logprobs must be"),
        (lambda: logprobs.token_logprobs(LOGITS[:, :0], IDS[:, :0]), "^seq must be at least 1"),
        (lambda: logprobs.LogprobKind(top_p=0.0), r"LogprobKind\.top_p must be"),
        (
            lambda: logprobs.require_same_support(*KINDS),
            "temperature: 1.0 and 0.5; top_p: 1.0 and 0.9",
        ),
        (lambda: masks.constant_weights(MASK, length=0), "length must be at least 1"),
        (lambda: policy.clipped(ROW, ROW, ROW, ROW, dual_clip=1.0), "dual_clip must be above 1"),
        (lambda: policy.cispo(ROW, ROW, ROW, ROW, clip_low=-0.1), "^clip_low must be at least 0"),
        (lambda: preference.dpo(ONE, ONE, ONE, ONE, ONE, label_smoothing=0.5), r"\[0, 0.5\)"),
        *((lambda x=x: preference.implicit_reward(ONE, divergence=x), "^divergence must be")
          for x in (1.5, "kl")),
        (lambda: policy.sapo(ROW, ROW, ROW, ROW, temperature_negative=0.0), "^temperature_neg"),
        (lambda: policy.gmpo(ROW, ROW, ROW, ROW, clip_low=-1.0), "^clip_low must be at least 0"),
        (lambda: preference.ipo(ONE, ONE, ONE, ONE, ONE, beta=0.0), "^beta must be above 0"),
        (lambda: preference.sequence_logprobs(ROW, MASK, IDS + 1), "num_sequences go together"),
        (lambda: preference.sequence_logprobs(ROW, MASK, IDS + 1, num_sequences=0),
         "num_sequences must be at least the number"),
        (lambda: advantages.scale_rewards(ONE, source_min=1.0), "source_max must be above"),
        (lambda: advantages.overlong_penalty(GROUP, max_length=10, buffer=11), "buffer must be"),
        (lambda: preference.bradley_terry(ONE, ONE, ONE, centering=-1.0), "^centering must be"),
        (lambda: value.value_loss(ROW, ROW, ROW, ROW, clip=0.0), "clip must be above 0"),
        (lambda: merge({"x": Sum(ONE[0])}, {"x": Mean(ONE[0], ONE[0])}), "metric x must be a"),
    ],
)  # fmt: skip
def test_a_bad_option_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
