"""What is shown of a step's responses: samples for the log, and their measurements."""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from nemorl.data.batch import TokenBatch
from nemorl.losses.rewards import informative_groups
from nemorl.rollout.collect import Rollouts
from nemorl.rollout.conversation import Conversation, examples_of

Samples = list[dict[str, Any]]
"""Rows of the sample log."""


def measured(rollouts: Rollouts) -> dict[str, float]:
    """Return rewards, accuracy (see `Rollouts.correct`) and sampled tokens of conversations on
    average; of several turns their number, and the reward of each; and the share that failed, by
    the kind of error.
    """
    found = {
        **rollouts.metrics,
        **rollouts.reward_metrics(),
        "response_length": float(rollouts.lengths.float().mean()),
        "truncated_fraction": float(rollouts.truncated.float().mean()),
    }
    if int(rollouts.num_turns.max()) > 1:
        found["turns"] = float(rollouts.num_turns.float().mean())
        given = [getattr(each.outcome, "turn_rewards", ()) for each in rollouts.conversations]
        for turn, rewards in enumerate(zip_longest(*given), start=1):
            there = [reward for reward in rewards if reward is not None]
            found[f"reward/turn_{turn}"] = sum(there) / len(there)
    if rollouts.failed:
        total = len(rollouts) + len(rollouts.failed)
        kinds = Counter(type(each.outcome.error).__name__ for each in rollouts.failed)  # type: ignore
        found["failed_fraction"] = len(rollouts.failed) / total
        found |= {f"failed/{kind}": count / total for kind, count in kinds.items()}
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
        turns, completion = rollouts.conversations[i].turns, rollouts.completions[i]
        begin, answer = len(rollouts.prompts[i]), rollouts.answers[i]
        examples = examples_of(turns)
        ids, logprobs, sampled = (
            [value for each in examples for value in getattr(each, name)]
            for name in ("input_ids", "generation_logprobs", "loss_mask")
        )
        samples.append(
            {
                "group": int(rollouts.group_id[i]),
                "prompt": rollouts.texts[i],
                "response": completion.text,
                "reward": float(rollouts.rewards[i]),
                **rollouts.rewards_of(i),
                **({} if answer is None else {"extracted_answer": answer}),
                "finish_reason": completion.finish_reason,
                "token_ids": ids[begin:],
                "logprobs": logprobs[begin:],
                **({} if len(turns) == 1 else said(rollouts.conversations[i], sampled[begin:])),
                "columns": dict(rollouts.rows[i]),
                **{n: v[i, begin : len(ids)].tolist() for n, v in values.items() if v is not None},
            }
        )
    return samples


def said(conversation: Conversation, sampled: Sequence[bool]) -> dict[str, Any]:
    """Return what a row of the log has of several turns: which tokens the model sampled, and of
    each turn what was given since the turn before, the response, and the reward.
    """
    rewards = getattr(conversation.outcome, "turn_rewards", ()) or [None] * len(conversation.turns)
    turns, before = list[dict[str, Any]](), list[int]()
    for turn, reward in zip(conversation.turns, rewards, strict=True):
        goes_on = list(turn.prompt[: len(before)]) == before
        given = turn.prompt[len(before) :] if goes_on else turn.prompt
        tokenizer = turn.completion.tokenizer
        turns.append(
            {
                "given": tokenizer.decode(list(given)) if tokenizer and turns else "",
                "response": turn.completion.text,
                "reward": reward,
                "rewritten": not goes_on,
            }
        )
        before = [*turn.prompt, *turn.completion.token_ids]
    return {"sampled": list(sampled), "turns": turns}


def worst_tokens(
    sample: Mapping[str, Any], tokenizer: Any, *, count: int = 3
) -> list[dict[str, Any]]:
    """Return the tokens on which sampler and trainer differ most, the worst first."""
    pairs = list(zip(sample["logprobs"], sample["trainer_logprobs"], strict=True))
    sampled = sample.get("sampled", [True] * len(pairs))

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
        for place in heapq.nlargest(count, (i for i, own in enumerate(sampled) if own), key=gap)
    ]
