"""A session: what one client asks of a policy, and which tokens each of its messages was."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from jinja2 import TemplateError

from nemorl.data.templates import Message
from nemorl.rollout.cohort import RecordingPolicy, with_stops
from nemorl.rollout.context import Context, before_calls
from nemorl.rollout.conversation import ContextFull
from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams
from nemorl.runtime.serve.wire import Ask, Refused, Sampled, demand, new_id

T = TypeVar("T")
OFF: dict[str, Any] = {"repetition_penalty": 1, "logit_bias": {}}
"""What the engine lacks has no effect at 0, or at these."""
RETRIES = 64
"""Requests of a session whose answers are kept for retries."""


@dataclass(frozen=True, kw_only=True)
class Unrecorded:
    """A policy whose samples nobody trains on."""

    generator: GenerationBackend
    params: SamplingParams
    longest: int | None

    async def sample(
        self, prompt: Sequence[int], *, stop: Sequence[str | int] = (), change: Mapping[str, Any]
    ) -> Completion:
        """Return the answer to token ids. Raises: ContextFull."""
        if self.longest is not None and len(prompt) >= self.longest:
            raise ContextFull("leave room for an answer")
        return (await self.generator.sample(prompt, with_stops(self.params, stop, change)))[0]

    def forget(self, completion: Completion) -> None:
        """Do nothing."""


@dataclass(eq=False)
class Session:
    """Answers the requests of one client by a policy, on the event loop that made it.

    What a client writes as the assistant's message is looked up among the answers that it got, so
    that the prompt goes on with their tokens; what it has changed is rendered anew.
    """

    policy: RecordingPolicy | Unrecorded
    tokenizer: Any
    _: KW_ONLY
    model: str = "policy"
    longest: int | None = None
    free: bool = False
    """Requests may change how tokens are sampled, as nobody trains on them."""
    max_turns: int | None = None
    most: int = sys.maxsize
    """Answers that are remembered."""

    def __post_init__(self) -> None:
        self.cut = False
        """Whether a request came after the last turn."""
        self.asked: dict[Any, asyncio.Task[list[Sampled]]] = {}
        """The latest requests, on the server's loop."""
        self.earlier: dict[str, Sequence[Message]] = {}
        self._loop, self._here, self._turns = asyncio.get_running_loop(), copy_context(), 0
        self.busy = 0
        """Clients that wait for an answer, on the server's loop."""
        self._context = Context(self.tokenizer, messages=(), prompt=(), most=self.most)
        self._said: dict[str, Message] = {}
        """The policy's own message for each answer as a client may write it."""
        self._open: dict[Any, Any] = {}
        """Tasks of this loop, by the server's task that waits for each and must learn how it ended:
        an answer may be recorded while it is being abandoned.
        """

    async def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a coroutine on the session's loop, from any other."""
        run, kept = asyncio.run_coroutine_threadsafe, self._kept(asyncio.current_task(), work)
        try:
            found = self._here.copy().run(run, kept, self._loop)
        except RuntimeError as error:  # the loop has ended
            kept.close()
            raise Refused("the policy has ended: stop asking", status=503) from error
        return await asyncio.wrap_future(found)

    async def _kept(self, asker: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._open[asker] = asyncio.current_task()
        try:
            return await work()
        finally:
            del self._open[asker]

    def close(self) -> None:
        """End the requests that are open. On the session's loop."""
        for task in self._open.values():
            task.cancel()

    async def answer(self, ask: Ask) -> list[Sampled]:
        """Return `ask.n` answers. Raises: Refused."""
        (prompt, asked), change = self._prompt(ask), self._change(ask)
        tokens, size = (*prompt, *ask.stop_token_ids), len(self.tokenizer)
        # An engine that refuses a prompt would end all conversations.
        fits = len(prompt) > 0 and min(tokens) >= 0 and max(tokens) < size
        demand(fits, "the prompt", f"must be token ids below {size}", "use this model's tokenizer")
        self._turns += ask.n
        if self.max_turns is not None and self._turns > self.max_turns:
            self.cut = True
            most = f"the conversation has had its {self.max_turns} answers (rollout.max_turns)"
            raise Refused(f"{most}: end it", code="max_turns")
        stop: tuple[str | int, ...] = (*ask.stop, *ask.stop_token_ids)
        tasks = []
        for i in range(ask.n):
            own = change | ({"seed": change["seed"] + i} if "seed" in change else {})
            tasks.append(asyncio.ensure_future(self.policy.sample(prompt, stop=stop, change=own)))
        try:
            found = await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            self._forget([each for each in ends if isinstance(each, Completion)])
            if isinstance(error, ContextFull):  # in words that clients look for
                text = (
                    f"prompt is too long: {len(prompt)} tokens > {self.longest} maximum. This"
                    f" model's maximum context length is {self.longest} tokens: {error}"
                )
                raise Refused(text, code="context_length_exceeded") from error
            if isinstance(error, ValueError):
                raise Refused(str(error)) from error
            raise
        return [self._answer(prompt, asked, each, ask.stop) for each in found]

    def ask(self, key: Any, task: asyncio.Task[list[Sampled]]) -> None:
        """Remember a request, whose retries get the same answers, unless it fails."""

        def settle(task: asyncio.Task[list[Sampled]]) -> None:
            if task.cancelled() or task.exception():
                self._drop(key, task)

        self.asked[key] = task
        task.add_done_callback(settle)
        _trim(self.asked, min(self.most, RETRIES))

    def abandon(self, key: Any, task: asyncio.Task[list[Sampled]]) -> None:
        """End a request of which nobody waits for the answers, or forget these."""
        self._drop(key, task)
        task.add_done_callback(self._take_back)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cancel, task)

    def _drop(self, key: Any, task: asyncio.Task[list[Sampled]]) -> None:
        if self.asked.get(key) is task:  # not a later request that is equal
            del self.asked[key]

    def _cancel(self, asker: Any) -> None:
        if task := self._open.get(asker):
            task.cancel()

    def _take_back(self, task: asyncio.Task[list[Sampled]]) -> None:
        # It may have been answered while it was being cancelled.
        if not task.cancelled() and not task.exception():
            found = [each.completion for each in task.result()]
            self._loop.call_soon_threadsafe(self._forget, found)

    def _forget(self, completions: Sequence[Completion]) -> None:
        for each in completions:
            self.policy.forget(each)

    async def count(self, ask: Ask) -> int:
        """Return the number of tokens of a prompt. Raises: Refused."""
        return len(self._prompt(ask)[0])

    def keep(self, id: Any, ask: Ask, answer: Sampled) -> None:
        """Remember an answer, which later requests may name by its id."""
        self.earlier[id] = [*ask.messages[ask.instructed :], answer.message]
        _trim(self.earlier, self.most)

    def _prompt(self, ask: Ask) -> tuple[tuple[int, ...], Any]:
        if ask.token_ids:
            return tuple(ask.token_ids), None
        last, must = ask.messages[-1]["role"], "must not end with the assistant's"
        demand(last != "assistant", "messages", must, "no answer continues another")
        try:
            return self._context.prompt_of(self._recorded(ask.messages), ask.tools)
        except (ValueError, TypeError, TemplateError) as error:
            text = f"messages do not fit the chat template: {error}"
            raise Refused(text, field="messages") from error

    def _recorded(self, messages: Sequence[Message]) -> list[Message]:
        found, names = list[Message](), dict[Any, str]()
        for each in messages:
            calls = each.get("tool_calls", ())
            names |= {call["id"]: call["function"]["name"] for call in calls}
            if each["role"] == "assistant":
                exact, loose = _keys(each)
                plain = [{k: v for k, v in call.items() if k != "id"} for call in calls]
                bare = {**each, "tool_calls": plain} if plain else each
                each = self._said.get(exact) or self._said.get(loose) or bare
            elif each["role"] == "tool":
                name = names.get(each.get("tool_call_id"), "")
                each = {"role": "tool", "name": name, "content": each["content"]}
            found.append(each)
        return found

    def _answer(
        self, prompt: Sequence[int], asked: Any, completion: Completion, stops: Sequence[str]
    ) -> Sampled:
        message: Message = {"role": "assistant", "content": completion.text}
        if asked is not None:
            stops = (*self.policy.params.stop_strings, *stops)
            message = self._context.add(tuple(prompt), asked, completion, stops)
        calls = message.get("tool_calls", ())
        good = [{"id": new_id("call_"), **each} for each in calls if each["type"] == "function"]
        text = message["content"] or ""
        answer = Sampled(
            content=before_calls(text) if good and len(good) == len(calls) else text,
            calls=good,
            stop_string=message.get("stop_string"),
            prompt_tokens=len(prompt),
            completion=completion,
            tokenizer=self.tokenizer,
        )
        self._said |= dict.fromkeys(_keys(answer.message), message)
        _trim(self._said, 2 * self.most)
        return answer

    def _change(self, ask: Ask) -> dict[str, Any]:
        usual, change = self.policy.params, dict[str, Any]()
        for name, value in ask.sampling.items():
            value = 0 if (name, value) == ("top_k", -1) else value
            own = getattr(usual, name, OFF.get(name, 0))
            if value == own:
                continue
            known = hasattr(usual, name)
            demand(known, name, f"must be {own}: the engine has no other", "leave it out")
            must = f"must be {own}, as of the run, which trains on what is sampled"
            demand(self.free, name, must, "leave it out")
            change[name] = value
        if (most := ask.max_tokens) is not None:
            change["max_new_tokens"] = most if self.free else min(most, usual.max_new_tokens)
        return change


def _keys(message: Message) -> tuple[str, str]:
    """Return how an answer is found: with its calls' ids and white space, and without."""
    calls = message.get("tool_calls", ())
    text, ids = message["content"], [call["id"] for call in calls]
    said = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    return json.dumps([text, said, ids], sort_keys=True), json.dumps([text.strip(), said])


def _trim(kept: dict[Any, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
