"""Samples for the log and measurements of a step's responses."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.advantages import informative_groups
from nemorl.rollout.collect import Rollouts, select, turn_returns
from nemorl.rollout.conversation import Conversation, Failure, examples_of, segments_of
from nemorl.runtime.config.base import BaseConfig

Samples = list[dict[str, Any]]
"""Rows of the sample log."""
ENVIRONMENT = "environment/"
"""Begins the name of an environment's metric that is also one of nemorl's."""
MOST_FAILURES = 4
"""Failed conversations that are logged in a step."""


def measured(rollouts: Rollouts) -> dict[str, float]:
    """Return mean rewards, accuracy, tokens and turns of conversations, the reward of each turn of
    several, the share that failed, their number by error, and what environments measure.
    """
    ends = [each.outcome for each in rollouts.failed]
    failed = [type(end.error).__name__ for end in ends if isinstance(end, Failure)]
    found = {
        **rollouts.reward_metrics(),
        "response_length": float(rollouts.lengths.float().mean()),
        "truncated_fraction": float(rollouts.truncated.float().mean()),
        "turns": float(rollouts.num_turns.float().mean()),
        "failed_fraction": len(failed) / (len(rollouts) + len(failed)),
        **{f"failed/{kind}": float(count) for kind, count in Counter(failed).items()},
    }
    if int(rollouts.num_turns.max()) > 1:
        given = [getattr(each.outcome, "turn_rewards", ()) for each in rollouts.conversations]
        for turn, rewards in enumerate(zip_longest(*given), start=1):
            there = [reward for reward in rewards if reward is not None]
            found[f"reward/turn_{turn}"] = sum(there) / len(there)
        cut = [turn.completion.truncated for c in rollouts.conversations for turn in c.turns]
        found["truncated_turns"] = sum(cut) / len(cut)
    return beside(found, rollouts.metrics)


def beside(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Return both, those of an environment that have one of our names as environment/NAME.

    >>> beside({"loss": 0.5}, {"loss": 1.0, "wins": 2.0})
    {'environment/loss': 1.0, 'wins': 2.0, 'loss': 0.5}
    """
    return {f"{ENVIRONMENT * (key in ours)}{key}": x for key, x in theirs.items()} | {**ours}


def by_set(rollouts: Rollouts, names: Sequence[str]) -> dict[str, float]:
    """Return rewards and accuracy of each of several data sets (`Row.source`), and of each
    environment that rows name (column `environment`), as NAME/metric.
    """
    sets = _sets_of(rollouts, names)
    several = len(names) > 1 or len({*sets}) > 1
    members: dict[str, list[int]] = {}
    for i, (row, name) in enumerate(zip(rollouts.rows, sets, strict=True)):
        named = [name] * several + [row.get("environment")]
        for part in {each for each in named if isinstance(each, str)}:
            members.setdefault(part, []).append(i)
    return {
        f"{name}/{metric}": value
        for name, rows in sorted(members.items())
        for metric, value in select(rollouts, rows).reward_metrics().items()
    }


def _sets_of(rollouts: Rollouts, names: Sequence[str]) -> list[str]:
    """Return the name of each conversation's data set; one without is set_1, set_2, …"""
    numbers = [getattr(row, "source", 0) for row in rollouts.rows]
    return [names[n] if n < len(names) else f"set_{n + 1}" for n in numbers]


def outcomes_of(rollouts: Rollouts, names: Sequence[str]) -> Samples:
    """Return how each conversation was judged, as `nemorl.rollout.evaluation` compares records."""
    return [
        {
            "data": name,
            "group": int(rollouts.group_id[i]),
            "prompt": rollouts.conversations[i].text,
            **rollouts.judged(i),
        }
        for i, name in enumerate(_sets_of(rollouts, names))
    ]


def informative(rollouts: Rollouts, config: BaseConfig | None = None) -> Bool[Tensor, "batch"]:
    """Return whether responses to the same prompt differ in the reward, or with `advantage.level`
    turn in the return of a turn.
    """
    if getattr(getattr(config, "advantage", None), "level", None) != "turn":
        return informative_groups(rollouts.rewards, rollouts.group_id)
    rollout: Any = getattr(config, "rollout", None)
    differ = informative_groups(*turn_returns(rollouts, discount=rollout.discount))
    groups = rollouts.group_id.repeat_interleave(rollouts.num_turns)
    return torch.isin(rollouts.group_id, groups[differ])


def compared(rollouts: Rollouts, config: BaseConfig | None = None) -> dict[str, float]:
    """Return `measured`, the standard deviation of rewards, and the share of prompts whose
    responses differ (`informative`).
    """
    found, groups = dict[str, float](), rollouts.group_id
    if len(rollouts) > 1:
        found["reward_std"] = float(rollouts.rewards.std(correction=0))
    if len(rollouts) > len(groups.unique()):
        differing = groups[informative(rollouts, config)]
        found["informative_groups"] = len(differing.unique()) / len(groups.unique())
    return beside(found, measured(rollouts))


