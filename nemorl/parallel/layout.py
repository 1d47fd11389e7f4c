"""How a batch is cut into packed rows, ranks and microbatches, and put together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from nemorl.data.batch import RankRoutes, TokenBatch, each_array, take, to_device
from nemorl.data.packing import (
    Plan,
    pack,
    pack_plan,
    shard_by_rank,
    split,
    split_microbatches,
    unpack,
)
from nemorl.parallel.config import MICRO_BATCH_TOKENS, TrainerConfig
from nemorl.parallel.experts import require_routes
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.tokens import once


@dataclass(frozen=True)
class Layout:
    """A batch's rows as the model sees them, and the microbatches of each rank."""

    rows: TokenBatch
    microbatches: tuple[Plan, ...]
    """Per rank its microbatches, equally many, as indices of `rows`; one may be empty."""
    packing: Plan | None
    lengths: tuple[int, ...]
    width: int
    multiple_of: int

    def parts(self, rank: int = 0) -> tuple[TokenBatch, ...]:
        """Return the microbatches of a rank; an empty one as a row of padding, for collectives."""
        plan = self.microbatches[rank]
        found = split(self.rows, plan, multiple_of=self.multiple_of)
        size = (1, self.multiple_of)
        padding = each_array(self.rows, lambda x, free: x.new_full((*size, *x.shape[2:]), free))
        parts = tuple(part if rows else padding for part, rows in zip(found, plan, strict=True))
        routes = self.rows.routed_experts
        if not isinstance(routes, RankRoutes):
            return parts
        if routes.cut != self.plans(rank):
            raise RuntimeError(
                "ranks must cut a batch as its sender does, but they cut it otherwise"
            )
        return tuple(_placed(routes, parts))

    def plans(self, rank: int) -> tuple[Plan | None, Plan]:
        return self.packing, self.microbatches[rank]

    def experts(self, rank: int) -> Int[Tensor, "tokens layers topk"]:
        own = torch.tensor([*chain(*self.microbatches[rank])]).long()
        experts, segments = self.rows.routed_experts, self.rows.segment_ids.cpu()
        assert isinstance(experts, Tensor)
        return experts.cpu()[own][segments[own] > 0]

    def place(
        self, values: Sequence[Shaped[Tensor, "_ _ *rest"]], rank: int = 0
    ) -> Shaped[Tensor, "rows width *rest"]:
        """Put a rank's values of its microbatches in the rows' places; 0 elsewhere."""
        length, width = self.rows.input_ids.shape
        placed = values[0].new_zeros(length, width, *values[0].shape[2:])
        plan = self.microbatches[rank]
        own = [_widened(v, width) for v, rows in zip(values, plan, strict=True) if rows]
        if not own:
            return placed
        rows = torch.tensor([*chain(*plan)])
        return placed.index_copy(0, to_device(rows, placed.device), torch.cat(own))

    def restore(
        self, placed: Shaped[Tensor, "rows width *rest"]
    ) -> Shaped[Tensor, "batch seq *rest"]:
        if self.packing is not None:
            return unpack(placed, self.packing, self.lengths, length=self.width)
        return _widened(placed, self.width)


