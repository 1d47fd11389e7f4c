"""Requests to a generation engine, its answers, and the Protocol of engines."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from nemorl.checks import at_least, require, short, valid_seed

if TYPE_CHECKING:
    import torch
    from numpy import float32, int32
    from numpy.typing import NDArray
    from torch import Tensor

    from nemorl.losses.logprobs import LogprobKind

FinishReason = Literal["stop", "length"]
InFlight = Literal["keep", "wait"]
"""What an update does with unfinished requests: go on with new weights, or finish with the old."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; temperature 0 is greedy.

    Sample j draws from (seed, j): in float32 equal prompts, parameters and weights give equal
    tokens, whatever else is generated (bfloat16 may round otherwise in another batch). Without a
    seed each call draws one.

    >>> SamplingParams(temperature=-1.0)
    Traceback (most recent call last):
    ValueError: temperature must be at least 0, but it is -1.0: use 0 or more
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
    """Besides the end-of-sequence tokens."""
    ignore_eos: bool = False
    """End-of-sequence tokens are sampled like all others and end nothing."""
    n: int = 1
    """Samples of this prompt; they share its prefill."""
    seed: int | None = None

    def __post_init__(self) -> None:
        at_least(0, temperature=self.temperature, top_k=self.top_k)
        at_least(1, max_new_tokens=self.max_new_tokens, n=self.n)
        valid_seed(seed=self.seed)
        top_p, min_p = self.top_p, self.min_p
        require(0 < top_p <= 1, "top_p", "must be above 0 and at most 1", top_p, "1 turns it off")
        require(0 <= min_p <= 1, "min_p", "must be from 0 to 1", min_p, "0 turns it off")
        stops, must = self.stop_strings, "must not hold an empty string"
        require("" not in stops, "stop_strings", must, stops, "remove it")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response."""

    token_ids: tuple[int, ...]
    """The engine's own, never re-tokenized, with the stop token, if one ended it."""
    logprobs: tuple[float, ...]
    """Under the distribution that each token was sampled from, filters included."""
    finish_reason: FinishReason
    """stop: a stop token or string came; length: max_new_tokens was reached."""
    text: str
    """Without special tokens, up to a stop string."""
    policy_versions: tuple[int, ...] = ()
    """Version of the weights that sampled each token."""
    routed_experts: "Tensor | None" = field(default=None, compare=False, repr=False)
    """`[positions, layers, topk]`: the experts, in each layer that has any, that computed each
    token of prompt and response but the last one, which was only drawn; -1 where they are not
    known. None: the model has no experts, or the engine keeps no record.
    """
    tokenizer: Any = field(default=None, compare=False, repr=False)
    """The engine's, for `raw_text`. It does not go to other processes."""

    @property
    def raw_text(self) -> str:
        """Text of all tokens, special ones too. Raises: ValueError where the engine has no
        tokenizer.
        """
        require(
            self.tokenizer is not None,
            "raw_text",
            "needs the completion's tokenizer",
            self.tokenizer,
            "give the engine a tokenizer, or decode token_ids",
        )
        return self.tokenizer.decode(self.token_ids, skip_special_tokens=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"tokenizer": None}

    @property
    def policy_version(self) -> int:
        """The oldest that sampled a token."""
        return min(self.policy_versions, default=0)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Log-probabilities of given tokens. Index t of an array is about token t of its sequence,
    given all before.
    """

    token_logprobs: "tuple[NDArray[float32], ...]"
    """`[length]` of each sequence; 0 at its first token."""
    top_ids: "tuple[NDArray[int32], ...]" = ()
    """`[length, k]` of each sequence, likeliest first; () where top_k is 0."""
    top_logprobs: "tuple[NDArray[float32], ...]" = ()
    """`[length, k]`, of `top_ids`; -inf at the first token, and outside the support."""
    policy_version: int | None
    """Version of the weights that computed all of them."""


def check_in_flight(in_flight: str) -> None:
    """Raise ValueError for another word."""
    fits, remedy = in_flight in ("keep", "wait"), "keep changes the weights at once"
    require(fits, "in_flight", "must be 'keep' or 'wait'", in_flight, remedy)


def check_ready(*, asleep: bool, failed: bool) -> None:
    """Raise RuntimeError where an engine takes no requests."""
    if asleep:
        raise RuntimeError("the generation backend sleeps: call wake() before it generates")
    if failed:
        raise RuntimeError(
            "the generation backend's weights are incomplete, because an update failed: call"
            " update_weights() with all of them"
        )


def checked_requests(
    prompts: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    *,
    vocab_size: int,
    max_positions: int,
) -> list[SamplingParams]:
    """Return the parameters of each request. Raises: ValueError for what no engine can answer."""
    params = (
        [sampling_params] * len(prompts)
        if isinstance(sampling_params, SamplingParams)
        else list(sampling_params)
    )
    if len(params) != len(prompts):
        raise ValueError(
            f"sampling_params must be one for all or one per prompt, but there are {len(params)}"
            f" for {len(prompts)} prompts: pass one, or {len(prompts)}"
        )
    _check_ids("prompts", "prompt", prompts, vocab_size, max_positions, room=1)
    return params


def check_scored(
    token_ids: Sequence[Sequence[int]], top_k: int, *, vocab_size: int, max_positions: int
) -> None:
    """Raise ValueError for what no engine can score."""
    fits, must = 0 <= top_k <= vocab_size, f"must be from 0 to the model's {vocab_size} tokens"
    require(fits, "top_k", must, top_k, "0 gives the log-probabilities of token_ids alone")
    _check_ids("token_ids", "sequence", token_ids, vocab_size, max_positions, room=0)


def _check_ids(
    field_name: str,
    name: str,
    sequences: Sequence[Any],
    vocab_size: int,
    max_positions: int,
    *,
    room: int,
) -> None:
    for index, ids in enumerate(sequences):
        if not len(ids):
            must, but = "have at least one token", "is empty: begin it with a special token"
        elif isinstance(ids[0], str):
            must = "be token ids"
            but = f'is {short(ids)}: tokenizer(text)["input_ids"] gives those of a text'
        elif not 0 <= min(ids) <= max(ids) < vocab_size:
            must = f"be of the model's {vocab_size} tokens"
            but = f"has {min(min(ids), 0) or max(ids)}: use the model's own tokenizer"
        elif len(ids) + room > max_positions:
            must = f"{'leave room' if room else 'fit'} in the model's {max_positions} positions"
            but = f"has {len(ids)} tokens: shorten it"
        else:
            continue
        raise ValueError(f"{field_name} must {must}, but {name} {index} {but}")


def seeded(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Return parameters with a seed, drawn from torch's generator if they have none."""
    if params.stop_strings and tokenizer is None:
        raise ValueError(
            "stop_strings need a tokenizer: give the backend one, or use stop_token_ids"
        )
    if params.seed is not None:
        return params
    import torch

    return replace(params, seed=int(torch.randint(2**62, ())))


