"""`TokenBatch`: everything a training step needs to know about its tokens, as one frozen pytree."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad as pad_tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from nemorl.accelerator import is_accelerator
from nemorl.checks import at_least, require
from nemorl.data.example import Example
from nemorl.losses.logprobs import LogprobKind
from nemorl.losses.types import PerToken, TokenIds, TokenMask, register_pytree


def pad(
    sequences: Sequence[Tensor],
    *,
    value: int | float | bool,
    length: int | None = None,
    multiple_of: int = 1,
) -> tuple[Shaped[Tensor, "batch seq *rest"], Int[Tensor, "batch"]]:
    """Return sequences as rows of one tensor, and their lengths; `unpad` is the inverse.

    The width is `length`, or the longest sequence, rounded up to `multiple_of`; free places, on the
    right, hold `value`. Raises: ValueError that names a sequence longer than `length`.

    >>> padded, lengths = pad([torch.tensor([1, 2, 3]), torch.tensor([4])], value=0, multiple_of=2)
    >>> padded.tolist(), lengths.tolist()
    ([[1, 2, 3, 0], [4, 0, 0, 0]], [3, 1])
    """
    at_least(1, multiple_of=multiple_of)
    sizes = [len(sequence) for sequence in sequences]
    width = max(sizes) if length is None else length
    require_room("length", width, sizes)
    padded = pad_sequence(list(sequences), batch_first=True, padding_value=value)
    free = round_up(width, multiple_of) - max(sizes)
    padded = pad_tensor(padded, (0, 0) * (padded.ndim - 2) + (0, free), value=value)
    return padded, torch.tensor(sizes, device=padded.device)


def require_room(name: str, room: int, sizes: Sequence[int], what: str = "sequence") -> None:
    """Raise ValueError that names the longest if it is longer than `room`.

    >>> require_room("length", 2, [1, 3])
    Traceback (most recent call last):
    ValueError: length must hold the longest sequence: sequence 1 has 3 tokens, length is 2
    """
    longest = max(sizes, default=0)
    if longest > room:
        raise ValueError(
            f"{name} must hold the longest {what}: {what} {sizes.index(longest)} has {longest}"
            f" tokens, {name} is {room}"
        )


def unpad(padded: Shaped[Tensor, "batch seq *rest"], lengths: Int[Tensor, "batch"]) -> list[Tensor]:
    """Return the rows of a padded tensor without their padding.

    >>> rows = unpad(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]))
    >>> [row.tolist() for row in rows]
    [[1, 2, 3], [4]]
    """
    return [row[:size] for row, size in zip(padded, lengths.tolist(), strict=True)]


def round_up(length: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `length`.

    >>> round_up(5, 4), round_up(8, 4)
    (8, 8)
    """
    return -(-length // multiple_of) * multiple_of


@dataclass(frozen=True)
class RankRoutes:
    """The experts of a rank's tokens and layers, in the order of its microbatches, no padding."""

    experts: Int[Tensor, "tokens layers topk"]
    ids: Int[Tensor, "tokens"] | None
    """Equal, and in order, where the experts of all layers are; None where these are all layers."""
    cut: Any
    """The plans by which the batch was cut: a rank that cuts it otherwise would mix up tokens."""


def to_device(values: Any, device: torch.device) -> Any:
    """Return a pytree with its tensors on a device, through pinned memory.

    >>> to_device([torch.ones(1), "x"], torch.device("cpu"))
    [tensor([1.]), 'x']
    """

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        if is_accelerator(device) and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # torch keeps it until the copy is done
        return tensor.to(device, non_blocking=True)

    return pytree.tree_map_only(Tensor, moved, values)


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Sequences and their per-token arrays, all `[batch, seq]` like `input_ids`.

    A row holds one sequence (of `collate`) or several (after `pack`). Index t is about token t:
    `prev_logprobs[:, t]` is log p(x_t | x_<t). The first token of each segment is never trained on.
    """

    input_ids: TokenIds
    segment_ids: TokenIds
    """0 = padding, 1.. = the sequences of the row."""
    position_ids: TokenIds
    """Restart at 0 with every segment."""
    loss_mask: TokenMask
    """True = trained on. A subset of `response_mask`."""
    response_mask: TokenMask
    """True = not the prompt; includes tool output and observations."""
    loss_weights: PerToken | None = None
    """Built once for the optimizer step (docs/numerics.md, Weighted sums); 0 off the loss mask."""
    advantages: PerToken | None = None
    prev_logprobs: PerToken | None = None
    generation_logprobs: PerToken | None = None
    reference_logprobs: PerToken | None = None
    values: PerToken | None = None
    """The critic's, before the update."""
    returns: PerToken | None = None
    """What the critic's values are trained on."""
    policy_versions: Int[Tensor, "batch seq"] | None = None
    """Version of the weights that sampled each token; -1 off the sampler's tokens."""
    sampled_hashes: Int[Tensor, "batch seq"] | None = None
    """`token_hashes` of what was sampled, by which a step proves its tokens; 0 off them."""
    routed_experts: Int[Tensor, "batch seq layers topk"] | RankRoutes | None = None
    """The experts that the sampler chose for each token, for `trainer.router_replay`; -1 where the
    trainer's router chooses: off the sampler's tokens, and for the last one, which it only drew.
    One of several ranks gets those of its own tokens and layers.
    """
    route_ids: Int[Tensor, "batch seq"] | None = None
    """In microbatches of a rank with some of the layers: equal where the experts of all are."""
    target_ids: Int[Tensor, "batch seq *k"] | None = None
    """Tokens to predict instead of `input_ids`: one at each place, or k."""
    target_weights: Float[Tensor, "batch seq k"] | None = None
    """Probabilities of `target_ids`: `token_logprobs` is Σ_k w_k log p(target_k | x_<t)."""
    teacher_logprobs: Float[Tensor, "batch seq k"] | None = None
    """A teacher's, of `target_ids`, for distillation; -inf: an empty place."""
    logprob_kind: LogprobKind = LogprobKind()
    """The distribution of all logprob arrays, also of the ones that the trainer computes."""

    @property
    def lengths(self) -> Int[Tensor, "batch"]:
        """Tokens per row that are not padding."""
        return (self.segment_ids > 0).sum(-1)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return self.input_ids.shape[0]


DTYPES = {
    "input_ids": torch.int64,
    "loss_mask": torch.bool,
    "response_mask": torch.bool,
    "policy_versions": torch.int64,
    "routed_experts": torch.int16,
    "target_ids": torch.int64,
}
FREE: dict[str, float] = {
    **dict.fromkeys(("policy_versions", "routed_experts", "route_ids"), -1),
    "teacher_logprobs": -math.inf,
}
"""What stands in free places, if not 0."""
register_pytree(TokenBatch, constant="logprob_kind")


def each_array(batch: TokenBatch, function: Callable[[Tensor, float], Tensor]) -> TokenBatch:
    """Return a batch with `function(values, free)` of each array.

    >>> one = collate([{"input_ids": [5], "loss_mask": [False], "response_mask": [False]}])
    >>> each_array(one, lambda values, free: values.repeat(2, 1)).input_ids.tolist()
    [[5], [5]]
    """
    changed: dict[str, Any] = {
        name: function(values, FREE.get(name, 0))
        for name, values in vars(batch).items()
        if isinstance(values, Tensor)
    }
    return replace(batch, **changed)


def collate(
    examples: Sequence[Example | Mapping[str, Any]],
    *,
    length: int | None = None,
    logprob_kind: LogprobKind = LogprobKind(),
) -> TokenBatch:
    """Return examples as one `TokenBatch`: a sequence per row, padded on the right.

    Args:
        examples: `Example`s, or dicts with their fields. An optional array is for all or none.
        length: the width; default: the longest sequence.
    Raises: ValueError where only some have an optional array, where a loss mask leaves its response
    mask or trains on a first token, and of `check_targets`.

    >>> one = Example(input_ids=[5, 6], loss_mask=[False, True], response_mask=[False, True])
    >>> batch = collate([one, {"input_ids": [8], "loss_mask": [False], "response_mask": [False]}])
    >>> batch.input_ids.tolist(), batch.segment_ids.tolist()
    ([[5, 6], [8, 0]], [[1, 1], [1, 0]])
    """
    if not examples:
        raise ValueError("examples must hold at least one sequence, got none")
    items = [Example(**each) if isinstance(each, Mapping) else each for each in examples]
    columns: dict[str, Tensor] = {}
    for field in fields(Example):
        missing = [row for row, item in enumerate(items) if getattr(item, field.name) is None]
        if missing and len(missing) < len(items):
            raise ValueError(
                f"{field.name} must be given for all examples or for none: example {missing[0]} has"
                " none"
            )
        if not missing:
            dtype = DTYPES.get(field.name, torch.float32)
            sequences = [torch.as_tensor(getattr(item, field.name), dtype=dtype) for item in items]
            shapes = [tuple(each.shape[1:]) for each in sequences]
            for row, shape in enumerate(shapes):
                require(
                    shape == shapes[0],
                    f"{field.name}[{row}]",
                    f"must have the shape {shapes[0]} at each token, as in example 0",
                    shape,
                    "pad it",
                )
            free = FREE.get(field.name, 0)
            columns[field.name], lengths = pad(sequences, value=free, length=length)
    loss_mask = columns["loss_mask"]
    for wrong, must in (
        (loss_mask & ~columns["response_mask"], "be a subset of response_mask"),
        (loss_mask[:, :1], "be False at index 0 (a first token has no log-probability)"),
    ):
        if rows := wrong.any(-1).nonzero().flatten().tolist():
            raise ValueError(f"loss_mask must {must}, unlike that of example {rows[0]}")
    place = torch.arange(columns["input_ids"].shape[1]).expand_as(columns["input_ids"])
    real = place < lengths[:, None]
    batch = TokenBatch(
        segment_ids=real.long(),
        position_ids=torch.where(real, place, 0),
        logprob_kind=logprob_kind,
        **columns,
    )
    check_targets(batch)
    return batch


def check_targets(batch: TokenBatch, *, vocab_size: int = 2**31) -> None:
    """Raise ValueError that names the first wrong place of a batch's targets, if there is one.

    vocab_size: of the model; what ids must be below.

    >>> masks = {"loss_mask": [False], "response_mask": [False]}
    >>> check_targets(collate([{"input_ids": [5], **masks, "target_ids": [8]}]), vocab_size=8)
    Traceback (most recent call last):
    ValueError: target_ids[0, 0] must be a token id, 0 … 7, but it is 8: use the model's tokenizer
    """

    def every(fits: Any, must: str, remedy: str) -> None:
        if not fits.all():
            place = (~fits).nonzero()[0].tolist()
            require(False, f"{name}{place}", must, values[tuple(place)].tolist(), remedy)

    ids, real = batch.target_ids, batch.segment_ids > 0
    own = None if ids is None else tuple(ids.shape)
    for name in ("target_ids", "target_weights", "teacher_logprobs"):
        if (values := vars(batch)[name]) is None:
            continue
        shape, must = tuple(values.shape), "must be [batch, seq, k] as target_ids"
        fits = shape == own and len(shape) == 3
        if name == "target_ids":
            fits, must = shape[:2] == real.shape and len(shape) < 4, "must be [batch, seq(, k)]"
        require(fits, name, must, shape, f"target_ids are {own}, input_ids {tuple(real.shape)}")
        free, here = FREE.get(name, 0), real.view(*real.shape, *[1] * (values.ndim - 2))
        every((values == free) | here, f"must be {free} on padding", "give it no targets")
        if name == "target_ids":
            must = f"must be a token id, 0 … {vocab_size - 1}"
            every((values >= 0) & (values < vocab_size), must, "use the model's tokenizer")
        elif name == "target_weights":
            every((values >= 0) & (values < math.inf), "must be 0 or more", "give probabilities")
            one = (values.float().sum(-1) - 1).abs() < 1e-3
            must = "must sum to one where loss_mask is True"
            every(one | ~batch.loss_mask, must, "divide them by their sum")
        else:
            every(values < 1e-3, "must be 0 or less", "give log-probabilities")


def take(batch: TokenBatch, rows: Sequence[int] | Int[Tensor, "rows"]) -> TokenBatch:
    """Return the given rows of a batch, in the given order.

    >>> none = {"loss_mask": [False], "response_mask": [False]}
    >>> batch = collate([{"input_ids": [n], **none} for n in (5, 6, 7)])
    >>> take(batch, [2, 0]).input_ids.tolist()
    [[7], [5]]
    """
    index = torch.as_tensor(rows, dtype=torch.int64, device=batch.input_ids.device)
    return pytree.tree_map_only(Tensor, lambda values: values[index], batch)


def trim(batch: TokenBatch, *, multiple_of: int = 1) -> TokenBatch:
    """Return a batch without the columns on the right that hold no token, up to `multiple_of`.

    >>> masks = {"loss_mask": [False], "response_mask": [False]}
    >>> trim(collate([{"input_ids": [5], **masks}], length=9), multiple_of=4).input_ids.shape[1]
    4
    """
    longest = int(extents(batch).max()) if len(batch) else 0
    added = round_up(max(longest, 1), multiple_of) - batch.input_ids.shape[1]
    return each_array(
        batch, lambda x, free: pad_tensor(x, (0, 0) * (x.ndim - 2) + (0, added), value=free)
    )


def extents(batch: TokenBatch) -> Int[Tensor, "batch"]:
    """Return per row the columns up to its last token: its cost in a padded batch.

    >>> masks = {"loss_mask": [False], "response_mask": [False]}
    >>> extents(collate([{"input_ids": [5], **masks}], length=9)).tolist()
    [1]
    """
    place = torch.arange(1, batch.segment_ids.shape[1] + 1, device=batch.segment_ids.device)
    place = torch.where(batch.segment_ids > 0, place, 0)
    return place.amax(-1) if place.shape[1] else place.sum(-1)
