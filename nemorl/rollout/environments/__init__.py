"""Rewards by name. A reward is a function `fn(prompt, response, **columns)`; see `nemorl.rollout.environment`."""

import difflib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemorl.rollout.environment import EnvironmentInterface, FunctionalRewardWrapper


def exact_match(prompt: str, response: str, answer: Any) -> float:
    """1 where the response, without white space around it, is the answer; else 0.

    >>> exact_match("1+1=", " 2\\n", "2")
    1.0
    """
    return float(response.strip() == str(answer).strip())


def contains_answer(prompt: str, response: str, answer: Any) -> float:
    """1 where the response contains the answer; else 0.

    >>> contains_answer("1+1=", "It is 2.", 2)
    1.0
    """
    return float(str(answer).strip() in response)


REWARDS: dict[str, Callable[..., float]] = {"exact_match": exact_match, "contains_answer": contains_answer}


def make_environment(reward: "str | Callable[..., float] | EnvironmentInterface") -> EnvironmentInterface:
    """An environment from the name of a reward in REWARDS, from `module:function`, from a function, or the environment itself.

    >>> make_environment("exact_mach")
    Traceback (most recent call last):
    ValueError: reward must be one of contains_answer, exact_match, or module:function, but it is 'exact_mach': did you mean 'exact_match'?
    """
    if isinstance(reward, EnvironmentInterface):
        return reward
    if callable(reward):
        return FunctionalRewardWrapper(reward)
    if ":" in reward:
        module_name, _, attribute = reward.partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # an installed command does not look where it is run
        if importlib.util.find_spec(module_name.partition(".")[0]) is None:
            raise ValueError(f"reward must be importable as module:function, but there is no module {module_name!r} in {Path.cwd()} or installed")
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute):
            raise ValueError(f"reward must be importable as module:function, but {module.__file__} has no {attribute!r}")
        return make_environment(getattr(module, attribute))
    if reward not in REWARDS:
        close = difflib.get_close_matches(reward, REWARDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "give your own as module:function"
        raise ValueError(f"reward must be one of {', '.join(sorted(REWARDS))}, or module:function, but it is {reward!r}: {hint}")
    return FunctionalRewardWrapper(REWARDS[reward])
