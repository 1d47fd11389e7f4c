"""The loss of a preference step does not depend on how its batch is cut, and is what the pure
losses say of the pairs one by one.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemorl.data.batch import Example
from nemorl.data.comparisons import collate_together
from nemorl.data.packing import pack
from nemorl.losses import preference
from nemorl.losses.types import finalize
from nemorl.parallel.backend import ForwardOutput
from nemorl.parallel.config import BackendConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.layout import cut
from nemorl.runtime.algorithms.comparisons import make_loss, rewards
from nemorl.runtime.config.offline import (
    DPOConfig,
    DPOLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    ORPOLoss,
    SimPOLoss,
)
from tests.runtime.algorithms.pairs import CONFIGS, random_batch
from tests.runtime.runs import numbers
from tests.tiny_models import tiny_model

LAYOUTS = {
    "one row at a time": TrainerConfig(train_micro_batch_size=1),
    "three rows": TrainerConfig(train_micro_batch_size=3),
    "packed": TrainerConfig(sequence_packing=True, packed_row_tokens=64),
    "packed, one at a time": TrainerConfig(
        sequence_packing=True, packed_row_tokens=64, train_micro_batch_size=1
    ),
    "by tokens": TrainerConfig(micro_batch_tokens=48),
    "packed by tokens": TrainerConfig(sequence_packing=True, micro_batch_tokens=48),
}


def evaluated(config, batch, logprobs, layout: TrainerConfig):
    """Loss, gradient and metrics of a step on given logprobs, part by part."""
    logprobs = logprobs.clone().requires_grad_()
    carried = replace(batch, prev_logprobs=logprobs)  # so that they are cut like everything else
    loss_fn, total = make_loss(config, batch, KL), None
    for part in cut(carried, layout).parts():
        assert part.prev_logprobs is not None
        output = loss_fn(ForwardOutput(part.prev_logprobs), replace(part, prev_logprobs=None))
        total = output if total is None else total + output
    assert total is not None
    (gradient,) = torch.autograd.grad(total.loss, logprobs)
    return total.loss.detach(), gradient, finalize(total.metrics)


KL = 0.8


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from(sorted(LAYOUTS)), st.integers(-1, 6))
def test_the_loss_does_not_depend_on_the_layout(name, seed, layout, untrained):
    config = CONFIGS[name]
    batch = random_batch(config, seed=seed, untrained=untrained)
    logprobs = -torch.rand(
        batch.input_ids.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    whole, parts = (
        evaluated(config, batch, logprobs, trainer)
        for trainer in (TrainerConfig(), LAYOUTS[layout])
    )
    torch.testing.assert_close(parts[0], whole[0])
    torch.testing.assert_close(parts[1], whole[1])
    assert parts[2] == pytest.approx(whole[2], rel=1e-5)


@pytest.mark.slow_cases(but=["kto"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_the_model_does_not_depend_on_the_layout(name):
    """Value, gradient norm and the weights after it, through the model's own attention over rows of
    two sequences.
    """
    config, found = CONFIGS[name], []
    for layout in (TrainerConfig(), *LAYOUTS.values()):
        trainer = DTensorBackend(tiny_model(scale=2.0))
        trainer.setup(
            BackendConfig(trainer=replace(layout, device="cpu"), optimizer=OptimizerConfig(lr=1e-3))
        )
        batch = random_batch(config)
        metrics = numbers(finalize(trainer.train_step(batch, make_loss(config, batch, KL))))
        found.append((metrics, trainer.get_logprobs(batch).values))
    for metrics, logprobs in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=2e-4, abs=2e-5)
        torch.testing.assert_close(logprobs, found[0][1], atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_pairs_one_by_one(name):
    """Against the pure losses, called for each pair (KTO: response) with its tokens' sums."""
    config, weight = CONFIGS[name], 1 / 7
    batch = random_batch(config)
    logprobs = -torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
    total = 0.0
    for row in range(7):
        scores = []
        for segment in (1, 2):
            kept = batch.loss_mask[row] & (batch.segment_ids[row] == segment)
            for values in (logprobs, batch.reference_logprobs):
                picked = torch.zeros(0) if values is None else values[row][kept]
                averaged = getattr(
                    config.loss, "average_logprobs", isinstance(config.loss, SimPOLoss | ORPOLoss)
                )
                scores.append((picked.mean() if averaged else picked.sum())[None])
        chosen, chosen_reference, rejected, rejected_reference = scores
        pair = (chosen, rejected, chosen_reference, rejected_reference, torch.tensor([weight]))
        match config.loss:
            case DPOLoss(beta=beta, label_smoothing=smoothing, robust=robust, divergence=f):
                options = {"label_smoothing": smoothing, "robust": robust, "divergence": f}
                output = preference.dpo(*pair, beta=beta, **options)
            case IPOLoss(beta=beta):
                output = preference.ipo(*pair, beta=beta)
            case HingeLoss(beta=beta):
                output = preference.hinge(*pair, beta=beta)
            case SimPOLoss(beta=beta, margin=margin, label_smoothing=smoothing):
                output = preference.simpo(
                    chosen, rejected, pair[4], beta=beta, margin=margin, label_smoothing=smoothing
                )
            case ORPOLoss(coef=coef):
                output = preference.orpo(chosen, rejected, pair[4], coef=coef)
            case KTOLoss(beta=beta, desirable_coef=desirable, undesirable_coef=undesirable):
                judged = torch.tensor([row % 2 == 0])
                coefs = {"desirable_coef": desirable, "undesirable_coef": undesirable}
                output = preference.kto(
                    chosen, chosen_reference, judged, pair[4], torch.tensor(KL), beta=beta, **coefs
                )
        total += output.loss.item()
    likelihood = []
    for row in range(0, 7, 2 if isinstance(config.loss, KTOLoss) else 1):
        likelihood.append(-logprobs[row][batch.loss_mask[row] & (batch.segment_ids[row] == 1)])
    by_token, by_sequence = (
        torch.cat(likelihood).mean(),
        torch.stack([part.mean() for part in likelihood]).mean(),
    )
    expected = (
        total
        + config.sft_weight
        * (by_sequence if config.sft_reduction == "sequence_mean" else by_token).item()
    )
    loss, _, metrics = evaluated(config, batch, logprobs, TrainerConfig())
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert metrics["nll"] == pytest.approx(by_token.item(), rel=1e-4)


