"""Where rewards come from: environments, and plain functions made into one."""

import asyncio
import math
import weakref
from collections.abc import (
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    Sized,
)
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from nemorl.checks import as_number, closest, short, warn
from nemorl.data.rows import StreamedRows, first_of, for_rows, origin_of
from nemorl.rollout.calls import (
    PROMPT,
    RESPONSE,
    Call,
    EventLoop,
    Signature,
    exit_is_error,
    present_call,
    read_signature,
)
from nemorl.rollout.conversation import REMEDY, ConversationFailed, messages_of
from nemorl.rollout.processes import LATE, LIMIT, Processes

Message = Mapping[str, Any]
MessageLog = Sequence[Message]
"""A conversation: {"role": "user", "content": text}, ..."""
Metadata = Mapping[str, Any]
"""What an environment keeps of a conversation, at first the row."""
AT_ONCE = 64
"""Responses for which an `async` reward is called at once."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentReturn:
    """One entry per conversation."""

    observations: Sequence[Mapping[str, str] | None] | None
    """The message that follows, unless the conversation is over. This and the next two may be
    empty, or None, where all are over.
    """
    metadata: Sequence[Metadata | None] | None
    """Returned to the environment with the next step."""
    next_stop_strings: Sequence[Sequence[str] | None] | None
    """Additional stop strings of the next response."""
    rewards: Sequence[float] | Tensor
    terminateds: Sequence[bool] | Tensor
    """True: the conversation is over."""
    answers: Sequence[str | None] | None = None
    """What was read as the answer, if anything, for the sample log."""
    components: dict[str, list[float]] = field(default_factory=dict)
    """Several rewards, each by name before it is weighted."""
    failures: Sequence[Exception | None] | None = None
    """Why a conversation can't be judged, and is left out of training; None: all can be."""


