"""From prompts to judged responses (`collect`), and to a batch to train on (`to_batch`)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemorl.checks import require
from nemorl.data.batch import TokenBatch, collate, pad
from nemorl.data.packing import pack
from nemorl.losses.advantages import to_tokens
from nemorl.losses.importance import token_hashes
from nemorl.losses.logprobs import LogprobKind
from nemorl.rollout.calls import Call, blocking, call_in_turn
from nemorl.rollout.conversation import (
    Conversation,
    Failure,
    Outcome,
    Prompts,
    examples_of,
    segments_of,
    turns_of,
)
from nemorl.rollout.driver import Driver
from nemorl.rollout.environment import reward_tensor
from nemorl.rollout.episodes import Environment, judge_of, name_in, named, parts_of, places_of
from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams

MOST_FAILED = 0.5
"""Share of conversations that may fail; with more the run ends."""


@dataclass(frozen=True)
class Rollouts:
    """Conversations and their rewards, prompt by prompt."""

    conversations: Sequence[Conversation]
    """With an outcome each."""
    rewards: Float[Tensor, "batch"]
    """As the environment's global post-processing left them."""
    kind: LogprobKind
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the environment."""
    components: Mapping[str, Float[Tensor, "batch"]] = field(default_factory=dict)
    """As in `Outcome`; NaN where the conversation's environment has no such one (`ByRow`)."""
    failed: Sequence[Conversation] = ()
    """Those that failed, which are in nothing else."""

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return [conversation.row for conversation in self.conversations]

    @cached_property
    def prompts(self) -> Sequence[Sequence[int]]:
        return [conversation.turns[0].prompt for conversation in self.conversations]

    @cached_property
    def completions(self) -> Sequence[Completion]:
        """The last turns'."""
        return [conversation.turns[-1].completion for conversation in self.conversations]

    @cached_property
    def answers(self) -> Sequence[str | None]:
        return [getattr(each.outcome, "answer", None) for each in self.conversations]

    @cached_property
    def group_id(self) -> Int[Tensor, "batch"]:
        """Equal for the responses to one prompt."""
        return torch.tensor([each.group for each in self.conversations], dtype=torch.long)

    def __len__(self) -> int:
        return len(self.conversations)

    @property
    def correct(self) -> Bool[Tensor, "batch"] | None:
        """Whether the only reward, or the only one of several with accuracy in its name, is at
        least 1; None: there is no such one, or environments differ in it.
        """
        if any(values.isnan().any() for values in self.components.values()):
            return None
        if len(self.components) < 2:
            return next(iter(self.components.values()), self.rewards) >= 1
        named = [values for name, values in self.components.items() if "accuracy" in name]
        return named[0] >= 1 if len(named) == 1 else None

    def judged(self, index: int) -> dict[str, Any]:
        """Return one response's reward and, if known, whether it is `correct`."""
        judged = {} if self.correct is None else {"correct": bool(self.correct[index])}
        return {"reward": float(self.rewards[index]), **judged}

    def reward_metrics(self) -> dict[str, float]:
        """Return mean reward, accuracy if known, and reward/NAME of each component."""
        correct = self.correct
        return {
            "reward": float(self.rewards.mean()),
            **({} if correct is None else {"accuracy": float(correct.float().mean())}),
            **{f"reward/{name}": float(x.nanmean()) for name, x in self.components.items()},
        }

    def rewards_of(self, index: int) -> dict[str, dict[str, float]]:
        """Return one response's components, if any, for a log: {"rewards": {name: value}}."""
        items = self.components.items()
        parts = {name: x for name, each in items if not math.isnan(x := float(each[index]))}
        return {"rewards": parts} if parts else {}

    @property
    def truncated(self) -> Bool[Tensor, "batch"]:
        return torch.tensor([each.truncated for each in self.conversations], dtype=torch.bool)

    @property
    def lengths(self) -> Int[Tensor, "batch"]:
        """Tokens that the model sampled in each conversation."""
        return torch.tensor([each.num_tokens for each in self.conversations])

    @property
    def longest_responses(self) -> Int[Tensor, "batch"]:
        lengths = [[len(turn.completion.token_ids) for turn in c.turns] for c in self.conversations]
        return torch.tensor([max(each) for each in lengths])

    @property
    def num_turns(self) -> Int[Tensor, "batch"]:
        return torch.tensor([len(each.turns) for each in self.conversations])

    def to_batch(
        self,
        advantage: Callable[..., Tensor] | Tensor | None = None,
        weights: Callable[..., Tensor] | Tensor | None = None,
    ) -> TokenBatch:
        """Return one row per conversation, all that was sampled trained on, with
        `generation_logprobs`, and `policy_versions` where all completions have them.

        Where a prompt rewrites what was before, and where a conversation branches, a row has
        several segments; what those of a conversation share is trained on in the first of them.

        Args:
            advantage: per conversation or token, or a function of rewards and group_id, such as
                `advantages.grpo`.
            weights: of tokens, or a function of the loss mask, such as
                `masks.token_mean_weights`.

        >>> batch = groups.to_batch(advantages.grpo, masks.token_mean_weights)  # doctest: +SKIP
        """
        found = [examples_of(each.turns) for each in self.conversations]
        examples = [*chain.from_iterable(found)]
        if any(one.policy_versions is None for one in examples):
            examples = [replace(one, policy_versions=None) for one in examples]
        batch = collate(examples, logprob_kind=self.kind)
        if len(batch) != len(found):
            places = iter(range(len(batch)))
            batch = pack(batch, tuple(tuple(next(places) for _ in each) for each in found))
        hashes = torch.zeros_like(batch.input_ids)
        hashes[batch.segment_ids > 0] = sampled_hashes(self.conversations)
        if advantage is not None:
            if not isinstance(advantage, Tensor):
                advantage = advantage(self.rewards, self.group_id)
            if advantage.ndim == 1:
                advantage = to_tokens(advantage, batch.loss_mask)
        if weights is not None and not isinstance(weights, Tensor):
            weights = weights(batch.loss_mask)
        return replace(batch, advantages=advantage, loss_weights=weights, sampled_hashes=hashes)


