"""The unit of rollouts: a conversation of an episode with the model."""

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from nemorl.checks import require
from nemorl.data.datasets import as_messages, prompt_of
from nemorl.data.example import Example
from nemorl.data.templates import Message
from nemorl.rollout.generation import Completion

if TYPE_CHECKING:
    from torch import Tensor


REMEDY = "return 0.0, for example; rewards are float32, up to 3.4e38"
"""Of rewards that are not finite."""
DEFAULT_TURNS = 16
"""Most turns of an environment without `max_turns`."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request to the model, and its answer."""

    prompt: Sequence[int]
    """Token ids of all that the model was given."""
    completion: Completion


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an episode returns at its end."""

    reward: float = 0.0
    """Of the whole conversation; with `turn_rewards` it must be left out."""
    turn_rewards: Sequence[float] = ()
    """A reward for each turn; the conversation's is Σ_t discount^t · reward_t."""
    answer: str | None = None
    """What was read as the answer, if anything, for the sample log."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Several rewards, each by name before it is weighted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further measurements, averaged over the conversations that have them."""
    truncated: bool = False
    """Whether a limit on turns or tokens ended it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of an episode that raised."""

    error: BaseException

    @property
    def reason(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


class ContextFull(Exception):
    """Raised by a `Policy` whose longest sequence leaves no room for another turn; an episode that
    does not catch it is truncated, with reward 0.
    """


class ConversationFailed(Exception):
    """Raised by a reward or an environment for one conversation, which is left out of training."""

    environment: Any = None
    """The object of that conversation, where its process ended."""


class EnvironmentTimeout(ConversationFailed, TimeoutError):
    """Raised for a call of an environment that takes longer than `rollout.timeout_s`."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on a conversation, and the discount of its later rewards."""

    max_turns: int | None = None
    """Turns of the model. None: the environment's `max_turns`, else DEFAULT_TURNS."""
    max_tokens: int | None = None
    """Longest sequence, prompts and responses together. None: the engine's own limit."""
    timeout_s: float = 60.0
    """Longest call of an environment, after which the conversation fails."""
    discount: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The turns of one episode with the model, and how it ended."""

    row: Mapping[str, Any]
    group: int
    """Number of the row's group."""
    member: int
    turns: tuple[Turn, ...]
    outcome: Outcome | Failure
    text: str = ""
    """Of the row's prompt, a message a line."""
    cut_by: str | None = None
    """The setting that truncated it, or "environment"."""

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it or its last turn."""
        cut = bool(self.turns) and self.turns[-1].completion.finish_reason == "length"
        return cut or (isinstance(self.outcome, Outcome) and self.outcome.truncated)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model sampled."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


class Policy(Protocol):
    """An episode's view of the model; everything that it samples is recorded."""

    prompt: Sequence[int]
    """Token ids of the row's prompt, as the run's chat template makes them."""
    messages: Sequence[Message]
    """The row's prompt as messages."""
    group: int
    """Number of the row's group, whose members are compared."""
    member: int
    group_size: int
    """Conversations of the group in this attempt: fewer where failed ones begin again."""

    async def sample(self, prompt: Sequence[int], *, stop: Sequence[str | int] = ()) -> Completion:
        """Return the model's answer to token ids; `stop`: strings and tokens that end it besides
        the run's.

        Raises: ContextFull where the longest sequence leaves no room for an answer.
        """

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
    ) -> Message:
        """Return the model's answer to messages: `role`, `content`, `stop_string` if one ended it,
        and `tool_calls` if it calls any of the `tools` (JSON schemas; none: those of the row).

        To go on from any earlier answer, pass the messages up to it, answers as they were returned,
        and the new ones: token ids of earlier turns stay as the engine made them wherever the chat
        template renders earlier messages as before under the same tools, whatever was asked in
        between. Of equal answers to equal messages it goes on with the one whose dict is passed,
        else with the latest. Raises: ContextFull as `sample`.
        """


Episode = Callable[[Mapping[str, Any], Policy], Awaitable[Outcome]]
"""`async def episode(row, policy) -> Outcome`: one conversation about a row of the data."""


@dataclass
class Segment:
    """Turns of a conversation, each with all tokens of the one before."""

    numbers: list[int]
    """Of the turns, from 1."""
    turns: list[Turn]
    shared: list[Turn]
    """Of earlier segments, that the first one goes on with."""

    @property
    def tokens(self) -> list[int]:
        last = self.turns[-1]
        return [*last.prompt, *last.completion.token_ids]


def examples_of(turns: Sequence[Turn]) -> list[Example]:
    """Return an example for each of `segments_of`, in which sampled tokens are trained on; those
    that several begin with, in the first of them alone.
    """
    return [_example(segment) for segment in segments_of(turns)]


