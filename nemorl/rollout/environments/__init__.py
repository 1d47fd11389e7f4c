"""`make_environment`, which makes an environment of any reward, or of a class that leads
conversations.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

from nemorl.checks import closest, refuse_unused, require
from nemorl.rollout.answers import ENVIRONMENTS, REWARDS, require_known
from nemorl.rollout.calls import is_async, name_of
from nemorl.rollout.config import RolloutConfig
from nemorl.rollout.environment import (
    EnvironmentInterface,
    FunctionalRewardWrapper,
)
from nemorl.rollout.environments.classes import ClassEnvironment, Workers, kind_of
from nemorl.rollout.environments.weighted import WeightedRewards
from nemorl.rollout.episodes import LIMITS, ByRow, LeadsConversations, limits_read, named
from nemorl.rollout.episodes import Environment as Environment
from nemorl.rollout.reward_model import PREFIX, reward_model
from nemorl.rollout.user_code import function_of

Reward = str | Callable[..., Any] | EnvironmentInterface
Rewards = None | Reward | Sequence[Reward] | Mapping[str, Any]
Weights = Sequence[float] | Mapping[str, Sequence[float]]


def make_environment(
    reward: Rewards,
    weights: Weights = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    environment: Any = None,
    chosen: bool = True,
    workers: Callable[[], Workers] | None = None,
) -> Environment:
    """Return an environment of a reward: a name in REWARDS, `module:function`, a function, itself.

    Several in a sequence become their sum with `weights` (default: 1 each; see `WeightedRewards`).
    They have their functions' names; a second one gets _2. `settings`: values of the functions'
    parameters, by name.

    environment: a class whose objects lead conversations (`ClassEnvironment`), or its name; may be
    given as the reward, too. chosen: whether the reward is more than a default, which an
    environment with its own goes without. workers: makes processes for its objects.

    From a mapping as reward, environment or both each row chooses by name (`ByRow`); what is no
    mapping is for all names. `weights` and `settings` are by name where the reward is.

    >>> make_environment("exact_mach")
    Traceback (most recent call last):
    ValueError: reward must be one of choice, code, contains_answer, ... did you mean exact_match?
    >>> list(make_environment(["exact_match", "think_format"], weights=(1, 0.2)).weights.items())
    [('exact_match', 1.0), ('think_format', 0.2)]
    """
    if isinstance(reward, Mapping) or isinstance(environment, Mapping):
        return ByRow(_by_name(reward, weights, settings, environment, chosen, workers))
    judge: Callable[[], Any] = partial(make_environment, reward, weights, settings)
    if environment is None and _leads(reward):
        environment, chosen, reward = reward, False, None
    if environment is not None:
        more = {"reward_weights": weights, "reward_kwargs": list(settings)}
        given = {name: value for name, value in more.items() if value}
        judge = judge if reward is not None else lambda: None
        return _led(environment, judge, given, chosen=chosen, workers=workers)
    require(
        workers is None,
        "rollout.workers",
        "needs an environment",
        None,
        "give rollout.environment, too",
    )
    several = isinstance(reward, Sequence) and not isinstance(reward, str)
    named = _numbered(cast(Sequence[Reward], reward if several else [reward]))
    alone = len(named) == 1 and not weights
    parts = {name: _one(part, None if alone else name, settings) for name, part in named.items()}
    functions = [part for part in parts.values() if isinstance(part, FunctionalRewardWrapper)]
    for key in settings.keys() - {*chain(*(each.signature.settings for each in functions))}:
        known = [*chain(*(each.signature.columns for each in functions))]
        raise ValueError(
            f"reward_kwargs must name parameters of the rewards, but there is no {key!r}"
            f"{closest(key, known)}: remove it"
        )
    return next(iter(parts.values())) if alone else WeightedRewards(parts, cast(Any, weights))


def _by_name(
    reward: Any, weights: Any, settings: Any, environment: Any, chosen: bool, workers: Any
) -> dict[str, Environment]:
    def of(given: Any, name: str) -> Any:
        return given.get(name) if isinstance(given, Mapping) else given

    given = [each for each in (reward, environment) if isinstance(each, Mapping)]
    names, parts = dict.fromkeys(chain(*given)), dict[str, Any]()
    require(bool(names), "reward", "must be a mapping of one name or more", reward, "name one")
    by_name = isinstance(reward, Mapping)
    for setting, values in {"reward_weights": weights, "reward_kwargs": settings}.items():
        require(
            not values or not by_name or (isinstance(values, Mapping) and {*values} <= {*names}),
            setting,
            f"must have some of the names {', '.join(names)}, as reward has",
            values,
            "give rewards that are to be added up as a list",
        )
    leading = [n for n in names if of(environment, n) is not None or _leads(of(reward, n))]
    pool = workers and cache(workers)
    for name in names:
        own, led = of(reward, name), of(environment, name)
        require(
            not isinstance(own, Mapping),
            f"reward {name!r}",
            "must be a name, a function or a list of them",
            own,
            "give one of them",
        )
        try:
            parts[name] = make_environment(
                own,
                weights.get(name, ()) if by_name and weights else weights,
                settings.get(name, {}) if by_name else settings,
                environment=led,
                chosen=chosen and own is not None,
                workers=pool if name in leading or not leading else None,
            )
        except ValueError as error:
            raise ValueError(f"environment {name!r}: {error}") from error
    return parts


def check_limits(
    environment: Environment, rollout: RolloutConfig, *, by_turn: bool = False
) -> None:
    """Raise ValueError for a limit in `rollout` that an environment does not read.

    by_turn: whether turns have their own advantages, for which rewards are discounted, too.
    """
    read = limits_read(environment)
    read |= {"discount"} if by_turn and "max_turns" in read else set()
    one = isinstance(environment, EnvironmentInterface) and not read
    what = "a reward, which judges one response" if one else named(environment)
    remedy = "remove it" + ", or give rollout.environment" * one
    refuse_unused("rollout", rollout, f"has no effect on {what}", remedy, names=set(LIMITS) - read)


def _led(
    environment: Any,
    judge: Callable[[], Any],
    given: Mapping[str, Any],
    *,
    chosen: bool,
    workers: Callable[[], Workers] | None,
) -> Environment:
    if isinstance(environment, str):
        setting = "rollout.environment"
        require_known(environment, ENVIRONMENTS, setting, "environment_factory")
        environment = function_of(ENVIRONMENTS.get(environment, environment), setting)
    kinds, judged = EnvironmentInterface | LeadsConversations, None
    whole = isinstance(environment, kinds) and not isinstance(environment, type)
    if whole or is_async(environment):
        leads, found = True, environment
    else:
        require(
            callable(environment),
            "environment",
            "must be a class, a function that makes an object of it, or an episode",
            environment,
            "give the class itself",
        )
        kind = kind_of(environment)
        batched = hasattr(kind, "global_post_process_and_metrics")
        must, remedy = "must be an object where it judges batches", f"give {name_of(kind)}()"
        require(not batched, "environment", must, environment, remedy)
        leads, own = hasattr(kind, "step"), hasattr(kind, "get_reward")
        judged = judge() if not leads and (chosen or not own) else None
        found, workers = ClassEnvironment(environment, kind, judged, workers and workers()), None
    remedy, name = "leave it out, or give an environment of tools", name_of(environment)
    must = "must be left out with an environment that gives rewards itself"
    for setting in (*["reward"] * (chosen and leads), *([] if judged else given)):
        require(False, setting, must, given.get(setting, name), remedy)
    require(
        workers is None,
        "rollout.workers",
        "is for a class with an object for each conversation, step or tools",
        name,
        "remove it",
    )
    return found


def _leads(reward: Any) -> bool:
    if not isinstance(reward, type):
        return isinstance(reward, LeadsConversations)
    batched = hasattr(reward, "global_post_process_and_metrics")
    return not batched and (hasattr(reward, "step") or hasattr(reward, "reset"))


def _numbered(rewards: Sequence[Reward]) -> dict[str, Reward]:
    named: dict[str, Reward] = {}
    for reward in rewards:
        name = reward.rpartition(":")[2] if isinstance(reward, str) else ""
        name = name or str(getattr(reward, "name", None) or name_of(reward))
        count = 1
        while (numbered := name if count == 1 else f"{name}_{count}") in named:
            count += 1
        named[numbered] = reward
    return named


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
    if reward.startswith(PREFIX):
        return _one(reward_model(reward.removeprefix(PREFIX)), name or reward, settings)
    if ":" in reward or reward.endswith(".py"):
        return _one(function_of(reward, "reward"), name, settings)
    require_known(reward, REWARDS, "reward", "reward")
    return _one(REWARDS[reward], name or reward, settings)
