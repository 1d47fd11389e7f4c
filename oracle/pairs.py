"""Rows: preferences, reward models, supervised fine-tuning, distillation, log-probabilities."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nemorl.losses import (
    bradley_terry,
    distillation_topk,
    divergence,
    dpo,
    entropy,
    entropy_bonus,
    hinge,
    ipo,
    kto,
    nll,
    orpo,
    sequence_logprobs,
    simpo,
    token_logprobs,
    token_mean_weights,
)
from oracle.batches import Pairs, Sequences, Vocabulary, pairs, vocabularies
from oracle.compare import Row
from oracle.peers import load, statements, trainer

TOP_K = 3


def mean(b: Pairs) -> Tensor:
    return torch.full_like(b.margin, 1 / len(b.margin))


def ours(loss: Any, **options: Any) -> Any:
    return lambda b: loss(*b.scores, *b.reference, mean(b), **options).loss


def free(loss: Any, **options: Any) -> Any:
    """Without a reference."""
    return lambda b: loss(*b.scores, mean(b), **options).loss


def output(logprobs: Tensor, mask: Tensor) -> Any:
    """A model that has these log-probabilities."""
    zeros = torch.zeros_like(logprobs)
    found = SimpleNamespace(
        log_probs=torch.where(mask, logprobs, 0.0),
        label_mask=mask,
        entropy=zeros,
        mean_logits=zeros,
        is_top1=zeros > 0,
    )
    return lambda **_: found


def answers(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Answers of one token each, and their mask."""
    tokens = logprobs.reshape(-1, 1)
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


def batch(mask: Tensor) -> dict[str, Tensor]:
    """Answers after a prompt of one token."""
    ids = torch.nn.functional.pad(mask.long(), (1, 0))
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": ids}


def dpo_trainer(
    loss_type: str, logprobs: Tensor, reference: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    self = trainer(
        loss_types=[loss_type],
        loss_weights=[1.0],
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
        **{"f_divergence_type": "reverse_kl", "beta": 0.1, "label_smoothing": 0.0, **options},
    )
    chosen, rejected = reference
    inputs = {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected, **batch(mask)}
    module = load("trl.trainer.dpo_trainer")
    return module.DPOTrainer._compute_loss(self, output(logprobs, mask), inputs, False)


def trl_dpo(loss_type: str, **options: Any) -> Any:
    def run(b: Pairs) -> Tensor:
        logprobs, mask = answers(b.scores)
        return dpo_trainer(loss_type, logprobs, b.reference, mask, **options)

    return run


def in_float32(loss: Any) -> Any:
    """TRL's α-divergence knows no float64."""
    return lambda b: loss(replace(b, scores=b.scores.float(), reference=b.reference.float()))


def openrlhf_dpo(**options: Any) -> Any:
    def run(b: Pairs) -> Tensor:
        loss = load("openrlhf.models.loss").DPOLoss(0.1, **options)
        return loss(*b.scores, *b.reference)[0]

    return run


def trl_simpo(b: Pairs) -> Tensor:
    cpo = load("trl.experimental.cpo.cpo_trainer").CPOTrainer
    self = trainer(loss_type="simpo", simpo_gamma=1.0, beta=2.0, label_smoothing=0.1, alpha=0.0)
    return cpo.cpo_loss(self, *b.scores)[0].mean()


def trl_orpo(b: Pairs) -> Tensor:
    module = load("trl.experimental.orpo.orpo_trainer")
    return -module.ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), *b.scores)[0].mean()


def shift(b: Pairs) -> Tensor:
    """The KL of mismatched answers, of any numbers."""
    return (b.reference[0] - b.reference[1]).mean()


def our_kto(with_kl: bool) -> Any:
    def run(b: Pairs) -> Tensor:
        scores, wanted = b.scores.flatten(), torch.arange(b.scores.numel()) % 3 > 0
        w = torch.full_like(scores, 1 / len(scores))
        shifted = shift(b) if with_kl else None
        options = {"desirable_coef": 1.5, "undesirable_coef": 0.5}
        return kto(scores, b.reference.flatten(), wanted, w, shifted, **options).loss

    return run


