"""The ranks that train, as a `GenerationBackend` that computes with their weights."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.types import Needs
from nemorl.models.causal_lm import end_tokens
from nemorl.models.tensor_files import check_held, sampled
from nemorl.parallel.megatron.engine import Order
from nemorl.rollout.config import TRAITS, GenerationConfig
from nemorl.rollout.generation import InFlight, WeightSource
from nemorl.rollout.scheduler import Request, ScheduledBackend
from nemorl.runtime.engines.weights import TrainerWeights, checked_weights
from nemorl.runtime.ranks.trainer import RankedTrainer

STEP_S = 0.05
"""Seconds that a call of the ranks should take."""
MOST_PASSES = 256


class RankedGenerator(ScheduledBackend):
    """`GenerationBackend` "megatron": the trainer's ranks generate, each replica of the model some
    of the requests. Sampling and seeds are those of "torch".
    """

    traits = TRAITS["megatron"]

    def __init__(self, *, trainer: RankedTrainer, tokenizer: Any = None) -> None:
        super().__init__(self._step, tokenizer)
        self.trainer = trainer
        self._numbers, self._open = count(), dict[Request, int]()
        self._order = Order()
        """For the next call."""
        self._passes = 1

    def setup(self, config: GenerationConfig) -> None:
        model = self.trainer.model
        self.limits(model.config)
        self._expected = self.trainer.open_engine(
            max_batch_size=config.max_batch_size,
            max_positions=self.max_positions,
            end_tokens=end_tokens(model, self.tokenizer),
            tokenizer=self.tokenizer,
        )

    def metrics(self) -> dict[str, float]:
        return {}

    async def update_weights(self, source: WeightSource, *, in_flight: InFlight = "keep") -> int:
        """Go on with the trainer's weights as they are now, which need no receipt, or with others,
        which become its.

        Raises: RuntimeError for "wait" where requests are in flight on the trainer's old weights;
        WeightsDiffer where the ranks hold others.
        """
        same = isinstance(source, TrainerWeights) and source.trainer is self.trainer
        version, weights = source.newest()
        with self._scheduler.updating(version, in_flight, shared=same):
            self._order = replace(self._order, anew=True)
            if not same:
                given = dict(checked_weights(weights, self._expected))
                found = self.trainer.take_weights(given, version)
                sent = {
                    name: sampled(given[name], version).to(one.dtype) for name, one in found.items()
                }
                check_held("the ranks", sent, found)
        return version

    def sleep(self) -> None:
        with self._scheduler.lock:
            self.trainer.decode(Order(asleep=True))
            self._scheduler.asleep = True

    def _scored(self, batch: TokenBatch, top_k: int) -> Sequence[Tensor]:
        found = self.trainer.compute(batch, Needs(top_k=top_k))
        return (found.token_logprobs, *((found.top_ids, found.top_logprobs) if top_k else ()))

    def _step(self, new: list[Request], dropped: list[Request]) -> None:
        """Have the ranks decode for about STEP_S."""
        numbered = dict(zip(new, self._numbers, strict=False))
        self._open |= numbered
        gone = [self._open.pop(request) for request in dropped if request in self._open]
        order = replace(
            self._order,
            new=[(number, request.prompt, request.params) for request, number in numbered.items()],
            dropped=[*self._order.dropped, *gone],
            passes=self._passes,
            version=self.policy_version or 0,
        )
        self._order = Order()
        try:
            answers, seconds = self.trainer.decode(order)
        except BaseException:  # after an interrupt the ranks still have them
            self._order = Order(dropped=[*self._open.values()])
            self._open.clear()
            raise
        if seconds:
            self._passes = max(1, min(int(STEP_S / seconds), 2 * self._passes, MOST_PASSES))
        for request in [one for one, number in self._open.items() if number in answers]:
            found = answers[self._open.pop(request)]
            request.answer([replace(one, tokenizer=self.tokenizer) for one in found])
