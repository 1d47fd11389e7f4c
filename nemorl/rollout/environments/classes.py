"""Environments written as classes, an object for each conversation: ours, TRL's, SkyRL-Gym's."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from nemorl.checks import as_number, require, short
from nemorl.data.rows import Row, own_copy
from nemorl.data.templates import Message
from nemorl.rollout.calls import ENVIRONMENT, accepted, blocking, name_of
from nemorl.rollout.cohort import Cohort
from nemorl.rollout.conversation import (
    DEFAULT_TURNS,
    ContextFull,
    Episode,
    Outcome,
    Policy,
)
from nemorl.rollout.environment import EnvironmentInterface, check_rows
from nemorl.rollout.environments.tools import schemas_of, tools_of, use_tools
from nemorl.rollout.episodes import whole


@dataclass(frozen=True, kw_only=True)
class TurnResult:
    """What an environment's `step` returns.

    A tuple (observation, reward, done), or Gymnasium's (observation, reward, terminated,
    truncated, info), is the same.
    """

    observation: Any = None
    """What the model is told next: text of the user's, a message, or a list of messages."""
    reward: float = 0.0
    """Of this turn."""
    done: bool = False
    """Whether the conversation is over."""
    answer: str | None = None
    """What was read as the answer, for the sample log."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements, averaged over conversations; the last of a name counts."""
    stop: Sequence[str] = ()
    """Strings that end the next response, besides the run's."""
    truncated: bool = False
    """Whether a limit of the environment ended the conversation."""


@runtime_checkable
class Workers(Protocol):
    """Processes in which objects of environments live."""

    def room(
        self, make: Callable[..., Any], kind: Any
    ) -> AbstractAsyncContextManager[Callable[..., Any]]:
        """Wait for a process; give what makes an object of `kind` there, as `make`."""