def test_what_sft_adds():
    assert DPOConfig().sft_weight == 0.0
    assert DPOConfig(loss=ORPOLoss()).sft_weight == 1.0, "ORPO's own loss contains it"
    assert DPOConfig(loss=ORPOLoss(), sft_coef=0.0).sft_weight == 0.0
    assert DPOConfig(sft_coef=0.5).sft_weight == 0.5


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo"])
def test_what_has_nothing_to_train_on_does_not_count(name):
    """The loss is that of the batch without it."""
    config = CONFIGS[name]
    batch = random_batch(config, untrained=6)
    logprobs = -torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
    loss, gradient, _ = evaluated(config, batch, logprobs, TrainerConfig())
    without = random_batch(config, count=6)
    width = without.input_ids.shape[1]
    alone, expected, _ = evaluated(config, without, logprobs[:6, :width], TrainerConfig())
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(gradient[:6, :width], expected)
    assert not gradient[6].any()


def test_nothing_at_all_to_train_on():
    for config in CONFIGS.values():
        batch = random_batch(config, count=1, untrained=0)
        loss, gradient, metrics = evaluated(
            config, batch, torch.zeros(batch.input_ids.shape), TrainerConfig()
        )
        assert loss == 0
        assert not gradient.any()
        assert all(value == value for value in metrics.values())


def test_rewards_by_hand():
    masks = [{"loss_mask": m, "response_mask": m} for m in ([False, True, True], [False, True])]
    one = Example(input_ids=[2, 3, 4], reference_logprobs=[9.0, -1.0, -2.0], **masks[0])
    two = Example(input_ids=[2, 5], reference_logprobs=[9.0, -4.0], **masks[1])
    batch = pack(collate_together([(one, two), (two, one)]), ((1, 0),))
    logprobs = torch.tensor([[9.0, -5.0, 9.0, -1.0, -1.0, 9.0, -1.0, -1.0, 9.0, -5.0]])
    assert rewards(DPOLoss(beta=0.5), logprobs, batch).tolist() == [-0.5, 0.5, 0.5, -0.5]
    forward = rewards(DPOLoss(beta=0.5, divergence="forward_kl"), logprobs, batch)
    e = math.e
    assert forward.tolist() == pytest.approx([(1 - e) / 2, *[(1 - 1 / e) / 2] * 2, (1 - e) / 2])
    assert rewards(IPOLoss(beta=0.5), logprobs, batch).tolist() == [-0.5, 0.25, 0.25, -0.5]
    free = replace(batch, reference_logprobs=None)
    assert rewards(SimPOLoss(beta=2.0), logprobs, free).tolist() == [-10.0, -2.0, -2.0, -10.0]
    assert rewards(ORPOLoss(coef=0.5), logprobs, free).tolist() == [-2.5, -0.5, -0.5, -2.5]