def trl_kto(loss_type: str) -> Any:
    def run(b: Pairs) -> Tensor:
        self = trainer(
            loss_type=loss_type,
            calculate_KL=loss_type == "kto",
            precompute_ref_logps=True,
            beta=0.1,
            desirable_weight=1.5,
            undesirable_weight=0.5,
        )
        self._compute_kl_logps = lambda *_: b.reference[0]
        logprobs, mask = answers(b.scores)
        inputs = {
            "label": torch.arange(b.scores.numel()) % 3 > 0,
            "ref_logps": b.reference.flatten(),
            "ref_KL_logps": b.reference[1],
            **batch(mask),
        }
        kto_trainer = load("trl.trainer.kto_trainer").KTOTrainer
        return kto_trainer._compute_loss(self, output(logprobs, mask), inputs, False)

    return run


def our_reward_model(margin: bool, **options: Any) -> Any:
    return lambda b: bradley_terry(*b.scores, mean(b), b.margin if margin else None, **options).loss


def trl_reward_model(margin: bool, centering: float | None = None) -> Any:
    def run(b: Pairs) -> Tensor:
        self = trainer()
        self.args.center_rewards_coefficient = centering
        given = {"attention_mask": b.margin, **({"margin": b.margin} if margin else {})}
        logits = SimpleNamespace(logits=b.scores.reshape(-1, 1))
        reward_trainer = load("trl.trainer.reward_trainer").RewardTrainer
        return reward_trainer.compute_loss(self, lambda **_: logits, given)

    return run


def openrlhf_reward_model(name: str) -> Any:
    def run(b: Pairs) -> Tensor:
        loss = getattr(load("openrlhf.models.loss"), name)()
        return loss(*b.scores, b.margin) if name == "PairWiseLoss" else loss(*b.scores)

    return run


def our_nll(b: Sequences) -> Tensor:
    return nll(b.logprobs, token_mean_weights(b.mask)).loss


def our_dft(b: Sequences) -> Tensor:
    return nll(b.logprobs, token_mean_weights(b.mask), dynamic=True).loss


def trl_sft(loss_type: str) -> Any:
    def run(b: Sequences) -> Tensor:
        self = trainer(compute_loss_func=None, label_smoother=None)
        self.args.loss_type, self.args.average_tokens_across_devices = loss_type, False
        sft_trainer = load("trl.trainer.sft_trainer").SFTTrainer
        return sft_trainer.compute_loss(self, output(b.logprobs, b.mask), batch(b.mask))

    return run


def openrlhf_sft(b: Sequences) -> Tensor:
    return load("openrlhf.models.loss").SFTLoss()(b.logprobs, b.mask)


def our_divergence(direction: str, mix: float = 0.5) -> Any:
    def run(b: Vocabulary) -> Tensor:
        student, teacher = b.logits.log_softmax(-1), b.teacher.log_softmax(-1)
        found = divergence(student, teacher, direction=direction, mix=mix)
        return (token_mean_weights(b.mask) * torch.where(b.mask, found, 0.0)).sum()

    return run


def trl_divergence(beta: float) -> Any:
    def run(b: Vocabulary) -> Tensor:
        gkd = load("trl.experimental.gkd.gkd_trainer").GKDTrainer
        labels = torch.where(b.mask, b.ids, -100)
        return gkd.generalized_jsd_loss(b.logits, b.teacher, labels, beta)

    return run


def top_k(b: Vocabulary) -> tuple[Tensor, Tensor]:
    found = b.teacher.log_softmax(-1).topk(TOP_K)
    return found.values, found.indices


def our_top_k(outside: str) -> Any:
    def run(b: Vocabulary) -> Tensor:
        teacher, ids = top_k(b)
        student = b.logits.log_softmax(-1)
        others = student.scatter(-1, ids, -torch.inf).logsumexp(-1)
        weights = token_mean_weights(b.mask)
        chosen = student.gather(-1, ids)
        return distillation_topk(chosen, others, ids, teacher, weights, outside=outside).loss

    return run