@runtime_checkable
class EnvironmentInterface(Protocol):
    """Answer and judge responses, one `step` for a batch.

    One of several turns has an attribute `max_turns`, and is called with the conversations that
    wait; any other with all that are left. They end after `max_turns` at the latest (without it,
    DEFAULT_TURNS).
    """

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Metadata]
    ) -> EnvironmentReturn:
        """Judge each conversation, whose last message is the assistant's."""

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Return the batch, maybe changed, and metrics to log.

        It has "rewards" as a tensor [batch], "components", "texts" and "truncated".
        """


class FunctionalRewardWrapper:
    """A reward function `fn(prompt, response, **columns)` as a single-turn environment.

    `fn` gets the texts of prompt and response and the columns that its parameters name. With plural
    parameters (`prompts`, `responses`, `completions`) or batch=True it gets lists, once per batch,
    and returns one number per response: a list, array or tensor. Where the prompt is a
    conversation, it and `completions` are messages, as in TRL. An `async` function is called for
    many responses at once. An attribute `answer_of(response)` says what it read as the answer.
    `name`: for metrics and errors. `settings`: values of parameters that are no columns.

    Raises: ValueError if `fn` can't take a response, names a missing column, or returns anything
    but one finite number per response. Its own exceptions get a note with prompt and response.

    >>> environment = FunctionalRewardWrapper(lambda prompt, response, answer: response == answer)
    >>> log = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    >>> environment.step([log], [{"answer": "2"}]).rewards
    [1.0]
    """

    max_turns = 1

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        batch: bool | None = None,
        name: str | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._read = partial(read_signature, fn, batch=batch, name=name, settings=settings)
        self.signature = self._read()
        self._columns_known = False
        self.fn = fn
        self.name = self.signature.name
        self._processes = Processes(fn) if hasattr(fn, LIMIT) else None
        self._has_limit = hasattr(fn, LIMIT) or getattr(fn, "has_own_limit", False)
        self.each_alone = not self.signature.batch
        if self._processes and (self.signature.awaited or self.signature.batch):
            kind = "async" if self.signature.awaited else "of a batch"
            raise ValueError(
                f"reward {self.name!r} must be a plain function of one response to be judged in"
                f" processes, but it is {kind!r}: make it one, or leave judged_in_processes out"
            )
        if self.signature.awaited:
            self._loop = EventLoop()  # the same for all calls: it may keep connections
            weakref.finalize(self, self._loop.close)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Metadata]
    ) -> EnvironmentReturn:
        size = len(message_log_batch)
        self._check_columns(metadata)
        texts = [(text_of(log[:-1]), str(log[-1]["content"])) for log in message_log_batch]
        given: Sequence[tuple[Any, Any]] = texts
        if getattr(self.fn, "reads_messages", False):
            given = [(log[:-1], log[-1:]) for log in message_log_batch]
        elif self.signature.response == "completions":
            given = [*map(_parted, message_log_batch, metadata, texts)]
        failures: list[Exception | None] = [None] * size
        if self.signature.batch:
            rewards = self._of_batch(given, texts, metadata) if size else []
        else:
            rewards, failures = self._of_each(given, texts, metadata)
        answer_of, answers = getattr(self.fn, "answer_of", lambda response: None), []
        for prompt, response in texts:
            with self._named(_shown(prompt, response)):
                answers.append(answer_of(response))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * size,
            metadata=[None] * size,
            next_stop_strings=[None] * size,
            rewards=rewards,
            terminateds=[True] * size,
            answers=answers,
            failures=failures,
        )

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        return batch, {}

    def check(self, rows: Sequence[Metadata]) -> None:
        """Raise a ValueError that names a row that can't be judged."""
        self._check_columns(rows)
        check_rows(self.fn, rows)
        if check_row := getattr(self.fn, "check_row", None):
            for_rows(rows, check_row)

    def _check_columns(self, rows: Sequence[Metadata]) -> None:
        if rows and not self._columns_known:
            self.signature = self._read(there={*chain.from_iterable(rows)})
            self._columns_known = True
        _require_columns(self.signature, rows)

    def _of_each(
        self,
        given: Sequence[tuple[Any, Any]],
        texts: Sequence[tuple[str, str]],
        rows: Sequence[Metadata],
    ) -> tuple[list[float], list[Exception | None]]:
        calls = [self.signature.arguments(*one, row) for one, row in zip(given, rows, strict=True)]
        rewards, failures = list[float](), list[Exception | None]()
        late: list[tuple[str, str]] = []
        results: Generator[Callable[[], Any]] = (partial(self.fn, **call) for call in calls)
        if self._processes:
            results = self._processes.run(calls)
        with closing(results):
            answers: Iterable[Any] = map(self._answer, results, texts)
            if self.signature.awaited:
                answers = self._loop.run(self._awaited(calls, texts))
            for answer, text in zip(answers, texts, strict=True):
                failed = isinstance(answer, ConversationFailed)
                if answer is LATE:
                    late.append(text)
                rewards.append(0.0 if failed or answer is LATE else self._number(answer, *text))
                failures.append(answer if failed else None)
        if self._processes and late:
            warn(
                f"reward {self.name!r} took longer than {self._processes.seconds:g} s for"
                f" {len(late)} of {len(texts)} responses, which count 0, as for {_shown(*late[0])}"
            )
        return rewards, failures

    def _answer(self, result: Callable[[], Any], text: tuple[str, str]) -> Any:
        try:
            with self._named(_shown(*text)):
                return result()
        except ConversationFailed as error:
            return error

    async def _awaited(
        self, calls: Sequence[dict[str, Any]], texts: Sequence[tuple[str, str]]
    ) -> list[Any]:
        free = asyncio.Semaphore(AT_ONCE)

        async def one(call: dict[str, Any], text: tuple[str, str]) -> Any:
            async with free:
                try:
                    with self._named(_shown(*text)):
                        return await self._in_time(self.fn(**call))
                except ConversationFailed as error:
                    return error

        tasks = [asyncio.ensure_future(one(*each)) for each in zip(calls, texts, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # after an error none goes on
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        if self._has_limit:
            return await work
        call = Call(f"reward {self.name!r}", present_call().seconds, conversations=0)
        async with call.limited():
            call.part()
            return await work

    @contextmanager
    def _named(self, shown: str) -> Iterator[None]:
        call = present_call()
        most = 2 * call.seconds if self.signature.awaited else None  # else `_in_time` is earlier
        call.part(f"reward {self.name!r}", most=math.inf if self._has_limit else most)
        try:
            with exit_is_error(f"reward {self.name!r}"):
                yield
        except Exception as error:
            error.add_note(f"This was reward {self.name!r} for {shown}.")
            if "main thread" in str(error):
                error.add_note(
                    "Rewards are called in a thread, where limits by signals, as of math-verify,"
                    " must be off (None): rollout.timeout_s is the limit."
                )
            if self.signature.response == "completions":
                error.add_note(
                    "Where the prompt is a conversation, completions are lists of messages, as in"
                    " TRL; a parameter called responses gets texts."
                )
            raise

    def _of_batch(
        self,
        pairs: Sequence[tuple[Any, Any]],
        texts: Sequence[tuple[str, str]],
        rows: Sequence[Metadata],
    ) -> list[float]:
        prompts, responses = map(list, zip(*pairs, strict=True))
        names = dict.fromkeys(chain.from_iterable(rows))
        given = self.signature.arguments(
            prompts, responses, {name: [row.get(name) for row in rows] for name in names}
        )
        first = f"a batch of {len(texts)} responses, of which the first is for {_shown(*texts[0])}"
        with self._named(first):
            result = self.fn(**given)
            if self.signature.awaited:
                result = self._loop.run(self._in_time(result))
        numbers = result.tolist() if hasattr(result, "tolist") else result
        found: int | str = short(result)
        if isinstance(numbers, Iterable) and not isinstance(numbers, str | Mapping | Set):
            if not isinstance(numbers, Sized):  # it may have no end
                numbers = [*islice(numbers, len(texts) + 1)]
            found = len(numbers)
        if found != len(texts):
            raise ValueError(
                f"reward {self.name!r} must return a list with one number per response, but it"
                f" returned {found} for {first}: return one for each"
            )
        return [self._number(number, *text) for number, text in zip(numbers, texts, strict=True)]

    def _number(self, result: Any, prompt: str, response: str) -> float:
        remedy = REMEDY
        if isawaitable(result):
            remedy = "write the function as async def, so that it is awaited"
            getattr(result, "close", bool)()
        reward = as_number(result)
        if math.isnan(reward):
            raise ValueError(
                f"reward {self.name!r} must be a finite number, but it is {short(result)} for"
                f" {_shown(prompt, response)}: {remedy}"
            )
        return reward


def _require_columns(signature: Signature, rows: Sequence[Metadata]) -> None:
    wanted = [name for name, required in signature.columns.items() if required]
    by_place = [
        (what, name)
        for what, name in (("prompt", signature.prompt), ("response", signature.response))
        if name and name not in (*PROMPT, *RESPONSE)
    ]
    for number, row in enumerate(rows):
        for what, name in by_place:
            if name in row:
                raise ValueError(
                    f"reward {signature.name!r} would get the {what} as its parameter {name!r}, but"
                    f" there is a column of that name, too: call the parameter {what!r}"
                )
        missing = next((name for name in wanted if row.get(name) is None), None)
        if missing is not None:
            hint = "" if missing in row else closest(missing, map(str, row))
            raise ValueError(
                f"reward {signature.name!r} wants the column {missing!r}, but"
                f" {origin_of(row, number)} has only {sorted(row)}{hint}: add it or leave the"
                " row out"
            )


def check_rows(environment: Any, rows: Sequence[Metadata]) -> Any:
    """Return rows after an environment's `check(rows)`; a stream's are checked as they come."""
    if check := getattr(environment, "check", None):
        check(first_of(rows))
        if isinstance(rows, StreamedRows):
            return rows.mapped(lambda row: (check([row]), row)[1])
    return rows


def check_counts(result: Any, count: int, name: str, **more: Any) -> None:
    """Raise ValueError unless there is one of everything, and of the lists `more`, per
    conversation.
    """
    # NeMo RL's own have no components and failures.
    optional = [each for each in ("answers", "failures") if getattr(result, each, None)]
    lists = {each: getattr(result, each) for each in ("rewards", "terminateds", *optional)}
    lists |= more | getattr(result, "components", {})
    for field_name, values in lists.items():
        _require_count(values, count, f"environment {name!r}", field_name)


def reward_tensor(
    values: Any, count: int, name: str, field_name: str = "rewards"
) -> Float[Tensor, "batch"]:
    """Return rewards of `name` as float32 [count]. Raises: ValueError unless finite."""
    _require_count(values, count, name, field_name)
    values = listed(values)
    rewards = list(map(as_number, values))
    for index, reward in enumerate(rewards):
        if math.isnan(reward):
            raise ValueError(
                f"{name} must return finite {field_name}, but it returned"
                f" {short(values[index])} for conversation {index}: {REMEDY}"
            )
    return torch.tensor(rewards, dtype=torch.float32)


def _require_count(values: Any, count: int, name: str, field_name: str) -> None:
    try:
        found = len(values)
    except TypeError as error:
        raise ValueError(
            f"{name} must return {field_name} as a list, but it returned"
            f" {short(values)}: return a list"
        ) from error
    if found != count:
        raise ValueError(
            f"{name} must return one of {field_name} per conversation, but it"
            f" returned {found} for {count} conversations: return one for each"
        )


def listed(values: Any) -> list[Any]:
    """Return values as a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _parted(log: MessageLog, row: Metadata, texts: tuple[str, str]) -> tuple[Any, Any]:
    prompt = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
    if prompt is None or isinstance(prompt, str):
        return texts
    begin = min(len(messages_of(row)) or len(log), len(log) - 1)
    return [dict(message) for message in log[:begin]], [dict(message) for message in log[begin:]]


def _shown(prompt: str, response: str) -> str:
    return f"prompt {short(prompt, 500)} and response {short(response, 500)}"


def text_of(log: MessageLog) -> str:
    """Return a conversation as text."""
    if len(log) == 1:
        return str(log[0].get("content") or "")
    return "\n".join(f"{each['role']}: {each.get('content') or ''}" for each in log)
