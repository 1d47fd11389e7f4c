"""The unit of rollouts: a conversation of an episode with the model."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from nemorl.data.example import Example
from nemorl.rollout.generation import Completion


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request to the model, and its answer."""

    prompt: Sequence[int]
    """Token ids of all that the model was given."""
    completion: Completion


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an episode returns at its end."""

    reward: float
    answer: str | None = None
    """What was read as the answer, for the sample log; None where nothing was."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Several rewards, each by name before it is weighted."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of an episode that raised."""

    error: BaseException

    @property
    def reason(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The turns of one episode with the model, and how it ended."""

    row: Mapping[str, Any]
    group: int
    """Number of the row's group, whose members are compared."""
    member: int
    turns: tuple[Turn, ...]
    outcome: Outcome | Failure


class Policy(Protocol):
    """An episode's view of the model; everything that it samples is recorded."""

    prompt: Sequence[int]
    """Token ids of the row's prompt, as the run's chat template makes them."""

    async def sample(self, prompt: Sequence[int], *, stop: Sequence[str] = ()) -> Completion:
        """Return the model's answer to token ids; `stop`: strings that end it besides the run's."""


Episode = Callable[[Mapping[str, Any], Policy], Awaitable[Outcome]]
"""`async def episode(row, policy) -> Outcome`: one conversation about a row of the data."""


def examples_of(turns: Sequence[Turn]) -> list[Example]:
    """Return the tokens of a conversation, sampled ones trained on, with `generation_logprobs`.

    Turns are one example as long as each prompt begins with all tokens before it, as the engine
    made them. A prompt that rewrites them begins another. Nothing is tokenized again.

    >>> said = Completion(token_ids=(2,), logprobs=(-0.5,), finish_reason="stop", text="")
    >>> turns = [Turn(prompt=prompt, completion=said) for prompt in ([1], [1, 2, 3], [1, 3])]
    >>> [example.input_ids for example in examples_of(turns)]
    [[1, 2, 3, 2], [1, 3, 2]]
    """
    segments: list[list[Turn]] = []
    tokens: list[int] = []
    for turn in turns:
        if not segments or list(turn.prompt[: len(tokens)]) != tokens:
            segments.append([])
        segments[-1].append(turn)
        tokens = [*turn.prompt, *turn.completion.token_ids]
    return [_example(segment) for segment in segments]


def _example(turns: Sequence[Turn]) -> Example:
    last = turns[-1]
    sampled, logprobs = list[bool](), list[float]()
    for turn in turns:
        given = len(turn.prompt) - len(sampled)
        sampled += [False] * given + [True] * len(turn.completion.token_ids)
        logprobs += [0.0] * given + list(turn.completion.logprobs)
    return Example(
        input_ids=[*last.prompt, *last.completion.token_ids],
        loss_mask=sampled,
        response_mask=sampled,
        generation_logprobs=logprobs,
        routed_experts=with_last(last.completion.routed_experts),
    )


def with_last(
    experts: Int[Tensor, "computed layers topk"] | None,
) -> Int[Tensor, "tokens layers topk"] | None:
    """Append −1 for the last token, for which the sampler chose no experts."""
    return None if experts is None else pad(experts, (0, 0, 0, 0, 0, 1), value=-1)