def trl_top_k(tail: bool) -> Any:
    def run(b: Vocabulary) -> Tensor:
        module = load("trl.experimental.server_distillation.server_distillation_trainer")
        cls = module.ServerDistillationTrainer
        self = trainer(loss_add_tail=tail, _reduce_divergence_loss=cls._reduce_divergence_loss)
        teacher, ids = top_k(b)
        found = {"topk_logprobs": teacher, "topk_token_ids": ids}
        labels = torch.where(b.mask, b.ids, -100)
        return cls._compute_server_forward_kl_loss(self, found, b.logits.log_softmax(-1), labels)

    return run


def verl_top_k(b: Vocabulary) -> Tensor:
    per_token = load("verl.trainer.distillation.fsdp.losses").compute_forward_kl_topk
    teacher, ids = (torch.nested.nested_tensor(list(x), layout=torch.jagged) for x in top_k(b))
    settings = SimpleNamespace(log_prob_min_clamp=None)
    logits = b.logits.reshape(1, -1, b.logits.shape[-1])
    config = SimpleNamespace(distillation_loss=settings)
    found = per_token(logits, teacher, ids, config, "thd")["distillation_losses"]
    wrapper = load("verl.trainer.distillation.losses").compute_forward_kl_topk
    scope = {"distillation_losses": found.reshape(b.mask.shape)}
    clamped = statements(wrapper, "distillation_losses = distillation_losses.clamp_min", scope)
    agg_loss = load("verl.trainer.ppo.core_algos").agg_loss
    return agg_loss(clamped.distillation_losses, b.mask.double(), "token-mean")


def our_entropy(b: Vocabulary) -> Tensor:
    weights = token_mean_weights(b.mask[:, 1:])
    return entropy_bonus(entropy(b.logits)[:, 1:], weights, coef=1.0).loss


def verl_entropy(b: Vocabulary) -> Tensor:
    core = load("verl.trainer.ppo.core_algos")
    return -core.compute_entropy_loss(b.logits[:, :-1], b.mask[:, 1:].double())


def our_logprobs(b: Vocabulary) -> Tensor:
    return token_logprobs(b.logits, b.ids)[:, 1:]


def trl_logprobs(b: Vocabulary) -> Tensor:
    return load("trl.trainer.utils").selective_log_softmax(b.logits[:, :-1], b.ids[:, 1:])


def openrlhf_logprobs(b: Vocabulary) -> Tensor:
    return load("openrlhf.models.utils").log_probs_from_logits(b.logits[:, :-1], b.ids[:, 1:])


def our_average_ipo(b: Sequences) -> Tensor:
    """Of answers of several tokens, whose means are compared."""
    policy = sequence_logprobs(b.logprobs, b.mask, average=True).chunk(2)
    reference = sequence_logprobs(b.reference, b.mask, average=True).chunk(2)
    return ipo(*policy, *reference, torch.full((3,), 1 / 3).double()).loss


def trl_average_ipo(b: Sequences) -> Tensor:
    reference = torch.where(b.mask, b.reference, 0.0).sum(-1).view(2, -1)
    return dpo_trainer("ipo", b.logprobs, reference, b.mask)


def pair(ours: str, peer: str, theirs: str, mine: Any, other: Any, *notes: str) -> Row:
    return Row(ours, peer, theirs, mine, other, notes, "scores", pairs)


def places(ours: str, peer: str, theirs: str, mine: Any, other: Any, *notes: str) -> Row:
    return Row(ours, peer, theirs, mine, other, notes, "logits", vocabularies)


