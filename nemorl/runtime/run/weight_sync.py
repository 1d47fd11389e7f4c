"""From the trainer's weights to the generator's, and a probe whether they have arrived."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemorl.data.batch import Example, collate
from nemorl.parallel.backend import TrainingBackend
from nemorl.rollout.collect import with_last
from nemorl.rollout.generation import GenerationBackend, SamplingParams

T = TypeVar("T")
AGREEMENT = {"float32": 1e-3, "bfloat16": 0.25}
"""How far the log-probabilities of trainer and generator may be apart, by what the generator
computes in.
"""


class TrainerWeights:
    """The trainer's present weights under their Hugging Face names, readable any number of times
    until its next step: a replica that dies is replaced by one with the same weights.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.step = trainer, trainer.step

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._check()
        yield from self.trainer.weights()

    def send(
        self, send: Callable[[Iterable[tuple[str, Tensor]]], T], *, dtype: torch.dtype | None = None
    ) -> T:
        """Call `send` with the weights and return its result: on the trainer's rank 0 if it has
        the method `send_weights`, which may gather them in `dtype`; else here.
        """
        self._check()
        elsewhere = getattr(self.trainer, "send_weights", None)
        return send(self) if elsewhere is None else elsewhere(send, dtype=dtype)

    def _check(self) -> None:
        if self.trainer.step != self.step:
            raise RuntimeError(
                "weights must be read before the trainer's next step, but these are of step"
                f" {self.step} and it has done {self.trainer.step}: call sync_weights() after every"
                " step"
            )


def sync_weights(trainer: Any, generator: GenerationBackend) -> None:
    """Give the generator the trainer's weights, unless it has them already. Their version, which
    completions carry, is the trainer's `step`.

    Raises what the generator raises; then nothing can be generated until an update succeeds.
    """
    if generator.policy_version != trainer.step:
        generator.update_weights(TrainerWeights(trainer), trainer.step)


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
