"""Settings of the whole process, for as long as anyone needs them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Block = Callable[[], AbstractContextManager[None]]


def overlapping(setting: Block) -> Block:
    """Return a block like `setting` of which several may overlap: the first one begins it, and the
    last one that ends restores what was before, in whatever order they end.
    """
    inside, process = 0, ExitStack()

    @contextmanager
    def block() -> Iterator[None]:
        nonlocal inside
        if not inside:
            process.enter_context(setting())
        inside += 1
        try:
            yield
        finally:
            inside -= 1
            if not inside:
                process.close()

    block.__doc__ = setting.__doc__
    return block
