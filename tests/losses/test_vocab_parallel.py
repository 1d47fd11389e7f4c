"""A vocabulary that is split between ranks gives what a whole one gives."""

from typing import Any

import torch
import torch.distributed as dist

from nemorl.losses.logprobs import HeadOutputs, LogprobKind, flat_linear_logprobs
from tests.ranks import run_ranks

EXACT = {"atol": 1e-12, "rtol": 0}
KINDS = {
    "plain": (LogprobKind(), None),
    "top_k": (LogprobKind(temperature=1.3, top_k=5), None),
    "top_p and min_p": (LogprobKind(top_p=0.8, min_p=0.01), None),
    "capped top_k": (LogprobKind(top_k=5), 2.0),
}
"""Distributions, and caps of the logits."""
TOP = 8
"""More than the rows of the head that one of two ranks has."""


def problem() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    states, weight, scale = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((11, 6), (12, 6), (11,))
    )
    ids, targets = (torch.randint(0, 12, (11, *k), generator=generator) for k in ((), (3,)))
    return 2 * states, weight, ids, targets, scale


def outcome(found: HeadOutputs, scale: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """All outputs, and the gradients of a sum of all."""
    numbers = [x for x in found if x.is_floating_point()]
    finite = [torch.where(x.isfinite(), x, 0.0).view(len(scale), -1).sum(-1) for x in numbers]
    sum((i + scale) @ x for i, x in enumerate(finite)).backward()
    return [*(x.detach() for x in numbers), *(leaf.grad.clone() for leaf in leaves)]


def of_head(kind: LogprobKind, softcap: float | None, chunk: int, split: bool) -> list[Any]:
    """The outcome with all of the head's rows, or with this rank's half of them."""
    states, weight, ids, targets, scale = problem()
    options: dict[str, Any] = {"kind": kind, "softcap": softcap, "chunk": chunk}
    if split:
        options["group"] = dist.group.WORLD
        weight = weight.chunk(2)[dist.get_rank()].clone()
    states.requires_grad_(), weight.requires_grad_()
    more = {"targets": targets, "top_k": TOP, "with_entropy": True}
    both = flat_linear_logprobs(states, weight, ids, **options, **more)
    found = outcome(both, scale, states, weight)
    alone = flat_linear_logprobs(states.detach(), weight, ids, **options)[0]
    (scale @ alone).backward()  # without anything else
    assert torch.allclose(alone.detach(), both[0].detach(), atol=1e-12)
    return found


def of_all(split: bool) -> dict[tuple[str, int], list[Any]]:
    return {(n, chunk): of_head(*KINDS[n], chunk, split) for n in KINDS for chunk in (3, 100)}


def test_a_split_head_is_what_a_whole_one_gives():
    first, second = run_ranks(2, of_all, True)
    for case, expected in of_all(False).items():
        for one, other, wanted in zip(first[case][:-2], second[case][:-2], expected, strict=False):
            torch.testing.assert_close(one, wanted, **EXACT)
            torch.testing.assert_close(other, wanted, **EXACT)
        (states, rows), (more, others) = first[case][-2:], second[case][-2:]
        torch.testing.assert_close(states + more, expected[-2], **EXACT)
        torch.testing.assert_close(torch.cat([rows, others]), expected[-1], **EXACT)