def text_before(stop_strings: Sequence[str], text: str) -> str:
    """Return a text up to the first of its stop strings."""
    stop = first_stop(stop_strings, text)
    return text.partition(stop)[0] if stop else text


def first_stop(stop_strings: Sequence[str], text: str) -> str:
    """Return the first stop string in a text, of several there the shortest; none: ""."""
    return min(
        (stop for stop in stop_strings if stop in text),
        key=lambda stop: (text.index(stop), len(stop)),
        default="",
    )


@runtime_checkable
class WeightSource(Protocol):
    """The newest weights of a model, read at any time.

    The tensors are live: an older version can't be read. A class that derives from this Protocol
    needs `newest` alone.
    """

    def newest(self) -> "tuple[int, Iterator[tuple[str, Tensor]]]":
        """Return the newest version, and an iterator over its tensors by Hugging Face name, tied
        ones once.

        Use each tensor before you ask for the next one, and go to the end: where the weights change
        on the way, the iterator raises RuntimeError.
        """

    def send(
        self,
        use: "Callable[[int, Iterator[tuple[str, Tensor]]], T]",
        *,
        dtype: "torch.dtype | None" = None,
        adapters: Literal["merged", "apart", "alone"] = "merged",
    ) -> T:
        """Return `use(version, weights)`, called where the newest weights are, which do not change
        meanwhile. May be called from any thread.

        use: picklable. adapters: LoRA's, merged into the weights, apart (behind them, under PEFT's
        names), or alone.
        """
        return use(*self.newest())


