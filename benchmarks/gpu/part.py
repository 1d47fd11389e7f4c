"""A part in a process of its own: `python -m benchmarks.gpu.part NAME [--small]`."""

import gc
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from common import quiet

from benchmarks.gpu import MARK

Row = dict[str, Any]
Measurements = Iterator[tuple[str, Callable[[], Iterable[Row]]]]


class Skip(Exception):
    """Why something can't be measured here, in a sentence."""


def row(
    what: str,
    value: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Row:
    """Return a measured value, with its goal. NaN meets none."""
    low, high = at_least, at_most
    bounds = {"≥": low, "≤": high}
    goals = [f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None]
    met = bool((low is None or value >= low) and (high is None or value <= high))
    return {
        "what": what,
        "value": float(f"{value:.4g}"),
        "goal": " and ".join(goals),
        "met": met if goals else None,
        "note": note,
    }


def skipped(what: str, reason: object) -> Row:
    return {"what": what, "skipped": str(reason)}


def refusal(small: bool) -> str:
    """Return why nothing can be measured here, or nothing."""
    found = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if found < (2, 11):
        return f"PyTorch must be 2.11 or newer, but it is {torch.__version__}: update it"
    if small:
        return ""
    remedy = "python -m benchmarks.gpu --small tries the kit on a CPU"
    if torch.version.cuda is None:
        build = torch.__version__
        return f"PyTorch must be built for CUDA, but it is {build}: install such a build; {remedy}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        # It says whether there is no driver, no GPU, or a driver that is too old.
        return f"PyTorch must find a GPU, but it does not: {str(error).splitlines()[0]} ({remedy})"
    return ""


def device(small: bool) -> Row:
    """Return what the numbers were measured on."""
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {} if small else {"CUDA": torch.version.cuda}
    if small:
        return {"device": "CPU, small form", "versions": versions}
    return {"device": torch.cuda.get_device_name(), "versions": versions}


def shared() -> Iterator[Row]:
    """Yield a row where others use the GPU."""
    free, total = torch.cuda.mem_get_info()
    if free < 0.95 * total:
        used = f"other programs hold {(total - free) / 1e9:.0f} GB of this GPU"
        yield skipped("memory", f"{used}: times are unreliable, and larger models are left out")


def require_package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise Skip(f"needs {name}, which is not installed")


def require_memory(needed: float, small: bool) -> None:
    """Raise Skip unless as many bytes are free, with a tenth for fragments."""
    free, total = (needed * 2, 0) if small else torch.cuda.mem_get_info()
    if needed > 0.9 * free:
        room = f"{free / 1e9:.0f} of {total / 1e9:.0f} GB are free"
        raise Skip(f"needs {needed / 1e9:.0f} GB by the planner's estimate, but {room}")


def rows(measurements: Measurements) -> Iterator[Row]:
    """Yield all rows; a measurement that can't be had is a row that says why."""
    for what, measure in measurements:
        try:
            yield from measure()
        except (Skip, torch.OutOfMemoryError) as error:
            yield skipped(what, str(error).splitlines()[0])
        except Exception as error:
            if isinstance(error.__cause__, ImportError):  # of torchtitan
                yield skipped(what, error)
            else:
                traceback.print_exc()
                yield {"what": what, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        gc.collect()
        torch.cuda.empty_cache()


def main(name: str, small: bool) -> None:
    def say(found: Row) -> None:
        print(MARK + json.dumps(found), flush=True)

    quiet()
    torch.manual_seed(0)
    if problem := refusal(small):
        return say({"refused": problem})
    say(device(small))
    for found in () if small else shared():
        say(found)
    try:
        part = importlib.import_module(f"benchmarks.gpu.{name}")
    except ImportError as error:
        return say(skipped("all of it", f"{error} (benchmarks/gpu/requirements.txt)"))
    for found in rows(part.measurements(small)):
        say(found)
    return None


if __name__ == "__main__":
    # The parts import this module by its own name.
    importlib.import_module("benchmarks.gpu.part").main(sys.argv[1], "--small" in sys.argv)
