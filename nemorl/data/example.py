"""A sequence as token ids with masks, before it is a tensor. Free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Example:
    """A tokenized sequence before it is collated: plain Python, one entry per token.

    `loss_mask` (trained on) is a subset of `response_mask` (not the prompt); its first entry is
    False, as nothing predicts that token.

    >>> mask = [False, True, True]
    >>> Example(input_ids=[5, 6, 7], loss_mask=mask, response_mask=mask).num_tokens
    3
    """

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    response_mask: Sequence[bool]
    loss_weights: Sequence[float] | None = None
    advantages: Sequence[float] | None = None
    prev_logprobs: Sequence[float] | None = None
    generation_logprobs: Sequence[float] | None = None
    reference_logprobs: Sequence[float] | None = None
    policy_versions: Sequence[int] | None = None
    """As in `TokenBatch`, as all fields are."""
    routed_experts: Any = None
    """`[tokens, layers, topk]`, of lists or a tensor."""
    target_ids: Any = None
    """`[tokens]` or `[tokens, k]`."""
    target_weights: Any = None
    teacher_logprobs: Any = None

    def __post_init__(self) -> None:
        for name, values in self.arrays().items():
            if len(values) != len(self.input_ids):
                raise ValueError(
                    f"{name} must have one entry per token: input_ids has {len(self.input_ids)},"
                    f" {name} has {len(values)}"
                )

    def arrays(self) -> dict[str, Sequence]:
        """Return the per-token arrays that are not None, by name."""
        return {name: values for name, values in vars(self).items() if values is not None}

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)
