"""Requests of training as batches, and losses by the protocol's names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemorl.data.batch import TokenBatch, pad
from nemorl.losses import policy
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput, Sum, masked, weighted_sum
from nemorl.parallel.backend import ForwardOutput
from nemorl.runtime.serve.tinker.messages import MESSAGES, array
from nemorl.runtime.serve.wire import demand

MOST_CELLS = 1 << 25
"""Of a request's arrays, whole where only some cells were sent."""
CLIPS = "clip_low_threshold", "clip_high_threshold"
BOUNDS = {
    "importance_sampling": (0.0, math.inf),
    "ppo": (0.8, 1.2),
    "cispo": (0.0, 4.0),
    "gspo": (1 - 3e-4, 1 + 4e-4),  # the paper's: the protocol names none
}
"""What the ratio is clipped to, unless a request says otherwise."""
SETTINGS = {"dro": ("beta",), **dict.fromkeys(("ppo", "cispo", "gspo"), CLIPS)}
RATIO_MASK = "sequence_ratio_mask"
NEEDED = "target_tokens", "logprobs", "advantages"
LOSSES = {
    "cross_entropy": NEEDED[:1],
    **dict.fromkeys(("dro", *BOUNDS), NEEDED),
    "gspo": (*NEEDED, RATIO_MASK),
}
"""Inputs that must be given with each."""
NAMES = {
    CLIPS[0]: "values",
    CLIPS[1]: "returns",
    "logprobs": "generation_logprobs",
    "advantages": "advantages",
}
"""Arrays of a batch that carry inputs; bounds go by ones that only critics need."""
REMEDIES = {
    "stable_reinforce": "importance_sampling is the nearest: its formula is not published",
    "custom": "send the gradient as cross_entropy's weights",
}


@dataclass(frozen=True)
class Loss:
    """A loss of the protocol, a sum over tokens: `LossFn` of the batches of `read_work`."""

    name: str
    beta: float = 0.0

    def __call__(self, output: ForwardOutput, batch: Any) -> LossOutput:
        now, weights, prev = output.token_logprobs, batch.loss_weights, batch.generation_logprobs
        mask, A = weights != 0, batch.advantages
        if self.name == "cross_entropy":
            loss = nll(now, weights).loss
        elif self.name == "dro":
            gap = masked(mask, now) - masked(mask, prev)
            loss = weighted_sum(weights, 0.5 * self.beta * gap**2 - A * now)
        else:
            clips: Any = {
                "clip_low": masked(mask, 1 - batch.values),
                "clip_high": masked(mask, batch.returns - 1),
            }
            if self.name == "gspo":
                clips |= {"segment_ids": batch.segment_ids, "token_gradient": True}
            fn: Any = {"cispo": policy.cispo, "gspo": policy.gspo}.get(self.name, policy.clipped)
            loss = fn(now, prev, A, weights, **clips).loss
        return LossOutput(loss, {"loss": Sum(loss.detach())})


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """A request of `forward_backward`, read and checked."""

    batch: TokenBatch
    loss: Loss
    shapes: Sequence[tuple[int, ...]]
    """Of each datum's targets in the batch: [1 + tokens] or, soft, [1 + tokens, k]."""

    @property
    def soft(self) -> bool:
        return self.batch.target_weights is not None

    def answer(self, logprobs: Tensor, loss: float) -> bytes:
        """Return the answer as a message. logprobs: [batch, seq] or [batch, seq, k]."""
        records = []
        for row, (end, *k) in enumerate(self.shapes):
            found = logprobs[row, 1:end].reshape(end - 1, -1)[:, : math.prod(k)]
            data = found.float().numpy().tobytes()
            offsets = np.array([0, len(data)]).tobytes()
            batched = {"data": data, "offsets": offsets, "dtype": 1, "trailing_shape": k}
            records.append({"fields": [{"key": "logprobs", "value": batched}], "num_datums": 1})
        return MESSAGES["ForwardBackwardOutput"](
            type_name="ArrayRecord",
            records=records,
            metrics=[{"key": "loss:sum", "value": loss}],
        ).SerializeToString()


def read_work(request: Any, *, vocab_size: int, longest: int) -> ForwardBackward:
    """Return a request as a batch and a loss. Raises: Refused."""
    name, known = request.loss_fn, SETTINGS.get(request.loss_fn, ())
    must = f"must be one of {', '.join(LOSSES)}, but is {name[:80]!r}"
    demand(name in LOSSES, "loss_fn", must, REMEDIES.get(name, "name another"))
    settings: dict[str, Any] = {each.key: each.value for each in request.numbers}
    settings |= {each.key: each.value.text or each.value.number for each in request.settings}
    for key, value in settings.items():
        only = " and ".join(known) or "nothing"
        must = f"must have {only} with {name}, but has {key[:80]!r}"
        demand(key in known, "loss_fn_config", must, "leave it out")
        fits = isinstance(value, float) and 0 <= value < math.inf
        demand(fits, f"loss_fn_config.{key}", "must be a number, 0 or more", "change it")
    demand(
        name != "dro" or "beta" in settings,
        "loss_fn_config.beta",
        "must be given with dro: its strength has no usual value",
        "0.05 is mild",
    )
    loss = Loss(name, settings.pop("beta", 0.0))
    demand(len(request.data) > 0, "data", "must not be empty", "add a datum")
    inputs = (each.value.shape for datum in request.data for each in datum.inputs)
    must, cells = f"must have at most {MOST_CELLS} values", sum(abs(math.prod(x)) for x in inputs)
    demand(cells <= MOST_CELLS, "data", must, "send less at a time")
    usual = {"mask": 1.0, **dict(zip(CLIPS, BOUNDS.get(name, ()), strict=False)), **settings}
    usual |= {"weights": 1.0} if name == "cross_entropy" else {}
    rows = [
        _datum(each, f"data.{i}", name, usual, vocab_size, longest)
        for i, each in enumerate(request.data)
    ]
    shapes = [each["target_ids"].shape for each in rows]
    width = max(math.prod(k) for _, *k in shapes)
    fits = sum(shape[0] for shape in shapes) * width <= MOST_CELLS
    demand(fits, "data", f"{must}, with all targets as wide", "send wide ones apart")
    if any(len(shape) > 1 for shape in shapes):
        below = [_soft(each, width, -1) for each in rows if (each["loss_weights"] < 0).any()]
        rows = [_soft(each, width, 1) for each in rows] + below
    batch: Any = {
        key: pad([torch.from_numpy(row[key]) for row in rows], value=0)[0] for key in rows[0]
    }
    if torch.equal(batch["target_ids"], batch["input_ids"] * (batch["position_ids"] > 0)):
        del batch["target_ids"]  # the next tokens, as usual
    return ForwardBackward(batch=TokenBatch(**batch), loss=loss, shapes=shapes)


