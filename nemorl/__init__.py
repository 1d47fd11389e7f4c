"""nemorl: reinforcement learning and fine-tuning of language models.

>>> import nemorl
>>> nemorl.GRPOConfig(max_num_steps=20).max_num_steps
20

Everything is imported when it is first used: `import nemorl` loads neither torch nor transformers.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import nemorl.openmp as _openmp  # noqa: F401  (before torch, which reads what it sets)

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {
    name: module
    for module, names in re.findall(r"from (\S+) import (\([^)]*|.*)", _STUB)
    for name in re.findall(r"(\w+) as", names)
}
__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("nemorl")
    elif name not in _MODULE_OF:
        raise AttributeError(f"module 'nemorl' has no attribute {name!r}")
    elif (module := _MODULE_OF[name]) == "nemorl":
        value = import_module(f"nemorl.{name}")
    else:
        value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