def _widened(values: Tensor, width: int) -> Tensor:
    return pad(values, (0, 0) * (values.ndim - 2) + (0, width - values.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How a training backend cuts batches, and the driver of its ranks, which sends each rank the
    experts of its own tokens and layers.
    """

    trainer: TrainerConfig
    plan: ParallelPlan
    model: Any
    layers: int

    def layout(self, batch: TokenBatch, *, replay: bool = True) -> Layout:
        """Return the batch's layout on the ranks; its routes are kept only to replay them.

        Raises: ValueError for routes that are missing, or another model's.
        """
        replay = replay and self.trainer.router_replay
        if replay:
            require_routes(batch, self.model, layers=self.layers)
        elif batch.routed_experts is not None:
            batch = replace(batch, routed_experts=None)
        return cut(
            batch,
            self.trainer,
            num_ranks=self.plan.data_ranks,
            multiple_of=self.plan.row_multiple,
            min_microbatches=self.plan.min_microbatches,
        )

    def own_layout(self, batch: TokenBatch, place: tuple[int, int], *, replay: bool) -> Layout:
        """Return the batch's layout with one rank's routes: data rank, place in the pipeline."""
        layout = self.layout(batch, replay=replay)
        if isinstance(layout.rows.routed_experts, Tensor):
            (routes,) = self._routes(layout, place[0], [place[1]])
            layout = replace(layout, rows=replace(layout.rows, routed_experts=routes))
        return layout

    def routes(self, batch: TokenBatch) -> dict[tuple[int, int], RankRoutes]:
        """Return each rank's routes of a batch, by data rank and place in the pipeline."""
        layout, pp_ranks = self.layout(batch), range(self.plan.pp)
        return {
            (rank, pp_rank): routes
            for rank in range(self.plan.data_ranks)
            for pp_rank, routes in enumerate(self._routes(layout, rank, pp_ranks))
        }

    def _routes(self, layout: Layout, rank: int, pp_ranks: Sequence[int]) -> Iterator[RankRoutes]:
        experts, plan = layout.experts(rank), self.plan
        ids = None if plan.pp == 1 else _ids(experts)
        for pp_rank in pp_ranks:
            layers = [*chain(*plan.stages.layers(self.layers)[pp_rank :: plan.pp])]
            own = experts if plan.pp == 1 else experts[:, layers]
            yield RankRoutes(own, ids, layout.plans(rank))


def _ids(experts: Int[Tensor, "tokens layers topk"]) -> Int[Tensor, "tokens"]:
    """Number different experts of a token in the order of their bytes, in which `once` sorts."""
    found = [token.tobytes() for token in experts.flatten(1).numpy()]
    number = {token: index for index, token in enumerate(sorted(set(found)))}
    return torch.tensor([number[token] for token in found], dtype=torch.int32)


def _placed(routes: RankRoutes, parts: Sequence[TokenBatch]) -> Iterator[TokenBatch]:
    real = [part.segment_ids.cpu() > 0 for part in parts]
    sizes = [int(each.sum()) for each in real]
    experts = routes.experts.split(sizes)
    ids = [None] * len(sizes) if routes.ids is None else routes.ids.split(sizes)
    for part, mask, own, numbers in zip(parts, real, experts, ids, strict=True):
        placed = own.new_full((*mask.shape, *own.shape[1:]), -1)
        placed[mask] = own
        by_id = None
        if numbers is not None:
            by_id = numbers.new_full(mask.shape, -1)
            by_id[mask] = numbers
        yield replace(part, routed_experts=placed, route_ids=by_id)


def cut(
    batch: TokenBatch,
    config: TrainerConfig,
    *,
    num_ranks: int = 1,
    multiple_of: int = 1,
    min_microbatches: int = 1,
) -> Layout:
    """Cut a batch into microbatches, but never a row of it: a preference pair stays together.

    Rows are dealt to the ranks by their cost; those that share a prompt (`trainer.share_prompts`)
    stay together where that is worth it. No number of a training step depends on how the batch is
    cut (docs/numerics.md).

    config: packing, and the size of microbatches.
    num_ranks: ranks with rows of their own.
    multiple_of: of the width of microbatches.
    min_microbatches: of each rank; empty ones only if it has fewer sequences.

    Raises: ValueError that names a row longer than `packed_row_tokens` or `micro_batch_tokens`.
    """
    lengths = tuple(batch.lengths.tolist())
    packing, rows, alike = None, batch, None
    dealt_by_size = config.sequence_packing or config.train_micro_batch_size is None
    if config.share_prompts and (dealt_by_size or num_ranks > 1):
        alike = with_the_same_prompt(batch)
    if config.sequence_packing:
        capacity = config.packed_row_tokens or config.micro_batch_tokens or max(lengths, default=1)
        packing = pack_plan(lengths, capacity, num_rows_multiple=num_ranks, units=alike)
        wanted = num_ranks * min_microbatches
        if len(packing) < wanted:
            packing = pack_plan(lengths, capacity, num_rows_multiple=wanted, units=alike)
        rows, alike = pack(batch, packing), None
    dealt: Plan = (tuple(range(len(rows))),)
    if num_ranks > 1:
        dealt = shard_by_rank(rows, num_ranks, units=alike)
    count = max(len(_microbatches(rows, config, own, alike, min_microbatches)) for own in dealt)
    microbatches = tuple(_microbatches(rows, config, own, alike, count) for own in dealt)
    return Layout(rows, microbatches, packing, lengths, batch.input_ids.shape[1], multiple_of)


def with_the_same_prompt(batch: TokenBatch) -> Plan | None:
    """Group rows by prompt, the longest common prefix first. A prompt ends before the first token
    of `response_mask`.

    Returns None where this would cost more balance than it saves: copies are less than a quarter of
    all tokens, or a prompt has more than twice the mean's rows.
    """
    found = once(replace(batch, routed_experts=None))
    if found is None or 4 * len(found[0]) > 3 * batch.num_tokens:
        return None
    tokens, responses = batch.input_ids.cpu().numpy(), batch.response_mask.cpu().numpy()
    keys = list[tuple[bytes, int]]()
    for ids, response, length in zip(tokens, responses, batch.lengths.tolist(), strict=True):
        prompt = int(response.argmax()) if response.any() else length
        keys.append((ids[: prompt - min(4, prompt // 16)].tobytes(), -length))
    units = list[list[int]]()
    for row in sorted(range(len(batch)), key=keys.__getitem__):
        if not units or not keys[row][0].startswith(keys[units[-1][0]][0]):
            units.append([])
        units[-1].append(row)
    if len(units) * max(map(len, units)) > 2 * len(batch):
        return None
    return tuple(map(tuple, units))


def _microbatches(
    rows: TokenBatch, config: TrainerConfig, own: Sequence[int], units: Plan | None, at_least: int
) -> Plan:
    if not own:
        return ((),) * at_least
    mine, budget = take(rows, own), config.micro_batch_tokens
    if budget is None and config.train_micro_batch_size is None:
        longest = int(mine.lengths.max())
        if len(mine) * longest > MICRO_BATCH_TOKENS:
            budget = max(MICRO_BATCH_TOKENS, longest)
    if budget is not None:
        place = {row: index for index, row in enumerate(own)}
        parts = (tuple(place[row] for row in unit if row in place) for unit in units or ())
        together = tuple(filter(None, parts)) or None
        plan = split_microbatches(
            mine, token_budget=budget, min_microbatches=at_least, units=together
        )
    else:
        size = config.train_micro_batch_size or len(mine)
        plan = split_microbatches(mine, rows=size, min_microbatches=at_least)
    return tuple(tuple(own[row] for row in part) for part in plan)
