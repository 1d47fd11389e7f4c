"""The law checkers catch what they are for: losses that are wrong on purpose, each the classical
mistake that its law forbids.
"""

from collections.abc import Callable

import pytest
import torch

from nemorl.losses.types import LossOutput, Mean
from tests.helpers import Case
from tests.losses.laws import LAWS
from tests.losses.wrong import INPUTS, host_sync, right
from tests.strategies import problem


def mask_product(logprobs, prev, advantages, weights, segment_ids):
    return LossOutput((weights * -advantages * (logprobs - prev).exp()).sum(), {})


def local_token_count(*arrays):
    output = right(*arrays)
    return LossOutput(output.loss / (arrays[3] != 0).sum().clamp(min=1), output.metrics)


def unguarded_count(*arrays):
    output = right(*arrays)
    return LossOutput(output.loss / (arrays[3] != 0).sum(), output.metrics)


def last_token_dropped(*arrays):
    return right(*(array[:, :-1] for array in arrays))


def mean_over_width(*arrays):
    output = right(*arrays)
    return LossOutput(output.loss / arrays[0].shape[1], output.metrics)


def ratio_of_the_row(logprobs, prev, advantages, weights, segment_ids):
    mask = weights != 0
    gap = torch.where(mask, logprobs - prev, 0.0).sum(-1, keepdim=True) / mask.sum(
        -1, keepdim=True
    ).clamp(min=1)
    return LossOutput(-(weights * torch.where(mask, advantages, 0.0) * gap.exp()).sum(), {})


def first_row_counts_twice(*arrays):
    output = right(*arrays)
    return LossOutput(output.loss + right(*(array[:1] for array in arrays)).loss, output.metrics)


def reduced_in_input_precision(logprobs, prev, advantages, weights, segment_ids):
    mask = weights != 0
    return LossOutput(
        (
            weights.to(logprobs.dtype)
            * torch.where(mask, (logprobs - prev).exp() * -advantages, 0.0)
        ).sum(),
        {},
    )


def detached_ratio(logprobs, prev, advantages, weights, segment_ids):
    return LossOutput(
        right(logprobs.detach(), prev, advantages, weights, segment_ids).loss
        + 0.0 * logprobs[:, :0].sum()
        + logprobs.sum() * 0.0,
        {},
    )


def weights_squared(logprobs, prev, advantages, weights, segment_ids):
    return right(logprobs, prev, advantages, weights**2, segment_ids)


def only_trained_tokens(logprobs, prev, advantages, weights, segment_ids):
    mask = weights != 0  # a shape that depends on data
    return LossOutput(
        -(weights[mask] * advantages[mask] * (logprobs[mask] - prev[mask]).exp()).sum(), {}
    )


def mean_of_means(*arrays):
    output = right(*arrays)
    metric = output.metrics["loss"]
    return LossOutput(
        output.loss, {"loss": Mean(metric.total / metric.count.clamp(min=1), torch.ones(()))}
    )


WRONG: list[tuple[Callable[..., LossOutput], str]] = [
    (last_token_dropped, "1 padding"),
    (mean_over_width, "1 padding"),
    (ratio_of_the_row, "2 packing"),
    (local_token_count, "3 additivity"),
    (first_row_counts_twice, "4 permutation"),
    (mask_product, "5 masked slots"),
    (unguarded_count, "6 empty mask"),
    (reduced_in_input_precision, "7 precision"),
    (detached_ratio, "8 gradcheck"),
    (weights_squared, "9 linearity"),
    (host_sync, "16 transforms"),
    (only_trained_tokens, "16 transforms"),
    (mean_of_means, "17 metrics"),
]
PROBLEMS = [problem(seed) for seed in range(8)]


@pytest.mark.parametrize("law", LAWS)
def test_the_right_loss_passes(law: str):
    for example in PROBLEMS:
        LAWS[law](Case("right", right, INPUTS, ("token_logprobs",)), example)


@pytest.mark.parametrize(
    ("function", "law"), WRONG, ids=[f"{function.__name__}: {law}" for function, law in WRONG]
)
def test_a_wrong_loss_is_caught(function: Callable[..., LossOutput], law: str):
    assert {law for _, law in WRONG} == set(LAWS), "every law has its wrong loss"
    case = Case(function.__name__, function, INPUTS, ("token_logprobs",))
    assert any(_breaks(case, law, example) for example in PROBLEMS)


def _breaks(case: Case, law: str, example) -> bool:
    try:
        LAWS[law](case, example)
    except (AssertionError, RuntimeError):
        return True
    return False
