"""From prompts to judged responses (`collect`), and to a batch to train on (`to_token_batch`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemorl.checks import require
from nemorl.data.batch import TokenBatch, collate
from nemorl.data.datasets import as_messages, prompt_of
from nemorl.losses.logprobs import LogprobKind
from nemorl.rollout.conversation import Conversation, Episode, Failure, Outcome, examples_of
from nemorl.rollout.environment import ONE_TURN, EnvironmentInterface, reward_tensor
from nemorl.rollout.episodes import converse
from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams
from nemorl.rollout.signature import name_of


@dataclass(frozen=True)
class Prompts:
    """Rows of a data set and their prompts as token ids."""

    rows: Sequence[Mapping[str, Any]]
    token_ids: Sequence[Sequence[int]]
    groups: Sequence[int] = ()
    """The number of each prompt's group in the run; empty: not numbered yet."""

    def __post_init__(self) -> None:
        for name in ("token_ids", "groups") if self.groups else ("token_ids",):
            count = len(getattr(self, name))
            fits = f"must have an entry for each of the {len(self.rows)} rows"
            require(count == len(self.rows), name, fits, count, "take them from one data set")

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int]) -> "Prompts":
        return replace(
            self,
            rows=[self.rows[i] for i in indices],
            token_ids=[self.token_ids[i] for i in indices],
            groups=[self.groups[i] for i in indices] if self.groups else (),
        )

    def messages(self, index: int) -> list[Mapping[str, Any]]:
        """Return a row's prompt as a conversation."""
        return as_messages(prompt_of(self.rows[index]), "prompt", "user")


@dataclass(frozen=True)
class Rollouts:
    """Responses and their rewards, prompt by prompt: one entry per response."""

    conversations: Sequence[Conversation]
    """Each with one turn."""
    texts: Sequence[str]
    """Texts of the prompts."""
    rewards: Float[Tensor, "batch"]
    """Rewards as the environment's global post-processing left them."""
    kind: LogprobKind
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment."""
    components: Mapping[str, Float[Tensor, "batch"]] = field(default_factory=dict)
    """Several rewards, each by name before it is weighted."""

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return [conversation.row for conversation in self.conversations]

    @cached_property
    def prompts(self) -> Sequence[Sequence[int]]:
        """Token ids."""
        return [conversation.turns[0].prompt for conversation in self.conversations]

    @cached_property
    def completions(self) -> Sequence[Completion]:
        return [conversation.turns[0].completion for conversation in self.conversations]

    @cached_property
    def answers(self) -> Sequence[str | None]:
        """What was read as each response's answer."""
        return [getattr(each.outcome, "answer", None) for each in self.conversations]

    @cached_property
    def group_id(self) -> Int[Tensor, "batch"]:
        """The number of each response's group in the run: equal for the responses to one prompt."""
        return torch.tensor([each.group for each in self.conversations], dtype=torch.long)

    def __len__(self) -> int:
        return len(self.conversations)

    @property
    def correct(self) -> Bool[Tensor, "batch"]:
        """True where the reward is at least 1; of several rewards the first counts."""
        return next(iter(self.components.values()), self.rewards) >= 1

    def reward_metrics(self) -> dict[str, float]:
        """Return mean reward, share of `correct` responses, and reward/NAME of each component."""
        return {
            "reward": float(self.rewards.mean()),
            "accuracy": float(self.correct.float().mean()),
            **{f"reward/{name}": float(x.mean()) for name, x in self.components.items()},
        }

    def rewards_of(self, index: int) -> dict[str, dict[str, float]]:
        """Return one response's components for a log: {"rewards": {name: value}}, or nothing."""
        parts = {name: float(values[index]) for name, values in self.components.items()}
        return {"rewards": parts} if parts else {}

    @property
    def truncated(self) -> Bool[Tensor, "batch"]:
        return torch.tensor([c.truncated for c in self.completions], dtype=torch.bool)

    @property
    def lengths(self) -> Int[Tensor, "batch"]:
        """Tokens of each response."""
        return torch.tensor([len(c.token_ids) for c in self.completions])


