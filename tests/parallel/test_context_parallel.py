"""Attention over rows that ranks split is that of whole rows, and so is its gradient."""

import pytest
import torch
import torch.distributed as dist

from nemorl.parallel.attention import (
    ContextState,
    RowSplit,
    context_attention,
    segment_attention,
    segments_of,
    zigzag,
)
from tests.ranks import run_ranks

SEGMENTS = {
    "whole rows": [[1] * 16, [1] * 16],
    "padded": [[1] * 16, [1] * 5 + [0] * 11],
    "packed": [[1] * 3 + [2] * 7 + [3] * 1 + [0] * 5, [1] * 9 + [2] * 7],
}
HEADS = {"as many": (4, 4), "grouped": (4, 2), "one": (4, 1)}


def positions(segments: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(segments)
    for row in range(len(segments)):
        for segment in range(1, int(segments[row].max()) + 1):
            inside = segments[row] == segment
            found[row, inside] = torch.arange(int(inside.sum()))
    return found


def problem(heads: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, count, 16, width, generator=generator, dtype=torch.float64)
        for count, width in zip((heads[0], heads[1], heads[1], heads[0]), (4, 4, 6, 6), strict=True)
    ]


def split(method: str) -> dict:
    rank, group, found = dist.get_rank(), dist.group.WORLD, {}
    for name, rows in SEGMENTS.items():
        for many, heads in HEADS.items():
            segments = torch.tensor(rows)
            row_split = RowSplit.of(16, rank, group, torch.device("cpu"))
            query, key, value, cotangent = (
                x.index_select(2, row_split.own).requires_grad_() for x in problem(heads)
            )
            state = ContextState(row_split, segments_of(segments, "buckets"))
            if method == "allgather":
                places = positions(segments)
                state = ContextState.with_bias(segments, places, row_split, torch.float64)
            output = context_attention(query, key, value, context=state)
            real = row_split.take(segments > 0)[:, :, None, None]
            output = torch.where(real, output, 0.0)
            (output * cotangent.detach().transpose(1, 2)).sum().backward()
            found[name, many] = [output.detach(), query.grad, key.grad, value.grad]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["ulysses", "allgather"])
def test_it_is_attention_over_whole_rows(method, size):
    parts = run_ranks(size, split, method)
    order = zigzag(16, size).argsort()
    for name, rows in SEGMENTS.items():
        for many, heads in HEADS.items():
            segments = torch.tensor(rows)
            query, key, value, cotangent = (x.requires_grad_() for x in problem(heads))
            output = segment_attention(query, key, value, segments=segments_of(segments, "buckets"))
            output = torch.where((segments > 0)[:, :, None, None], output, 0.0)
            (output * cotangent.detach().transpose(1, 2)).sum().backward()
            joined = [
                torch.cat([part[name, many][i] for part in parts], dim=1 if i == 0 else 2)
                for i in range(4)
            ]
            found = [
                joined[0].index_select(1, order),
                *(x.index_select(2, order) for x in joined[1:]),
            ]
            expected = [output, query.grad, key.grad, value.grad]
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
