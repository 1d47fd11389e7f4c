"""The GPU kit: what the library does on this GPU, measured in minutes. See docs/performance.md.

`__main__` starts each part in a process of its own (`part`) and writes down the rows that it
prints. The other modules are the parts: `measurements(small)` yields names and functions that yield
rows; small: a form of seconds on the CPU, which shows that the part works.
"""

import sys
from pathlib import Path

MARK = "@row "
"""Begins the lines with rows, among all that libraries print."""

sys.path.append(str(Path(__file__).parent.parent))  # the other benchmarks, which are scripts
