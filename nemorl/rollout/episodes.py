"""Episodes side by side (`converse`), and environments of batches as episodes (`episode_of`)."""

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from nemorl.checks import as_number, require, short
from nemorl.data.datasets import prompt_of, with_tools
from nemorl.data.rows import own_copy
from nemorl.data.templates import ROLES, Message
from nemorl.rollout.context import Context, Tools
from nemorl.rollout.conversation import (
    DEFAULT_TURNS,
    ContextFull,
    Conversation,
    Episode,
    Failure,
    Limits,
    Outcome,
    Policy,
    Prompts,
    Turn,
    messages_of,
)
from nemorl.rollout.environment import (
    REMEDY,
    EnvironmentInterface,
    MessageLog,
    Metadata,
    check_counts,
    listed,
)
from nemorl.rollout.generation import Completion, GenerationBackend, Samples, SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.rollout.rounds import Rounds, caller
from nemorl.rollout.signature import ENVIRONMENT, is_async, name_of
from nemorl.user_code import exit_is_error

MOST_FAILED = 0.5
"""Share of conversations that may fail; with more the run ends."""
ATTEMPTS = 3
"""How often a failed conversation is begun at most, where its group needs it."""
LIMITS = ("max_turns", "timeout_s", "discount")
"""Settings of `rollout` that limit a conversation."""
Request = tuple[tuple[int, ...], SamplingParams]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A generator for the conversations of one call of `converse`."""

    generator: Samples
    rounds: Rounds
    shared: dict[Request, asyncio.Task[list[Completion]]] = field(default_factory=dict)

    async def sample(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Completion]:
        """Return `params.n` completions. An error of the generator ends all conversations."""
        try:
            found = await self.generator.sample(prompt, params)
            name = type(getattr(self.generator, "engine", self.generator)).__name__
            fits, remedy = f"must return {params.n} completions", "return `n` for a prompt"
            require(len(found) == params.n, f"{name}.sample", fits, len(found), remedy)
            return found
        except Exception as error:
            self.rounds.fail(error)
            raise

    async def member(
        self, prompt: tuple[int, ...], params: SamplingParams, member: int
    ) -> Completion:
        """Return one sample of a request that is made once for a group."""
        request = prompt, params
        if request not in self.shared:
            self.shared[request] = asyncio.create_task(self.sample(*request))
            self.rounds.begun(self.shared[request])
        return (await asyncio.shield(self.shared[request]))[member]


class Sampler:
    """The `Policy` of one conversation: its first answer to the row's own prompt is one of the
    samples of a request that its group shares; others have seeds of their own.
    """

    def __init__(
        self,
        engine: Engine,
        context: Context,
        params: SamplingParams,
        member: int,
        *,
        group: int = 0,
        group_size: int = 1,
        attempt: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        self.prompt: Sequence[int] = tuple(context.prompt)
        self.messages: Sequence[Message] = [dict(message) for message in context.messages]
        self.group, self.member, self.group_size = group, member, group_size
        self._made = dict[int, Turn]()
        self.over = False
        self.full: ContextFull | None = None
        """Raised where the longest sequence left no room for a response."""
        self._engine, self._context, self._params = engine, context, params
        self._attempt, self._max_tokens = attempt, max_tokens
        self._asked = 0

    async def sample(self, prompt: Sequence[int], *, stop: Sequence[str | int] = ()) -> Completion:
        if self.over:
            raise RuntimeError("the conversation is over: sample before its episode returns")
        prompt = tuple(prompt)  # an episode may go on with its list
        stop = [stop] if isinstance(stop, str) else stop
        params, number = self._params, self._asked
        self._asked += 1
        if stop:
            strings = (each for each in stop if isinstance(each, str))
            ids = (each for each in stop if not isinstance(each, str))
            params = replace(
                params,
                stop_strings=(*params.stop_strings, *strings),
                stop_token_ids=(*params.stop_token_ids, *ids),
            )
        if self._max_tokens is not None:
            room = self._max_tokens - len(prompt)
            if room < 1:
                self.full = ContextFull(
                    f"the conversation has {len(prompt)} tokens, and the longest sequence is"
                    f" {self._max_tokens} (data.max_total_sequence_length; of `nemorl eval`"
                    " generation.max_model_len): raise it"
                )
                raise self.full
            params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        if number or self._attempt or prompt != self.prompt:
            place = (self.member, number, *[self._attempt] * bool(self._attempt))
            params = replace(params, seed=derive_seed(params.seed or 0, *place), n=1)
            completion = (await self._engine.sample(prompt, params))[0]
        else:
            completion = await self._engine.member(prompt, params, self.member)
        self._made[number] = Turn(prompt=prompt, completion=completion)
        return completion

    @property
    def turns(self) -> list[Turn]:
        return [turn for _, turn in sorted(self._made.items())]

    async def chat(
        self, messages: Sequence[Message], *, tools: Tools = (), stop: Sequence[str] = ()
    ) -> Message:
        prompt, asked = self._context.prompt_of(messages, tools)
        stop = [stop] if isinstance(stop, str) else stop
        completion = await self.sample(prompt, stop=stop)
        stops = (*self._params.stop_strings, *stop)
        return self._context.add(prompt, asked, completion, stops)


@runtime_checkable
class LeadsConversations(Protocol):
    """An environment that makes its own episode: of objects for each conversation, or of groups."""

    def episode(self, rounds: Rounds, limits: Limits) -> Episode:
        """Return the episode of one conversation."""


Environment = EnvironmentInterface | LeadsConversations | Episode
"""What leads and judges conversations."""


def converse(
    generator: GenerationBackend,
    environment: Environment,
    prompts: Prompts,
    sampling: SamplingParams,
    *,
    seed: int,
) -> list[Conversation]:
    """Run `sampling.n` episodes for each prompt, and return their conversations, row by row.

    One that raises ends in a `Failure`; it begins again with another seed, up to ATTEMPTS times,
    where less than two members of its group are left. What the generator raises ends all.
    """
    check_environment(environment)
    places = [(index, member) for index in range(len(prompts)) for member in range(sampling.n)]
    found: dict[tuple[int, int], Conversation] = {}
    attempt, missing = 0, places
    while missing and attempt < ATTEMPTS:
        rounds = Rounds()
        talk = _Talk.about(generator, environment, prompts, sampling, seed, rounds, attempt)
        found |= zip(missing, rounds.run(talk.conversations(missing)), strict=True)
        ended = len(_failed(found)) > MOST_FAILED * len(found)
        missing, attempt = [] if ended else _missing(found, sampling.n), attempt + 1
    return [found[place] for place in places]


async def converse_beside(
    generator: Samples,
    environment: Environment,
    prompts: Prompts,
    sampling: SamplingParams,
    *,
    seed: int,
    beside: Rounds,
) -> list[Conversation]:
    """Run `sampling.n` episodes for one prompt, as `converse`, on the event loop of `beside`. A
    group all of whose conversations fail ends nothing.
    """
    (group,) = prompts.groups
    places = [(0, member) for member in range(sampling.n)]
    found: dict[tuple[int, int], Conversation] = {}
    attempt, missing = 0, places
    while missing and attempt < ATTEMPTS:
        rounds = Rounds(beside=beside, number=group)
        talk = _Talk.about(generator, environment, prompts, sampling, seed, rounds, attempt)
        talks = await rounds.led(talk.conversations(missing))
        found |= zip(missing, talks, strict=True)
        missing, attempt = _missing(found, sampling.n), attempt + 1
    return [found[place] for place in places]


def check_environment(environment: Any) -> None:
    """Raise ValueError for what leads no conversations."""
    if not isinstance(environment, EnvironmentInterface | LeadsConversations):
        written = "must be an EnvironmentInterface or an episode, async def episode(row, policy)"
        remedy = "write async def, or wrap a reward function in FunctionalRewardWrapper"
        require(is_async(environment), "environment", written, environment, remedy)


def named(environment: Environment) -> str:
    """Return what errors call it."""
    if isinstance(environment, LeadsConversations):
        return f"environment {getattr(environment, 'name', name_of(environment))!r}"
    kind = "environment" if isinstance(environment, EnvironmentInterface) else "episode"
    return f"{kind} {name_of(environment)!r}"


def _failed(found: Mapping[tuple[int, int], Conversation]) -> list[tuple[int, int]]:
    return [place for place, each in found.items() if isinstance(each.outcome, Failure)]


def _missing(found: Mapping[tuple[int, int], Conversation], size: int) -> list[tuple[int, int]]:
    """Return the failed members of groups in which less than two are left to compare."""
    failed = _failed(found)
    left = Counter(index for index, _ in found.keys() - set(failed))
    return [place for place in failed if left[place[0]] < min(2, size)]


@dataclass(frozen=True, kw_only=True)
class _Talk:
    """What conversations side by side have in common."""

    engine: Engine
    episode: Episode
    name: str
    prompts: Prompts
    sampling: SamplingParams
    seed: int
    attempt: int

    @classmethod
    def about(
        cls,
        generator: Samples,
        environment: Environment,
        prompts: Prompts,
        sampling: SamplingParams,
        seed: int,
        rounds: Rounds,
        attempt: int,
    ) -> "_Talk":
        return cls(
            engine=Engine(generator=generator, rounds=rounds),
            episode=episode_of(environment, rounds, prompts.limits),
            name=named(environment),
            prompts=prompts,
            sampling=sampling,
            seed=seed,
            attempt=attempt,
        )

    def conversations(
        self, places: Sequence[tuple[int, int]]
    ) -> list[Coroutine[Any, Any, Conversation]]:
        sizes = Counter(index for index, _ in places)
        return [self.conversation(*place, sizes[place[0]]) for place in places]

    async def conversation(self, index: int, member: int, size: int) -> Conversation:
        prompts = self.prompts
        row, group = prompts.rows[index], prompts.groups[index] if prompts.groups else index
        policy = Sampler(
            self.engine,
            _context(prompts, index),
            replace(self.sampling, seed=derive_seed(self.seed, group)),
            member,
            group=group,
            group_size=size,
            attempt=self.attempt,
            max_tokens=prompts.limits.max_tokens,
        )
        outcome = await self._outcome(own_copy(row), policy)
        policy.over = True
        turns = tuple(policy.turns)
        found = Conversation(row=row, group=group, member=member, turns=turns, outcome=outcome)
        return replace(found, cut_by=_cut_by(found, policy, prompts.limits))

    async def _outcome(self, row: Mapping[str, Any], policy: Sampler) -> Outcome | Failure:
        try:
            with exit_is_error(self.name):
                outcome = await self.episode(row, policy)
            if policy.full and not policy.turns:
                raise policy.full
            return checked(outcome, self.name, policy, self.prompts.limits)
        except ContextFull as error:
            return Outcome(truncated=True) if policy.turns else Failure(error=error)
        except Exception as error:
            return Failure(error=error)
        except asyncio.CancelledError as error:
            if self.engine.rounds.over:
                raise
            cancelled = RuntimeError(f"{self.name} awaited a task that was cancelled")
            cancelled.__cause__ = error
            return Failure(error=cancelled)


def _cut_by(conversation: Conversation, policy: Sampler, limits: Limits) -> str | None:
    outcome, turns = conversation.outcome, conversation.turns
    if isinstance(outcome, Failure) or not conversation.truncated:
        return None
    if outcome.truncated and not policy.full:
        most = limits.max_turns or DEFAULT_TURNS
        return "rollout.max_turns" if len(turns) == most else "environment"
    length = len(turns[-1].prompt) + len(turns[-1].completion.token_ids)
    full = policy.full is not None or length == limits.max_tokens
    return "data.max_total_sequence_length" if full else "generation.max_new_tokens"


def _context(prompts: Prompts, index: int) -> Context:
    row = prompts.rows[index]
    messages = messages_of(row)
    return Context(
        tokenizer=prompts.tokenizer,
        messages=messages,
        prompt=prompts.token_ids[index],
        plain=not messages or isinstance(prompt_of(row), str),
        tools=prompts.tools or with_tools(row, {}).get("tools", []),
    )


def checked(outcome: Any, name: str, policy: Sampler, limits: Limits) -> Outcome:
    """Return an episode's outcome with its reward."""
    remedy = "return Outcome(reward=…)"
    require(isinstance(outcome, Outcome), name, "must return an Outcome", outcome, remedy)
    if not policy.turns:
        raise ValueError(f"{name} must sample a response: await policy.sample(policy.prompt)")
    turns, count = outcome.turn_rewards, len(policy.turns)
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
        finite = not math.isnan(as_number(value))
        require(finite, f"{name}: metric {key!r}", "must be a finite number", value, "leave it out")
    if not len(turns):
        return outcome
    turns = [as_number(reward) for reward in turns]
    total = sum(limits.discount**turn * reward for turn, reward in enumerate(turns))
    return replace(outcome, turn_rewards=turns, reward=total)


