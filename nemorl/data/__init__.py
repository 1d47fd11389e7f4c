"""Conversations and tensors: everything between a data set's rows and the `TokenBatch` of a
training step. Others use the names below: `load_rows`, `to_examples`, `collate`, `pack`, `split`.
Pure but for reading files and `datasets`. Imported when first used: rows need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemorl.data.batch import TokenBatch as TokenBatch
    from nemorl.data.batch import collate as collate
    from nemorl.data.batch import pad as pad
    from nemorl.data.batch import take as take
    from nemorl.data.batch import trim as trim
    from nemorl.data.batch import unpad as unpad
    from nemorl.data.datasets import load_rows as load_rows
    from nemorl.data.datasets import prompt_of as prompt_of
    from nemorl.data.datasets import to_examples as to_examples
    from nemorl.data.datasets import to_prompts as to_prompts
    from nemorl.data.example import Example as Example
    from nemorl.data.lengths import limit_length as limit_length
    from nemorl.data.messages import tokenize_messages as tokenize_messages
    from nemorl.data.messages import tokenize_prompt as tokenize_prompt
    from nemorl.data.messages import tokenize_prompt_response as tokenize_prompt_response
    from nemorl.data.packing import merge as merge
    from nemorl.data.packing import pack as pack
    from nemorl.data.packing import pack_plan as pack_plan
    from nemorl.data.packing import shard_by_rank as shard_by_rank
    from nemorl.data.packing import split as split
    from nemorl.data.packing import split_microbatches as split_microbatches
    from nemorl.data.packing import unpack as unpack
    from nemorl.data.preferences import Pair as Pair
    from nemorl.data.preferences import labelled_rows as labelled_rows
    from nemorl.data.preferences import pair_rows as pair_rows
    from nemorl.data.preferences import to_labelled as to_labelled
    from nemorl.data.preferences import to_pairs as to_pairs
    from nemorl.data.rows import Row as Row
    from nemorl.data.rows import RowOrder as RowOrder
    from nemorl.data.rows import origin_of as origin_of
    from nemorl.data.rows import split_rows as split_rows
    from nemorl.data.sources import DataModule as DataModule
    from nemorl.data.statistics import Lengths as Lengths
    from nemorl.data.statistics import LengthStatistics as LengthStatistics
    from nemorl.data.statistics import length_statistics as length_statistics
    from nemorl.data.templates import with_chat_template as with_chat_template

_NAMES = {
    "batch": ["TokenBatch", "collate", "pad", "take", "trim", "unpad"],
    "datasets": ["load_rows", "prompt_of", "to_examples", "to_prompts"],
    "example": ["Example"],
    "lengths": ["limit_length"],
    "messages": ["tokenize_messages", "tokenize_prompt", "tokenize_prompt_response"],
    "packing": [
        *("merge", "pack", "pack_plan", "shard_by_rank"),
        *("split", "split_microbatches", "unpack"),
    ],
    "preferences": ["Pair", "labelled_rows", "pair_rows", "to_labelled", "to_pairs"],
    "rows": ["Row", "RowOrder", "origin_of", "split_rows"],
    "sources": ["DataModule"],
    "statistics": ["LengthStatistics", "Lengths", "length_statistics"],
    "templates": ["with_chat_template"],
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'nemorl.data' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"nemorl.data.{_MODULE_OF[name]}"), name)
    return value
