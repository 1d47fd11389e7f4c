"""How long OpenMP's threads, with which torch computes, spin while they wait for work.

By default they spin for milliseconds, so two programs on one machine stall each other.
"""

import os
import sys

LIMITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
"""GNU's runtime counts turns of a loop; LLVM's and Intel's milliseconds (as torch's launcher)."""
CHOICES = {*LIMITS, "OMP_WAIT_POLICY"}
"""The variables by which a user has chosen otherwise."""


def limit_spinning() -> bool:
    """Set how long threads spin, in this process and those that it starts, unless the user has.

    Return whether it is too late for this process: torch has read the environment before.
    """
    chosen = CHOICES & os.environ.keys()
    if "OMP_WAIT_POLICY" not in chosen:
        os.environ.update({name: os.environ.get(name, value) for name, value in LIMITS.items()})
    return "torch" in sys.modules and not chosen


def spinning_variables() -> dict[str, str]:
    """Return the variables for a process that does not inherit the environment."""
    return {name: os.environ[name] for name in sorted(CHOICES & os.environ.keys())}


SPINS = limit_spinning()
"""Whether this process's threads spin, because torch was imported before nemorl."""
