"""Environments written for Tinker: its `Env`, and `EnvGroupBuilder`, which judges a group."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import count, islice
from typing import Any

from nemorl.checks import as_number, require
from nemorl.rollout.conversation import (
    ContextFull,
    ConversationFailed,
    Episode,
    Limits,
    Outcome,
    Policy,
)
from nemorl.rollout.environments.classes import columns_for, kind_of
from nemorl.rollout.generation import Completion
from nemorl.rollout.rounds import Rounds, caller
from nemorl.rollout.signature import name_of
from nemorl.user_code import exit_is_error

Call = Callable[..., Awaitable[Any]]
Step = tuple[Any, Completion, Any]
"""An observation, the answer to it, and the `StepResult`."""
LIMITS = (
    *("max_trajectory_tokens", "max_sampled_tokens", "max_turn_tokens"),
    "rollout_timeout_seconds",
)
"""Fields of Tinker's `RolloutLimits` that are the run's here."""


@dataclass(frozen=True)
class TinkerEnvironment:
    """A function `make(**columns)` whose annotation says that it returns an `Env`, or an
    `EnvGroupBuilder`.

    It gets the columns of the row that it names, and as `group_size` the number of conversations
    about it, which share a builder. What `compute_group_rewards` gives one, of those that did not
    fail, is added to the reward of its last turn.
    """

    make: Callable[..., Any]

    @property
    def name(self) -> str:
        return name_of(self.make)

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError for rows without a column that `make` needs."""
        for row in rows:
            try:
                signature(self.make).bind(**self._columns(row, 1))
            except TypeError as error:
                must, remedy = "must be made of the columns of a row", "add it, or give a default"
                require(False, f"environment {self.name!r}", must, str(error), remedy)

    def _columns(self, row: Mapping[str, Any], size: int) -> dict[str, Any]:
        return columns_for(self.make, {**row, "group_size": size})

    def episode(self, rounds: Rounds, limits: Limits) -> Episode:
        """Return the episode of one conversation."""
        call = caller(rounds, f"environment {self.name!r}", limits.timeout_s)
        groups: dict[int, list[tuple[Policy, asyncio.Future]]] = defaultdict(list)

        async def alone(row: Mapping[str, Any], policy: Policy) -> Outcome:
            environment = await call(self.make, **self._columns(row, policy.group_size))
            return _outcome(await _steps(environment, policy, call, limits.max_turns))

        async def member(row: Mapping[str, Any], policy: Policy) -> Outcome:
            group, future = groups[policy.group], asyncio.get_running_loop().create_future()
            group.append((policy, future))
            if len(group) == policy.group_size:  # the last one leads all
                policies, futures = zip(*group, strict=True)
                try:
                    with exit_is_error(self.name):
                        builder = await call(self.make, **self._columns(row, len(group)))
                        found = await _group(self.name, builder, policies, call, limits.max_turns)
                except (Exception, asyncio.CancelledError) as error:
                    found = [error] * len(group)
                for each, outcome in zip(futures, found, strict=True):
                    each.set_result(outcome)
            if isinstance(outcome := await future, BaseException):
                raise outcome
            return outcome

        return member if hasattr(kind_of(self.make), "make_envs") else alone


async def _group(
    name: str, builder: Any, policies: Sequence[Policy], call: Call, most: int | None
) -> list[Outcome | BaseException]:
    """Lead the conversations of a group, and judge those that did not fail together."""
    try:
        environments = await call(builder.make_envs)
        must = f"must be at least {len(policies)}, one for each conversation"
        enough, remedy = len(environments) >= len(policies), "have the factory take group_size"
        require(enough, "environments of make_envs", must, len(environments), remedy)
        talks = [
            _alive(name, _steps(*each, call, most))
            for each in zip(environments, policies, strict=False)
        ]
        found: list[Any] = await asyncio.gather(*talks, return_exceptions=True)
        good = [place for place, steps in enumerate(found) if isinstance(steps, list)]
        if good:
            paths, those = [_trajectory(found[i]) for i in good], [environments[i] for i in good]
            judged = await call(builder.compute_group_rewards, paths, those)
            for place, (reward, metrics) in zip(good, judged, strict=True):
                found[place] = _outcome(found[place], as_number(reward), **metrics)
        return found
    finally:
        await call(builder.cleanup)


async def _alive(name: str, steps: Awaitable[list[Step]]) -> list[Step]:
    """Return the steps. A sys.exit in a task would end the loop whatever awaits it."""
    with exit_is_error(name):
        return await steps


async def _steps(environment: Any, policy: Policy, call: Call, most: int | None) -> list[Step]:
    """Lead a conversation of token ids to its end."""
    first, steps = await call(environment.initial_observation), list[Step]()
    if not isinstance(first, tuple):
        raise ConversationFailed(f"the environment finds its first observation too long: {first}")
    limits = getattr(environment, "rollout_limits", None)
    given = [name for name in LIMITS if getattr(limits, name, None) is not None]
    must, remedy = "must leave these to the run", "see docs/environments.md#limits"
    require(not given, f"rollout_limits of {name_of(environment)}", must, given, remedy)
    most = min(filter(None, (most, getattr(limits, "max_turns", None))), default=None)
    observation, stop = first
    for _ in islice(count(), most):
        try:
            said = await policy.sample(observation.to_ints(), stop=stop)
        except ContextFull:
            if not steps:
                raise
            break
        extra = columns_for(environment.step, {"extra": {"stop_reason": said.finish_reason}})
        result = await call(environment.step, list(said.token_ids), **extra)
        steps.append((observation, said, result))
        if result.episode_done:
            break
        observation, stop = result.next_observation, result.next_stop_condition
    return steps


def _outcome(steps: Sequence[Step], reward: float = 0.0, /, **metrics: float) -> Outcome:
    """Return the rewards of the turns, with `reward` for the last."""
    results = [result for _, _, result in steps]
    for result in reversed(results):
        metrics = {**result.metrics, **metrics}
    *rewards, last = (as_number(result.reward) for result in results)
    return Outcome(
        turn_rewards=[*rewards, last + reward],
        metrics={name: as_number(value) for name, value in metrics.items()},
        truncated=not results[-1].episode_done,
    )


def _trajectory(steps: Sequence[Step]) -> Any:
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory, Transition

    last, transitions = steps[-1][2], []
    for observation, said, result in steps:
        action = TokensWithLogprobs([*said.token_ids], [*said.logprobs], said.finish_reason)
        parts = result.reward, result.episode_done, result.metrics, result.logs
        transitions.append(Transition(observation, action, *parts))
    reasons = (name[5:] for name, on in last.metrics.items() if on and name.startswith("stop/"))
    return Trajectory(transitions, last.next_observation, next(reasons, None))
