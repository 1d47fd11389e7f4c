"""Conversations that are judged together: a `Cohort`, and the `Policy` of each."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from nemorl.checks import as_number, require, short
from nemorl.data.datasets import prompt_of, with_tools
from nemorl.data.rows import own_copy
from nemorl.data.templates import Message
from nemorl.rollout.calls import BatchCalls, Call, Question, call_limited, exit_is_error, name_of
from nemorl.rollout.context import Context, Tools
from nemorl.rollout.conversation import (
    DEFAULT_TURNS,
    REMEDY,
    ContextFull,
    Conversation,
    Episode,
    Failure,
    Limits,
    Outcome,
    Prompts,
    Turn,
    messages_of,
    text_of,
)
from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams
from nemorl.rollout.random import derive_seed

T = TypeVar("T")
_PLACE: ContextVar[int] = ContextVar("_PLACE", default=0)
"""Of a conversation in its cohort."""


@dataclass(kw_only=True, eq=False)
class Cohort:
    """Conversations side by side, and what they share."""

    generator: GenerationBackend
    awake: asyncio.Event
    """Set while the generator takes new requests."""
    prompts: Prompts
    sampling: SamplingParams
    seed: int
    name: str
    """Of the environment, in errors."""
    judge: BatchCalls | None
    free: asyncio.Semaphore
    """Of threads."""
    attempt: int = 0
    over: bool = False
    _open: int = 0
    """Conversations that have not ended, of which some are `_outside` of a room."""
    _outside: int = 0
    _asked: list[Question] = field(default_factory=list)
    _shared: dict[tuple[int, SamplingParams], asyncio.Task[list[Completion]]] = field(
        default_factory=dict
    )

    @property
    def limits(self) -> Limits:
        return self.prompts.limits

    async def run(
        self, episode: Episode, places: Sequence[tuple[int, int]], *, timed: bool
    ) -> list[Conversation]:
        """Return the conversations of places: the number of a prompt, and that of a member.

        timed: whether the episode is the user's own, whose time between samples has a limit.
        Raises: an error of the generator, which ends all.
        """
        self._ended = asyncio.get_running_loop().create_future()
        self._open = len(places)
        sizes = Counter(index for index, _ in places)

        async def conversation(number: int, index: int, member: int) -> Conversation:
            _PLACE.set(number)
            try:
                group = self.prompts.groups[index] if self.prompts.groups else index
                params = replace(self.sampling, seed=derive_seed(self.seed, group))
                policy = RecordingPolicy(self, (index, group, member), params, sizes[index])
                outcome = await self._outcome(episode, policy, timed)
                policy.over = True
                return policy.conversation(outcome)
            finally:
                self._open -= 1
                self._judge_if_all_wait()

        tasks = [
            asyncio.create_task(conversation(number, *place)) for number, place in enumerate(places)
        ]
        try:
            await self._ended
            return [task.result() for task in tasks]
        finally:
            self.over = True
            left = [task for task in (*tasks, *self._shared.values()) if not task.done()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def ask_together(self, item: Any) -> Any:
        """Return the judge's answer to an item, one of a batch of all conversations that are left.

        Raises: the answer if it is an error.
        """
        self._asked.append(question := self._question(item))
        self._judge_if_all_wait()
        return _result(await question.answer)

    async def ask(self, item: Any) -> Any:
        """Return the judge's answer to an item, one of a batch of those that wait at the time."""
        assert self.judge is not None
        question = self._question(item)
        self.judge.ask([question], self.limits.timeout_s, merged=True)
        return _result(await question.answer)

    async def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Return the result of a function of the user's. Raises: EnvironmentTimeout."""
        call = Call(f"{self.name}: {name_of(function)}", self.limits.timeout_s)
        return await call_limited(call, self.free, function, *args, **named)

    @asynccontextmanager
    async def room(self, room: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Enter a context; `ask_together` does not wait for conversations that are outside."""
        async with AsyncExitStack() as stack:
            self._outside += 1
            self._judge_if_all_wait()
            try:
                found = await stack.enter_async_context(room)
            finally:
                self._outside -= 1
            yield found

    async def sample(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Completion]:
        while not self.awake.is_set():  # it may sleep again before this task goes on
            await self.awake.wait()
        try:
            found = await self.generator.sample(prompt, params)
            what, fits = f"{name_of(self.generator)}.sample", f"must return {params.n} completions"
            require(len(found) == params.n, what, fits, len(found), "return `n` for a prompt")
            return found
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)
            raise

    async def member(
        self, index: int, prompt: tuple[int, ...], params: SamplingParams, member: int
    ) -> Completion:
        """Return one sample of a request that is made once for a group."""
        if (index, params) not in self._shared:
            self._shared[index, params] = asyncio.create_task(self.sample(prompt, params))
        return (await asyncio.shield(self._shared[index, params]))[member]

    async def _outcome(
        self, episode: Episode, policy: "RecordingPolicy", timed: bool
    ) -> Outcome | Failure:
        call = policy.call = Call(self.name, self.limits.timeout_s) if timed else None
        try:
            async with call.limited() if call else nullcontext():
                if call:
                    call.part()
                with exit_is_error(self.name):
                    found = await episode(own_copy(policy.row), policy)
            if policy.full and not policy.turns:
                raise policy.full
            return _checked(found, self.name, len(policy.turns), self.limits)
        except ContextFull as error:
            return Outcome(truncated=True) if policy.turns else Failure(error=error)
        except Exception as error:
            return Failure(error=error)
        except asyncio.CancelledError as error:
            if self.over:
                raise
            cancelled = RuntimeError(f"{self.name} awaited a task that was cancelled")
            cancelled.__cause__ = error
            return Failure(error=cancelled)

    def _question(self, item: Any) -> Question:
        first = next(iter(self.prompts.groups), 0)
        return Question(
            place=(first, _PLACE.get()),
            item=item,
            answer=asyncio.get_running_loop().create_future(),
        )

    def _judge_if_all_wait(self) -> None:
        if self._asked and len(self._asked) + self._outside >= self._open:
            assert self.judge is not None
            batch, self._asked = self._asked, []
            self.judge.ask(batch, self.limits.timeout_s, merged=self.judge.each_alone)
        elif not self._open and not self._ended.done():
            self._ended.set_result(None)


def _result(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _checked(outcome: Any, name: str, count: int, limits: Limits) -> Outcome:
    remedy = "return Outcome(reward=…)"
    require(isinstance(outcome, Outcome), name, "must return an Outcome", outcome, remedy)
    if not count:
        raise ValueError(f"{name} must sample a response: await policy.sample(policy.prompt)")
    turns = outcome.turn_rewards
    if len(turns):
        fits, remedy = f"must be one for each of {count} turns", "return 0.0 where there is none"
        require(len(turns) == count, f"{name}: turn_rewards", fits, len(turns), remedy)
        fits, remedy = "must be left out beside turn_rewards", "it is their discounted sum"
        require(not outcome.reward, f"{name}: reward", fits, outcome.reward, remedy)
    for reward in (outcome.reward, *turns, *outcome.components.values()):
        if math.isnan(as_number(reward)):
            raise ValueError(
                f"{name} must return finite rewards, but it returned {short(reward)}: {REMEDY}"
            )
    for key, value in outcome.metrics.items():
        require(
            not math.isnan(as_number(value)),
            f"{name}: metric {key!r}",
            "must be a finite number",
            value,
            "leave it out",
        )
    if not len(turns):
        return outcome
    turns = [as_number(reward) for reward in turns]
    return replace(
        outcome,
        turn_rewards=turns,
        reward=sum(limits.discount**turn * reward for turn, reward in enumerate(turns)),
    )


def with_stops(
    params: SamplingParams, stop: Sequence[str | int], change: Mapping[str, Any]
) -> SamplingParams:
    """Return parameters that stop at further strings and tokens, with other changes."""
    strings, ids = list(params.stop_strings), list(params.stop_token_ids)
    for each in [stop] if isinstance(stop, str) else stop or ():
        strings.append(each) if isinstance(each, str) else ids.append(each)
    return replace(params, **change, stop_strings=tuple(strings), stop_token_ids=tuple(ids))


class RecordingPolicy:
    """The `Policy` of one conversation: its first answer to the row's own prompt is one of the
    samples of a request that its group shares; others have seeds of their own.
    """

    def __init__(
        self, cohort: Cohort, place: tuple[int, int, int], params: SamplingParams, group_size: int
    ) -> None:
        """place: numbers of the prompt in the cohort, of the group and of the member."""
        self.index, self.group, self.member = place
        prompts = cohort.prompts
        self.row = prompts.rows[self.index]
        messages = messages_of(self.row)
        self._context = Context(
            tokenizer=prompts.tokenizer,
            messages=messages,
            prompt=prompts.token_ids[self.index],
            plain=not messages or isinstance(prompt_of(self.row), str),
            tools=prompts.tools or with_tools(self.row, {}).get("tools", []),
        )
        self.prompt: Sequence[int] = tuple(self._context.prompt)
        self.messages: Sequence[Message] = [dict(each) for each in messages]
        self.group_size, self.over = group_size, False
        self.full: ContextFull | None = None
        """Raised where the longest sequence left no room for a response."""
        self.call: Call | None = None
        """The episode's own, which pauses while it samples."""
        self._cohort, self.params = cohort, params
        self._made = dict[int, Turn]()
        self._asked = self._waiting = 0

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        stop: Sequence[str | int] = (),
        change: Mapping[str, Any] = MappingProxyType({}),
    ) -> Completion:
        """Return the answer to token ids; `change`: fields of SamplingParams for it alone."""
        if self.over:
            raise RuntimeError("the conversation is over: sample before its episode returns")
        prompt = tuple(prompt)  # an episode may go on with its list
        params, number = self._with_limits(prompt, stop, change), self._asked
        self._asked, self._waiting = self._asked + 1, self._waiting + 1
        if self.call:
            self.call.pause()
        try:
            completion = await self._completion(number, prompt, params)
        finally:
            self._waiting -= 1
            if self.call and not self._waiting:
                self.call.part()
        self._made[number] = Turn(prompt=prompt, completion=completion)
        return completion

    async def _completion(
        self, number: int, prompt: tuple[int, ...], params: SamplingParams
    ) -> Completion:
        attempt = self._cohort.attempt
        if not number and not attempt and prompt == self.prompt:
            return await self._cohort.member(self.index, prompt, params, self.member)
        place = (self.member, number, *[attempt] * bool(attempt))
        params = replace(params, seed=derive_seed(params.seed or 0, *place), n=1)
        return (await self._cohort.sample(prompt, params))[0]

    def forget(self, completion: Completion) -> None:
        """Take back what was recorded of an answer that nobody saw."""
        self._made = {n: t for n, t in self._made.items() if t.completion is not completion}

    def _with_limits(
        self, prompt: Sequence[int], stop: Sequence[str | int], change: Mapping[str, Any]
    ) -> SamplingParams:
        params, most = with_stops(self.params, stop, change), self._cohort.limits.max_tokens
        if most is None or len(prompt) + params.max_new_tokens <= most:
            return params
        if len(prompt) >= most:
            self.full = ContextFull(
                f"the conversation has {len(prompt)} tokens, and the longest sequence is"
                f" {most} (data.max_total_sequence_length; of `nemorl eval`"
                " generation.max_model_len): raise it"
            )
            raise self.full
        return replace(params, max_new_tokens=most - len(prompt))

    @property
    def turns(self) -> list[Turn]:
        return [turn for _, turn in sorted(self._made.items())]

    async def chat(
        self, messages: Sequence[Message], *, tools: Tools = (), stop: Sequence[str] = ()
    ) -> Message:
        prompt, asked = self._context.prompt_of(messages, tools)
        stop = [stop] if isinstance(stop, str) else stop
        completion = await self.sample(prompt, stop=stop)
        return self._context.add(prompt, asked, completion, (*self.params.stop_strings, *stop))

    def conversation(self, outcome: Outcome | Failure) -> Conversation:
        found = Conversation(
            row=self.row,
            group=self.group,
            member=self.member,
            turns=tuple(self.turns),
            outcome=outcome,
            text=text_of(self.messages),
        )
        return replace(found, cut_by=self._cut_by(found)) if found.truncated else found

    def _cut_by(self, found: Conversation) -> str | None:
        outcome, turns, limits = found.outcome, found.turns, self._cohort.limits
        if isinstance(outcome, Failure):
            return None
        if outcome.truncated and not self.full:
            most = limits.max_turns or DEFAULT_TURNS
            return "rollout.max_turns" if len(turns) == most else "environment"
        length = len(turns[-1].prompt) + len(turns[-1].completion.token_ids)
        full = self.full is not None or length == limits.max_tokens
        return "data.max_total_sequence_length" if full else "generation.max_new_tokens"
