"""Environments of several turns or of tools by name."""

from typing import Any

from nemorl.checks import closest
from nemorl.rollout.answers import GIVEN
from nemorl.user_code import function_of

ENVIRONMENTS: dict[str, str] = {}
"""Ours, as module:Class."""


def require_environment(name: str) -> None:
    """Raise ValueError for an environment that is neither in ENVIRONMENTS nor a `module:Class`."""
    if name.startswith(GIVEN):
        raise ValueError(
            f"environment_factory must be given again, because the run's was {name}: pass it in"
            " Python, or name it as module:Class or ./file.py:Class (--rollout.environment)"
        )
    if name not in ENVIRONMENTS and ":" not in name:
        raise ValueError(
            f"rollout.environment must be one of {', '.join(sorted(ENVIRONMENTS))}, or"
            f" module:Class, but it is {name!r}{closest(name, ENVIRONMENTS)}"
        )


def environment_named(name: str) -> Any:
    """Return the class, or the episode, that a name stands for."""
    require_environment(name)
    return function_of(ENVIRONMENTS.get(name, name), "rollout.environment")
