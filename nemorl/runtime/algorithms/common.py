"""What the algorithms share."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.data.sharding import merge, split, split_microbatches
from nemorl.losses.logprobs import Logprobs


def num_steps(config: Any, num_rows: int) -> int:
    """Return the number of optimizer steps by `max_num_steps` or `num_epochs`."""
    whole = config.num_epochs * num_rows // config.train_global_batch_size
    return config.max_num_steps or max(1, whole)


def in_chunks(
    compute: Callable[[TokenBatch], Logprobs], batch: TokenBatch, *, rows: int
) -> Float[Tensor, "batch seq"]:
    """Return a model's logprobs of a batch of any size, computed `rows` rows at a time."""
    plan = split_microbatches(batch, rows=rows)
    return merge([compute(part).values for part in split(batch, plan)], plan)