ALPHA = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5}
ROWS = [
    pair(
        "dpo, implicit_reward(divergence=forward_kl)",
        "trl",
        "f_divergence_type=forward_kl",
        ours(dpo, divergence="forward_kl"),
        trl_dpo("sigmoid", f_divergence_type="forward_kl"),
        "bound",
    ),
    pair(
        "dpo, implicit_reward(divergence=jensen_shannon)",
        "trl",
        "f_divergence_type=js_divergence",
        ours(dpo, divergence="jensen_shannon"),
        trl_dpo("sigmoid", f_divergence_type="js_divergence"),
    ),
    pair(
        "dpo, implicit_reward(divergence=0.5)",
        "trl",
        "alpha_divergence, coef=0.5",
        in_float32(ours(dpo, divergence=0.5)),
        in_float32(trl_dpo("sigmoid", **ALPHA)),
        "bound",
    ),
    pair(
        "bradley_terry(margin, centering=0.01)",
        "trl",
        "center_rewards_coefficient",
        our_reward_model(True, centering=0.01),
        trl_reward_model(True, 0.01),
    ),
    Row("nll(dynamic)", "trl", "loss_type=dft", our_dft, trl_sft("dft")),
    pair("dpo", "trl", "loss_type=sigmoid", ours(dpo), trl_dpo("sigmoid")),
    pair(
        "dpo(robust, label_smoothing=0.1)",
        "trl",
        "loss_type=robust",
        ours(dpo, robust=True, label_smoothing=0.1),
        trl_dpo("robust", label_smoothing=0.1),
    ),
    pair(
        "dpo(label_smoothing=0.1)",
        "openrlhf",
        "DPOLoss(label_smoothing=0.1)",
        ours(dpo, label_smoothing=0.1),
        openrlhf_dpo(label_smoothing=0.1),
    ),
    pair("ipo", "openrlhf", "DPOLoss(ipo=True)", ours(ipo), openrlhf_dpo(ipo=True)),
    Row(
        "ipo, sequence_logprobs(average)", "trl", "loss_type=ipo", our_average_ipo, trl_average_ipo
    ),
    pair("hinge", "trl", "loss_type=hinge", ours(hinge), trl_dpo("hinge")),
    pair(
        "simpo(label_smoothing=0.1)",
        "trl",
        "CPOTrainer, simpo",
        free(simpo, label_smoothing=0.1),
        trl_simpo,
    ),
    pair("orpo", "trl", "ORPOTrainer", free(orpo), trl_orpo),
    pair("kto", "trl", "loss_type=kto", our_kto(True), trl_kto("kto")),
    pair("kto(kl=None)", "trl", "apo_zero_unpaired", our_kto(False), trl_kto("apo_zero_unpaired")),
    pair("bradley_terry", "trl", "RewardTrainer", our_reward_model(False), trl_reward_model(False)),
    pair(
        "bradley_terry(margin)",
        "trl",
        "margin column",
        our_reward_model(True),
        trl_reward_model(True),
    ),
    pair(
        "bradley_terry(margin)",
        "openrlhf",
        "PairWiseLoss",
        our_reward_model(True),
        openrlhf_reward_model("PairWiseLoss"),
    ),
    pair(
        "bradley_terry",
        "openrlhf",
        "LogExpLoss",
        our_reward_model(False),
        openrlhf_reward_model("LogExpLoss"),
        "overflow",
    ),
    Row("nll", "trl", "SFTTrainer, loss_type=nll", our_nll, trl_sft("nll")),
    Row("nll", "openrlhf", "SFTLoss", our_nll, openrlhf_sft, notes=("empty", "nan")),
    places(
        "divergence(direction=forward)",
        "trl",
        "GKD, beta=0",
        our_divergence("forward"),
        trl_divergence(0),
        "excluded",
    ),
    places(
        "divergence(direction=reverse)",
        "trl",
        "GKD, beta=1",
        our_divergence("reverse"),
        trl_divergence(1),
        "excluded",
    ),
    places(
        "divergence(direction=jensen_shannon, mix=0.3)",
        "trl",
        "GKD, beta=0.3",
        our_divergence("jensen_shannon", 0.3),
        trl_divergence(0.3),
        "excluded",
    ),
    places(
        "distillation_topk(outside=renormalize)",
        "trl",
        "server, loss_add_tail=False",
        our_top_k("renormalize"),
        trl_top_k(False),
    ),
    places(
        "distillation_topk(outside=rest_mass)",
        "trl",
        "server, loss_add_tail=True",
        our_top_k("rest_mass"),
        trl_top_k(True),
        "tail",
    ),
    places(
        "distillation_topk(outside=rest_mass)",
        "verl",
        "loss_mode=forward_kl_topk",
        our_top_k("rest_mass"),
        verl_top_k,
        "empty",
        "clamp",
    ),
    places(
        "entropy_bonus", "verl", "entropy_coeff", our_entropy, verl_entropy, "excluded", "empty"
    ),
    places("token_logprobs", "trl", "selective_log_softmax", our_logprobs, trl_logprobs),
    places("token_logprobs", "openrlhf", "log_probs_from_logits", our_logprobs, openrlhf_logprobs),
]
