"""Why rows disagree and who is right; what is not compared, and why."""

from typing import NamedTuple


class Note(NamedTuple):
    """The batches on which two sides may differ; none: on any."""

    batches: tuple[str, ...]
    title: str
    text: str


NOTES = {
    "nan": Note(
        ("NaN under the mask",),
        "A NaN that no one trains on",
        "Ours ignores it, bit for bit. Most of the peers' losses multiply by the mask, and 0 · NaN"
        " is NaN. Padding, tool output and rejected tokens may hold anything, so the mask has to"
        " come before the arithmetic. OpenRLHF #1240 (open) proposes that.",
    ),
    "empty": Note(
        ("empty mask",),
        "No token to train on",
        "Ours has loss 0 and gradient 0. verl and OpenRLHF divide 0 by 0, or raise, where every"
        " answer of a batch is filtered. verl #782 fixed `masked_mean`, which these paths do not"
        " take.",
    ),
    "one": Note(
        ("groups of one",),
        "A group of one",
        "Ours is 0: there is nothing to compare with. verl returns the reward itself, an advantage"
        " without a baseline among others that have one; its `rloo_vectorized` returns 0 as we do"
        " (verl #7793, open). OpenRLHF divides by 0.",
    ),
    "bound": Note(
        ("log ratio 60", "scores ±400"),
        "How far a ratio can go",
        "Ours is at most e²⁰, with gradient 0 above, as in verl. TRL (f-DPO, too) and OpenRLHF's"
        " GSPO have no bound, and verl's GSPO has e¹⁰. All agree below. One token of ratio e⁶⁰ is"
        " beyond any optimizer step: its squared gradient overflows float32.",
    ),
    "sampler": Note(
        ("sampler at -inf",),
        "A sampler's log-probability of −∞",
        "A token that was drawn can't have had probability 0; the number is missing. Ours drops the"
        " token. The peers read a ratio of ∞ and clamp it, so that it gets the largest weight, or"
        " drop the whole answer. TRL gives ratio 1 to NaN (TRL #6693), but not to −∞.",
    ),
    "rows": Note(
        ("one answer masked",),
        "An answer that is masked as a whole",
        "`sequence_mean_weights` are the mean over the answers that are trained on, as in verl and"
        " OpenRLHF; TRL's denominator counts masked ones, too. `constant_weights` count all, as in"
        " TRL: Dr. GRPO's denominator is a constant. verl's shrinks with each masked answer. GMPO's"
        " mean counts masked answers in both; in TRL's value each has −A.",
    ),
    "epsilon": Note(
        (),
        "What is added to σ",
        "Ours adds 1e-6, TRL 1e-4: TRL's advantages are 0.01 % smaller for σ = 1, and 9 % for"
        " σ = 0.001. Neither is wrong.",
    ),
    "flat": Note(
        ("equal rewards",),
        "Rewards that are all equal",
        "Ours is exactly 0: such a group teaches nothing. Three rewards of 0.9 in float32 have a"
        " mean that is off by 6e-8. Divided by an epsilon, that is an advantage of 60 with"
        " OpenRLHF (1e-9), 0.06 with `grpo_vectorized` (1e-6) and 6e-4 with TRL (1e-4). verl #4597"
        " reported it.",
    ),
    "root": Note(
        ("equal rewards",),
        "An epsilon under the root",
        "Ours is (V − mean) / (σ + 1e-6). The peers have 1e-8 beside or below σ² under the root:"
        " 1e-5 of the value at σ = 0.1. Neither is wrong. Both whitenings are here: verl divides by"
        " n − 1, OpenRLHF by n (`ddof=0`).",
    ),
    "dropped": Note(
        ("ratio far from 1", "log ratio 60"),
        "Every token dropped",
        "Ours has weight 0 everywhere. verl's IcePop stops the run with a ZeroDivisionError, in a"
        " metric (verl #7559, open).",
    ),
    "gdpo": Note(
        (),
        "GDPO's last normalization",
        "Ours is over answers, as in the paper and TRL. verl's is over tokens, so that a long"
        " answer counts more often (verl #6497, open). For answers of one token both agree.",
    ),
    "tool": Note(
        ("tool tokens",),
        "GAE across a tool's answer",
        "Ours carries value and advantage over tokens that the policy did not write, as verl does."
        " OpenRLHF sets V = 0 on them: δ of the last token before a call is r − V, as if the"
        " episode ended there, and each token of tool output discounts by γλ. Ours is right: the"
        " length of a tool's answer is no decision of the policy. Miles #1827 fixed the same.",
    ),
    "overflow": Note(
        ("scores ±400",),
        "log(1 + exp(x))",
        "Ours is `logsigmoid`, which is exact. OpenRLHF's `LogExpLoss` overflows: its loss is ∞ and"
        " its gradient NaN. Its `PairWiseLoss` does not.",
    ),
    "excluded": Note(
        ("teacher excludes a token", "both exclude a token"),
        "A token of probability 0",
        "0 · log 0 is 0 in ours. `F.kl_div` and `softmax · logits` compute 0 · (−∞) = NaN. Top-k"
        " and top-p make such tokens.",
    ),
    "clamp": Note(
        (),
        "A top-k divergence clamped at 0",
        "verl sums p (log p − log q) over the teacher's k tokens only. That is no divergence: it is"
        " negative wherever the student has more mass on them, and is then clamped to 0 with its"
        " gradient. verl #7856 saw that in 415 of 467 steps. Where student and teacher are equal,"
        " its gradient is not 0: it pushes the student onto the k tokens. Ours with"
        ' `outside="rest_mass"` makes all other tokens one outcome: never negative, and least'
        " where both are equal. TRL's tail is the same; verl #7855 (open) adds it.",
    ),
    "tail": Note(
        ("sure student",),
        "The smallest tail",
        "TRL keeps the mass outside the top-k above 1e-7. A student that has less gets a smaller"
        " loss and no gradient to spread. Ours is exact.",
    ),
}

