import random

import pytest
from beartype.roar import BeartypeCallHintParamViolation

from tests.shape_checks import check


def test_checks_draw_none_of_pythons_random_numbers():
    @check
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    before = random.getstate()
    assert total([1, 2, 3]) == 6
    assert random.getstate() == before
    with pytest.raises(BeartypeCallHintParamViolation):
        total(["one"])
