"""`python -m tests.losses.compiled BACKEND 1|all CASE...`: law 16 for torch.compile, with the first
or all options of each case; one JSON line a case: [name, error or null].

A program of its own, run by test_compile.py, because the shape checks of the test run wrap every
function and dataclass, and Dynamo can't trace through them. What is compiled here is what a user's
program imports.
"""

import itertools
import json
import sys

import torch

from tests.helpers import Case, arrays_in, assert_same, lay_out
from tests.losses.cases import CASES
from tests.losses.laws import on_arrays
from tests.losses.wrong import UNCOMPILABLE
from tests.strategies import problem

LENGTHS = (3, 5, 1, 4)


def check(case: Case, backend: str, variants: int) -> None:
    """Every variant compiles into one graph, gives the eager result, and is not compiled again for
    other numbers and masks of the same shape.
    """
    for variant in range(variants):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda arrays, variant=variant: case(arrays, variant),
            fullgraph=True,
            dynamic=False,
            backend=backend,
        )
        for seed, mask in itertools.product((0, 1), ("holes", "response", "none")):
            example = problem(seed, LENGTHS, mask=mask)
            arrays = arrays_in(case, example, lay_out(example))
            eager = on_arrays(case, arrays, variant)
            result = on_arrays(_Compiled(case, compiled), arrays, variant)
            assert_same(eager, result)


class _Compiled:
    def __init__(self, case: Case, function):
        self.differentiable, self.function = case.differentiable, function

    def __call__(self, arrays, seed):
        return self.function(arrays)


def main(backend: str, options: str, *names: str) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.error_on_recompile = True
    for name in names:
        case = (CASES | UNCOMPILABLE)[name]
        try:
            check(case, backend, len(case.options) if options == "all" else 1)
            error = None
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
