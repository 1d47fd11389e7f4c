"""A vocabulary that is split between ranks gives what a whole one gives."""

import torch
import torch.distributed as dist

from nemorl.losses.logprobs import (
    LogprobKind,
    flat_linear_logprobs,
    vocab_parallel_linear_logprobs,
)
from tests.ranks import run_ranks

EXACT = {"atol": 1e-12, "rtol": 0}
KINDS = {
    "plain": (LogprobKind(), None),
    "top_k": (LogprobKind(temperature=1.3, top_k=5), None),
    "top_p and min_p": (LogprobKind(top_p=0.8, min_p=0.01), None),
    "capped top_k": (LogprobKind(top_k=5), 2.0),
}
"""Distributions, and caps of the logits."""


def problem() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    states, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((11, 6), (12, 6))
    )
    ids = torch.randint(0, 12, (11,), generator=generator)
    return (
        2 * states,
        weight,
        ids,
        *(torch.randn(11, generator=generator, dtype=torch.float64) for _ in range(2)),
    )


def whole(kind: LogprobKind, softcap: float | None) -> list[torch.Tensor]:
    states, weight, ids, a, b = problem()
    states.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = flat_linear_logprobs(
        states, weight, ids, kind=kind, with_entropy=True, softcap=softcap
    )
    (a @ logprobs + b @ entropy).backward()
    assert states.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), states.grad, weight.grad]


def split() -> dict[str, list[torch.Tensor]]:
    rank, group, found = dist.get_rank(), dist.group.WORLD, {}
    for name, (kind, softcap) in KINDS.items():
        options = {"kind": kind, "softcap": softcap}
        for chunk in (3, 100):
            states, weight, ids, a, b = problem()
            part = weight.chunk(2)[rank].clone().requires_grad_()
            states.requires_grad_()
            logprobs, entropy = vocab_parallel_linear_logprobs(
                states, part, ids, group, chunk=chunk, with_entropy=True, **options
            )
            (a @ logprobs + b @ entropy).backward()
            found[f"{name}, {chunk}"] = [
                logprobs.detach(),
                entropy.detach(),
                states.grad,
                part.grad.clone(),
            ]
            alone = vocab_parallel_linear_logprobs(
                states.detach(), part, ids, group, chunk=chunk, **options
            )[0]
            (a @ alone).backward()  # without the entropy
            assert torch.allclose(alone.detach(), logprobs.detach(), atol=1e-12)
    return found


def test_a_split_head_is_what_a_whole_one_gives():
    parts = run_ranks(2, split)
    for name, how in KINDS.items():
        expected = whole(*how)
        for chunk in (3, 100):
            first, second = (found[f"{name}, {chunk}"] for found in parts)
            for i, wanted in enumerate(expected[:2]):
                torch.testing.assert_close(first[i], wanted, **EXACT)
                torch.testing.assert_close(second[i], wanted, **EXACT)
            torch.testing.assert_close(first[2] + second[2], expected[2], **EXACT)
            torch.testing.assert_close(torch.cat([first[3], second[3]]), expected[3], **EXACT)
