import random

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from nemorl.checks import closest
from tests.helpers import shapes_checked
from tests.shape_checks import check, jaxtyped


def test_checks_draw_none_of_pythons_random_numbers():
    @check
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    before = random.getstate()
    assert total([1, 2, 3]) == 6
    assert random.getstate() == before
    with pytest.raises(BeartypeCallHintParamViolation):
        total(["one"])


def plain(number: int) -> str:
    return "one" if number == 1 else number


def shaped(one: Float[Tensor, " rows"], other: Float[Tensor, " rows"]) -> None: ...


def in_words(one: "Float[Tensor, ' rows']", other: "Float[Tensor, ' rows']") -> None: ...


def test_types_and_shapes_are_checked():
    hooked = jaxtyped(typechecker=check)(plain)
    assert hooked(1) == "one"
    with pytest.raises(BeartypeCallHintParamViolation):
        hooked("one")
    with pytest.raises(BeartypeCallHintReturnViolation):
        hooked(2)
    with shapes_checked(on=False):
        assert hooked(2) == 2
    for function in (shaped, in_words):
        hooked = jaxtyped(typechecker=check)(function)
        hooked(torch.zeros(2), torch.zeros(2))
        with pytest.raises(TypeCheckError):
            hooked(torch.zeros(2), torch.zeros(3))


def test_the_package_is_checked():
    with pytest.raises(BeartypeCallHintParamViolation):
        closest(1, [])
