"""What the loops share: when something is due, validation by answering, and the sample log."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.data.batch import TokenBatch
from nemorl.rollout.collect import Prompts, Rollouts, collect
from nemorl.rollout.environment import EnvironmentInterface
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from nemorl.runtime.callbacks import Callback, notify
from nemorl.runtime.state import LoopState, Run


def due(step: int, period: int, last_step: int) -> bool:
    """Every `period` steps (0: never) and at the last one.

    >>> [step for step in range(1, 8) if due(step, 3, 7)]
    [3, 6, 7]
    """
    return step == last_step or (period > 0 and step % period == 0)


def begin_epochs(callbacks: Sequence[Callback], run: Run, num_rows: int) -> None:
    """Tell the callbacks of the epoch that a run starts or goes on in."""
    notify(callbacks, "on_epoch_begin", run, run.state.epoch(num_rows))


def end_epochs(callbacks: Sequence[Callback], before: LoopState, run: Run, num_rows: int, metrics: dict[str, float]) -> None:
    """Tell the callbacks if the step since `before` came to the end of an epoch."""
    if run.state.epoch(num_rows) > before.epoch(num_rows):
        notify(callbacks, "on_epoch_end", run, before.epoch(num_rows), metrics)
        begin_epochs(callbacks, run, num_rows)


def evaluate(
    generator: GenerationBackend, environment: EnvironmentInterface, prompts: Prompts, sampling: SamplingParams, *, seed: int, first_group: int = 0
) -> tuple[dict[str, float], Rollouts]:
    """Mean reward, accuracy (share of responses with a reward of at least 1) and response length over all prompts, and the responses themselves."""
    rollouts = collect(generator, environment, prompts, sampling, seed=seed, first_group=first_group)
    return {
        **rollouts.metrics,
        "accuracy": float((rollouts.rewards >= 1).float().mean()),
        "reward": float(rollouts.rewards.mean()),
        "response_length": float(rollouts.lengths.float().mean()),
        "truncated_fraction": float(rollouts.truncated.float().mean()),
    }, rollouts


def samples_of(rollouts: Rollouts, batch: TokenBatch | None, count: int) -> list[dict[str, Any]]:
    """`count` responses from all over the batch as rows of the sample log; with the batch, the advantage of each of their tokens as well."""
    samples = []
    count = min(count, len(rollouts))
    for i in (place * len(rollouts) // count for place in range(count)):
        completion = rollouts.completions[i]
        sample: dict[str, Any] = {
            "prompt": rollouts.texts[i],
            "response": completion.text,
            "reward": float(rollouts.rewards[i]),
            "group_id": int(rollouts.group_id[i]),
            "finish_reason": completion.finish_reason,
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs),
            "columns": plain(rollouts.rows[i]),
        }
        if batch is not None and batch.advantages is not None:
            begin = len(rollouts.prompts[i])
            sample["advantages"] = batch.advantages[i, begin : begin + len(completion.token_ids)].tolist()
        samples.append(sample)
    return samples


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that JSON can hold as they are."""
    return {name: value for name, value in row.items() if isinstance(value, str | int | float | bool | Sequence) or value is None}
