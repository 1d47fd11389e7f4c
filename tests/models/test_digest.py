"""Samples of a tensor that is in pieces are those of the whole."""

from itertools import pairwise, product

import pytest
import torch

from nemorl.models.tensor_files import sampled, sampled_box

CUTS = {
    (): [()],
    (5,): [((0, 2, 5),)],
    (300,): [((0, 299, 300),), ((0, 300),)],
    (40, 9): [((0, 1, 40), (0, 9)), ((0, 40), (0, 3, 8, 9)), ((0, 17, 18, 40), (0, 4, 9))],
    (3, 20, 7): [((0, 2, 3), (0, 20), (0, 7)), ((0, 3), (0, 11, 20), (0, 6, 7))],
}


@pytest.mark.parametrize(
    ("shape", "cuts"), [(shape, cuts) for shape, found in CUTS.items() for cuts in found]
)
def test_boxes_have_the_samples_of_the_whole_once(shape, cuts):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) - 0.5
    expected = sampled(tensor, side=4)
    found, times = torch.zeros_like(expected), torch.zeros_like(expected)
    for box in product(*map(pairwise, cuts)):
        values = tensor[tuple(slice(*each) for each in box)]
        places, numbers = sampled_box(values, [begin for begin, _ in box], shape, side=4)
        found[places], times[places] = numbers, times[places] + 1
    assert torch.equal(found, expected) and (times == 1).all()
