"""From the trainer's weights to the generator's, and a probe whether they have arrived."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import count
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from nemorl.checks import own_methods
from nemorl.data.batch import Example, collate
from nemorl.models.adapters import Adapters
from nemorl.parallel.backend import FullTrainingBackend, TrainingBackend
from nemorl.rollout.calls import blocking
from nemorl.rollout.conversation import with_last
from nemorl.rollout.generation import GenerationBackend, InFlight, SamplingParams, WeightSource

T = TypeVar("T")
AGREEMENT = {"float32": 1e-3, "bfloat16": 0.25}
"""How far the log-probabilities of trainer and generator may be apart, by what the generator
computes in.
"""


@runtime_checkable
class SendsWeights(Protocol):
    """A trainer whose weights are in other processes, as `RankedTrainer`."""

    def send_weights(
        self,
        send: Callable[[Iterator[tuple[str, Tensor]]], Any],
        *,
        dtype: torch.dtype | None = None,
        together: bool = False,
        **options: Any,
    ) -> Any:
        """Return `send(weights)`, called where rank 0 has the weights, gathered in `dtype`.

        together: called by all ranks, of which rank 0 returns. options: of the backend's `weights`,
        such as `adapters`.
        """


class TrainerWeights(WeightSource):
    """The weights of a trainer after its last step; their version is its `step`.

    From the first TrainerWeights on, the trainer's methods wait for `send`, and `send` for them: no
    collective of a reader meets one of a step. The iterator of `newest` holds nothing up, and
    raises RuntimeError if a step comes between.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self._turn = trainer, exclusive(trainer)

    def newest(self) -> tuple[int, Iterator[tuple[str, Tensor]]]:
        with self._turn:
            return self.trainer.step, self._unchanged(self.trainer.step)

    def send(
        self,
        use: Callable[[int, Iterator[tuple[str, Tensor]]], T],
        *,
        dtype: torch.dtype | None = None,
        adapters: Adapters = "merged",
    ) -> T:
        options: Any = {} if adapters == "merged" else {"adapters": adapters}
        with self._turn:
            version = self.trainer.step
            if isinstance(self.trainer, SendsWeights):
                if getattr(use, "by_all_ranks", False):  # as WeightSender
                    options["together"] = True
                return self.trainer.send_weights(partial(use, version), dtype=dtype, **options)
            return use(version, iter(self.trainer.weights(**options)))  # perhaps on another thread

    def _unchanged(self, version: int) -> Iterator[tuple[str, Tensor]]:
        weights: Iterator[tuple[str, Tensor]] = iter(())
        for number in count():
            with self._turn:
                if self.trainer.step != version:
                    raise RuntimeError(
                        f"weights must be read between two steps, but while those of step {version}"
                        f" were read, the trainer went on to step {self.trainer.step}: read the"
                        " newest ones again"
                    )
                weights = weights if number else iter(self.trainer.weights())
                found = next(weights, None)
            if found is None:
                return
            yield found


WAITING = {*own_methods(FullTrainingBackend, object)} - {
    "setup",
    "shutdown",
    "wait_for_checkpoint",
    "weights",
}
"""Methods of a trainer that wait while its weights are read."""


def exclusive(trainer: Any) -> threading.RLock:
    """Return the lock that the trainer's `WAITING` methods hold."""
    lock = vars(trainer).get("_exclusive")
    if lock is None:
        lock = trainer._exclusive = threading.RLock()
        for name in WAITING:
            if (method := getattr(trainer, name, None)) is not None:
                setattr(trainer, name, _held(lock, method))
    return lock


def _held(lock: threading.RLock, method: Callable[..., T]) -> Callable[..., T]:
    @wraps(method)
    def call(*args: Any, **options: Any) -> T:
        with lock:
            return method(*args, **options)

    return call


def sync_weights(
    trainer: Any, generator: GenerationBackend, *, in_flight: InFlight = "keep"
) -> None:
    """Give the generator the trainer's newest weights, unless it has them already. Blocks, also
    where an event loop runs. After an error nothing can be generated until an update succeeds.
    """
    if generator.policy_version != trainer.step:
        options: Any = {} if in_flight == "keep" else {"in_flight": in_flight}
        blocking(generator.update_weights(TrainerWeights(trainer), **options))


def check_agreement(
    trainer: TrainingBackend,
    generator: GenerationBackend,
    prompt: Sequence[int],
    *,
    precision: str,
    num_tokens: int = 8,
) -> float:
    """Return the largest difference between the log-probabilities that trainer and generator give
    to the tokens of a greedy answer. The generator sleeps from then on.

    Raises RuntimeError where it is more than rounding can explain: the generator then has other
    weights, or computes another model.
    """
    greedy = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, seed=0)
    answer = generator.generate([prompt], greedy)[0]
    generator.sleep()  # the trainer needs its memory
    tokens = [*prompt, *answer.token_ids]
    mask = [False] * len(prompt) + [True] * len(answer.token_ids)
    experts = with_last(answer.routed_experts)
    example = Example(input_ids=tokens, loss_mask=mask, response_mask=mask, routed_experts=experts)
    batch = collate([example])
    ours = trainer.get_logprobs(batch).values[0, len(prompt) :].cpu()
    theirs = torch.tensor(answer.logprobs)
    worst = float((ours - theirs).abs().max())
    if not worst <= AGREEMENT[precision]:
        raise RuntimeError(
            "trainer and generator must give a token the same log-probability, but they differ by"
            f" {worst:.6f}, where {AGREEMENT[precision]} would be rounding: see that the generator"
            " is of the same model, and that its weights are synced"
        )
    return worst
