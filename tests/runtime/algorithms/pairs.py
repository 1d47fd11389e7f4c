"""Preferences of random tokens, and a configuration of each loss."""

from dataclasses import replace

import torch

from nemorl.data.batch import Example
from nemorl.data.comparisons import collate_together
from nemorl.runtime.algorithms.comparisons import with_loss_weights
from nemorl.runtime.config.offline import (
    DPOConfig,
    DPOLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    ORPOLoss,
    SimPOLoss,
)

CONFIGS = {
    "dpo": DPOConfig(loss=DPOLoss(beta=0.3)),
    "dpo averaged": DPOConfig(loss=DPOLoss(average_logprobs=True)),
    "dpo smoothed, with sft": DPOConfig(loss=DPOLoss(label_smoothing=0.1), sft_coef=0.7),
    "dpo robust": DPOConfig(loss=DPOLoss(label_smoothing=0.1, robust=True)),
    "dpo, forward_kl": DPOConfig(loss=DPOLoss(divergence="forward_kl")),
    "ipo": DPOConfig(loss=IPOLoss(beta=0.2)),
    "ipo summed": DPOConfig(loss=IPOLoss(average_logprobs=False)),
    "hinge": DPOConfig(loss=HingeLoss(beta=0.05)),
    "simpo": DPOConfig(loss=SimPOLoss(beta=1.0, margin=0.5, label_smoothing=0.1)),
    "orpo": DPOConfig(loss=ORPOLoss(coef=0.2)),
    "orpo by sequence": DPOConfig(loss=ORPOLoss(), sft_reduction="sequence_mean"),
    "kto": DPOConfig(
        loss=KTOLoss(beta=0.2, desirable_coef=1.5, undesirable_coef=2.0), sft_coef=0.3
    ),
}


def random_example(
    length: int, random: torch.Generator, *, label: float | None, trained: bool = True
) -> Example:
    ids = torch.randint(2, 38, (length,), generator=random).tolist()
    begin = int(torch.randint(1, length, (), generator=random))
    mask = [
        trained
        and place >= begin
        and (place == begin or bool(torch.rand((), generator=random) < 0.8))
        for place in range(length)
    ]
    reference = torch.randn(length, generator=random).tolist()
    advantages = None if label is None else [label * kept for kept in mask]
    return Example(
        input_ids=ids,
        loss_mask=mask,
        response_mask=mask,
        reference_logprobs=reference,
        advantages=advantages,
    )


def random_batch(config: DPOConfig, *, seed: int = 0, count: int = 7, untrained: int = -1):
    """Pairs, or for KTO labelled responses, of 2 to 20 tokens each; of pair `untrained` the
    rejected one has no token to train on.
    """
    random = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        lengths = torch.randint(2, 21, (2,), generator=random).tolist()
        if isinstance(config.loss, KTOLoss):
            label, kept = float((-1) ** i), i != untrained
            rows.append((random_example(lengths[0], random, label=label, trained=kept),))
        else:
            rows.append(
                tuple(
                    random_example(length, random, label=None, trained=(i, side) != (untrained, 1))
                    for side, length in enumerate(lengths)
                )
            )
    batch = collate_together(rows)
    if not config.needs_reference:
        batch = replace(batch, reference_logprobs=None)
    return with_loss_weights(batch, config)
