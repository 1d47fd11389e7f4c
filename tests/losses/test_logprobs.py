"""Log-probabilities by hand, the sampling filters, and the chunked head against the plain form.
(Laws 1 to 9 and 16 are in test_laws.py.)
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nemorl.losses.logprobs import (
    LogprobKind,
    entropy,
    filter_logits,
    flat_linear_logprobs,
    linear_token_logprobs,
    token_logprobs,
)
from nemorl.losses.types import same_segment

INF = math.inf
SEEDS = st.integers(0, 2**20)
KINDS = st.builds(
    LogprobKind,
    st.sampled_from([1.0, 0.5, 1.7]),
    st.sampled_from([0, 1, 3, 50]),
    st.sampled_from([1.0, 0.9, 0.4]),
    st.sampled_from([0.0, 0.1, 0.5]),
)
EXACT = {"rtol": 1e-10, "atol": 1e-12}
IDS = torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2]])
SEGMENTS = torch.tensor([[1, 1, 2, 2], [1, 1, 1, 0]])


def randn(*shape, seed=0, **options):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), **{"dtype": torch.float64} | options
    )


def token_logprobs_and_entropy(logits, ids, *, segment_ids=None, kind=LogprobKind()):
    """The plain form of the chunked head, whose entropy has each drawn token in the support."""
    drawn = ids[:, 1:].long()
    inside = torch.ones_like(drawn, dtype=torch.bool)
    if segment_ids is not None:
        inside = same_segment(segment_ids)[:, 1:]
    rows = torch.where(inside[..., None], logits[:, :-1], 0.0)
    support = filter_logits(rows, keep=drawn, **vars(kind)).log_softmax(-1)
    entropies = torch.where(inside, -(support.exp() * support.clamp(min=-1e4)).sum(-1), 0.0)
    plain = token_logprobs(logits, ids, segment_ids=segment_ids, kind=kind)
    return plain, torch.nn.functional.pad(entropies, (1, 0))


def test_by_hand_with_the_shift():
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(4.0), 0.0], [50.0, 60.0]]])
    ids = torch.tensor([[0, 1, 1]])
    # Token 1 is id 1 under (1/4, 3/4), token 2 is id 1 under (4/5, 1/5); the last position predicts
    # nothing that is there.
    logprobs, entropies = token_logprobs_and_entropy(logits, ids)
    assert logprobs.tolist() == [pytest.approx([0.0, math.log(3 / 4), math.log(1 / 5)])]
    h = [-(p * math.log(p) + (1 - p) * math.log(1 - p)) for p in (1 / 4, 1 / 5)]
    assert entropies.tolist() == [pytest.approx([0.0, *h])]
    assert torch.equal(token_logprobs(logits, ids), logprobs) and torch.equal(
        entropy(logits), entropies
    )


def test_temperature_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])
    result = token_logprobs(logits, torch.tensor([[0, 1]]), kind=LogprobKind(temperature=0.5))
    assert result[0, 1].item() == pytest.approx(math.log(9 / 10))


def test_short_and_empty_batches():
    for batch, seq in ((1, 1), (0, 3), (2, 1)):
        ids = torch.zeros(batch, seq, dtype=torch.long)
        for kind in (LogprobKind(), LogprobKind(0.5, 2, 0.9, 0.1)):
            for values in (
                *token_logprobs_and_entropy(randn(batch, seq, 4), ids, kind=kind),
                *linear_token_logprobs(randn(batch, seq, 2), randn(4, 2), ids, with_entropy=True),
            ):
                assert values.shape == (batch, seq) and not values.any()


# Filters


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"min_p": 1.0}, [0.4, 0, 0, 0]),
        ({"min_p": 0.7, "top_p": 0.58}, [0.4, 0.3, 0, 0]),  # of what min_p left, 0.4 holds 0.57
        ({"top_k": 1, "keep": torch.tensor(3)}, [0.4, 0, 0, 0.1]),
    ],
)
def test_filters_by_hand(options, expected):
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    assert filter_logits(logits, **options).exp().tolist() == pytest.approx(expected)


def test_borders_of_the_filters_in_float64():
    tenth = torch.tensor([1.0, 0.1], dtype=torch.float64).log()
    assert filter_logits(tenth, min_p=0.1).isfinite().all(), "at least min_p times the largest"
    assert (
        filter_logits(torch.tensor([1.0, 0.4], dtype=torch.float64).log(), min_p=0.4)
        .isfinite()
        .all()
    )
    nearly = torch.tensor([0.699999995, 0.300000005], dtype=torch.float64).log()
    assert filter_logits(nearly, top_p=0.7).isfinite().all(), "0.7 in float32 is a little less"
    half = torch.tensor([math.log(2), 0.0, 0.0], dtype=torch.float64)
    assert filter_logits(half, top_p=0.5).tolist() == [
        math.log(2),
        -INF,
        -INF,
    ], "half of the mass is there already"
    far = torch.tensor([[0.0, -50.0], [0.0, -50.0]])
    assert filter_logits(far, top_p=torch.tensor([1.0, 0.9])).tolist() == [
        [0.0, -50.0],
        [0.0, -INF],
    ], "off, although rounding says it is enough"


def test_whole_numbers_may_have_16_bits():
    logits = randn(2, 4, 5)
    for kind in (LogprobKind(), LogprobKind(top_k=2, top_p=0.9)):
        long, short = (
            token_logprobs_and_entropy(logits, cast(IDS), segment_ids=cast(SEGMENTS), kind=kind)
            for cast in (torch.Tensor.long, torch.Tensor.short)
        )
        assert all(map(torch.equal, long, short))
    top_k, keep = torch.tensor([1, 2]), torch.tensor([4, 4])
    assert torch.equal(
        filter_logits(logits[:, 0], top_k=top_k.short(), keep=keep.short()),
        filter_logits(logits[:, 0], top_k=top_k, keep=keep),
    )


def test_of_equal_logits_top_k_keeps_all_and_top_p_as_many_as_it_needs():
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0])
    assert filter_logits(logits, top_k=2).tolist() == [1, 2, 1, -INF]
    assert filter_logits(logits, top_k=torch.tensor(2)).tolist() == [1, 2, 1, -INF]
    assert filter_logits(logits, top_p=0.6).tolist() == [-INF, 2, 1, -INF]
    assert filter_logits(torch.zeros(4), top_p=0.4).tolist() == [-INF, -INF, 0, 0]


@given(
    SEEDS,
    st.sampled_from([0.3, 1.0, 5.0]),
    st.integers(1, 7),
    st.sampled_from([0.2, 0.5, 0.9, 0.99]),
    st.sampled_from([0.05, 0.3]),
)
def test_each_filter_is_that_of_transformers(seed, spread, top_k, top_p, min_p):
    logits = spread * randn(3, 7, seed=seed)
    ids = torch.zeros(3, 1, dtype=torch.long)
    assert torch.equal(filter_logits(logits, top_k=top_k), TopKLogitsWarper(top_k)(ids, logits))
    assert torch.equal(filter_logits(logits, top_p=top_p), TopPLogitsWarper(top_p)(ids, logits))
    assert torch.equal(filter_logits(logits, min_p=min_p), MinPLogitsWarper(min_p)(ids, logits))
    both = TopPLogitsWarper(top_p)(ids, TopKLogitsWarper(top_k)(ids, logits))
    assert torch.equal(filter_logits(logits, top_k=top_k, top_p=top_p), both)
    equal = logits.round()  # which of equal ones is left to its sort
    theirs = TopPLogitsWarper(top_p)(ids, equal).sort(-1).values
    assert torch.equal(filter_logits(equal, top_p=top_p).sort(-1).values, theirs)


@given(SEEDS, st.lists(KINDS, min_size=1, max_size=4), st.booleans())
def test_rows_with_their_own_options_are_filtered_as_if_alone(seed, kinds, with_keep):
    logits = 2 * randn(len(kinds), 7, seed=seed)
    keep = torch.arange(len(kinds)) if with_keep else None
    columns = {
        name: torch.tensor([getattr(kind, name) for kind in kinds], dtype=torch.float64)
        for name in vars(kinds[0])
    }
    columns["top_k"] = columns["top_k"].long()
    together = filter_logits(logits, **columns, keep=keep)
    for i, kind in enumerate(kinds):
        alone = filter_logits(logits[i], keep=None if keep is None else keep[i], **vars(kind))
        assert torch.equal(together[i], alone)


@given(SEEDS, KINDS)
def test_a_filtered_distribution_sums_to_one_over_the_support(seed, kind):
    logits = 2 * randn(2, 3, 6, seed=seed)
    inside = filter_logits(logits, **vars(kind))[:, :-1] > -INF
    every = torch.stack(
        [token_logprobs(logits, torch.full((2, 3), token), kind=kind)[:, 1:] for token in range(6)],
        -1,
    )
    probabilities = torch.where(inside, every.exp(), 0.0)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 2, dtype=torch.float64))
    torch.testing.assert_close(
        entropy(logits, kind=kind)[:, 1:],
        -torch.special.xlogy(probabilities, probabilities).sum(-1),
    )
    assert (
        every.isfinite().all()
    )  # a token that was drawn is in the support, whatever rounding says


# The chunked head


@given(
    SEEDS,
    st.integers(1, 3),
    st.integers(1, 6),
    KINDS,
    st.sampled_from([1, 2, 3, 5, 1000]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1.5]),
)
def test_the_chunked_head_is_the_plain_one(
    seed, batch, seq, kind, chunk, packed, with_entropy, softcap
):
    hidden, weight = (
        randn(batch, seq, 3, seed=seed).requires_grad_(),
        randn(7, 3, seed=seed + 1).requires_grad_(),
    )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (batch, seq), generator=generator)
    segments = (
        torch.randint(0, 3, (batch, seq), generator=generator).sort(descending=True).values
        if packed
        else None
    )
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    plain = token_logprobs_and_entropy(logits, ids, segment_ids=segments, kind=kind)
    options = {"kind": kind, "chunk": chunk, "with_entropy": with_entropy, "softcap": softcap}
    chunked = linear_token_logprobs(hidden, weight, ids, segment_ids=segments, **options)
    assert (chunked[1] is not None) == with_entropy
    cotangents = randn(2, batch, seq, seed=seed + 2)
    results = [
        sum((c * v).sum() for c, v in zip(cotangents, values, strict=True) if v is not None)
        for values in (plain if with_entropy else (*plain[:1], None), chunked)
    ]
    for a, b in zip(plain, chunked, strict=True):
        if b is not None:
            torch.testing.assert_close(b, a, **EXACT)
    for a, b in zip(*(torch.autograd.grad(r, (hidden, weight)) for r in results), strict=True):
        torch.testing.assert_close(b, a, **EXACT)


@given(
    SEEDS,
    KINDS,
    st.integers(1, 7),
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([None, 1.5]),
    st.sets(st.sampled_from(["targets", "rest", "top", "top rest"]), min_size=1),
)
def test_sets_of_tokens_and_what_is_outside_them_are_those_of_whole_logits(
    seed, kind, k, chunk, softcap, used
):
    states, weight = 2 * randn(5, 3, seed=seed), randn(7, 3, seed=seed + 1)
    leaves = states.requires_grad_(), weight.requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(0, 7, (5, *n), generator=generator) for n in ((), (3,)))
    options = {"kind": kind, "chunk": chunk, "softcap": softcap}
    found = flat_linear_logprobs(states, weight, ids, targets=targets, top_k=k, **options)

    logits = states @ weight.T
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = filter_logits(logits, keep=ids, **vars(kind))
    every = logits.log_softmax(-1)
    top = found.top_ids

    def rest(ids):
        others = every.masked_fill(torch.zeros_like(every).scatter(1, ids, 1.0) > 0, -INF)
        none = (others == -INF).all(-1)
        return torch.where(none, -INF, torch.where(none[:, None], 0.0, others).logsumexp(-1))

    expected = {
        "targets": (found.target_logprobs, every.gather(1, targets)),
        "rest": (found.target_rest_logprobs, rest(targets)),
        "top": (found.top_logprobs, every.topk(k).values),
        "top rest": (found.top_rest_logprobs, rest(top)),
    }
    for got, value in expected.values():
        torch.testing.assert_close(got, value, **EXACT)
    mass = found.top_logprobs.exp().sum(-1) + found.top_rest_logprobs.exp()
    torch.testing.assert_close(mass, torch.ones_like(mass))
    assert k < 7 or (found.top_rest_logprobs == -INF).all()
    pairs = [expected[name] for name in sorted(used)]
    given = [randn(*a.shape, seed=seed + 2) for a, _ in pairs]
    # Where a logarithm is -inf it has no gradient.
    finite = [torch.where(b.isfinite(), b, 0.0) for _, b in pairs]
    gradients = (torch.autograd.grad(x, leaves, given) for x in ([a for a, _ in pairs], finite))
    for got, value in zip(*gradients, strict=True):
        torch.testing.assert_close(got, value, **EXACT)


def test_what_is_outside_a_set_is_exact_however_little_it_is():
    states = torch.ones(1, 1)
    weight = torch.tensor([[0.0], [-200.0], [-201.0]]).requires_grad_()
    rest = flat_linear_logprobs(states, weight, torch.tensor([0]), top_k=1).top_rest_logprobs
    assert rest is not None and rest.item() == pytest.approx(-200 + math.log1p(math.exp(-1)))
    (gradient,) = torch.autograd.grad(rest, weight)
    shares = torch.tensor([-1.0, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])
    torch.testing.assert_close(gradient[:, 0], shares)


@pytest.mark.parametrize(
    "kind", [LogprobKind(), LogprobKind(temperature=0.7, top_k=3, top_p=0.9, min_p=0.02)]
)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_law_8_gradcheck_also_of_the_second_derivative(kind, softcap):
    leaves = randn(2, 3).requires_grad_(), randn(5, 3, seed=1).requires_grad_()
    ids = torch.tensor([4, 0])
    targets = torch.stack([ids, ids], -1)  # repeated, and in each support
    options = {"kind": kind, "chunk": 1, "with_entropy": True, "softcap": softcap}

    def chunked(h, w):
        found = flat_linear_logprobs(h, w, ids, targets=targets, top_k=2, **options)
        return tuple(x for x in found if x.is_floating_point() and x.isfinite().all())

    # Also with a batch dimension that hidden states and weight have not.
    assert torch.autograd.gradcheck(chunked, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(chunked, leaves)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("kind", [LogprobKind(), LogprobKind(temperature=0.7, top_k=3, top_p=0.8)])
def test_either_output_may_go_without_a_gradient(kind, used):
    hidden, weight = randn(2, 4, 3).requires_grad_(), randn(5, 3, seed=1).requires_grad_()
    cotangent = randn(2, 4, seed=2)

    def loss(h, w, head=None):
        both = (
            linear_token_logprobs(h, w, IDS, kind=kind, chunk=2, with_entropy=True)
            if head
            else token_logprobs_and_entropy(h @ w.T, IDS, kind=kind)
        )
        return sum((both[i] * cotangent).sum() * (i + 1) for i in used)

    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    together = torch.func.vmap(
        torch.func.grad(lambda h, w: loss(h, w, head=True), argnums=(0, 1)), in_dims=(0, None)
    )
    for results in (
        torch.autograd.grad(loss(hidden, weight, head=True), (hidden, weight)),
        torch.func.grad(lambda h, w: loss(h, w, head=True), argnums=(0, 1))(hidden, weight),
        [x[1] for x in together(torch.stack([2 * hidden, hidden]), weight)],
    ):
        for got, value in zip(results, expected, strict=True):
            torch.testing.assert_close(got, value, **EXACT)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(with_entropy):
    def gradients_of(hidden: bool, weight: bool):
        h, w = randn(2, 4, 3).requires_grad_(hidden), randn(5, 3, seed=1).requires_grad_(weight)
        logprobs, entropies = linear_token_logprobs(h, w, IDS, chunk=2, with_entropy=with_entropy)
        (logprobs.sum() + (entropies.sum() if with_entropy else 0)).backward()
        return h.grad, w.grad

    both, only_hidden, only_weight = (
        gradients_of(*trained) for trained in ((True, True), (True, False), (False, True))
    )
    assert torch.equal(only_hidden[0], both[0]) and only_hidden[1] is None
    assert torch.equal(only_weight[1], both[1]) and only_weight[0] is None


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize(
    "kind", [LogprobKind(), LogprobKind(temperature=0.7, top_k=3, top_p=0.9, min_p=0.02)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_all_tokens_by_the_vocabulary_is_ever_made(kind, dtype):
    batch, seq, width, vocab, chunk = 4, 65, 4, 512, 16
    hidden, weight = (
        randn(batch, seq, width, dtype=torch.float32).to(dtype).requires_grad_(),
        randn(vocab, width, dtype=torch.float32).to(dtype).requires_grad_(),
    )
    ids = torch.randint(0, vocab, (batch, seq))
    options = {"kind": kind, "chunk": chunk, "with_entropy": True}
    with LargestTensor() as chunked:
        sum(
            linear_token_logprobs(hidden, weight, ids, segment_ids=torch.ones_like(ids), **options)
        ).sum().backward()
    assert chunked.numel <= chunk * vocab
    with LargestTensor() as plain:  # the measure sees what the plain form makes
        token_logprobs(hidden @ weight.T, ids, kind=kind)
    assert plain.numel >= batch * (seq - 1) * vocab


def test_half_precision_states_and_no_grad():
    hidden, weight, ids = (
        randn(2, 9, 16, dtype=torch.float32),
        0.5 * randn(11, 16, seed=1, dtype=torch.float32),
        torch.randint(0, 11, (2, 9)),
    )
    expected = token_logprobs(hidden @ weight.T, ids)
    with torch.no_grad():
        result, none = linear_token_logprobs(hidden.bfloat16(), weight.bfloat16(), ids, chunk=5)
    assert none is None and not result.requires_grad and result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.05)
    weight.requires_grad_()
    # A float32 head under bfloat16 states.
    mixed = linear_token_logprobs(hidden.bfloat16(), weight, ids, chunk=5)[0]
    mixed.sum().backward()
    assert mixed.dtype == weight.grad.dtype == torch.float32 and not hidden.requires_grad


def test_under_autocast_it_computes_as_a_linear_layer_would():
    hidden, weight, ids = (
        randn(2, 9, 16, dtype=torch.float32).requires_grad_(),
        randn(11, 16, seed=1, dtype=torch.float32).requires_grad_(),
        torch.randint(0, 11, (2, 9)),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked = linear_token_logprobs(hidden, weight, ids, chunk=5)[0]
        plain = token_logprobs(torch.nn.functional.linear(hidden, weight), ids)
        torch.testing.assert_close(chunked, plain)
        gradients = torch.autograd.grad(
            chunked.sum(), (hidden, weight)
        )  # also when backward is called inside
    for got, expected in zip(
        gradients, torch.autograd.grad(plain.sum(), (hidden, weight)), strict=True
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


def test_the_sum_over_chunks_is_kept_in_float32():
    """1 + 1000 · 0.001 in bfloat16 additions stays 1: a chunk's share is below the rounding of the
    sum.
    """
    hidden = torch.full((1, 2001, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_token_logprobs(hidden, weight, torch.zeros(1, 2001, dtype=torch.long), chunk=1)[
        0
    ].sum().backward()
    assert weight.grad.flatten().tolist() == [1000, -1000]
