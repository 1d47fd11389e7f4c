"""Several rewards as one: their weighted sum, with each of them logged."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nemorl.rollout.environment import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Metadata,
    check_counts,
    check_rows,
    listed,
)


class WeightedRewards:
    """Single-turn environments by name as one: reward = Σ weight · reward of each.

    `components` has each before it is weighted. Without `weights` each counts 1; with weight 0 a
    reward is only logged. Raises: ValueError unless weights fit, and for more than one turn.

    >>> from nemorl.rollout.environment import FunctionalRewardWrapper
    >>> right = FunctionalRewardWrapper(lambda prompt, response: response == "2")
    >>> short = FunctionalRewardWrapper(lambda prompt, response: -len(response))
    >>> environment = WeightedRewards({"right": right, "short": short}, weights=(1.0, 0.1))
    >>> log = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    >>> environment.step([log], [{}]).rewards
    [0.9]
    """

    max_turns = 1

    def __init__(
        self, environments: Mapping[str, EnvironmentInterface], weights: Sequence[float] = ()
    ) -> None:
        weights = [float(weight) for weight in weights] or [1.0] * len(environments)
        if not environments:
            raise ValueError(
                "reward must be at least one reward, but there is none: name one, as exact_match"
            )
        if len(weights) != len(environments):
            raise ValueError(
                f"reward_weights must be one number per reward, but there are {len(weights)} for"
                f" {', '.join(environments)}: give {len(environments)}"
            )
        if not all(map(math.isfinite, weights)) or not any(weights):
            raise ValueError(
                f"reward_weights must be finite numbers that are not all 0, but they are {weights}"
            )
        self.environments = dict(environments)
        self.weights = dict(zip(environments, weights, strict=True))

    def check(self, rows: Sequence[Metadata]) -> None:
        for environment in self.environments.values():
            check_rows(environment, rows)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Metadata]
    ) -> EnvironmentReturn:
        returns = {
            name: environment.step(message_log_batch, metadata)
            for name, environment in self.environments.items()
        }
        for name, result in returns.items():
            check_counts(result, len(message_log_batch), name)
            if not all(result.terminateds):
                raise ValueError(
                    f"reward {name!r} must end every conversation after the first response to be"
                    " one of several rewards: use it alone"
                )
        components = {name: listed(result.rewards) for name, result in returns.items()}
        return replace(
            next(iter(returns.values())),
            rewards=self.total(components),
            components=components,
            answers=_first(result.answers for result in returns.values()),
            failures=_first(result.failures for result in returns.values()),
        )

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Let each environment change its own rewards; its metrics begin with its name. Other
        components, as `get_reward` of tools, are added as they are.
        """
        components: dict[str, list[float]] = {}
        metrics: dict[str, float] = {}
        for name, environment in self.environments.items():
            changed, found = environment.global_post_process_and_metrics(
                {
                    **batch,
                    "rewards": torch.tensor(batch["components"][name], dtype=torch.float32),
                    "components": {},
                }
            )
            components[name] = [float(reward) for reward in changed["rewards"]]
            metrics |= {f"{name}/{key}": float(value) for key, value in found.items()}
        more = {name: of for name, of in batch["components"].items() if name not in components}
        rewards = [sum(each) for each in zip(self.total(components), *more.values(), strict=True)]
        return {**batch, "rewards": rewards, "components": {**components, **more}}, metrics

    def total(self, components: Mapping[str, Sequence[float]]) -> list[float]:
        return [
            sum(
                weight * reward
                for weight, reward in zip(self.weights.values(), of_one, strict=True)
            )
            for of_one in zip(*components.values(), strict=True)
        ]


def _first(lists: Iterable[Sequence[Any] | None]) -> list[Any] | None:
    parts = zip(*filter(None, lists), strict=True)
    return [next((each for each in of_one if each is not None), None) for of_one in parts] or None