def collect(
    generator: GenerationBackend,
    environment: Environment,
    prompts: Prompts,
    sampling: SamplingParams,
    *,
    seed: int,
) -> Rollouts:
    """Have `sampling.n` conversations about each prompt, judged by an environment or led by an
    episode, `async def episode(row, policy) -> Outcome`.

    Group g of `prompts.groups` (empty: 0, 1, 2, ...) samples from the seed `derive_seed(seed, g)`:
    a conversation depends on nothing else in the batch. One that fails is left out (`failed`).
    Raises: the first one's exception where more than MOST_FAILED fail.
    """
    driver = Driver(generator, environment, sampling, seed=seed, most_failed=MOST_FAILED)
    with closing(driver):
        driver.resume()
        driver.begin([prompts])
        everything = driver.next_ended()[1]
    return as_rollouts(everything, environment, sampling, timeout_s=prompts.limits.timeout_s)


def as_rollouts(
    everything: Sequence[Conversation],
    environment: Environment,
    sampling: SamplingParams,
    *,
    timeout_s: float = math.inf,
) -> Rollouts:
    """Return conversations that have ended, after each environment's global post-processing, which
    may take `timeout_s`. Metrics of one of several (`ByRow`) begin with its name.
    """
    conversations, failed = _parted(everything, environment)
    size, metrics = len(conversations), dict[str, float]()
    rewards, components = torch.zeros(size), dict[str, Tensor]()
    for name, places in places_of(environment, (each.row for each in conversations)).items():
        judged, parts, found = _processed(
            [conversations[place] for place in places], parts_of(environment)[name], timeout_s
        )
        rewards[places] = judged
        for key, values in parts.items():
            components.setdefault(key, torch.full((size,), math.nan))[places] = values
        metrics |= {f"{name}/{key}" if name else key: value for key, value in found.items()}
    return Rollouts(
        conversations=conversations,
        rewards=rewards,
        kind=kind_of(sampling),
        metrics=_outcome_metrics(conversations) | metrics,
        components=components,
        failed=failed,
    )