NOT_COMPARED = {
    "explained_variance": "a metric, which the peers compute inside their trainers",
    "gap_by_depth": "a metric of ours only",
    "group_mean_weights": "DAPO's equation; no peer has it",
    "informative_groups": "a filter; the peers compare σ with 0 inside their trainers",
    "interpolated_logprobs": "AReaL's, which is not installed here",
    "length_adaptive_lambda": "VAPO's; no peer here has it",
    "max_rl": "TRL #5026 was closed without it; verl has it in a fork only",
    "members": "statistics that `advantages` is made of",
    "nemo_grpo": "NeMo RL's, which does not install without CUDA",
    "positive_nll": "VAPO's, in NeMo RL, which does not install without CUDA",
    "scale_rewards": "NeMo RL's, which does not install without CUDA",
    "support_ratio": "a metric of ours only",
    "to_tokens": "a part of every advantage's row",
    "to_turns": "places a turn's advantage; no peer here has it",
    "token_hashes": "a receipt of ours only",
    "token_receipt": "a receipt of ours only",
}

KL = (
    "Over five tokens, where an expectation is a sum: how far the expected gradient of each"
    " estimator is from the exact ones. KL(π‖π_ref) is what a penalty is meant to be. k1 as a loss"
    " has no gradient in expectation. k3 by backpropagation has the gradient of KL(π_ref‖π): the"
    " right value of the wrong divergence. It is TRL's, verl's and our default;"
    ' `gradient="score"` has the right one, as have k2, `k3+` of verl and `unbiased_gradient` of'
    " OpenRLHF #1309 (merged, off by default)."
)
TRUNCATION = (
    "OpenRLHF's RewardDataset writes the end-of-text token over the last token of every answer,"
    " also of one that was cut. Two answers that differ only there become the same ids, so that"
    " the pair teaches nothing (shown with its own class), and a cut answer teaches to stop at the"
    " limit (OpenRLHF #1311, open). nemorl's `data.too_long` refuses, drops or cuts such a pair,"
    " and adds no token to one that is cut."
)
