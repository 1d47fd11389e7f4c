"""Tensors of a Hugging Face model as megatron-core has them, and back, bit for bit.

Names of parameters begin with the number of the stage on its rank, and layers have their numbers on
that stage. Queries, keys and values lie in one matrix, group by group of query heads, as do gate
and up projection, of which ranks of tensor parallelism have rows or columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from nemorl.models.causal_lm import SCORE
from nemorl.models.tensor_files import Piece, TensorFiles
from nemorl.parallel.checkpoint import Pieces, shared_out
from nemorl.parallel.megatron.limits import FAMILIES, Kind
from nemorl.parallel.world import World

if TYPE_CHECKING:
    from nemorl.parallel.megatron.optimizer import ShardedAdamW


Read = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Returns a box of a Hugging Face tensor: by name, where it begins, and its shape."""
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """A parameter of megatron-core, and the Hugging Face tensors that it is made of."""

    kind: Kind
    names: tuple[str, ...]
    divided: bool = True
    """Whether ranks of tensor parallelism may have parts of it; not of experts with ep."""

    @property
    def dim(self) -> int | None:
        if not self.divided:
            return None
        return {"whole": None, "columns": 1}.get(self.kind, 0)


HEAD = "output_layer.weight"


class Rows(NamedTuple):
    name: str
    first: int
    shape: tuple[int, ...]


