"""From prompts to judged responses (`collect`), and to a batch to train on (`to_token_batch`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.data.datasets import as_messages, prompt_of
from nemorl.data.rows import own_copy
from nemorl.losses.logprobs import LogprobKind
from nemorl.rollout.environment import (
    ONE_TURN,
    EnvironmentInterface,
    check_counts,
    reward_tensor,
)
from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.user_code import exit_is_error

LISTS = ("rows", "prompts", "texts", "completions", "answers")
"""Fields of `Rollouts` with one entry per response that are no tensors."""


@dataclass(frozen=True)
class Prompts:
    """Rows of a data set and their prompts as token ids."""

    rows: Sequence[Mapping[str, Any]]
    token_ids: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int]) -> "Prompts":
        return replace(
            self,
            rows=[self.rows[i] for i in indices],
            token_ids=[self.token_ids[i] for i in indices],
        )

    def messages(self, index: int) -> list[Mapping[str, Any]]:
        """Return a row's prompt as a conversation."""
        return as_messages(prompt_of(self.rows[index]), "prompt", "user")


@dataclass(frozen=True)
class Rollouts:
    """Responses and their rewards, prompt by prompt: one entry per response."""

    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[Sequence[int]]
    texts: Sequence[str]
    """Of the prompts."""
    completions: Sequence[Completion]
    rewards: Float[Tensor, "batch"]
    group_id: Int[Tensor, "batch"]
    """Which responses answer the same prompt."""
    answers: Sequence[str | None]
    kind: LogprobKind
    metrics: Mapping[str, float]
    """Of the environment."""
    components: Mapping[str, Float[Tensor, "batch"]] = field(default_factory=dict)
    """Of several rewards, each by name before it is weighted."""

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def correct(self) -> Bool[Tensor, "batch"]:
        """Whose reward is at least 1; of several rewards the first counts."""
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
    environment: EnvironmentInterface,
    prompts: Prompts,
    sampling: SamplingParams,
    *,
    seed: int,
    first_group: int = 0,
) -> Rollouts:
    """Sample `sampling.n` responses to each prompt and have them judged.

    Group i, counted from `first_group`, samples from the seed `derive_seed(seed, i)`: a response
    depends on nothing else in the batch. Raises: ValueError where the environment goes on after the
    first response.
    """
    requests = [
        replace(sampling, seed=derive_seed(seed, first_group + i)) for i in range(len(prompts))
    ]
    completions = generator.generate(prompts.token_ids, requests)
    index = [i for i in range(len(prompts)) for _ in range(sampling.n)]
    logs = [
        [*prompts.messages(i), {"role": "assistant", "content": c.text}]
        for i, c in zip(index, completions, strict=True)
    ]
    size, name = len(logs), type(environment).__name__
    with exit_is_error(f"environment {name!r}"):
        result = environment.step(logs, [own_copy(prompts.rows[i]) for i in index])
    check_counts(result, size, name)
    if not all(result.terminateds):
        raise ValueError(f"environment {name!r} {ONE_TURN}")
    texts = ["\n".join(str(message["content"]) for message in log[:-1]) for log in logs]
    changed, metrics = environment.global_post_process_and_metrics(
        {
            "rewards": reward_tensor(result.rewards, size, name),
            "components": result.components,
            "texts": texts,
            "truncated": [c.truncated for c in completions],
        }
    )
    components = {
        key: reward_tensor(values, size, name, key)
        for key, values in changed.get("components", {}).items()
    }
    return Rollouts(
        rows=[prompts.rows[i] for i in index],
        prompts=[prompts.token_ids[i] for i in index],
        texts=texts,
        completions=completions,
        rewards=reward_tensor(changed["rewards"], size, name),
        group_id=torch.tensor(index, dtype=torch.long) + first_group,
        answers=list(result.answers or ()) or [None] * len(completions),
        kind=kind_of(sampling, version=_version(completions)),
        metrics={key: float(value) for key, value in metrics.items()},
        components=components,
    )


def _version(completions: Sequence[Completion]) -> int | None:
    """The version that sampled all tokens, if it is one."""
    versions = {version for c in completions for version in c.policy_versions} or {0}
    return versions.pop() if len(versions) == 1 else None


def kind_of(sampling: SamplingParams, *, version: int | None = None) -> LogprobKind:
    """Return the distribution of `sampling`'s logprobs (greedy: the model's own)."""
    if sampling.temperature == 0:
        return LogprobKind(policy_version=version)
    return LogprobKind(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, policy_version=version
    )


def select(rollouts: Rollouts, keep: Sequence[int]) -> Rollouts:
    """Return some of the responses, in the order given."""
    index = torch.tensor(list(keep), dtype=torch.long)
    columns: dict[str, Any] = {name: [getattr(rollouts, name)[i] for i in keep] for name in LISTS}
    return replace(
        rollouts,
        rewards=rollouts.rewards[index],
        group_id=rollouts.group_id[index],
        components={name: values[index] for name, values in rollouts.components.items()},
        **columns,
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
    columns: dict[str, Any] = {
        name: [item for part in parts for item in getattr(part, name)] for name in LISTS
    }
    metrics = {
        name: _mean_metric(name, parts)
        for name in dict.fromkeys(name for part in parts for name in part.metrics)
    }
    components = {
        name: torch.cat([part.components[name] for part in parts]) for name in first.components
    }
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ("rewards", "group_id")
    }
    return replace(first, metrics=metrics, components=components, **tensors, **columns)


def _mean_metric(name: str, parts: Sequence[Rollouts]) -> float:
    with_it = [part for part in parts if name in part.metrics]
    size = sum(map(len, with_it))
    return sum(len(part) / size * part.metrics[name] for part in with_it)


def to_token_batch(rollouts: Rollouts) -> TokenBatch:
    """Return one row per response, all of its tokens trained on, with `generation_logprobs`."""
    examples = []
    for prompt, completion in zip(rollouts.prompts, rollouts.completions, strict=True):
        response = [False] * len(prompt) + [True] * len(completion.token_ids)
        examples.append(
            Example(
                input_ids=[*prompt, *completion.token_ids],
                loss_mask=response,
                response_mask=response,
                generation_logprobs=[0.0] * len(prompt) + list(completion.logprobs),
                routed_experts=with_last(completion.routed_experts),
            )
        )
    return collate(examples, logprob_kind=rollouts.kind)


def with_last(
    experts: Int[Tensor, "computed layers topk"] | None,
) -> Int[Tensor, "tokens layers topk"] | None:
    """Add the last token, for which the sampler chose none."""
    return None if experts is None else pad(experts, (0, 0, 0, 0, 0, 1), value=-1)
