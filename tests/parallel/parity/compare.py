"""How far a case is from its reference, and how far it may be."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from nemorl.losses.types import finalize
from nemorl.parallel.backend import ForwardOutput
from tests.parallel.parity.cases import Case
from tests.parallel.parity.golden import Problem, golden_batch
from tests.parallel.parity.losses import watched
from tests.parallel.parity.reference import Outcome, reference
from tests.parallel.parity.worker import Result

LIMITS = {
    "logprobs": 2e-6,
    "logprobs in the loss": 2e-6,
    "entropy": 2e-6,
    "loss": 1e-6,
    "gradient": 1e-6,
    "gradient norm": 1e-6,
    "weights": 2e-6,
    "logprobs afterwards": 5e-6,
    "metrics": 1e-5,
    "between ranks": 1e-6,
}
"""In float32: the greatest difference anywhere (of loss and norm in any of the three steps), for
the norm and metrics relative to the value.
"""
BFLOAT16_LIMITS = {
    **dict.fromkeys(("logprobs", "logprobs in the loss", "entropy"), 2.0),
    "loss": 2.0**-8,
    "gradient": 2.0,
    "gradient norm": 2.0**-8,
    **dict.fromkeys(("weights", "logprobs afterwards"), 2.0),
    "between ranks": 1e-6,
}
"""In bfloat16, of arrays: the root of the mean square difference to float32, as a multiple of that
of plain PyTorch's autocast. Of loss and norm: what rounding may do to a single number, relative.
"""

OTHER_PARAMETERS = "of other parameters"
Errors = dict[str, float]


def errors(case: Case, results: list[Result]) -> Errors:
    """The ranks' errors by the names of `limits`."""
    outcome = results[0][0]
    assert outcome is not None
    exact = reference(replace(case.problem, dtype="float32"))
    require_same_names(outcome.gradients, exact.gradients, "gradients")
    require_same_names(outcome.weights, exact.weights, "weights")
    between = max(
        [spread for _, _, spread in results]
        + [metric_error(metrics, results[0][1]) for _, metrics, _ in results]
    )
    found = {"gradient norm": relative(outcome.grad_norms, exact.grad_norms)}
    found["between ranks"] = between
    if case.problem.dtype == "float32":
        losses = zip(outcome.losses, exact.losses, strict=True)
        found["loss"] = max(abs(ours - theirs) for ours, theirs in losses)
        found["metrics"] = metric_error(results[0][1], expected_metrics(case.problem))
        return found | distances(outcome, exact, greatest)
    found["loss"] = relative(outcome.losses, exact.losses)
    usual = distances(reference(case.problem), exact, mean_square)
    rounded = distances(outcome, exact, mean_square)
    return found | {name: rounded[name] / usual[name] for name in usual}


def limits(case: Case) -> Mapping[str, float]:
    return LIMITS if case.problem.dtype == "float32" else BFLOAT16_LIMITS


def beyond(case: Case, found: Errors) -> dict[str, tuple[float, float]]:
    allowed = limits(case)
    return {
        name: (value, allowed[name]) for name, value in found.items() if not value <= allowed[name]
    }


def verdict(case: Case, found: Errors | str) -> tuple[bool, str]:
    """Whether a case came out as it has to (where it is broken on purpose: with a wrong gradient),
    and what differs. `found` are its errors, or the reason why there are none.
    """
    if isinstance(found, str):
        return bool(case.sabotage) and OTHER_PARAMETERS in found, found.strip().splitlines()[-1]
    wrong = beyond(case, found)
    words = ", ".join(f"{name} {value:.1e} > {limit:.1e}" for name, (value, limit) in wrong.items())
    return ("gradient" in wrong if case.sabotage else not wrong), words


def require_same_names(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str
) -> None:
    ours, theirs = (
        {(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        for tensors in (found, expected)
    )
    if ours != theirs:
        raise ValueError(f"{what} are {OTHER_PARAMETERS}: {sorted(ours ^ theirs)}")


def arrays(outcome: Outcome) -> dict[str, Tensor]:
    def flat(tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in sorted(tensors)])

    return {
        "logprobs": flat({"": outcome.logprobs, **outcome.sets}).nan_to_num(neginf=-1e6),
        "logprobs in the loss": outcome.token_logprobs,
        "entropy": outcome.entropy,
        "gradient": flat(outcome.gradients),
        "weights": flat(outcome.weights),
        "logprobs afterwards": outcome.after,
    }


def distances(outcome: Outcome, exact: Outcome, measure: Callable[[Tensor], Tensor]) -> Errors:
    ours, theirs = arrays(outcome), arrays(exact)
    return {name: float(measure(ours[name] - theirs[name])) for name in theirs}


def greatest(difference: Tensor) -> Tensor:
    return difference.abs().max().nan_to_num(torch.inf)


def mean_square(difference: Tensor) -> Tensor:
    return difference.square().mean().sqrt()


def relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def metric_error(found: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """The greatest difference relative to 1 + the value, of all but times and num_tokens."""
    return max(
        abs(found.get(name, math.inf) - value) / (1 + abs(value))
        for name, value in expected.items()
        if not name.startswith("trainer/") and name != "num_tokens"
    )


@cache
def expected_metrics(problem: Problem) -> dict[str, float]:
    exact, batch = reference(problem), golden_batch(problem)
    output = watched(problem.loss, lambda *_: None)(
        ForwardOutput(exact.token_logprobs, exact.entropy, **exact.sets), batch
    )
    return finalize(output.metrics)