def _datum(
    message: Any,
    place: str,
    loss: str,
    usual: Mapping[str, float],
    vocab_size: int,
    longest: int,
) -> dict[str, np.ndarray]:
    """Return a sequence's row: index t + 1 of a batch is about target t. usual: of inputs that need
    not be given.
    """
    at, given = f"{place}.loss_fn_inputs", dict[str, np.ndarray]()
    for each in message.chunks:
        must = "must be tokens: the model takes no images or audio"
        demand(not (each.image or each.audio), f"{place}.model_input", must, "leave them out")
    tokens = np.frombuffer(b"".join(each.text.tokens for each in message.chunks), "<i4")
    must = f"must have 1 to {longest} tokens, but has {(size := len(tokens))}"
    demand(0 < size <= longest, f"{place}.model_input", must, "cut it")
    for each in message.inputs:
        found = given[each.key] = array(each.value, where := f"{at}.{each.key[:80]}")
        demand(bool(np.isfinite(found).all()), where, "must be finite", "remove NaN and infinity")
        soft = loss == "cross_entropy" and each.key in ("target_tokens", "weights")
        demand(
            found.shape[:1] == (size,) and found.ndim <= 1 + soft and found.size > 0,
            where,
            f"must be [{size}]{f' or [{size}, k]' * soft}, but is {[*found.shape]}",
            "give a value for each token of model_input",
        )
    for key in LOSSES[loss]:
        demand(key in given, f"{at}.{key}", f"must be given with {loss}", "add it")
    more = sorted({*given} - {*usual, *LOSSES[loss]})
    demand(not more, at, f"must be inputs of {loss}, but has {more}", "leave these out")
    targets = given["target_tokens"].astype(np.int64)
    for ids, where in ((tokens, "model_input"), (targets, "loss_fn_inputs.target_tokens")):
        demand(
            bool(0 <= ids.min() <= ids.max() < vocab_size),
            f"{place}.{where}",
            f"must be token ids below {vocab_size}",
            "use this model's tokenizer",
        )
    mask = given.get("mask", np.ones(size)) != 0
    given = {key: np.full(targets.shape, value, "f4") for key, value in usual.items()} | given
    weights = given.get("weights", given.get(RATIO_MASK, np.ones(size)) != 0)
    demand(
        weights.shape == targets.shape,
        f"{at}.weights",
        f"must be {[*targets.shape]} as target_tokens, but is {[*weights.shape]}",
        "correct it",
    )
    demand(
        loss != "gspo" or not given["advantages"][weights == 0].any(),
        f"{at}.advantages",
        f"must be 0 where {RATIO_MASK} is",
        "set it there",
    )
    low, high = (given.get(key, np.ones(1)) for key in CLIPS)
    around = bool((low <= 1).all() and (high >= 1).all())
    demand(around, " and ".join(CLIPS), "must lie around 1, the ratio of no change", "change them")
    shown = (weights.T * mask).T.astype("f4")
    mask |= targets.ndim > 1  # soft ones are scored where they are not trained on, too
    row = {"target_ids": targets, "loss_mask": mask, "response_mask": mask, "loss_weights": shown}
    row |= {name: given[key].astype("f4") for key, name in NAMES.items() if key in given}
    row["position_ids"] = np.arange(1, size + 1)
    row = {key: np.insert(x, 0, 0, axis=0) for key, x in row.items()}
    ids = np.append(tokens, targets.reshape(size, -1)[-1, 0]).astype(np.int64)
    return row | {"input_ids": ids, "segment_ids": np.ones(size + 1, np.int64)}


def _soft(row: Mapping[str, np.ndarray], width: int, sign: int) -> dict[str, np.ndarray]:
    """Return a row of soft targets with its weights of one sign, as a batch has shares."""
    size = len(row["loss_mask"])
    free = (0, 0), (0, width - row["target_ids"].size // size)
    targets = np.pad(row["target_ids"].reshape(size, -1), free)
    share = np.maximum(sign * np.pad(row["loss_weights"].reshape(size, -1), free), 0)
    total = share.sum(-1)
    share[total == 0, 0] = 1
    share /= share.sum(-1, keepdims=True)
    return {**row, "target_ids": targets, "target_weights": share, "loss_weights": sign * total}