def segments_of(turns: Sequence[Turn]) -> list[Segment]:
    """Return turns in segments: each goes on with the longest earlier turn whose tokens its prompt
    begins with. Where there is none, or another turn goes on with it already, a segment begins.
    """
    segments, last = list[Segment](), dict[int, Segment]()
    before = _continued(turns)
    for number, turn in enumerate(turns):
        segment = last.pop(before[number], None)
        if segment is None:
            shared, above = list[Turn](), before[number]
            while above >= 0:
                shared.append(turns[above])
                above = before[above]
            segments.append(segment := Segment([], [], shared[::-1]))
        segment.numbers.append(number + 1)
        segment.turns.append(turn)
        last[number] = segment
    return segments


def _continued(turns: Sequence[Turn]) -> list[int]:
    """Return the index of the turn that each goes on with, −1: none."""
    whole, found = list[bytes](), list[int]()
    for turn in turns:
        prompt = array("q", turn.prompt).tobytes()
        last_first = reversed(range(len(whole)))
        longest_first = sorted(last_first, key=lambda number: -len(whole[number]))
        found.append(next((n for n in longest_first if prompt.startswith(whole[n])), -1))
        whole.append(prompt + array("q", turn.completion.token_ids).tobytes())
    return found


def turns_of(turns: Sequence[Turn]) -> list[int]:
    """Return the turn, from 1, that sampled each token of `examples_of`; 0 of other tokens."""
    return [number for segment in segments_of(turns) for number in _sampled_by(segment)]


def _sampled_by(segment: Segment) -> list[int]:
    found = list[int]()
    for number, turn in zip(segment.numbers, segment.turns, strict=True):
        found += [0] * (len(turn.prompt) - len(found))
        found += [number] * len(turn.completion.token_ids)
    return found


def _example(segment: Segment) -> Example:
    first = len([*segment.shared, *segment.turns][0].prompt)
    said = [turn.completion for turn in segment.turns]
    known = all(len(each.policy_versions) == len(each.token_ids) for each in said)
    sampled = [number > 0 for number in _sampled_by(segment)]
    logprobs, versions = list[float](), list[int]()
    for turn in segment.turns:
        given = len(turn.prompt) - len(logprobs)
        logprobs += [0.0] * given + list(turn.completion.logprobs)
        versions += [-1] * given + list(turn.completion.policy_versions)
    return Example(
        input_ids=segment.tokens,
        loss_mask=sampled,
        response_mask=[place >= first for place in range(len(sampled))],
        generation_logprobs=logprobs,
        policy_versions=versions if known else None,
        routed_experts=with_last(_experts([*segment.shared, *segment.turns])),
    )


def _experts(turns: Sequence[Turn]) -> "Tensor | None":
    parts: list[Tensor] = []
    length = 0
    for turn in turns:
        found = turn.completion.routed_experts
        if found is None:
            return None
        parts.append(found[length:])
        length = len(found)
    import torch

    return torch.cat(parts)


def with_last(experts: Any) -> Any:
    """Append −1 for the last token, for which no experts were chosen."""
    if experts is None:
        return None
    from torch.nn.functional import pad

    return pad(experts, (0, 0, 0, 0, 0, 1), value=-1)


@dataclass(frozen=True)
class Prompts:
    """Rows of a data set and their prompts as token ids."""

    rows: Sequence[Mapping[str, Any]]
    token_ids: Sequence[Sequence[int]]
    groups: Sequence[int] = ()
    """The number of each prompt's group in the run; empty: not numbered yet."""
    tokenizer: Any = None
    """The one that made `token_ids`, with its chat template: for the messages of later turns."""
    limits: Limits = Limits()
    """Of the conversations about them."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Of the environment, which `token_ids` have instead of the rows' own."""
    shows_tools: bool = False
    """Whether each row's `token_ids` have the tools of its environment, if that has any."""

    def __post_init__(self) -> None:
        for name in ("token_ids", "groups") if self.groups else ("token_ids",):
            count = len(getattr(self, name))
            fits = f"must have an entry for each of the {len(self.rows)} rows"
            require(count == len(self.rows), name, fits, count, "take them from one data set")

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int]) -> "Prompts":
        found = [(self.rows[i], self.token_ids[i]) for i in indices]  # a stream is at one place
        return replace(
            self,
            rows=[row for row, _ in found],
            token_ids=[ids for _, ids in found],
            groups=[self.groups[i] for i in indices] if self.groups else (),
        )


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """Return a row's prompt, if it has one, as messages."""
    if row.get("prompt") is None and row.get("messages") is None:
        return []
    return as_messages(prompt_of(row), "prompt", "user")


def text_of(messages: Sequence[Message]) -> str:
    """Return messages' contents, one a line."""
    return "\n".join(str(message.get("content") or "") for message in messages)
