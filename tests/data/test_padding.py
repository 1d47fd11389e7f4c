"""Law 15 for pad and unpad, and worked examples."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from nemorl.data.batch import pad, unpad

SEQUENCES = st.lists(st.lists(st.integers(-5, 5), max_size=7), min_size=1, max_size=6)


def tensors(sequences):
    return [torch.tensor(sequence, dtype=torch.int64) for sequence in sequences]


@given(SEQUENCES, st.integers(0, 4), st.integers(1, 8))
def test_unpad_undoes_pad(sequences, spare, multiple_of):
    length = max(map(len, sequences)) + spare
    padded, lengths = pad(tensors(sequences), value=9, length=length, multiple_of=multiple_of)
    assert padded.shape[1] == -(-length // multiple_of) * multiple_of
    assert lengths.tolist() == [len(sequence) for sequence in sequences]
    assert (padded == 9).sum() == padded.numel() - sum(map(len, sequences))
    assert [row.tolist() for row in unpad(padded, lengths)] == sequences


def test_tensors_keep_dtype_trailing_dims_and_gradient():
    one = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    padded, _ = pad([one, torch.ones(1, 3, dtype=torch.float64)], value=0.0, length=4)
    assert padded.shape == (2, 4, 3) and padded.sum() == 9
    assert padded.dtype == torch.float64
    padded.sum().backward()
    assert one.grad is not None
    assert one.grad.tolist() == [[1.0] * 3] * 2


def test_errors_name_the_sequence():
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens, length is 2"):
        pad(tensors([[1], [1, 2, 3]]), value=0, length=2)
