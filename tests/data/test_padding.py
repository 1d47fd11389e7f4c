"""Law 15 for pad and unpad, and worked examples."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from nemorl.data.padding import pad, unpad

SIDES = st.sampled_from(["right", "left"])
SEQUENCES = st.lists(st.lists(st.integers(-5, 5), max_size=7), min_size=1, max_size=6)


@given(SEQUENCES, st.integers(0, 4), st.integers(1, 8), SIDES)
def test_unpad_undoes_pad(sequences, spare, multiple_of, side):
    padded, lengths = pad(
        sequences,
        value=9,
        length=max(map(len, sequences)) + spare,
        multiple_of=multiple_of,
        side=side,
    )
    assert padded.shape[1] % multiple_of == 0
    assert lengths.tolist() == [len(sequence) for sequence in sequences]
    assert (padded == 9).sum() == padded.numel() - sum(map(len, sequences))
    assert [row.tolist() for row in unpad(padded, lengths, side=side)] == sequences


@given(SEQUENCES.filter(any), SIDES)
def test_pad_undoes_unpad(sequences, side):
    padded, lengths = pad(sequences, value=0, side=side)
    again, same = pad(unpad(padded, lengths, side=side), value=0, side=side)
    assert torch.equal(again, padded)
    assert torch.equal(same, lengths)


def test_worked_example():
    sequences = [[1, 2, 3], [], [4]]
    assert pad(sequences, value=0)[0].tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert pad(sequences, value=7, length=4, side="left")[0].tolist() == [
        [7, 1, 2, 3],
        [7, 7, 7, 7],
        [7, 7, 7, 4],
    ]


@pytest.mark.parametrize(
    ("sequences", "value", "dtype"),
    [([[True]], False, torch.bool), ([[1.5]], 0, torch.float32), ([[], []], 0, torch.int64)],
)
def test_dtype_follows_the_data(sequences, value, dtype):
    assert pad(sequences, value=value)[0].dtype == dtype


def test_tensors_keep_dtype_trailing_dims_and_gradient():
    one, two = (
        torch.ones(2, 3, dtype=torch.float64, requires_grad=True),
        torch.ones(1, 3, dtype=torch.float64),
    )
    padded, _ = pad([one, two], value=0.0)
    assert padded.shape == (2, 2, 3)
    assert padded.dtype == torch.float64
    padded.sum().backward()
    assert one.grad is not None
    assert one.grad.tolist() == [[1.0] * 3] * 2


def test_errors_name_the_sequence():
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens, length is 2"):
        pad([[1], [1, 2, 3]], value=0, length=2)
    with pytest.raises(ValueError, match="multiple_of must be at least 1"):
        pad([[1]], value=0, multiple_of=0)
    with pytest.raises(ValueError, match="row 1 has 4"):
        unpad(torch.zeros(2, 3), [1, 4])
    with pytest.raises(ValueError, match="got 1 lengths"):
        unpad(torch.zeros(2, 3), [1])


def test_no_sequence_at_all_and_lists_beside_tensors():
    padded, lengths = pad([], value=0)
    assert padded.shape == (0, 0) and lengths.tolist() == []
    assert (
        pad([torch.tensor([1]), [2, 3]], value=0)[0].tolist()
        == pad([[1], torch.tensor([2, 3])], value=0)[0].tolist()
        == [[1, 0], [2, 3]]
    )
