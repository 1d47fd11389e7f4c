"""`make_environment`, which makes an environment of any reward: a name, `module:function`, a
function `fn(prompt, response, **columns)`, or several.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from nemorl.checks import closest
from nemorl.rollout.answers import REWARDS, require_reward
from nemorl.rollout.environment import (
    EnvironmentInterface,
    FunctionalRewardWrapper,
)
from nemorl.rollout.environments.weighted import WeightedRewards
from nemorl.rollout.signature import name_of
from nemorl.user_code import function_of

Reward = str | Callable[..., Any] | EnvironmentInterface
Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]


def make_environment(
    reward: Rewards,
    weights: Sequence[float] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> EnvironmentInterface:
    """Return an environment of a reward: a name in REWARDS, `module:function`, a function, itself.

    Several, a sequence or a mapping of names, become their sum with `weights` (default: 1 each; see
    `WeightedRewards`). In a sequence they have their functions' names; a second one gets _2.
    `settings`: values of the functions' parameters, by name.

    >>> make_environment("exact_mach")
    Traceback (most recent call last):
    ValueError: reward must be one of choice, contains_answer, ... did you mean exact_match?
    >>> list(make_environment(["exact_match", "think_format"], weights=(1, 0.2)).weights.items())
    [('exact_match', 1.0), ('think_format', 0.2)]
    """
    if isinstance(reward, Mapping):
        named = {str(name): part for name, part in reward.items()}
    else:
        several = isinstance(reward, Sequence) and not isinstance(reward, str)
        named = _numbered(cast(Sequence[Reward], reward if several else [reward]))
    alone = len(named) == 1 and not weights and not isinstance(reward, Mapping)
    parts = {name: _one(part, None if alone else name, settings) for name, part in named.items()}
    functions = [part for part in parts.values() if isinstance(part, FunctionalRewardWrapper)]
    for key in settings.keys() - {key for each in functions for key in each.signature.settings}:
        known = [column for each in functions for column in each.signature.columns]
        raise ValueError(
            f"reward_kwargs must name parameters of the rewards, but there is no {key!r}"
            f"{closest(key, known)}: remove it"
        )
    return next(iter(parts.values())) if alone else WeightedRewards(parts, weights)


def _numbered(rewards: Sequence[Reward]) -> dict[str, Reward]:
    named: dict[str, Reward] = {}
    for reward in rewards:
        name, count = _name(reward), 1
        while (numbered := name if count == 1 else f"{name}_{count}") in named:
            count += 1
        named[numbered] = reward
    return named


def _name(reward: Reward) -> str:
    if isinstance(reward, str):
        return reward.rpartition(":")[2]
    return str(getattr(reward, "name", None) or name_of(reward))


def _one(reward: Any, name: str | None, settings: Mapping[str, Any]) -> EnvironmentInterface:
    if isinstance(reward, type):
        raise ValueError(
            f"reward must be a function or an environment, but it is the class {reward.__name__}:"
            f" give {reward.__name__}()"
        )
    if isinstance(reward, EnvironmentInterface):
        return reward
    if not isinstance(reward, str):
        return FunctionalRewardWrapper(reward, name=name, settings=settings)
    if ":" in reward:
        return _one(function_of(reward, "reward"), name, settings)
    require_reward(reward)
    return _one(REWARDS[reward], name or reward, settings)
