"""A head whose vocabulary is split between ranks gives what a whole one gives, values and
gradients, without a rank that sees all of it.
"""

import pytest
import torch
import torch.distributed as dist

from nemorl.losses.logprobs import LogprobKind, flat_linear_logprobs
from nemorl.losses.vocab_parallel import vocab_parallel_linear_logprobs
from tests.ranks import run_ranks

KINDS = {
    "plain": LogprobKind(),
    "temperature": LogprobKind(temperature=0.7),
    "top_k": LogprobKind(temperature=1.3, top_k=5),
    "top_p and min_p": LogprobKind(top_p=0.8, min_p=0.01),
}


def problem(
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((11, 6), (12, 6))
    )
    ids = torch.randint(0, 12, (11,), generator=generator)
    return (
        2 * states,
        weight,
        ids,
        *(torch.randn(11, generator=generator, dtype=torch.float64) for _ in range(2)),
    )


def whole(kind: LogprobKind) -> list[torch.Tensor]:
    states, weight, ids, a, b = problem()
    states.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = flat_linear_logprobs(states, weight, ids, kind=kind, with_entropy=True)
    (a @ logprobs + b @ entropy).backward()
    assert states.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), states.grad, weight.grad]


def split() -> dict[str, list[torch.Tensor]]:
    rank, group, found = dist.get_rank(), dist.group.WORLD, {}
    for name, kind in KINDS.items():
        for chunk in (3, 100):
            states, weight, ids, a, b = problem()
            part = weight.chunk(2)[rank].clone().requires_grad_()
            states.requires_grad_()
            logprobs, entropy = vocab_parallel_linear_logprobs(
                states, part, ids, group, kind=kind, chunk=chunk, with_entropy=True
            )
            (a @ logprobs + b @ entropy).backward()
            found[f"{name}, {chunk}"] = [
                logprobs.detach(),
                entropy.detach(),
                states.grad,
                part.grad.clone(),
            ]
            alone = vocab_parallel_linear_logprobs(
                states.detach(), part, ids, group, kind=kind, chunk=chunk
            )[0]
            (a @ alone).backward()  # without the entropy
            assert torch.allclose(alone.detach(), logprobs.detach(), atol=1e-12)
    return found


@pytest.fixture(scope="module")
def parts() -> list[dict[str, list[torch.Tensor]]]:
    return run_ranks(2, split)


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_it_is_what_a_whole_head_gives(parts, kind, chunk):
    expected = whole(KINDS[kind])
    for found in parts:
        for value, wanted in zip(found[f"{kind}, {chunk}"][:2], expected[:2], strict=True):
            torch.testing.assert_close(value, wanted, atol=1e-12, rtol=0)
    first, second = (found[f"{kind}, {chunk}"] for found in parts)
    torch.testing.assert_close(first[2] + second[2], expected[2], atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.cat([first[3], second[3]]), expected[3], atol=1e-12, rtol=0)