@dataclass(frozen=True)
class ClassEnvironment:
    """A class as an environment: an object of it for each conversation.

    With a method `step(response) -> TurnResult` it leads the conversation. `reset(**columns)` gets
    the columns of the row that it names, and may return what is added to the prompt.
    Without `step` its public methods are tools, as in TRL's `environment_factory`: the reward is
    the `judge`'s, and that of `get_reward()`, if any, is added.
    With SkyRL-Gym's `init(prompt)` the object is made as `cls(extras=row)`; `get_metrics()` is
    measured at the end.

    Methods may be `async`; others are called in threads. `close()`, if any, is called at the end in
    any case. An error or a call of more than `timeout_s` fails its conversation alone. `workers`:
    processes in which the objects live.

    Raises: ValueError for a class with neither, and for tools without annotations or docstrings.
    """

    make: Callable[..., Any]
    kind: Any
    """The class (`kind_of(make)`)."""
    judge: EnvironmentInterface | None = None
    workers: Workers | None = None

    def __post_init__(self) -> None:
        leads = self.has("step")
        require(
            leads or self.has("reset"),
            f"environment {self.name!r}",
            "must have a method step(response), or reset(**columns) and methods that are tools",
            sorted(name for name in dir(self.kind) if not name.startswith("_")),
            "add one",
        )
        if not leads:
            _ = self.tools  # or an error
            require(
                self.judge is not None or self.has("get_reward"),
                f"environment {self.name!r}",
                "must have get_reward() where no reward function judges it",
                None,
                "add it, or give a reward",
            )

    @property
    def name(self) -> str:
        return name_of(self.make)

    @property
    def reads(self) -> tuple[str, ...]:
        return ("max_turns", *["discount"] * self.has("step"))

    def has(self, method: str) -> bool:
        return callable(getattr(self.kind, method, None))

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The schemas of its tools; none where it leads with `step`."""
        return [] if self.has("step") else schemas_of(tools_of(self.kind))

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        check_rows(self.kind, rows)
        check_rows(self.judge, [beside(row, self.kind) for row in rows])

    def episode(self, cohort: Cohort) -> Episode:
        call = cohort.call

        async def episode(row: Mapping[str, Any], policy: Policy) -> Outcome:
            workers = self.workers
            room = workers.room(self.make, self.kind) if workers else nullcontext(self.make)
            async with (
                cohort.room(room) as make,
                self._opened(make, row, policy, call) as (environment, messages),
            ):

                def max_turns() -> Any:  # a property's, or a process's
                    return getattr(environment, "max_turns", None)

                usual = await call(max_turns) or DEFAULT_TURNS
                if self.has("init"):  # some say 1 and have more
                    usual = max(usual, DEFAULT_TURNS)
                most = cohort.limits.max_turns or usual
                if self.has("step"):
                    read = _skyrl_result if self.has("init") else turn_result
                    outcome = await _led(environment.step, messages, policy, call, most, read)
                    if not self.has("get_metrics"):
                        return outcome
                    metrics = dict(outcome.metrics)
                    for name, value in (await call(environment.get_metrics)).items():
                        if isinstance(value, int | float):  # as SkyRL-Gym averages them
                            metrics[name] = float(value)
                    return replace(outcome, metrics=metrics)
                log, outcome = await use_tools(environment, messages, policy, call, most)
                if self.judge is not None:
                    after = await cohort.ask_together((log, beside(row, environment)))
                    outcome = replace(
                        outcome,
                        reward=after.reward,
                        components=after.components,
                        answer=after.answer,
                    )
                if self.has("get_reward"):
                    own, parts = as_number(await call(environment.get_reward)), outcome.components
                    if self.judge is not None and not parts:
                        parts = {getattr(self.judge, "name", "reward"): outcome.reward}
                    parts = {**parts, "get_reward": own}
                    outcome = replace(outcome, reward=outcome.reward + own, components=parts)
                return outcome

        return episode

    @asynccontextmanager
    async def _opened(
        self,
        make: Callable[..., Any],
        row: Mapping[str, Any],
        policy: Policy,
        call: Callable[..., Awaitable[Any]],
    ) -> AsyncIterator[tuple[Any, list[Message]]]:
        messages, columns = list(policy.messages), own_copy(dict(row))
        skyrl = {"extras": columns} if self.has("init") else {}
        environment = await call(make, **skyrl)
        try:
            if skyrl:
                messages = list((await call(environment.init, messages))[0])
            elif self.has("reset"):
                said = await call(environment.reset, **accepted(environment.reset, columns))
                messages = with_observation(messages, said)
            yield environment, messages
        finally:
            if callable(close := getattr(environment, "close", None)):
                await call(close)


def kind_of(make: Callable[..., Any]) -> Any:
    """Return a class; of a factory the class that it says it returns, else makes."""
    inner = make
    while isinstance(inner, partial):
        inner = inner.func
    if isinstance(inner, type):
        return inner
    said = inspect.signature(inner).return_annotation
    if isinstance(said, str):  # `from __future__ import annotations`
        said = inspect.get_annotations(inner, eval_str=True)["return"]
    if isinstance(said, type) and said not in (inspect.Signature.empty, Any):
        return said
    try:
        made = make()
    except TypeError as error:
        raise ValueError(
            f"environment {name_of(make)!r} must be a class, or a function that says or shows"
            f" without arguments what it returns ({error}): annotate it, as -> MyEnvironment"
        ) from error
    except Exception as error:
        error.add_note(f"This was environment {name_of(make)!r}, made once to see its class.")
        raise
    if callable(close := getattr(made, "close", None)) and inspect.iscoroutine(ends := close()):
        blocking(ends)
    return type(made)


def beside(row: Mapping[str, Any], environment: Any) -> Mapping[str, Any]:
    """Return a row with an environment, for rewards that name it as a parameter."""
    columns = dict.fromkeys(ENVIRONMENT, environment)
    return row.but(**columns) if isinstance(row, Row) else {**row, **columns}


def with_observation(messages: Sequence[Message], observation: Any) -> list[Message]:
    """Return messages with an observation: text continues a last message of the user's."""
    if observation is None or observation == "":
        return list(messages)
    if isinstance(observation, Mapping):
        return [*messages, observation]
    if not isinstance(observation, str):
        require(
            isinstance(observation, Sequence) and all(isinstance(m, Mapping) for m in observation),
            "an observation",
            "must be text, a message or a list of messages",
            observation,
            "return text",
        )
        return [*messages, *observation]
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and isinstance(last["content"], str):
        return [*messages[:-1], {**last, "content": last["content"] + observation}]
    return [*messages, {"role": "user", "content": observation}]


def _skyrl_result(found: Mapping[str, Any]) -> TurnResult:
    return TurnResult(
        observation=found["observations"] or None, reward=found["reward"], done=found["done"]
    )


async def _led(
    step: Callable[..., Any],
    messages: list[Message],
    policy: Policy,
    call: Callable[..., Awaitable[Any]],
    most: int,
    read: Callable[[Any], TurnResult],
) -> Outcome:
    outcome = Outcome(truncated=True)
    stop: Sequence[str] = ()
    for _ in range(most):
        try:
            message = await policy.chat(messages, stop=stop)
        except ContextFull:
            break
        said = whole(message) if read is _skyrl_result else message
        after = read(await call(step, said["content"]))
        outcome = replace(
            outcome,
            turn_rewards=[*outcome.turn_rewards, after.reward],
            answer=outcome.answer if after.answer is None else after.answer,
            metrics={**outcome.metrics, **after.metrics},
            truncated=after.truncated or not after.done,
        )
        if after.done or after.truncated:
            break
        messages = with_observation([*messages, message], after.observation)
        stop = after.stop
    return outcome


def turn_result(found: Any) -> TurnResult:
    """Return what a `step` returned as a `TurnResult`."""
    if isinstance(found, TurnResult):
        return found
    if isinstance(found, tuple) and len(found) in (3, 4, 5):
        observation, reward, done = found[:3]
        cut = bool(found[3]) if len(found) == 5 else False
        return TurnResult(observation=observation, reward=reward, done=bool(done), truncated=cut)
    raise ValueError(
        "step must return a TurnResult, or (observation, reward, done), but it returned"
        f" {short(found)}: return nemorl.TurnResult(observation=…, reward=…, done=…)"
    )