class Conversion:
    """Converts a model's tensors for a rank. shapes: of Hugging Face's, tied ones once."""

    def __init__(self, hf: Any, shapes: Shapes, world: World) -> None:
        self.shapes, self.world = shapes, world
        self.layers = world.plan.stages.layers(hf.num_hidden_layers)
        self.groups = getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads
        self.heads_per_group = hf.num_attention_heads // self.groups
        self.family = FAMILIES[hf.model_type]
        self.experts = self.family.experts
        self.num_experts = hf.num_local_experts // world.plan.ep if self.experts else 0
        self.here: dict[str, Entry] = {}
        for stage in map(world.stage, range(world.plan.vpp)):
            self.here |= self.entries(stage) | self.entries_of_experts(stage, world.ep_rank)

    def entries(self, stage: int) -> dict[str, Entry]:
        """Return what a stage's parameters are made of, by their names on its rank; without its
        experts.
        """
        found, last = {}, len(self.layers) - 1
        embedding = Entry("rows", ("model.embed_tokens.weight",))
        part = stage // self.world.plan.pp
        if stage == 0:
            found[f"{part}.embedding.word_embeddings.weight"] = embedding
        for number, index in enumerate(self.layers[stage]):
            own, layer = f"{part}.decoder.layers.{number}", f"model.layers.{index}"
            for leaf, (kind, leaves) in self.family.layer().items():
                names = tuple(f"{layer}.{each}" for each in leaves)
                if names[0] in self.shapes:
                    found[f"{own}.{leaf}"] = Entry(kind, names)
            if self.experts:
                gate = f"{layer}.{self.experts[0]}.gate.weight"
                found[f"{own}.mlp.router.weight"] = Entry("whole", (gate,))
        if stage == last:
            for leaf in ("weight", "bias"):
                if (name := f"model.norm.{leaf}") in self.shapes:
                    found[f"{part}.decoder.final_layernorm.{leaf}"] = Entry("whole", (name,))
            head = f"{part}.{HEAD}"
            if SCORE[0] in self.shapes:
                found[head] = Entry("whole", (SCORE[0],))
            elif "lm_head.weight" in self.shapes:
                found[head] = Entry("rows", ("lm_head.weight",))
            elif last:  # its copy of a tied embedding
                found[head] = embedding
        return found

    def entries_of_experts(self, stage: int, rank: int) -> dict[str, Entry]:
        """Return the same of the experts of a rank of expert parallelism."""
        found: dict[str, Entry] = {}
        if self.experts is None:
            return found
        (where, *names), plan = self.experts, self.world.plan
        part, divided = stage // plan.pp, plan.ep == 1
        for number, index in enumerate(self.layers[stage]):
            layer = f"{part}.decoder.layers.{number}.mlp.experts.local_experts"
            for expert in range(self.num_experts):
                whole = f"model.layers.{index}.{where}.experts.{rank * self.num_experts + expert}"
                gate, up, down = (f"{whole}.{name}.weight" for name in names)
                own = f"{layer}.{expert}"
                found[f"{own}.linear_fc1.weight"] = Entry("gated", (gate, up), divided)
                found[f"{own}.linear_fc2.weight"] = Entry("columns", (down,), divided)
        return found

    def _everywhere(self) -> Iterator[tuple[int, int | None, dict[str, Entry]]]:
        for stage in range(len(self.layers)):
            yield stage, None, self.entries(stage)
            for rank in range(self.world.plan.ep if self.experts else 0):
                yield stage, rank, self.entries_of_experts(stage, rank)

    def is_copy(self, name: str) -> bool:
        """Return whether it is the last stage's copy of a tied embedding."""
        return name.endswith(HEAD) and self.shapes.keys().isdisjoint(("lm_head.weight", *SCORE))

    def own(self, entry: Entry, read: Read) -> Tensor:
        tp, rank = self.world.plan.tp, self.world.tp_rank
        found = self._rows(entry)
        if entry.kind == "qkv" and self.groups % tp:  # a group is of several ranks
            return fused([self._box(rows, read) for rows in found], self.groups).chunk(tp)[rank]
        parts = [self._box(rows, read, entry.dim, rank, tp) for rows in found]
        return fused(parts, self.groups // tp) if entry.kind == "qkv" else torch.cat(parts)

    def _rows(self, entry: Entry) -> list[Rows]:
        shares = {"qkv": (self.heads_per_group, 1, 1), "gated": (1, 1)}.get(entry.kind, (1,))
        if len(shares) == 1 or len(entry.names) > 1:
            return [Rows(name, 0, self.shapes[name]) for name in entry.names]
        (name,) = entry.names
        rows, *rest = self.shapes[name]
        counts = [rows * share // sum(shares) for share in shares]
        firsts = accumulate(counts, initial=0)
        return [Rows(name, first, (n, *rest)) for first, n in zip(firsts, counts, strict=False)]

    def _box(
        self, rows: Rows, read: Read, dim: int | None = None, rank: int = 0, parts: int = 1
    ) -> Tensor:
        shape, offsets = list(rows.shape), [rows.first, *[0] * (len(rows.shape) - 1)]
        if dim is not None:
            shape[dim] //= parts
            offsets[dim] += rank * shape[dim]
        return read(rows.name, tuple(offsets), tuple(shape))

    def whole(
        self, own: Callable[[str], Tensor], dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all whole Hugging Face tensors, on all ranks; a collective call.

        own: returns this rank's part of a parameter of its stages; called in order.
        """
        world = self.world
        for stage, expert_rank, entries in self._everywhere():
            rank = stage % world.plan.pp
            here = rank == world.pp_rank and expert_rank in (None, world.ep_rank)
            for name, entry in entries.items():
                if self.is_copy(name):
                    continue
                if here:
                    wholes = self._wholes(entry, own(name).detach().to(dtype))
                    if len(wholes) > len(entry.names):
                        wholes = [torch.cat(wholes)]
                else:
                    shapes = map(self.shapes.__getitem__, entry.names)
                    wholes = [torch.empty(x, dtype=dtype, device=world.device) for x in shapes]
                for hf_name, value in zip(entry.names, wholes, strict=True):
                    yield hf_name, self._sent(value.contiguous(), rank, expert_rank)

    def _wholes(self, entry: Entry, own: Tensor) -> list[Tensor]:
        group, parts = self.world.tp_group, [own]
        if group is not None and entry.dim is not None:
            parts = [torch.empty_like(own) for _ in range(self.world.plan.tp)]
            dist.all_gather(parts, own.contiguous(), group=group)
        if entry.kind == "gated":
            halves = (part.chunk(2) for part in parts)
            return [torch.cat(each) for each in zip(*halves, strict=True)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, entry.dim or 0)
        if entry.kind == "qkv":
            return split(whole, self.groups, self.heads_per_group)
        return [whole]

    def _sent(self, value: Tensor, pp_rank: int, expert_rank: int | None) -> Tensor:
        world = self.world
        for group, source in ((world.ep_group, expert_rank), (world.pp_group, pp_rank)):
            if group is not None and source is not None:
                dist.broadcast(value, group=group, group_src=source)
        return value


def fused(parts: list[Shaped[Tensor, "..."]], groups: int) -> Shaped[Tensor, "rows ..."]:
    """Join the rows of queries, keys and values, group by group.

    >>> fused([torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6]), torch.tensor([7, 8])], 2).tolist()
    [1, 2, 5, 7, 3, 4, 6, 8]
    """
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def split(
    whole: Shaped[Tensor, "rows ..."], groups: int, heads_per_group: int
) -> list[Shaped[Tensor, "..."]]:
    """Undo `fused`.

    >>> [part.tolist() for part in split(torch.tensor([1, 2, 5, 7, 3, 4, 6, 8]), 2, 2)]
    [[1, 2, 3, 4], [5, 6], [7, 8]]
    """
    of_groups = whole.unflatten(0, (groups, heads_per_group + 2, -1))
    return [part.flatten(0, 2) for part in of_groups.split([heads_per_group, 1, 1], 1)]


def mark_split(model: nn.Module, conversion: Conversion) -> None:
    """Mark the parameters of which each rank of tensor parallelism has its own: the gradient's norm
    counts all others once.
    """
    for name, parameter in model.named_parameters():
        entry = conversion.here[name]
        if entry.dim is not None or not entry.divided:
            vars(parameter).update(
                partition_dim=entry.dim or 0, partition_stride=1, tensor_model_parallel=True
            )


@dataclass(frozen=True)
class SpanBox:
    """A box of a Hugging Face tensor, and its place in a rank's span of a parameter."""

    piece: Piece
    parameter: nn.Parameter
    part: slice
    rows: Tensor

    def of(self, span: Tensor) -> Tensor:
        rows = span[self.part].view(-1, prod(self.piece.shape[1:]))
        return rows[self.rows.to(rows.device)].view(self.piece.shape)


def own_boxes(stages: Any, optimizer: "ShardedAdamW", conversion: Conversion) -> list[SpanBox]:
    """Return the boxes that this rank writes; one of several ranks writes what they have alike."""
    parameters, entries = dict(stages.named_parameters()), conversion.here
    same = {
        name: parameter.numel()
        for name, parameter in parameters.items()
        if entries[name].divided and entries[name].dim is None
    }
    owners, rank = shared_out(same, conversion.world.plan.tp), conversion.world.tp_rank
    boxes: list[SpanBox] = []
    for name, parameter in parameters.items():
        span, ours = optimizer.span(parameter), owners.get(name, rank) == rank
        if span is not None and ours and not conversion.is_copy(name):
            boxes += _boxes(parameter, entries[name], conversion, span)
    return boxes


def own_weights(boxes: list[SpanBox], optimizer: "ShardedAdamW") -> Pieces:
    """Return the pieces of weights, and their values in float32."""
    values = (box.of(optimizer.main(box.parameter)) for box in boxes)
    return [box.piece for box in boxes], values


def _boxes(
    parameter: nn.Parameter, entry: Entry, conversion: Conversion, span: slice
) -> Iterator[SpanBox]:
    starts, addresses, column = _addresses(entry, conversion)
    width = prod(parameter.shape[1:])
    for begin, end in _by_rows(span.start, span.stop, width):
        row, left = divmod(begin, width)
        found = addresses[row : row + max((end - begin) // width, 1)]
        order = found.argsort()
        cuts = (found[order].diff() != 1).nonzero().flatten() + 1
        for rows in order.tensor_split(cuts):
            first = int(found[rows[0]])
            name = max((name for name in starts if starts[name] <= first), key=starts.__getitem__)
            shape: tuple[int, ...] = (len(rows),)
            offsets: tuple[int, ...] = (first - starts[name],)
            if parameter.ndim > 1:
                shape, offsets = (*shape, min(end - begin, width)), (*offsets, column + left)
            part = slice(begin - span.start, end - span.start)
            yield SpanBox(Piece(name, torch.float32, shape, offsets), parameter, part, rows)


def _addresses(entry: Entry, conversion: Conversion) -> tuple[dict[str, int], Tensor, int]:
    sizes = [conversion.shapes[name][0] + 1 for name in entry.names]
    starts = dict(zip(entry.names, accumulate(sizes, initial=0), strict=False))
    columns = set()

    def read(name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        columns.add((*offsets, 0)[1])
        return torch.arange(shape[0]) + starts[name] + offsets[0]

    addresses = conversion.own(entry, read)
    (column,) = columns
    return starts, addresses, column


def _by_rows(begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the part of a row, the whole rows, and the part of a row in a span.

    >>> list(_by_rows(2, 12, 5)), list(_by_rows(6, 9, 5)), list(_by_rows(5, 10, 5))
    ([(2, 5), (5, 10), (10, 12)], [(6, 9)], [(5, 10)])
    """
    whole = min(end, -(-begin // width) * width), max(begin, end // width * width)
    return pairwise(sorted({begin, *whole, end}))


MOMENTS = ("exp_avg", "exp_avg_sq")


def own_moments(boxes: list[SpanBox], optimizer: "ShardedAdamW", step: int) -> Pieces:
    """Return the pieces of AdamW's state that this rank writes, and their values."""
    if not step:
        return [], ()
    pieces = [
        replace(box.piece, name=f"{box.piece.name}.{what}") for what in MOMENTS for box in boxes
    ]
    # One box of each tensor begins at its first number.
    begun = [box.piece.name for box in boxes if not any(box.piece.offsets)]
    pieces += [Piece(f"{name}.step", torch.float32, (), ()) for name in begun]
    values = (box.of(optimizer.state(box.parameter)[what]) for what in MOMENTS for box in boxes)
    return pieces, chain(values, [torch.tensor(float(step))] * len(begun))


def fill_moments(
    stages: Any,
    optimizer: "ShardedAdamW",
    conversion: Conversion,
    stored: TensorFiles,
    device: torch.device,
) -> None:
    """Copy this rank's spans out of stored moments; before a first step there are none."""

    def read(what: str, name: str, *box: tuple[int, ...]) -> Tensor:
        return stored.read(f"{name}.{what}", *box)

    for name, parameter in stages.named_parameters():
        if (span := optimizer.span(parameter)) is None:
            continue
        state, entry = optimizer.state(parameter), conversion.here[name]
        state.clear()
        if stored.shapes:
            for what in MOMENTS:
                value = conversion.own(entry, partial(read, what))
                state[what] = value.flatten()[span].to(device, copy=True)
            state["step"] = read("step", entry.names[0]).to(device, copy=True)
