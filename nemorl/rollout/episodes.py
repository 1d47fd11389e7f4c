"""Environments of batches as episodes (`episode_of`)."""

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from nemorl.checks import closest, require
from nemorl.data.rows import ENVIRONMENT as COLUMN
from nemorl.data.rows import Row, for_rows
from nemorl.data.templates import ROLES, Message
from nemorl.rollout.calls import ENVIRONMENT, exit_is_error, is_async, name_of
from nemorl.rollout.cohort import Cohort
from nemorl.rollout.context import require_readable
from nemorl.rollout.conversation import DEFAULT_TURNS, ContextFull, Episode, Outcome, Policy
from nemorl.rollout.environment import (
    EnvironmentInterface,
    MessageLog,
    Metadata,
    check_counts,
    check_rows,
    listed,
)

LIMITS = ("max_turns", "discount")
"""Settings of `rollout` that some environments do not read."""
GOES_ON = ("observations", "metadata", "next_stop_strings")
"""What an `EnvironmentReturn` may leave empty, or None, where all conversations are over."""


@runtime_checkable
class LeadsConversations(Protocol):
    """An environment that makes its own episode."""

    def episode(self, cohort: Cohort) -> Episode:
        """Return the episode of one conversation of a cohort."""


@dataclass(frozen=True)
class ByRow:
    """Environments by name, of which each row chooses one (column `environment`)."""

    environments: Mapping[str, Any]

    def of(self, row: Mapping[str, Any]) -> str:
        """Return the name of a row's environment. Raises: ValueError for none or another name."""
        name, known = row.get(COLUMN), [*self.environments]
        if name_in(row) in self.environments:
            return str(name)
        hint = closest(str(name), known) or ": correct it, or set data.environment_column"
        if name is None:
            hint = ": add the column, set data.environments, or add up several rewards as a list"
        raise ValueError(
            f"environment must name the row's environment or reward ({', '.join(known)}), but it"
            f" is {name!r}{hint}"
        )

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        names = for_rows(rows, self.of)
        for name, each in self.environments.items():
            check_rows(each, [row for row, own in zip(rows, names, strict=True) if own == name])

    def require_used(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise ValueError for an environment that no row names, or a name of none."""
        rows = list(rows)
        named = [row for row in rows if row.get(COLUMN) is not None]
        used = {*for_rows(named or rows[:1], self.of)}
        unused = [name for name in self.environments if name not in used]
        require(
            not unused,
            "reward or rollout.environment",
            f"must have names that rows choose, which name {', '.join(sorted(used))}",
            unused[:1],
            "remove it",
        )


Environment = EnvironmentInterface | LeadsConversations | Episode | ByRow
"""What leads and judges conversations."""


def name_in(row: Mapping[str, Any]) -> str | None:
    """Return the environment that a row names."""
    found = row.get(COLUMN)
    return found if isinstance(found, str) else None


def parts_of(environment: Any) -> Mapping[Any, Any]:
    """Return environments by name, one for all rows by None."""
    return environment.environments if isinstance(environment, ByRow) else {None: environment}


def places_of(environment: Environment, rows: Iterable[Mapping[str, Any]]) -> dict[Any, list[int]]:
    """Return the places of rows by the name of their environment, as `parts_of` has it."""
    found = dict[Any, list[int]]()
    for place, row in enumerate(rows):
        name = environment.of(row) if isinstance(environment, ByRow) else None
        found.setdefault(name, []).append(place)
    return found


def with_environment_tools(
    environment: Any, rows: Sequence[Mapping[str, Any]], tokenizer: Any
) -> Sequence[Mapping[str, Any]]:
    """Return rows with their environment's tools, if it has any, in place of their own.

    Raises: ValueError for tools whose calls can't be read in the chat template's format.
    """
    parts = parts_of(environment).items()
    found = {name: list(tools) for name, each in parts if (tools := getattr(each, "tools", ()))}
    for tools in found.values():
        has = getattr(tokenizer, "chat_template", None)
        require_readable(has and tokenizer.get_chat_template(tools=tools))

    def shown(row: Mapping[str, Any]) -> Mapping[str, Any]:
        (name,) = places_of(environment, [row])
        own = {"tools": found[name]} if name in found else {}
        return Row({**row, **own}, origin=getattr(row, "origin", ""))

    return for_rows(rows, shown) if found else rows


def check_environment(environment: Any) -> None:
    """Raise ValueError for what leads no conversations."""
    if not isinstance(environment, EnvironmentInterface | LeadsConversations):
        written = "must be an EnvironmentInterface or an episode, async def episode(row, policy)"
        require(
            is_async(environment),
            "environment",
            written,
            environment,
            "write async def, or wrap a reward function in FunctionalRewardWrapper",
        )


def named(environment: Environment) -> str:
    """Return what errors call it."""
    if isinstance(environment, ByRow):
        return f"the environments {', '.join(environment.environments)}"
    if isinstance(environment, LeadsConversations):
        return f"environment {getattr(environment, 'name', name_of(environment))!r}"
    kind = "environment" if isinstance(environment, EnvironmentInterface) else "episode"
    return f"{kind} {name_of(environment)!r}"


def judge_of(environment: Environment) -> EnvironmentInterface | None:
    """Return what gives rewards to a batch, if anything does."""
    judges = (environment, getattr(environment, "judge", None))
    return next((each for each in judges if isinstance(each, EnvironmentInterface)), None)


def episode_of(environment: Any, cohort: Cohort) -> Episode:
    """Return an environment of batches as an episode."""
    if isinstance(environment, LeadsConversations):
        return environment.episode(cohort)
    if not isinstance(environment, EnvironmentInterface):
        led: Episode = environment
        return led
    limits = cohort.limits
    said = limits.max_turns or getattr(environment, "max_turns", None)
    several = (said or 1) > 1 and getattr(environment, "max_turns", None) != 1
    ask = cohort.ask if several else cohort.ask_together

    async def episode(row: Mapping[str, Any], policy: Policy) -> Outcome:
        log, metadata = list(policy.messages), row
        stop: Sequence[str] = ()
        outcome = Outcome(truncated=True)
        for turn in range(said or DEFAULT_TURNS):
            try:
                log.append(await policy.chat(log, stop=stop))
            except ContextFull:
                break
            after = await ask(([*map(whole, log)] if several else list(log), metadata))
            outcome = replace(
                outcome,
                turn_rewards=[*outcome.turn_rewards, after.reward],
                answer=outcome.answer if after.answer is None else after.answer,
                components={
                    key: outcome.components.get(key, 0.0)
                    + limits.discount**turn * after.components.get(key, 0.0)
                    for key in {**outcome.components, **after.components}
                },
                truncated=not after.over,
            )
            if after.over:
                break
            log.append(after.observation)
            metadata, stop = metadata if after.metadata is None else after.metadata, after.stop
        return outcome

    return episode


def limits_read(environment: Environment) -> set[str]:
    """Return which of `LIMITS` act on an environment.

    One that leads conversations may list them in an attribute `reads`; without it, all do.
    """
    if isinstance(environment, ByRow):
        return set[str]().union(*map(limits_read, environment.environments.values()))
    if isinstance(environment, LeadsConversations):
        return set(getattr(environment, "reads", LIMITS))
    if not isinstance(environment, EnvironmentInterface):
        return {"discount"}
    return set() if getattr(environment, "max_turns", None) == 1 else {*LIMITS}


def whole(message: Message) -> Message:
    """Return a message with the stop string that ended it, as in NeMo RL and SkyRL."""
    stop = message.get("stop_string", "")
    return {**message, "content": message["content"] + stop} if stop else message


@dataclass(frozen=True)
class Judgment:
    """One conversation of an `EnvironmentReturn`."""

    reward: float
    over: bool
    observation: Message
    metadata: Metadata | None
    stop: Sequence[str]
    answer: str | None
    components: Mapping[str, float]


def judged(
    environment: EnvironmentInterface, asked: Sequence[tuple[MessageLog, Metadata]]
) -> Sequence[Judgment | Exception]:
    """Have an environment judge conversations. An error is that of all, but one whose process ended
    fails alone: the others are judged again.
    """
    name = type(environment).__name__
    try:
        with exit_is_error(f"environment {name!r}"):
            result = environment.step([log for log, _ in asked], [row for _, row in asked])
        check_counts(result, size := len(asked), name)
        parts = {each: getattr(result, each) for each in GOES_ON}
        if all(listed(result.terminateds)):
            parts = {key: values or [None] * size for key, values in parts.items()}
        check_counts(result, size, name, **parts)
        return _of_each(result, parts, size)
    except (Exception, asyncio.CancelledError) as caught:  # which its own event loop may raise
        ended = RuntimeError(f"environment {name!r} raised {caught!r}")
        error = caught if isinstance(caught, Exception) else ended
        lost = getattr(error, "environment", None)
        fails = [lost is not None and row.get(ENVIRONMENT[0]) is lost for _, row in asked]
        if not any(fails):
            return [error] * len(asked)
        left = [one for one, fail in zip(asked, fails, strict=True) if not fail]
        found = iter(judged(environment, left) if left else ())
        return [error if fail else next(found) for fail in fails]


def _of_each(result: Any, parts: Mapping[str, Any], size: int) -> list[Judgment | Exception]:
    observations, metadata, stops = (parts[each] for each in GOES_ON)
    ends = [*map(bool, listed(result.terminateds))]
    failures = getattr(result, "failures", None) or [None] * size
    components = getattr(result, "components", {})  # NeMo RL's own have none
    components = {key: listed(values) for key, values in components.items()}
    found = itertools.starmap(
        Judgment,
        zip(
            listed(result.rewards),
            ends,
            map(_observation, observations, ends),
            metadata,
            [stop or () for stop in stops],
            result.answers or [None] * size,
            [{key: values[i] for key, values in components.items()} for i in range(size)],
            strict=True,
        ),
    )
    return [each if error is None else error for each, error in zip(found, failures, strict=True)]


def _observation(message: Message | None, over: bool) -> Message:
    """NeMo RL's role is "environment"."""
    fits, remedy = "must be a message where a conversation goes on", "return one, or terminate it"
    require(over or bool(message), "an environment's observation", fits, message, remedy)
    message = message or {}
    return message if message.get("role") in ROLES else {**message, "role": "user"}
