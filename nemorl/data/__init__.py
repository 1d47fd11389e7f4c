"""Conversations and tensors: everything between a data set's rows and the `TokenBatch` that a training step takes. Pure but for `datasets`."""

from nemorl.data.batch import Example, TokenBatch, collate, concatenate, resize, take, trim
from nemorl.data.datasets import DataModule, load_rows, prompt_of, rows_at, split_rows, to_examples, to_prompts
from nemorl.data.messages import LengthReport, limit_length, tokenize_messages, tokenize_prompt, tokenize_prompt_response
from nemorl.data.packing import pack, pack_plan, unpack
from nemorl.data.padding import pad, unpad
from nemorl.data.sharding import balance, merge, row_costs, shard_by_rank, split, split_microbatches, unshard

__all__ = [
    "DataModule",
    "Example",
    "LengthReport",
    "TokenBatch",
    "balance",
    "collate",
    "concatenate",
    "limit_length",
    "load_rows",
    "merge",
    "pack",
    "pack_plan",
    "pad",
    "prompt_of",
    "resize",
    "row_costs",
    "rows_at",
    "shard_by_rank",
    "split",
    "split_microbatches",
    "split_rows",
    "take",
    "to_examples",
    "to_prompts",
    "tokenize_messages",
    "tokenize_prompt",
    "tokenize_prompt_response",
    "trim",
    "unpack",
    "unpad",
    "unshard",
]
