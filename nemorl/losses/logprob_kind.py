"""What a log-probability is of:

`LogprobKind` travels with the arrays, and unlike kinds are not subtracted.
"""

import math
from dataclasses import dataclass, fields

from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree


class LogprobKindError(ValueError):
    """Two arrays of log-probabilities are of distributions that cannot be compared."""


@dataclass(frozen=True)
class LogprobKind:
    """Which distribution log-probabilities are about: the model's logits / `temperature`,
    restricted to the support of the sampling filters.

    `top_k=0`, `top_p=1` and `min_p=0` are off. `policy_version` says which weights; None = not
    recorded.

    Raises ValueError for a value out of its range. Greedy decoding (temperature 0) has no
    log-probabilities: use the kind that they were scored with.

    >>> LogprobKind(temperature=0.7, top_p=0.9).filtered
    True
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    policy_version: int | None = None

    def __post_init__(self):
        for name, ok, requirement in (
            (
                "temperature",
                0 < self.temperature < math.inf,
                "a finite number above 0; for greedy decoding score the tokens at temperature 1",
            ),
            ("top_k", self.top_k >= 0, "a whole number of at least 0; 0 turns it off"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1; 1 turns it off"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1; 0 turns it off"),
        ):
            if not ok:
                raise ValueError(
                    f"LogprobKind.{name} must be {requirement} (got {getattr(self, name)!r})"
                )

    @property
    def filtered(self) -> bool:
        """Whether some tokens are outside the support."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def require_same_support(
    kind_a: LogprobKind, kind_b: LogprobKind, *, what_a: str = "left", what_b: str = "right"
) -> None:
    """Check that two kinds have the same temperature and filters; the policy's version may differ,
    as in an importance ratio.

    Raises LogprobKindError that names both kinds and the fields that differ.

    >>> require_same_support(LogprobKind(), LogprobKind(policy_version=3))
    >>> require_same_support(LogprobKind(), LogprobKind(top_k=5), what_a="prev", what_b="generation")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    nemorl.losses.logprob_kind.LogprobKindError: prev and generation log-probabilities are of different distributions (top_k: 0 and 5): ...
    """
    _require_same(kind_a, kind_b, what_a, what_b, versions=False)


def _require_same(
    kind_a: LogprobKind, kind_b: LogprobKind, what_a: str, what_b: str, *, versions: bool
) -> None:
    pairs = [
        (field.name, getattr(kind_a, field.name), getattr(kind_b, field.name))
        for field in fields(LogprobKind)
    ]
    unlike = [
        f"{name}: {a} and {b}"
        for name, a, b in pairs
        if a != b and (name != "policy_version" or (versions and None not in (a, b)))
    ]
    if unlike:
        only_version = unlike[0].startswith("policy_version")
        remedy = (
            "for a ratio between two versions use log_ratio"
            if only_version
            else "compute both with the same temperature and filters"
        )
        raise LogprobKindError(
            f"{what_a} and {what_b} log-probabilities are of different distributions"
            f" ({'; '.join(unlike)}): {what_a} is {kind_a}, {what_b} is {kind_b}; {remedy}"
        )


@dataclass(frozen=True)
class Logprobs:
    """An array of log-probabilities together with the kind that it is of. A pytree (`tree_map`
    works).

    `a - b` is the difference of the values, for the same distribution and the same weights (a
    train/inference gap); it raises LogprobKindError where the kinds differ. For a ratio between two
    versions of a policy use `log_ratio`.

    >>> import torch
    >>> (Logprobs(torch.tensor([-1.0]), LogprobKind()) - Logprobs(torch.tensor([-3.0]), LogprobKind())).tolist()
    [2.0]
    """

    values: Float[Tensor, "*shape"]
    kind: LogprobKind

    def __sub__(self, other: "Logprobs") -> Float[Tensor, "*shape"]:
        _require_same(self.kind, other.kind, "left", "right", versions=True)
        return self.values - other.values


def _unflatten(values, kind: LogprobKind) -> Logprobs:
    logprobs = object.__new__(
        Logprobs
    )  # not the constructor: tree_map may put anything in the place of the tensor
    object.__setattr__(logprobs, "values", values[0])
    object.__setattr__(logprobs, "kind", kind)
    return logprobs


pytree.register_pytree_node(
    Logprobs, lambda x: ([x.values], x.kind), _unflatten, serialized_type_name="nemorl.Logprobs"
)


def log_ratio(a: Logprobs, b: Logprobs) -> Float[Tensor, "*shape"]:
    """log(π_a / π_b): the two may be of different policy versions, but not of different
    temperatures or filters (LogprobKindError).

    >>> import torch
    >>> new, old = LogprobKind(policy_version=2), LogprobKind(policy_version=1)
    >>> log_ratio(Logprobs(torch.tensor([-1.0]), new), Logprobs(torch.tensor([-3.0]), old)).tolist()
    [2.0]
    """
    require_same_support(a.kind, b.kind)
    return a.values - b.values
