"""What the algorithms share."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from nemorl.data.batch import TokenBatch
from nemorl.data.packing import merge, pack, segments_apart, split, split_microbatches
from nemorl.losses.logprobs import Logprobs, require_same_support
from nemorl.rollout.random import derive_seed
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.run.loop import Run


def in_chunks(
    compute: Callable[[TokenBatch], Logprobs], batch: TokenBatch, *, rows: int
) -> Float[Tensor, "batch seq"]:
    """Return logprobs of a batch, computed `rows` rows at a time."""
    plan = split_microbatches(batch, rows=rows)
    return merge([compute(part).values for part in split(batch, plan)], plan)


def by_segment(compute: Callable[[TokenBatch], Logprobs], batch: TokenBatch) -> Logprobs:
    """Return logprobs of a batch, computed with a row for each segment."""
    apart, plan = segments_apart(batch)
    found = compute(apart)
    values = pack(replace(apart, prev_logprobs=found.values), plan).prev_logprobs
    assert values is not None
    width = batch.input_ids.shape[1] - values.shape[1]
    return replace(found, values=pad(values, (0, width)))


def with_prev_logprobs(run: Run, batch: TokenBatch) -> TokenBatch:
    """Add the trainer's logprobs before the update."""
    logprobs = by_segment(run.trainer.get_logprobs, batch)
    return replace(batch, prev_logprobs=of_this_batch(logprobs, batch, "prev_logprobs"))


def of_this_batch(logprobs: Logprobs, batch: TokenBatch, name: str) -> Float[Tensor, "batch seq"]:
    """Return logprobs' values, of the batch's distribution."""
    require_same_support(logprobs.kind, batch.logprob_kind, what_a=name, what_b="the batch's")
    return logprobs.values


def minibatches(num_responses: int, config: GRPOConfig, *, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each optimizer step, in random order if several."""
    size = config.train_global_batch_size or num_responses
    for epoch in range(config.num_updates_per_batch):
        rows = torch.arange(num_responses)
        if size < num_responses:
            generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
            rows = torch.randperm(num_responses, generator=generator)
        yield from rows.tensor_split(-(-num_responses // size))
