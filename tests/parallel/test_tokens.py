"""What sequences begin with is computed once, the head where it is asked for; no number changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemorl.data import collate, pack, pack_plan
from nemorl.data.batch import Example, TokenBatch
from nemorl.data.packing import rows_of
from nemorl.losses.masks import token_mean_weights
from nemorl.losses.types import finalize
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.layout import cut, with_the_same_prompt
from nemorl.parallel.tokens import once, work_of
from tests.parallel.batches import GROUPS, grouped, nll_loss
from tests.parallel.ways import set_up
from tests.tiny_models import ALPHABET, tiny_model

SEGMENTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6
)
"""Of each segment the tokens kept of the one before it, those given and those sampled."""


def rewritten(segments: Any, *, seed: int = 0) -> TokenBatch:
    generator, ids, examples = torch.Generator().manual_seed(seed), list[int](), list[Example]()
    for keep, asked, sampled in segments:
        fresh = torch.randint(2, len(ALPHABET) + 2, (asked + sampled,), generator=generator)
        ids = ids[:keep] + fresh.tolist()
        mask = [place >= len(ids) - sampled for place in range(len(ids))]
        examples.append(Example(input_ids=ids, loss_mask=mask, response_mask=mask))
    batch = collate(examples)
    return replace(batch, loss_weights=token_mean_weights(batch.loss_mask))


BATCHES = st.one_of(GROUPS.map(grouped), SEGMENTS.map(rewritten))


@given(st.one_of(BATCHES, st.builds(grouped, GROUPS, letters=st.integers(2, 30))), st.booleans())
@example(rewritten([(0, 5, 6), (1, 5, 6)]), False)
def test_every_token_is_computed_and_none_twice(batch: TokenBatch, packed: bool):
    if packed:
        lengths = batch.lengths.tolist()
        batch = pack(batch, pack_plan(lengths, 2 * max(lengths)))
    found, prefixes = once(batch), dict[tuple[int, ...], list[int]]()
    rows = zip(batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True)
    width = batch.input_ids.shape[1]
    for row, (ids, positions) in enumerate(rows):
        for place in (batch.segment_ids[row] > 0).nonzero()[:, 0].tolist():
            prefix = tuple(ids[place - positions[place] : place + 1])
            prefixes.setdefault(prefix, []).append(row * width + place)
    copied = batch.num_tokens - len(prefixes)
    assert (found is None) == (copied < max(batch.num_tokens / 16, 1))
    if found is None:
        return
    kept, place = found
    assert sorted(place[[own[0] for own in prefixes.values()]].tolist()) == [*range(len(kept))]
    for own in prefixes.values():
        assert len(set(place[own].tolist())) == 1 and int(kept[place[own[0]]]) in own


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"train_micro_batch_size": 2},
    {"sequence_packing": True, "packed_row_tokens": 40},
    {"sequence_packing": True, "micro_batch_tokens": 24},
    {"micro_batch_tokens": 60},
]


@pytest.mark.slow_cases("{'sequence_packing': True, 'micro_batch_tokens': 24}")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=8)
@given(batch=BATCHES, kind=st.sampled_from(["llama", "qwen2"]))
@example(batch=rewritten([(0, 4, 6), (7, 3, 5), (12, 2, 4), (3, 2, 4)]), kind="qwen2")
def test_no_number_depends_on_it(batch: TokenBatch, kind: str, layout: dict[str, Any]):
    found = list[Any]()
    for share in (True, False):
        trainer = {"share_prompts": share, "logprob_chunk": 7, **layout}
        backend = set_up(tiny_model(kind, scale=2.0), trainer=trainer)
        before = backend.get_logprobs(batch).values
        metrics = finalize(backend.forward_backward(batch, nll_loss).metrics)
        gradients = torch.cat([p.grad.flatten() for p in backend.model.parameters()])
        found.append((before, metrics["nll"], gradients))
        assert not before[~batch.response_mask].any()
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
def test_hard_targets_take_the_place_of_the_next_tokens(layout: dict[str, Any]):
    batch, model = grouped([(9, [4, 6]), (3, [5, 0])]), tiny_model(scale=2.0)
    targets = torch.where(batch.segment_ids > 0, batch.input_ids * 7 % 30, 0)
    expected = torch.zeros(targets.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            logits = model(batch.input_ids[row : row + 1, :length], use_cache=False).logits
        found = logits[0, :-1].log_softmax(-1).gather(-1, targets[row, 1:length, None])
        expected[row, 1:length] = found[:, 0]
    backend, given = set_up(model, trainer=layout), replace(batch, target_ids=targets)
    logprobs = backend.get_logprobs(given).values
    expected = expected.where(batch.response_mask, 0.0)
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=1e-5)
    loss = finalize(backend.train_step(given, nll_loss))["loss"]
    assert loss == pytest.approx(-float((batch.loss_weights * expected).sum()), rel=1e-5)
    own = replace(batch, target_ids=batch.input_ids)
    assert torch.equal(backend.get_logprobs(own).values, backend.get_logprobs(batch).values)
    beyond = replace(batch, target_ids=targets + 99 * batch.loss_mask)
    for call in (backend.get_logprobs, lambda given: backend.forward_backward(given, nll_loss)):
        with pytest.raises(ValueError, match=r"target_ids\[.*must be a token id, 0"):
            call(beyond)


def test_a_groups_prompt_goes_through_the_decoder_once():
    batch, shapes, heads = grouped([(45, [14] * 8), (30, [5, 9])]), [], []
    for share in (True, False):
        backend = set_up(tiny_model(scale=2.0), trainer={"share_prompts": share})
        backend.model.model.register_forward_pre_hook(
            lambda _, args, given: shapes.append(given["input_ids"].numel()), with_kwargs=True
        )
        backend.train_step(batch, nll_loss)
        heads.append(len(work_of(batch, batch.loss_mask, share=share).targets))
    kept, place = once(batch)
    assert len(set(place[:45].tolist())) == 45 and len(kept) <= 45 + 8 * 14 + 30 + 14
    assert shapes == [len(kept), 10 * 59]
    assert heads == [int(batch.loss_mask.sum())] * 2


def test_prompts_that_other_experts_computed_are_not_the_same():
    batch = grouped([(3, [1, 2, 1])])
    assert len(once(batch)[0]) == 3 + 4
    experts = torch.zeros(3, batch.input_ids.shape[1], 2, 2, dtype=torch.int16)
    experts[1, 2, 1] = torch.tensor([1, 0])
    found = once(replace(batch, routed_experts=experts))
    assert found is not None and found[0].tolist() == [0, 1, 2, 3, 7, 8, 9, 13]
    # They come in the layout of the tokens that are computed; -1 is padding.
    work = work_of(
        replace(batch, routed_experts=experts), batch.loss_mask, share=True, multiple_of=16
    )
    rows = work.computed(experts, free=-1)
    assert rows.shape == (1, 16, 2, 2)
    assert torch.equal(rows[0, :8], experts.flatten(0, 1)[found[0]]) and (rows[0, 8:] == -1).all()


def test_those_of_a_prompt_stay_together():
    batch = grouped([(4, [6, 1, 1]), (4, [6, 6, 1])])
    assert sorted(with_the_same_prompt(batch) or ()) == [(0, 1, 2), (3, 4, 5)]
    trainer = TrainerConfig(sequence_packing=True, packed_row_tokens=25, train_micro_batch_size=1)
    assert sorted(cut(batch, trainer).packing or ()) == [(0, 1, 2), (3, 4, 5)]
    alone = replace(trainer, share_prompts=False)
    assert sorted(cut(batch, alone).packing or ()) == [(0, 1, 3), (2, 4, 5)]
    for not_worth_it in ([(2, [6, 6]), (2, [6, 6])], [(9, [1]), (9, [1]), (9, [1] * 6)]):
        assert with_the_same_prompt(grouped(not_worth_it)) is None


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(9, 40),
    st.integers(1, 4),
)
def test_units_keep_the_laws_of_plans(sizes: list[list[int]], capacity: int, multiple: int):
    lengths = [length for unit in sizes for length in unit]
    begins = [sum(map(len, sizes[:i])) for i in range(len(sizes))]
    units = tuple(tuple(range(b, b + len(u))) for b, u in zip(begins, sizes, strict=True))
    plan = pack_plan(lengths, capacity, num_rows_multiple=multiple, units=units)
    assert sorted(i for row in plan for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in plan)
    assert len(plan) % multiple == 0
    assert rows_of(tuple((i,) for i in range(len(units))), units) == units
    for unit in units if len(units) >= multiple else ():
        if 0 < sum(lengths[i] for i in unit) <= capacity:
            assert sum(bool({*unit} & {*row}) for row in plan) == 1