def episode_of(environment: Environment, rounds: Rounds, limits: Limits) -> Episode:
    """Return an environment of batches as an episode: one of several turns is called with those
    that wait for it, any other with all conversations that are left.
    """
    if isinstance(environment, LeadsConversations):
        return environment.episode(rounds, limits)
    if not isinstance(environment, EnvironmentInterface):
        return environment
    said = limits.max_turns or getattr(environment, "max_turns", None)
    call = caller(rounds, named(environment), limits.timeout_s)
    several = (said or 1) > 1 and getattr(environment, "max_turns", None) != 1
    at_once = partial(rounds.at_once, call=call, owner=environment)
    ask = at_once if several else partial(rounds.together, owner=environment)

    def step(asked: Sequence[tuple[MessageLog, Metadata]]) -> Sequence[After | Exception]:
        return judged(environment, asked)

    async def episode(row: Mapping[str, Any], policy: Policy) -> Outcome:
        log, metadata = list(policy.messages), row
        stop: Sequence[str] = ()
        outcome = Outcome(truncated=True)
        for turn in range(said or DEFAULT_TURNS):
            try:
                log.append(await policy.chat(log, stop=stop))
            except ContextFull:
                break
            after = await ask(step, ([*map(whole, log)] if several else list(log), metadata))
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


