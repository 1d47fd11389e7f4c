"""Rewards by name (`REWARDS`), and `make_environment`, which makes an environment of any reward: a
name, `module:function`, a function `fn(prompt, response, **columns)`, or several.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.checks import closest
from nemorl.rollout.environment import (
    EnvironmentInterface,
    FunctionalRewardWrapper,
    exit_is_error,
)
from nemorl.rollout.environments.answers import (
    contains_answer,
    exact_match,
    last_number,
    math_equal,
    think_format,
)
from nemorl.rollout.environments.weighted import WeightedRewards
from nemorl.rollout.signature import name_of

REWARDS: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "contains_answer": contains_answer,
    "last_number": last_number,
    "math": math_equal,
    "think_format": think_format,
}

Reward = str | Callable[..., Any] | EnvironmentInterface
Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]


def make_environment(reward: Rewards, weights: Sequence[float] = ()) -> EnvironmentInterface:
    """Return an environment of a reward: a name in REWARDS, `module:function`, a function, itself.

    Several, a sequence or a mapping of names, become their sum with `weights` (default: 1 each; see
    `WeightedRewards`). In a sequence they have their functions' names; a second one gets _2.

    >>> make_environment("exact_mach")
    Traceback (most recent call last):
    ValueError: reward must be one of contains_answer, exact_match, ... did you mean exact_match?
    >>> list(make_environment([exact_match, "think_format"], weights=(1, 0.2)).weights.items())
    [('exact_match', 1.0), ('think_format', 0.2)]
    """
    if isinstance(reward, Mapping):
        return WeightedRewards(
            {str(name): _one(part, str(name)) for name, part in reward.items()}, weights
        )
    if isinstance(reward, str) or not isinstance(reward, Sequence):
        one = _one(reward)
        return WeightedRewards({_name(reward): one}, weights) if weights else one
    if len(reward) == 1 and not weights:
        return _one(reward[0])
    named: dict[str, EnvironmentInterface] = {}
    for part in reward:
        name, count = _name(part), 1
        while (numbered := name if count == 1 else f"{name}_{count}") in named:
            count += 1
        named[numbered] = _one(part, numbered)
    return WeightedRewards(named, weights)


def _name(reward: Reward) -> str:
    if isinstance(reward, str):
        return reward.rpartition(":")[2]
    return str(getattr(reward, "name", None) or name_of(reward))


def _one(reward: Any, name: str | None = None) -> EnvironmentInterface:
    if isinstance(reward, type):
        raise ValueError(
            f"reward must be a function or an environment, but it is the class {reward.__name__}:"
            f" give {reward.__name__}()"
        )
    if isinstance(reward, EnvironmentInterface):
        return reward
    if not isinstance(reward, str):
        return FunctionalRewardWrapper(reward, name=name)
    if ":" in reward:
        return _one(_imported(reward), name)
    if reward not in REWARDS:
        raise ValueError(
            f"reward must be one of {', '.join(sorted(REWARDS))}, or module:function, but it is"
            f" {reward!r}{closest(reward, REWARDS)}"
        )
    return FunctionalRewardWrapper(REWARDS[reward], name=name or reward)


def _imported(reward: str) -> Any:
    module_name, _, attribute = reward.partition(":")
    module_name = module_name.removesuffix(".py")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # an installed command does not look where it is run
    if importlib.util.find_spec(module_name.partition(".")[0]) is None:
        raise ValueError(
            f"reward must be importable as module:function, but there is no module {module_name!r}"
            f" in {Path.cwd()} or installed"
        )
    with exit_is_error(f"reward {reward}"):
        module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ValueError(
            f"reward must be importable as module:function, but {module.__file__} has no"
            f" {attribute!r}"
        )
    return getattr(module, attribute)
