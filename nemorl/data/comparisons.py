"""Rows of several sequences that stay together (a preference pair) as a `TokenBatch`, and
mismatched sequences for KTO's baseline.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.data.packing import pack

Together = tuple[Example, ...]
"""Sequences that share a row, so that no microbatch, packed row or rank parts them: (chosen,
rejected), or one alone.
"""


def collate_together(rows: Sequence[Together]) -> TokenBatch:
    """A batch with one of `rows` in each row: its sequences are the segments 1, 2, ... there.

    >>> one = Example(input_ids=[5, 6], loss_mask=[False, True], response_mask=[False, True])
    >>> two = Example(input_ids=[5, 7, 8], loss_mask=[False, True, True], response_mask=[False, True, True])
    >>> batch = collate_together([(one, two), (two,)])
    >>> batch.input_ids.tolist(), batch.segment_ids.tolist()
    ([[5, 6, 5, 7, 8], [5, 7, 8, 0, 0]], [[1, 1, 2, 2, 2], [1, 1, 1, 0, 0]])
    """
    ends = accumulate((len(row) for row in rows), initial=0)
    return pack(
        collate([example for row in rows for example in row]),
        tuple(tuple(range(*bounds)) for bounds in pairwise(ends)),
    )


def mismatched(examples: Sequence[Example], *, max_length: int, seed: int = 0) -> list[Example]:
    """For each example its prompt with the response of another one, whose prompt differs where
    there is such a one: what KTO measures its KL on.

    The other is the next one with another prompt in a random order of all, drawn from `seed`. A
    response begins with the first token that is trained on, and is cut where the sequence would
    exceed `max_length` tokens. A pure function, so that a resumed run sees the same sequences.

    >>> one = Example(input_ids=[5, 6, 7], loss_mask=[False, False, True], response_mask=[False, False, True])
    >>> two = Example(input_ids=[8, 9], loss_mask=[False, True], response_mask=[False, True])
    >>> [example.input_ids for example in mismatched([one, two], max_length=9)]
    [[5, 6, 9], [8, 7]]
    """
    order = np.random.default_rng((seed, len(examples))).permutation(len(examples)).tolist()
    begins = [list(example.loss_mask).index(True) for example in examples]
    prompts = [
        tuple(example.input_ids[:begin]) for example, begin in zip(examples, begins, strict=True)
    ]
    partner = [0] * len(examples)
    other = None  # of the examples behind the present place, the first with another prompt; right from the second round on
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