def collect(
    generator: GenerationBackend,
    environment: EnvironmentInterface | Episode,
    prompts: Prompts,
    sampling: SamplingParams,
    *,
    seed: int,
) -> Rollouts:
    """Have `sampling.n` conversations of one turn about each prompt, judged by an environment or
    ended by an episode, `async def episode(row, policy) -> Outcome`.

    Group g of `prompts.groups` (empty: 0, 1, 2, ...) samples from the seed `derive_seed(seed, g)`:
    a response depends on nothing else in the batch. Raises: ValueError for more turns than one; the
    exception of an episode.
    """
    conversations = converse(
        generator,
        environment,
        prompts.rows,
        prompts.token_ids,
        sampling,
        seed=seed,
        groups=prompts.groups or range(len(prompts)),
    )
    judge = environment if isinstance(environment, EnvironmentInterface) else None
    what = f"{'environment' if judge else 'episode'} {name_of(environment)!r}"
    outcomes = _outcomes(conversations, what)
    completions = [each.turns[0].completion for each in conversations]
    size = len(outcomes)
    messages = map(prompts.messages, range(len(prompts)))
    texts = [
        "\n".join(str(m["content"]) for m in log) for log in messages for _ in range(sampling.n)
    ]
    changed: Mapping[str, Any] = {
        "rewards": reward_tensor([outcome.reward for outcome in outcomes], size, what),
        "components": {
            key: [each.components[key] for each in outcomes]
            for key in (outcomes[0].components if outcomes else ())
        },
        "texts": texts,
        "truncated": [completion.truncated for completion in completions],
    }
    metrics: Mapping[str, float] = {}
    if judge is not None:
        changed, metrics = judge.global_post_process_and_metrics(changed)
    return Rollouts(
        conversations=conversations,
        texts=texts,
        rewards=reward_tensor(changed["rewards"], size, what),
        kind=kind_of(sampling),
        metrics={key: float(value) for key, value in metrics.items()},
        components={
            key: reward_tensor(values, size, what, key)
            for key, values in changed.get("components", {}).items()
        },
    )


def _outcomes(conversations: Sequence[Conversation], what: str) -> list[Outcome]:
    """Return how episodes ended. Raises what one raised, or a ValueError for several turns."""
    if failed := [(c, c.outcome.error) for c in conversations if isinstance(c.outcome, Failure)]:
        first, error = failed[0]
        row = getattr(first.row, "origin", "") or f"the row of group {first.group}"
        ended = f"{len(failed)} of {len(conversations)} conversations"
        error.add_note(f"This ended {ended}, the first about {row}.")
        raise error
    found = [each.outcome for each in conversations if isinstance(each.outcome, Outcome)]
    if not all(each.turns for each in conversations):
        raise ValueError(f"{what} must sample a response: await policy.sample(policy.prompt)")
    if any(len(each.turns) > 1 for each in conversations):
        raise ValueError(f"{what} {ONE_TURN}")
    names = {tuple(sorted(outcome.components)) for outcome in found}
    remedy = "return 0.0 where one has no value"
    alike = "must return the same reward components in every conversation"
    require(len(names) < 2, what, alike, sorted(names), remedy)
    return found


def kind_of(sampling: SamplingParams) -> LogprobKind:
    """Return the distribution of `sampling`'s logprobs (greedy: the model's own)."""
    if sampling.temperature == 0:
        return LogprobKind()
    return LogprobKind(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def select(rollouts: Rollouts, keep: Sequence[int]) -> Rollouts:
    """Return some of the responses, in the order given."""
    index = torch.tensor(list(keep), dtype=torch.long)
    return replace(
        rollouts,
        conversations=[rollouts.conversations[i] for i in keep],
        texts=[rollouts.texts[i] for i in keep],
        rewards=rollouts.rewards[index],
        components={name: values[index] for name, values in rollouts.components.items()},
    )


def join(parts: Sequence[Rollouts]) -> Rollouts:
    """Return several rollouts as one; metrics are averaged by size over the parts that have them.

    Raises: ValueError unless they have the same kind and reward components.
    """
    first = parts[0]
    for other in parts:
        if other.kind != first.kind:
            raise ValueError(
                f"rollouts of one batch must be sampled alike, but there are {first.kind} and"
                f" {other.kind}"
            )
        if other.components.keys() != first.components.keys():
            raise ValueError(
                "an environment must return the same reward components in every batch, but it"
                f" returned {sorted(first.components)} and {sorted(other.components)}: return 0.0"
                " where one has no value"
            )
    metrics = {
        name: _mean_metric(name, parts)
        for name in dict.fromkeys(name for part in parts for name in part.metrics)
    }
    components = {
        name: torch.cat([part.components[name] for part in parts]) for name in first.components
    }
    return replace(
        first,
        conversations=[each for part in parts for each in part.conversations],
        texts=[text for part in parts for text in part.texts],
        rewards=torch.cat([part.rewards for part in parts]),
        metrics=metrics,
        components=components,
    )


def _mean_metric(name: str, parts: Sequence[Rollouts]) -> float:
    with_it = [part for part in parts if name in part.metrics]
    size = sum(map(len, with_it))
    return sum(len(part) / size * part.metrics[name] for part in with_it)


def to_token_batch(rollouts: Rollouts) -> TokenBatch:
    """Return one row per response, all of its tokens trained on, with `generation_logprobs`."""
    examples = [one for each in rollouts.conversations for one in examples_of(each.turns)]
    return collate(examples, logprob_kind=rollouts.kind)
