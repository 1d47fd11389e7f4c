import random
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float, TypeCheckError
from jaxtyping._import_hook import Typechecker, _JaxtypingLoader
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


def test_code_with_checks_is_cached_apart_though_another_import_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Processes without the hook read the ordinary cache, and would fail at such code."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go.wait(60)

    class Second(_JaxtypingLoader):
        def get_filename(self, name: str | None = None) -> str:
            go.set()
            thread.join()
            return self.path

    typechecker, paths = Typechecker("tests.shape_checks.check"), []
    for name, text in {"first": "wait()", "second": "def f(): ..."}.items():
        paths.append(tmp_path / f"{name}.py")
        paths[-1].write_text(text)
    first = _JaxtypingLoader("first", str(paths[0]), typechecker=typechecker)
    module = ModuleType("first")
    vars(module)["wait"] = wait
    thread = threading.Thread(target=first.exec_module, args=[module])
    thread.start()
    assert begun.wait(60)
    Second("second", str(paths[1]), typechecker=typechecker).exec_module(ModuleType("second"))
    cached = sorted(path.name for path in (tmp_path / "__pycache__").iterdir())
    assert [name.split(".")[2][:14] for name in cached] == ["opt-jaxtyping1"] * 2, cached
