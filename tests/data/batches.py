"""Batches that Hypothesis draws: ragged sequences in which every token is a number of its own, so
that a lost or doubled one shows.
"""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import hypothesis.strategies as st
import torch
from torch.utils import _pytree as pytree

from nemorl.data.batch import FREE, Example, TokenBatch, collate

LENGTHS = st.lists(
    st.one_of(st.just(1), st.integers(2, 9), st.integers(10, 33)), min_size=1, max_size=12
)

OPTIONAL = [name for name, default in vars(Example).items() if default is None and name[0] != "_"]


def batch_of(lengths: list[int], *, width: int = 0, seed: int = 0) -> TokenBatch:
    """One sequence a row; the input ids count the tokens of the batch from 1, and every optional
    array is there. NaN stands off the loss mask.
    """
    generator = torch.Generator().manual_seed(seed)
    examples, first = [], 1
    for length in lengths:
        response = [False] + [True] * (length - 1) if length else []
        floats = torch.rand(5, length, generator=generator)
        floats[:, :1] = float("nan")
        arrays = {name: row.tolist() for name, row in zip(OPTIONAL[:5], floats, strict=True)}
        versions = torch.randint(-1, 9, (length,), generator=generator).tolist()
        experts = torch.randint(-1, 9, (length, 2, 3), generator=generator)
        soft = torch.rand(length, 3, generator=generator).softmax(-1)
        ids = list(range(first, first + length))
        examples.append(
            Example(
                input_ids=ids,
                loss_mask=response,
                response_mask=response,
                policy_versions=versions,
                routed_experts=experts,
                target_ids=torch.randint(9, (length, 3), generator=generator),
                target_weights=soft,
                teacher_logprobs=soft.log(),
                **arrays,
            )
        )
        first += length
    return collate(examples, length=max([width, *lengths]))


SPECS = st.tuples(LENGTHS, st.integers(0, 3), st.integers(0, 99))
"""What `built` makes a batch of: lengths, spare columns, seed. (In the test, not in the strategy:
the shape checks draw random numbers.)
"""


def built(spec: tuple[list[int], int, int]) -> TokenBatch:
    lengths, spare, seed = spec
    return batch_of(lengths, width=max(lengths) + spare, seed=seed)


def tokens_of(*parts: TokenBatch) -> list[int]:
    """The numbers of all tokens that are there."""
    return sorted(
        token for part in parts for token in part.input_ids[part.segment_ids > 0].tolist()
    )


def assert_equal(one: TokenBatch, other: TokenBatch) -> None:
    """Equal in every array, bit for bit, NaN included, and in the kind of the logprobs."""
    assert one.logprob_kind == other.logprob_kind
    for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def each_array(function: Callable[..., torch.Tensor], *batches: TokenBatch) -> TokenBatch:
    """The batch of `function`, which leaves 0 in free places, of each array of the batches."""

    names = [item.name for item in fields(TokenBatch)]
    columns = {name: [getattr(batch, name) for batch in batches] for name in names}
    changed = {}
    for name, arrays in columns.items():
        if isinstance(arrays[0], torch.Tensor):
            free = FREE.get(name)
            if free == -math.inf:
                found = function(*(array.where(array > free, 0) for array in arrays))
                changed[name] = found.where(found != 0, free)
                continue
            shifted = arrays if free is None else [array - free for array in arrays]
            found = function(*shifted)
            changed[name] = found if free is None else found + free
    return replace(batches[0], **changed)
