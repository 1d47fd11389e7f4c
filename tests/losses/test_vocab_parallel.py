"""A vocabulary that is split between ranks gives what a whole one gives."""

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


def whole(kind: LogprobKind, softcap: float | None) -> list[torch.Tensor]:
    states, weight, ids, targets, scale = problem()
    states.requires_grad_(), weight.requires_grad_()
    options = {"kind": kind, "softcap": softcap, "targets": targets, "top_k": TOP}
    found = flat_linear_logprobs(states, weight, ids, with_entropy=True, **options)
    return outcome(found, scale, states, weight)


def split() -> dict[str, list[torch.Tensor]]:
    rank, found = dist.get_rank(), {}
    for name, (kind, softcap) in KINDS.items():
        options = {"kind": kind, "softcap": softcap, "group": dist.group.WORLD}
        for chunk in (3, 100):
            states, weight, ids, targets, scale = problem()
            part = weight.chunk(2)[rank].clone().requires_grad_()
            states.requires_grad_()
            more = {"targets": targets, "top_k": TOP, "with_entropy": True}
            both = flat_linear_logprobs(states, part, ids, chunk=chunk, **options, **more)
            found[f"{name}, {chunk}"] = outcome(both, scale, states, part)
            alone = flat_linear_logprobs(states.detach(), part, ids, chunk=chunk, **options)[0]
            (scale @ alone).backward()  # without anything else
            assert torch.allclose(alone.detach(), both[0].detach(), atol=1e-12)
    return found


def test_a_split_head_is_what_a_whole_one_gives():
    parts = run_ranks(2, split)
    for name, how in KINDS.items():
        expected = whole(*how)
        for chunk in (3, 100):
            first, second = (found[f"{name}, {chunk}"] for found in parts)
            for i, wanted in enumerate(expected[:-2]):
                torch.testing.assert_close(first[i], wanted, **EXACT)
                torch.testing.assert_close(second[i], wanted, **EXACT)
            torch.testing.assert_close(first[-2] + second[-2], expected[-2], **EXACT)
            torch.testing.assert_close(torch.cat([first[-1], second[-1]]), expected[-1], **EXACT)
