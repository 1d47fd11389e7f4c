"""Rows of several sequences that stay together, and mismatched sequences for KTO's baseline."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.data.packing import pack

Together = tuple[Example, ...]
"""Sequences that no microbatch, packed row or rank separates: (chosen, rejected), or one alone."""


def collate_together(rows: Sequence[Together]) -> TokenBatch:
    """Return a batch with one of `rows` in each row: its sequences are the segments 1, 2, ...

    >>> one = Example(input_ids=[5, 6], loss_mask=[False, True], response_mask=[False, True])
    >>> collate_together([(one, one), (one,)]).segment_ids.tolist()
    [[1, 1, 2, 2], [1, 1, 0, 0]]
    """
    ends = accumulate((len(row) for row in rows), initial=0)
    return pack(
        collate([example for row in rows for example in row]),
        tuple(tuple(range(*bounds)) for bounds in pairwise(ends)),
    )


def mismatched(examples: Sequence[Example], *, max_length: int, seed: int = 0) -> list[Example]:
    """Return for each example its prompt with the response to another prompt, for KTO's KL.

    The other example is the next one with another prompt, if any, in an order drawn from `seed`.

    >>> mask = {"loss_mask": [False, True], "response_mask": [False, True]}
    >>> examples = [Example(input_ids=ids, **mask) for ids in ([5, 6], [8, 9])]
    >>> [example.input_ids for example in mismatched(examples, max_length=9)]
    [[5, 9], [8, 6]]
    """
    order = np.random.default_rng((seed, len(examples))).permutation(len(examples)).tolist()
    begins = [list(example.loss_mask).index(True) for example in examples]
    prompts = [
        tuple(example.input_ids[:begin]) for example, begin in zip(examples, begins, strict=True)
    ]
    partner = [0] * len(examples)
    other = None  # the next example with another prompt; right from the second round on
    for place in range(2 * len(order) - 1, -1, -1):
        index, after = order[place % len(order)], order[(place + 1) % len(order)]
        other = after if prompts[after] != prompts[index] else other
        partner[index] = after if other is None else other
    return [
        _joined(examples[i], begins[i], examples[j], begins[j], max_length)
        for i, j in enumerate(partner)
    ]


def _joined(one: Example, begin: int, other: Example, response: int, max_length: int) -> Example:
    length = max(0, max_length - begin)
    mask = [False] * begin + list(other.loss_mask[response:])[:length]
    ids = list(one.input_ids[:begin]) + list(other.input_ids[response:])[:length]
    return Example(
        input_ids=ids, loss_mask=mask, response_mask=[False] * begin + [True] * (len(ids) - begin)
    )
