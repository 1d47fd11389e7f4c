"""Conversations and tensors: everything between a data set's rows and the `TokenBatch` of a
training step. Others use the names below: `load_rows`, `to_examples`, `collate`, `pack`, `split`.
Pure but for reading files and `datasets`. What needs torch is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from nemorl.data.datasets import load_rows, prompt_of, to_examples, to_prompts
from nemorl.data.example import Example
from nemorl.data.lengths import limit_length
from nemorl.data.messages import tokenize_messages, tokenize_prompt, tokenize_prompt_response
from nemorl.data.preferences import Pair, labelled_rows, pair_rows, to_labelled, to_pairs
from nemorl.data.rows import Row, RowOrder, origin_of, split_rows
from nemorl.data.sources import DataModule
from nemorl.data.statistics import Lengths, LengthStatistics, length_statistics
from nemorl.data.templates import with_chat_template

if TYPE_CHECKING:
    from nemorl.data.batch import TokenBatch, collate, pad, take, trim, unpad
    from nemorl.data.packing import (
        merge,
        pack,
        pack_plan,
        shard_by_rank,
        split,
        split_microbatches,
        unpack,
    )

__all__ = [
    "DataModule",
    "Example",
    "LengthStatistics",
    "Lengths",
    "Pair",
    "Row",
    "RowOrder",
    "TokenBatch",
    "collate",
    "labelled_rows",
    "length_statistics",
    "limit_length",
    "load_rows",
    "merge",
    "origin_of",
    "pack",
    "pack_plan",
    "pad",
    "pair_rows",
    "prompt_of",
    "shard_by_rank",
    "split",
    "split_microbatches",
    "split_rows",
    "take",
    "to_examples",
    "to_labelled",
    "to_pairs",
    "to_prompts",
    "tokenize_messages",
    "tokenize_prompt",
    "tokenize_prompt_response",
    "trim",
    "unpack",
    "unpad",
    "with_chat_template",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nemorl.data' has no attribute {name!r}")
    from nemorl.data import batch, packing

    return getattr(batch if hasattr(batch, name) else packing, name)