def limits_read(environment: Environment, max_turns: int | None) -> set[str]:
    """Return which of `LIMITS` act on an environment, with this limit on its turns.

    One that leads conversations may list them in an attribute `reads`; without it, all do.
    """
    if isinstance(environment, LeadsConversations):
        return set(getattr(environment, "reads", LIMITS))
    if not isinstance(environment, EnvironmentInterface):
        return {"discount"}
    own = getattr(environment, "max_turns", None)
    several = (max_turns or own or 1) > 1
    return set() if own == 1 else {"max_turns", "discount", *["timeout_s"] * several}


def whole(message: Message) -> Message:
    """Return a message whose text has the stop string that ended it, as in NeMo RL and SkyRL."""
    stop = message.get("stop_string", "")
    return {**message, "content": message["content"] + stop} if stop else message


@dataclass(frozen=True, kw_only=True)
class After:
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
) -> Sequence[After | Exception]:
    """Have an environment judge conversations. An error is that of all, but one whose process ended
    fails alone: the others are judged again.
    """
    name = type(environment).__name__
    try:
        with exit_is_error(f"environment {name!r}"):
            result = environment.step([log for log, _ in asked], [row for _, row in asked])
        used = ("observations", "metadata", "next_stop_strings")
        check_counts(result, len(asked), name, *used)
        return _of_each(result, len(asked))
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


def _of_each(result: Any, size: int) -> list[After | Exception]:
    failures = getattr(result, "failures", None) or [None] * size
    components = getattr(result, "components", {})  # NeMo RL's own have none
    found = [
        After(
            reward=reward,
            over=bool(over),
            observation=_observation(observation),
            metadata=metadata,
            stop=stop or (),
            answer=answer,
            components={key: listed(values)[i] for key, values in components.items()},
        )
        for i, (reward, over, observation, metadata, stop, answer) in enumerate(
            zip(
                listed(result.rewards),
                listed(result.terminateds),
                result.observations,
                result.metadata,
                result.next_stop_strings,
                result.answers or [None] * size,
                strict=True,
            )
        )
    ]
    return [each if error is None else error for each, error in zip(found, failures, strict=True)]


def _observation(message: Message) -> Message:
    """NeMo RL's role is "environment"."""
    return message if message.get("role") in ROLES else {**message, "role": "user"}