@dataclass(frozen=True, kw_only=True)
class Weights(WeightSource):
    """A `WeightSource` of one version, for a script that has the tensors itself."""

    version: int
    tensors: "Iterable[tuple[str, Tensor]]"
    """Tensors by Hugging Face name; an iterator's are kept, to be read again."""

    def __post_init__(self) -> None:
        if iter(self.tensors) is self.tensors:
            object.__setattr__(self, "tensors", list(self.tensors))

    def newest(self) -> "tuple[int, Iterator[tuple[str, Tensor]]]":
        return self.version, iter(self.tensors)


@runtime_checkable
class GenerationBackend(Protocol):
    """An engine that turns prompts into completions (tests: test_generation_conformance.py).

    `as_generation_backend` completes a class with `setup`, `update_weights`, `shutdown`, and
    `sample` or `generate`; it sleeps, unless it says otherwise.
    """

    policy_version: int | None
    """Version of the weights. None: an update failed."""
    sleeps: bool
    """Whether unfinished requests pause from `sleep` to `wake`: not on devices of its own."""

    def __init__(self, *, model: Any, tokenizer: Any, precision: str = "float32") -> None:
        """Take the model, a `ModelSource`, without loading anything yet.

        In a run its `load()` returns the trainer's live model, to share or to copy; of a trainer on
        ranks, an empty one, which `update_weights` fills. An engine of its own needs `config` and
        `weights()` alone. A class may say by `traits` (`GenerationTraits`) what it can do.
        """

    def setup(self, config: Any) -> None:
        """Load what is needed to generate. The first call."""

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.n` completions of a prompt (token ids).

        Any number of requests at once, from any event loop. Cancelling the task that awaits ends
        the request. Raises: RuntimeError while asleep, after a failed update or `shutdown`.
        """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        """Return `n` completions for each prompt, in order: `sample` for scripts. Blocks, also
        where an event loop runs, as in a notebook.
        """

    async def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        top_k: int = 0,
        kind: "LogprobKind | None" = None,
    ) -> Scores:
        """Return log π(x_t | x_<t) of every token of some sequences, and of the `top_k` likeliest
        at its place.

        kind: the distribution, whose support includes x_t (None: temperature 1, all tokens).
        Raises: as `sample`; ValueError from `check_scored`.
        """

    async def update_weights(self, source: WeightSource, *, in_flight: InFlight = "keep") -> int:
        """Take the newest weights of `source` and return their version, which tokens carry from now
        on. `nemorl.sync_weights` is the blocking form.

        Unfinished requests go on with them ("keep"), or finish with the old ones first ("wait").
        After a failed update they fail, and nothing is generated. An engine that starts again asks
        the same source for what is newest then.
        """

    def sleep(self) -> None:
        """Free memory while the trainer works. May be repeated.

        A new request is an error then, unless `sleeps` is False.
        """

    def wake(self) -> None:
        """Be ready to generate again. May be repeated."""

    def metrics(self) -> dict[str, float]:
        """Return measurements since the last call, logged as generation/NAME."""

    def shutdown(self) -> None:
        """Free everything; unfinished requests fail. The last call."""


@dataclass(frozen=True, kw_only=True)
class GenerationTraits:
    """Where a generation backend computes, and what it can sample. A class without traits has the
    defaults.
    """

    on_trainer: bool = False
    """Whether the trainer's ranks sample: it is made with `trainer` in place of `model`."""
    shares_model: bool = True
    """Whether it computes in the loop's process with the model that its `ModelSource` loads, the
    trainer's own where that is not on ranks.
    """
    embedded: bool = False
    """Whether it computes where the trainer does, so that generation.num_replicas and the settings
    after it are errors.
    """
    engines: bool = False
    """Whether Ray places it in processes of their own, as generation.num_replicas,
    tensor_parallel_size, cpus_per_replica and colocated say; where they share the GPUs of ranks, it
    is made with `beside`, the places of these.
    """
    records_experts: bool = False
    """Whether completions have `routed_experts`, if asked for (trainer.router_replay); if not
    `on_trainer`, by the argument records_experts=True.
    """


EMBEDDED = GenerationTraits(embedded=True, records_experts=True)


@runtime_checkable
class HasEngines(Protocol):
    """A generation backend whose engines are in processes of their own, as vLLM's."""

    @property
    def transport(self) -> Any:
        """How the last weights came, as text for people; None before any."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices for a generation backend, as its `check` gets them."""

    gpus: int
    """GPUs of this machine."""
    taken: int = 0
    """GPUs of this machine that the trainer computes on."""
    cluster: bool = False
    """Whether the Ray cluster at RAY_ADDRESS, which knows its own devices, places engines."""
