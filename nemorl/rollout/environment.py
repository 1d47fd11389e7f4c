"""Where rewards come from: environments, and plain functions made into one."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, Any]
MessageLog = Sequence[Message]
"""A conversation so far: {"role": "user" | "assistant" | "environment" …, "content": text}."""
Metadata = Mapping[str, Any]
"""What an environment knows of one conversation: at first the row of the data set."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentReturn:
    """An environment's answer to a batch of conversations; every list has one entry per conversation."""

    observations: list[dict[str, str]]
    """The message that follows; not used where the conversation is over."""
    metadata: list[Metadata | None]
    """What the environment wants to be given back with the next step."""
    next_stop_strings: list[tuple[str, ...] | None]
    """Where the next response is to stop, besides the usual places."""
    rewards: list[float]
    terminateds: list[bool]
    """True: the conversation is over."""
    answers: list[str | None] = field(default_factory=list)
    """What the environment read as the answer, for the sample log."""


@runtime_checkable
class EnvironmentInterface(Protocol):
    """What `collect` talks to after each response."""

    def step(self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Metadata]) -> EnvironmentReturn:
        """Judge each conversation, whose last message is the assistant's."""

    def global_post_process_and_metrics(self, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, float]]:
        """See the whole rollout batch at once ({"rewards", "texts", "truncated"}): a changed batch and metrics to log."""


RewardFunction = Callable[..., float]
"""`fn(prompt, response) -> float`; further parameters are filled with the data set's columns of the same name."""


class FunctionalRewardWrapper:
    """A reward function as a single-turn environment.

    `fn` is called with the texts of prompt and response, and those columns of the row that it names as parameters (all, if it takes `**columns`).
    Raises ValueError if the function can't take a prompt and a response, wants a column that the rows don't have, or returns NaN or infinity.

    >>> environment = FunctionalRewardWrapper(lambda prompt, response, answer: float(response == answer))
    >>> log = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    >>> environment.step([log], [{"answer": "2"}]).rewards
    [1.0]
    """

    def __init__(self, fn: RewardFunction) -> None:
        if not callable(fn):
            raise ValueError(f"reward must be a function fn(prompt, response), but it is {fn!r}: pass the function itself")
        self.fn = fn
        self.name = getattr(fn, "__name__", type(fn).__name__)
        parameters = list(inspect.signature(fn).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
        if len(positional) < 2 and not any(p.kind == p.VAR_POSITIONAL for p in positional):
            raise ValueError(
                f"reward {self.name!r} must take at least (prompt, response), but its parameters are {[p.name for p in parameters]}: add them"
            )
        self._all_columns = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self._columns = {
            p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in positional[:2]
        }

    def step(self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Metadata]) -> EnvironmentReturn:
        size = len(message_log_batch)
        rewards = [self._reward(log, row) for log, row in zip(message_log_batch, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * size,
            metadata=[None] * size,
            next_stop_strings=[None] * size,
            rewards=rewards,
            terminateds=[True] * size,
            answers=[None] * size,
        )

    def global_post_process_and_metrics(self, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, float]]:
        return batch, {}

    def check(self, rows: Sequence[Metadata]) -> None:
        """Raise a ValueError that names the first row without a column that the function wants."""
        wanted = [name for name, required in self._columns.items() if required]
        for number, row in enumerate(rows, start=1):
            missing = [name for name in wanted if row.get(name) is None]
            if missing:
                raise ValueError(
                    f"reward {self.name!r} wants the column {missing[0]!r}, but row {number} has only {sorted(row)}: add it or leave the row out"
                )

    def _reward(self, log: MessageLog, row: Metadata) -> float:
        self.check([row])
        columns = dict(row) if self._all_columns else {name: row[name] for name in self._columns if name in row}
        prompt, response = text_of(log[:-1]), str(log[-1]["content"])
        for taken in ("prompt", "response"):
            columns.pop(taken, None)
        try:
            result = self.fn(prompt, response, **columns)
        except Exception as error:
            error.add_note(f"This was reward {self.name!r} for prompt {prompt!r} and response {response!r}.")
            raise
        reward = float(result) if hasattr(result, "__float__") else math.nan
        if not math.isfinite(reward):
            raise ValueError(f"reward {self.name!r} must be a finite number, but it is {result!r} for prompt {prompt!r} and response {response!r}")
        return reward


def text_of(log: MessageLog) -> str:
    """A conversation as a reward function sees its prompt: the text of a lone message, else one `role: text` per line.

    >>> text_of([{"role": "user", "content": "1+1="}])
    '1+1='
    """
    if len(log) == 1:
        return str(log[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in log)