def spread(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices below `total`, or all of fewer.

    >>> spread(10, 3), spread(2, 3)
    ([0, 3, 6], [0, 1])
    """
    count = min(count, total)
    return [place * total // count for place in range(count)]


def whole_groups(groups: Sequence[int], count: int) -> list[int]:
    """Return the rows of evenly spaced whole groups: at most `count` rows, but at least one group
    unless that is 0. groups: the group of each row.

    >>> whole_groups([0, 0, 1, 1, 2, 2], 5), whole_groups([7, 7, 7], 2), whole_groups([7], 0)
    ([0, 1, 2, 3], [0, 1, 2], [])
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    found = list(members.values())
    number = max(1, count // max(map(len, found), default=1)) if count else 0
    return [row for place in spread(len(found), number) for row in found[place]]


def samples_of(rollouts: Rollouts, batch: TokenBatch | None, rows: Iterable[int]) -> Samples:
    """Return conversations as rows of the sample log; with a batch also their tokens' advantages
    and the trainer's logprobs, and which sampled ones are trained on, if not all.
    """
    values = {
        "advantages": getattr(batch, "advantages", None),
        "trainer_logprobs": getattr(batch, "prev_logprobs", None),
        "values": getattr(batch, "values", None),
        "trained": getattr(batch, "loss_mask", None),
    }
    samples: Samples = []
    for i in rows:
        sample, answer = _row(rollouts.conversations[i]), rollouts.answers[i]
        begin = len(rollouts.prompts[i])
        end = begin + len(sample["token_ids"])
        sample |= {
            "reward": float(rollouts.rewards[i]),
            **rollouts.rewards_of(i),
            **({} if answer is None else {"extracted_answer": answer}),
            **{n: v[i, begin:end].tolist() for n, v in values.items() if v is not None},
        }
        if sample.get("trained") == sample.get("sampled", [True] * (end - begin)):
            del sample["trained"]
        samples.append(sample)
    return samples


def failures_of(rollouts: Rollouts, count: int) -> Samples:
    """Return the first failed conversation of each reason, up to `count` and MOST_FAILURES."""
    first: dict[str, Conversation] = {}
    for each in rollouts.failed:
        if isinstance(each.outcome, Failure):
            first.setdefault(each.outcome.reason, each)
    found = [{**_row(each), "failure": reason} for reason, each in first.items()]
    return found[: min(count, MOST_FAILURES)]


def _row(conversation: Conversation) -> dict[str, Any]:
    turns, row = conversation.turns, conversation.row
    begin, examples = len(turns[0].prompt) if turns else 0, examples_of(turns)
    ids, logprobs, sampled = (
        [value for each in examples for value in getattr(each, name)][begin:]
        for name in ("input_ids", "generation_logprobs", "loss_mask")
    )
    origin = getattr(row, "origin", "")
    return {
        "group": conversation.group,
        **({"origin": origin} if origin else {}),
        "prompt": conversation.text,
        "response": turns[-1].completion.text if turns else "",
        "finish_reason": turns[-1].completion.finish_reason if turns else None,
        **({"cut_by": conversation.cut_by} if conversation.cut_by else {}),
        "token_ids": ids,
        "logprobs": logprobs,
        **({"sampled": sampled, "turns": said(conversation)} if len(turns) > 1 else {}),
        "columns": dict(row),
    }


def said(conversation: Conversation) -> list[dict[str, Any]]:
    """Return for each turn what was given since the one that it goes on with (`rewritten`: the
    whole prompt), the response, its reward and tokens.
    """
    turns = conversation.turns
    rewards = getattr(conversation.outcome, "turn_rewards", ()) or [None] * len(turns)
    found, start = dict[int, dict[str, Any]](), -len(turns[0].prompt)
    for segment in segments_of(turns):
        before = segment.shared[-1:]
        for number, turn in zip(segment.numbers, segment.turns, strict=True):
            known = sum(len(each.prompt) + len(each.completion.token_ids) for each in before)
            begin, tokenizer = start + len(turn.prompt), turn.completion.tokenizer
            found[number] = {
                "given": tokenizer.decode(list(turn.prompt[known:])) if tokenizer else "",
                "response": turn.completion.text,
                "reward": rewards[number - 1],
                "rewritten": number > 1 and not before,
                "tokens": [begin, begin + len(turn.completion.token_ids)],
            }
            before = [turn]
        start += len(segment.tokens)
    return [found[number] for number in sorted(found)]


def worst_tokens(sample: Mapping[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the three tokens on which sampler and trainer differ most, the worst first."""
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
        for place in heapq.nlargest(3, (i for i, own in enumerate(sampled) if own), key=gap)
    ]
