"""Python that models wrote, parsed in threads."""

import ast
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemorl.rollout.syntax import parse


def test_threads_parse_while_garbage_is_collected():
    """A collection in the middle of a tree lets the other threads go on."""
    text = "def f(x): return x\nassert f(1) == 2\n" * 30
    wanted, before = ast.dump(ast.parse(text)), gc.get_threshold()

    def let_others_in(*_: object) -> None:
        time.sleep(0.001)

    gc.callbacks.append(let_others_in)
    gc.set_threshold(100)
    try:
        with ThreadPoolExecutor(3) as threads:
            trees = list(threads.map(parse, [text] * 60))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(let_others_in)
    assert {ast.dump(tree) for tree in trees} == {wanted}


def test_errors_are_those_of_python():
    with pytest.raises(SyntaxError, match="invalid syntax"):
        parse("1 +* 1")
    assert parse("1 + 1", mode="eval").body.op.__class__ is ast.Add
