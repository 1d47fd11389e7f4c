"""What is shown of a step's responses: samples for the log, and their measurements."""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.data.batch import TokenBatch
from nemorl.losses.rewards import informative_groups
from nemorl.rollout.collect import Rollouts, select

Samples = list[dict[str, Any]]
"""Rows of the sample log."""


def measured(rollouts: Rollouts) -> dict[str, float]:
    """Return rewards, accuracy (see `Rollouts.correct`) and length of responses on average."""
    return {
        **rollouts.metrics,
        **rollouts.reward_metrics(),
        "response_length": float(rollouts.lengths.float().mean()),
        "truncated_fraction": float(rollouts.truncated.float().mean()),
    }


def by_set(rollouts: Rollouts, names: Sequence[str]) -> dict[str, float]:
    """Return rewards and accuracy for each of several data sets (`Row.source`), as NAME/metric;
    a set without a name is set_1, set_2, …
    """
    members: dict[int, list[int]] = {}
    for i, row in enumerate(rollouts.rows):
        members.setdefault(getattr(row, "source", 0), []).append(i)
    found: dict[str, float] = {}
    for number, rows in members.items() if len(members) > 1 else ():
        name = names[number] if number < len(names) else f"set_{number + 1}"
        metrics = select(rollouts, rows).reward_metrics()
        found |= {f"{name}/{metric}": value for metric, value in metrics.items()}
    return found


def compared(rollouts: Rollouts) -> dict[str, float]:
    """Return `measured`, and how far the rewards differ: their standard deviation, and the share of
    prompts whose responses differ in reward; neither where there is only one to compare.
    """
    found, groups = measured(rollouts), rollouts.group_id
    if len(rollouts) > 1:
        found["reward_std"] = float(rollouts.rewards.std(correction=0))
    if len(rollouts) > len(groups.unique()):
        informative = informative_groups(rollouts.rewards, groups)
        found["informative_groups"] = float(informative.float().mean())
    return found


def spread(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices below `total`, or all of fewer.

    >>> spread(10, 3), spread(2, 3)
    ([0, 3, 6], [0, 1])
    """
    count = min(count, total)
    return [place * total // count for place in range(count)]


def whole_groups(groups: Sequence[int], count: int) -> list[int]:
    """Return the rows of evenly spaced whole groups: at most `count` rows, but one group at least.

    groups: the group of each row. A `count` of 0 takes none.

    >>> whole_groups([0, 0, 1, 1, 2, 2], 5), whole_groups([7, 7, 7], 2), whole_groups([7], 0)
    ([0, 1, 2, 3], [0, 1, 2], [])
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    found = list(members.values())
    number = max(1, count // max(map(len, found), default=1)) if count else 0
    return [row for place in spread(len(found), number) for row in found[place]]


def samples_of(rollouts: Rollouts, batch: TokenBatch | None, count: int) -> Samples:
    """Return `whole_groups` of responses as rows of the sample log; with a batch also their
    tokens' advantages and the trainer's logprobs.
    """
    values: dict[str, Any] = {}
    if batch is not None:
        values = {"advantages": batch.advantages, "trainer_logprobs": batch.prev_logprobs}
    samples: Samples = []
    for i in whole_groups(rollouts.group_id.tolist(), count):
        completion, begin = rollouts.completions[i], len(rollouts.prompts[i])
        end = begin + len(completion.token_ids)
        answer = rollouts.answers[i]
        samples.append(
            {
                "group": int(rollouts.group_id[i]),
                "prompt": rollouts.texts[i],
                "response": completion.text,
                "reward": float(rollouts.rewards[i]),
                **rollouts.rewards_of(i),
                **({} if answer is None else {"extracted_answer": answer}),
                "finish_reason": completion.finish_reason,
                "token_ids": list(completion.token_ids),
                "logprobs": list(completion.logprobs),
                "columns": dict(rollouts.rows[i]),
                **{name: v[i, begin:end].tolist() for name, v in values.items() if v is not None},
            }
        )
    return samples


def worst_tokens(
    sample: Mapping[str, Any], tokenizer: Any, *, count: int = 3
) -> list[dict[str, Any]]:
    """Return the tokens on which sampler and trainer differ most, the worst first."""
    pairs = list(zip(sample["logprobs"], sample["trainer_logprobs"], strict=True))

    def gap(place: int) -> float:
        difference = abs(pairs[place][0] - pairs[place][1])
        return math.inf if math.isnan(difference) else difference

    return [
        {
            "position": place,
            "token": tokenizer.decode([sample["token_ids"][place]]),
            "logprob": pairs[place][0],
            "trainer_logprob": pairs[place][1],
        }
        for place in heapq.nlargest(count, range(len(pairs)), key=gap)
    ]