def _processed(
    conversations: Sequence[Conversation], environment: Environment, timeout_s: float
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    judge, what = judge_of(environment), named(environment)
    outcomes = [each.outcome for each in conversations if isinstance(each.outcome, Outcome)]
    _require_alike(what, (each.components for each in outcomes if not _cut_short(each)))
    size = len(outcomes)
    changed: Mapping[str, Any] = {
        "rewards": reward_tensor([outcome.reward for outcome in outcomes], size, what),
        "components": {
            key: [each.components.get(key, 0.0) for each in outcomes]
            for key in next((each.components for each in outcomes if each.components), ())
        },
        "texts": [each.text for each in conversations],
        "truncated": [each.truncated for each in conversations],
    }
    metrics: Mapping[str, float] = {}
    if judge is not None:
        post = judge.global_post_process_and_metrics
        call = Call(f"{named(judge)}: global_post_process_and_metrics", timeout_s, size)
        changed, metrics = blocking(call_in_turn(call, partial(post, changed)))
    components = changed.get("components", {}).items()
    return (
        reward_tensor(changed["rewards"], size, what),
        {key: reward_tensor(values, size, what, key) for key, values in components},
        {key: float(value) for key, value in metrics.items()},
    )


def _parted(
    conversations: Sequence[Conversation], environment: Environment
) -> tuple[list[Conversation], list[Conversation]]:
    found = [each for each in conversations if isinstance(each.outcome, Outcome)]
    failed = [each for each in conversations if isinstance(each.outcome, Failure)]
    if len(failed) > MOST_FAILED * len(conversations):
        first = failed[0]
        assert isinstance(first.outcome, Failure)
        row = getattr(first.row, "origin", "") or f"the row of group {first.group}"
        turn = f"in turn {len(first.turns)}" if first.turns else "before its first turn"
        what = named(parts_of(environment)[next(iter(places_of(environment, [first.row])))])
        first.outcome.error.add_note(
            f"This ended {len(failed)} of {len(conversations)} conversations, the first about"
            f" {row}, {turn} ({what})."
        )
        raise first.outcome.error
    return found, failed


def _require_alike(what: str, components: Iterable[Iterable[str]]) -> None:
    names = {tuple(sorted(each)) for each in components}
    require(
        len(names) < 2,
        what,
        "must return the same reward components in every conversation",
        sorted(names),
        "return 0.0 where one has none",
    )


def _cut_short(outcome: Outcome | Failure) -> bool:
    """A limit ended it before it had any components: each counts 0."""
    return isinstance(outcome, Outcome) and outcome.truncated and not outcome.components


def _outcome_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for each in conversations:
        for name, value in getattr(each.outcome, "metrics", {}).items():
            found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


def kind_of(sampling: SamplingParams) -> LogprobKind:
    """Return the distribution of `sampling`'s logprobs (greedy: the model's own)."""
    if sampling.temperature == 0:
        return LogprobKind()
    return LogprobKind(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def select(rollouts: Rollouts, keep: Sequence[int]) -> Rollouts:
    """Return some of the responses, in the order given."""
    index = torch.tensor(list(keep), dtype=torch.long)
    found = {name: values[index] for name, values in rollouts.components.items()}
    return replace(
        rollouts,
        conversations=[rollouts.conversations[i] for i in keep],
        rewards=rollouts.rewards[index],
        components={name: x for name, x in found.items() if not x.isnan().all()},
    )


def join(parts: Sequence[Rollouts]) -> Rollouts:
    """Return several rollouts as one; metrics are averaged over the conversations or parts that
    have them. Raises: ValueError unless they have the same kind and reward components.
    """
    whole = [
        p for p in parts if p.components or not all(_cut_short(c.outcome) for c in p.conversations)
    ]
    first, by_row = (whole or parts)[0], any(name_in(row) for part in parts for row in part.rows)
    for other in parts:
        if other.kind != first.kind:
            raise ValueError(
                f"rollouts of one batch must be sampled alike, but there are {first.kind} and"
                f" {other.kind}: change no sampling in a step"
            )
    if not by_row:
        _require_alike("an environment", (part.components for part in whole))
    conversations = [*chain.from_iterable(part.conversations for part in parts)]
    metrics = dict[str, float]()
    for name in dict.fromkeys(chain.from_iterable(part.metrics for part in parts)):
        having = [part for part in parts if name in part.metrics]
        size = sum(map(len, having))
        metrics[name] = sum(len(part) / size * part.metrics[name] for part in having)
    none = math.nan if by_row else 0.0
    return replace(
        first,
        conversations=conversations,
        rewards=torch.cat([part.rewards for part in parts]),
        metrics=metrics | _outcome_metrics(conversations),
        components={
            name: torch.cat(
                [p.components.get(name, torch.full_like(p.rewards, none)) for p in parts]
            )
            for name in dict.fromkeys(chain.from_iterable(part.components for part in parts))
        },
        failed=[*chain.from_iterable(part.failed for part in parts)],
    )


def sampled_hashes(conversations: Sequence[Conversation]) -> Int[Tensor, "tokens"]:
    """Return `token_hashes` of all tokens of conversations, 0 of those that were not sampled."""
    ids, places, logprobs, sampled = list[int](), list[int](), list[float](), list[bool]()
    for conversation in conversations:
        for segment in segments_of(conversation.turns):
            begin = len(ids)
            for turn in segment.turns:
                given, said = turn.prompt[len(ids) - begin :], turn.completion
                ids += [*given, *said.token_ids]
                logprobs += [*[0.0] * len(given), *said.logprobs]
                sampled += [*[False] * len(given), *[True] * len(said.token_ids)]
            places += range(len(ids) - begin)
    hashes = token_hashes(
        torch.tensor([ids]), torch.tensor([places]), torch.tensor([logprobs], dtype=torch.float32)
    )
    return torch.where(torch.tensor(sampled), hashes[0], 0)


def turn_numbers(rollouts: Rollouts, batch: TokenBatch) -> Int[Tensor, "batch seq"]:
    """Return the turn, from 1, that sampled each token of `to_batch`; 0 of other tokens."""
    found = [torch.tensor(turns_of(each.turns)) for each in rollouts.conversations]
    return pad(found, value=0, length=batch.input_ids.shape[1])[0]


def turn_returns(
    rollouts: Rollouts, *, discount: float
) -> tuple[Float[Tensor, "turns"], Int[Tensor, "turns"]]:
    """Return G_t = Σ_{s ≥ t} discount^(s − t) · reward_s of each turn of each conversation, and the
    number of the turn's group: the same turn of all conversations of a group.

    Without `turn_rewards` the last turn has the conversation's reward. Raises: ValueError where the
    environment's global post-processing changed the reward of several turns.
    """
    returns, groups, labels = list[float](), list[int](), dict[tuple[int, int], int]()
    for each, total in zip(rollouts.conversations, rollouts.rewards.tolist(), strict=True):
        assert isinstance(each.outcome, Outcome)
        given = each.outcome.turn_rewards if len(each.turns) > 1 else ()
        same = math.isclose(total, each.outcome.reward, rel_tol=1e-6, abs_tol=1e-6)
        require(
            same or not len(given),
            "advantage.level",
            "is not for rewards of several turns that global_post_process_and_metrics changes",
            "turn",
            "use conversation, or leave them as they are",
        )
        rewards = list(given) or [*[0.0] * (len(each.turns) - 1), total]
        own = [*accumulate(reversed(rewards), lambda after, reward: reward + discount * after)]
        returns += reversed(own)
        turns = range(len(rewards))
        groups += [labels.setdefault((each.group, turn), len(labels)) for turn in turns]
    return torch.tensor(returns), torch.tensor(groups, dtype=torch.long)
