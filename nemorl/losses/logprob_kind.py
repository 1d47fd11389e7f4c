"""`LogprobKind`: which distribution log-probabilities are of. Unlike kinds are not subtracted."""

import math
from dataclasses import dataclass, fields

from jaxtyping import Float
from torch import Tensor

from nemorl.losses.types import register_pytree


class LogprobKindError(ValueError):
    """Two arrays of log-probabilities are of distributions that can't be compared."""


@dataclass(frozen=True)
class LogprobKind:
    """A distribution: the model's logits / `temperature`, restricted to the filters' support.

    `top_k=0`, `top_p=1` and `min_p=0` are off. `policy_version`: of the weights; None = not
    recorded. Greedy decoding (temperature 0) has no log-probabilities: use the kind that they were
    scored with.
    Raises: ValueError for a value out of its range.

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
    """Raise LogprobKindError unless two kinds have the same temperature and filters.

    The policy's version may differ, as in an importance ratio. The error names both kinds and the
    fields that differ.

    >>> kind = LogprobKind(top_k=5)
    >>> require_same_support(LogprobKind(), kind, what_a="prev", what_b="generation")
    Traceback (most recent call last):
    nemorl.losses.logprob_kind.LogprobKindError: prev and generation log-probabilities are of ...
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
    """An array of log-probabilities and its kind; a pytree.

    `a - b` is the difference of the values, for one distribution and the same weights (the gap of
    trainer and sampler), LogprobKindError where the kinds differ. Between two versions of a policy
    use `log_ratio`.

    >>> import torch
    >>> one, two = (Logprobs(torch.tensor([x]), LogprobKind()) for x in (-1.0, -3.0))
    >>> (one - two).tolist()
    [2.0]
    """

    values: Float[Tensor, "*shape"]
    kind: LogprobKind

    def __sub__(self, other: "Logprobs") -> Float[Tensor, "*shape"]:
        _require_same(self.kind, other.kind, "left", "right", versions=True)
        return self.values - other.values


register_pytree(Logprobs, constant="kind")


def log_ratio(a: Logprobs, b: Logprobs) -> Float[Tensor, "*shape"]:
    """Return log(π_a / π_b), of two policy versions but the same temperature and filters.

    Raises: LogprobKindError.

    >>> import torch
    >>> one = Logprobs(torch.tensor([-1.0]), LogprobKind(policy_version=2))
    >>> log_ratio(one, Logprobs(torch.tensor([-3.0]), LogprobKind(policy_version=1))).tolist()
    [2.0]
    """
    require_same_support(a.kind, b.kind)
    return a.values - b.values
