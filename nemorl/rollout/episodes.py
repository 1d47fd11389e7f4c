"""Episodes side by side (`converse`), and environments as episodes (`episode_of`)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nemorl.checks import require
from nemorl.data.datasets import as_messages, prompt_of
from nemorl.data.rows import own_copy
from nemorl.rollout.conversation import Conversation, Episode, Failure, Outcome, Policy, Turn
from nemorl.rollout.environment import (
    ONE_TURN,
    EnvironmentInterface,
    MessageLog,
    Metadata,
    check_counts,
    listed,
)
from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.rollout.rounds import Rounds
from nemorl.rollout.signature import is_async, name_of
from nemorl.user_code import exit_is_error

Request = tuple[tuple[int, ...], SamplingParams]
"""A prompt, and how it is sampled."""
Asked = tuple[tuple[int, ...], SamplingParams, int]
"""A request, and which of its samples is the conversation's."""


class Sampler:
    """The `Policy` of one conversation.

    Its first turn, if from the row's own prompt, is one of the samples of a request that its group
    shares. Other turns have seeds of their own: nothing depends on other conversations.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        member: int,
        ask: Callable[[Asked], Awaitable[Completion]],
    ) -> None:
        """params: of the group, with its seed."""
        self.prompt: Sequence[int] = tuple(prompt)
        self.turns = list[Turn]()
        self._params, self._member, self._ask, self._asked = params, member, ask, 0

    async def sample(self, prompt: Sequence[int], *, stop: Sequence[str] = ()) -> Completion:
        prompt = tuple(prompt)  # an episode may go on with its list
        params, member, number = self._params, self._member, self._asked
        self._asked += 1
        if number or prompt != self.prompt:
            seed = derive_seed(params.seed or 0, member, number)
            params, member = replace(params, seed=seed, n=1), 0
        if stop:
            params = replace(params, stop_strings=(*params.stop_strings, *stop))
        completion = await self._ask((prompt, params, member))
        self.turns.append(Turn(prompt=prompt, completion=completion))
        return completion


def converse(
    generator: GenerationBackend,
    environment: EnvironmentInterface | Episode,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    seed: int,
    groups: Sequence[int],
) -> list[Conversation]:
    """Run `sampling.n` episodes for each row, and return their conversations, row by row.

    groups: the number of each row's group in the run, from which its seed comes.

    An episode that raises an exception ends in a `Failure`. What the generator or an environment
    raises ends all.
    """
    rounds, name = Rounds(), name_of(environment)
    ask = partial(rounds.ask, partial(_generated, generator, {}))
    if isinstance(environment, EnvironmentInterface):
        episode = episode_of(environment, rounds)
    else:
        written = "must be an EnvironmentInterface or an episode, async def episode(row, policy)"
        remedy = "write async def, or wrap a reward function in FunctionalRewardWrapper"
        require(is_async(environment), "environment", written, environment, remedy)
        episode = environment

    async def conversation(index: int, params: SamplingParams, member: int) -> Conversation:
        policy = Sampler(prompts[index], params, member, ask)
        outcome: Outcome | Failure
        try:
            with exit_is_error(f"episode {name!r}"):
                outcome = await episode(own_copy(rows[index]), policy)
            returns, remedy = f"episode {name!r}", "return Outcome(reward=…)"
            require(
                isinstance(outcome, Outcome), returns, "must return an Outcome", outcome, remedy
            )
        except Exception as error:
            outcome = Failure(error=error)
        except asyncio.CancelledError as error:
            if rounds.over:
                raise
            cancelled = RuntimeError(f"episode {name!r} awaited a task that was cancelled")
            cancelled.__cause__ = error
            outcome = Failure(error=cancelled)
        return Conversation(
            row=rows[index],
            group=groups[index],
            member=member,
            turns=tuple(policy.turns),
            outcome=outcome,
        )

    work = []
    for index in range(len(rows)):
        params = replace(sampling, seed=derive_seed(seed, groups[index]))
        work += [conversation(index, params, member) for member in range(sampling.n)]
    return rounds.run(work)


def episode_of(environment: EnvironmentInterface, rounds: Rounds) -> Episode:
    """Return an environment as an episode of one turn: one `step` for all of a round."""
    judge = partial(_judged, environment)

    async def episode(row: Mapping[str, Any], policy: Policy) -> Outcome:
        completion = await policy.sample(policy.prompt)
        messages = as_messages(prompt_of(row), "prompt", "user")
        log = [*messages, {"role": "assistant", "content": completion.text}]
        return await rounds.ask(judge, (log, row))

    return episode


def _generated(
    generator: GenerationBackend,
    drawn: dict[Request, list[Completion]],
    asked: Sequence[Asked],
) -> list[Completion]:
    """Answer what is asked, with one request for the members of a group, whose samples `drawn`
    keeps for members that ask later.
    """
    new = [one for one in dict.fromkeys((p, params) for p, params, _ in asked) if one not in drawn]
    prompts, params = [prompt for prompt, _ in new], [params for _, params in new]
    found = generator.generate(prompts, params) if new else []
    name, count = type(generator).__name__, sum(each.n for each in params)
    fits, remedy = f"must return {count} completions", "return `n` for each prompt"
    require(len(found) == count, f"{name}.generate", fits, len(found), remedy)
    rest = iter(found)
    drawn |= {one: [next(rest) for _ in range(one[1].n)] for one in new}
    return [drawn[prompt, params][member] for prompt, params, member in asked]


def _judged(
    environment: EnvironmentInterface, asked: Sequence[tuple[MessageLog, Metadata]]
) -> list[Outcome]:
    """Have an environment judge conversations, each after one response."""
    size, name = len(asked), type(environment).__name__
    with exit_is_error(f"environment {name!r}"):
        result = environment.step([log for log, _ in asked], [row for _, row in asked])
    check_counts(result, size, name)
    if not all(result.terminateds):
        raise ValueError(f"environment {name!r} {ONE_TURN}")
    columns = {key: listed(values) for key, values in result.components.items()}
    answers = result.answers or [None] * size
    return [
        Outcome(reward=reward, answer=answer, components={k: v[i] for k, v in columns.items()})
        for i, (reward, answer) in enumerate(zip(listed(result.rewards), answers, strict=True))
    ]
