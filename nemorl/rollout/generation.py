"""What is asked of a generator, what it answers, and the Protocol that every generation backend
keeps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Temperature 0 is greedy.

    The seed belongs to the request: in float32 the same prompt, parameters and weights give the
    same tokens whatever else is being generated (with bfloat16, rounding may differ with the size
    of a batch). Sample j of a request draws from (seed, j). Without a seed each call draws a new
    one.

    >>> SamplingParams(temperature=-1.0)
    Traceback (most recent call last):
    ValueError: temperature must be 0 (greedy) or more, but it is -1.0: 1.0 samples from the model's own distribution
    """

    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    """A response ends here, or where the model's positions do."""
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-sequence token."""
    n: int = 1
    """Samples of this prompt; they share its prefill."""
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = {
            "temperature": (
                self.temperature >= 0,
                "must be 0 (greedy) or more",
                "1.0 samples from the model's own distribution",
            ),
            "top_k": (
                self.top_k >= 0,
                "must be 0 (off) or more",
                "50 keeps the 50 likeliest tokens",
            ),
            "top_p": (
                0 < self.top_p <= 1,
                "must lie in 0 … 1 (0 excluded)",
                "1.0 keeps every token",
            ),
            "min_p": (0 <= self.min_p <= 1, "must lie in 0 … 1", "0.0 keeps every token"),
            "max_new_tokens": (
                self.max_new_tokens >= 1,
                "must be at least 1",
                "it is the longest response, in tokens",
            ),
            "n": (self.n >= 1, "must be at least 1", "it is the number of samples of each prompt"),
        }
        for name, (holds, requirement, remedy) in rules.items():
            if not holds:
                raise ValueError(
                    f"{name} {requirement}, but it is {getattr(self, name)!r}: {remedy}"
                )
        if "" in self.stop_strings:
            raise ValueError(
                "stop_strings must not hold an empty string, which every text contains: remove it"
            )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response, as the engine made it: its token ids are never re-tokenised."""

    token_ids: tuple[int, ...]
    """Includes the stop token that ended it, if one did."""
    logprobs: tuple[float, ...]
    """Of each token, under the distribution that it was sampled from (temperature and filters
    applied).
    """
    finish_reason: FinishReason
    """stop: a stop token or string came; length: max_new_tokens was reached."""
    text: str
    """The decoded response, without special tokens and without what follows (and includes) a stop
    string.
    """
    policy_version: int = 0
    """Of the weights that sampled it."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def checked_requests(
    prompts: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    *,
    vocab_size: int,
    max_positions: int,
) -> list[SamplingParams]:
    """The parameters of each prompt's request. Raises ValueError for what no engine can answer, so
    that each backend says it alike.

    >>> checked_requests([[2], []], SamplingParams(), vocab_size=10, max_positions=64)
    Traceback (most recent call last):
    ValueError: prompts must have at least one token, but prompt 1 is empty: begin it with the tokenizer's bos token, for example
    """
    params = (
        [sampling_params] * len(prompts)
        if isinstance(sampling_params, SamplingParams)
        else list(sampling_params)
    )
    if len(params) != len(prompts):
        raise ValueError(
            f"sampling_params must be one for all or one per prompt, but there are {len(params)}"
            f" for {len(prompts)} prompts"
        )
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(
                f"prompts must have at least one token, but prompt {index} is empty: begin it with"
                " the tokenizer's bos token, for example"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ValueError(
                f"prompts must be of the model's {vocab_size} tokens, but prompt {index} has"
                f" {max(prompt)}: use the model's own tokenizer"
            )
        if len(prompt) >= max_positions:
            raise ValueError(
                f"prompts must leave room in the model's {max_positions} positions, but prompt"
                f" {index} has {len(prompt)} tokens: shorten it"
            )
    return params


def text_before(stop_strings: Sequence[str], text: str) -> str:
    """A response's text without what follows, and includes, the first of its stop strings.

    >>> text_before(["b", "cd"], "abcd")
    'a'
    """
    return text[
        : min((text.index(stop) for stop in stop_strings if stop in text), default=len(text))
    ]


@runtime_checkable
class GenerationBackend(Protocol):
    """An engine that turns prompts into completions. tests/rollout/test_generation_conformance.py
    is the contract that each one passes.
    """

    policy_version: int | None
    """Of its weights, as the last update said. None: it has none, or an update failed."""

    def __init__(self, *, model: Any, tokenizer: Any, precision: str = "float32") -> None:
        """`model` is the trainer's, live: an engine in the same process shares it, another one
        makes a copy that follows by `update_weights`.

        Where the trainer's is spread over ranks it is another one of the same configuration, which
        `update_weights` fills; for a class with the attribute `shares_model = False`, which only
        looks at the configuration, it is on the meta device.
        """

    def setup(self, config: Any) -> None:
        """Load what is needed to generate. Called once, first."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        """`n` completions for each prompt (token ids), prompt by prompt in the order given."""

    def update_weights(self, weights: Iterable[tuple[str, "Tensor"]], version: int) -> None:
        """Take over new weights (Hugging Face names); completions carry `version` from now on.
        After an update that failed nothing is generated.

        The loops give weights that can be iterated again until the next update, so that an engine
        that has to start anew gets the present ones. The tensors must not change before that
        either: engines would have different weights under one version.
        """

    def sleep(self) -> None:
        """Give memory back while the trainer works; generating while asleep is an error.

        Nothing happens to one that sleeps.
        """

    def wake(self) -> None:
        """Be ready to generate again. Nothing happens to one that is awake."""

    def metrics(self) -> dict[str, float]:
        """What the engine measured of itself since this was last asked, by name: a run's metrics
        show it as generation/NAME. May be empty.
        """

    def shutdown(self) -> None:
        """Free everything. The last call."""
