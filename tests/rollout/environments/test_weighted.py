"""Several rewards as one: the sum, its parts, their names, and environments among them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.rollout.answers import exact_match
from nemorl.rollout.environment import EnvironmentInterface, FunctionalRewardWrapper
from nemorl.rollout.environments import WeightedRewards, make_environment
from tests.rollout import talk

LOG, LONG = talk("1+1=", "2"), talk("1+1=", "It is 2")
ROWS = [{"answer": "2"}, {"answer": "2"}]


def brief(prompt, response):
    return -float(len(response))


class Counting(FunctionalRewardWrapper):
    """An environment with an answer, a metric and rewards that depend on the whole batch."""

    def step(self, message_log_batch, metadata):
        return replace(
            super().step(message_log_batch, metadata),
            answers=[log[-1]["content"][-1] for log in message_log_batch],
        )

    def global_post_process_and_metrics(self, batch):
        best = max(batch["rewards"])
        return {**batch, "rewards": [float(reward == best) for reward in batch["rewards"]]}, {
            "best": best
        }


class TwoTurns(FunctionalRewardWrapper):
    def step(self, message_log_batch, metadata):
        result = super().step(message_log_batch, metadata)
        return replace(result, terminateds=[False] * len(result.terminateds))


def test_the_reward_is_the_weighted_sum_and_its_parts_stay_apart():
    environment = make_environment([exact_match, brief, "contains_answer"], weights=(1.0, 0.1, 0))
    assert isinstance(environment, EnvironmentInterface)
    result = environment.step([LOG, LONG], ROWS)
    assert result.rewards == pytest.approx([1.0 - 0.1, -0.7])
    assert result.components == {
        "exact_match": [1.0, 0.0],
        "brief": [-1.0, -7.0],
        "contains_answer": [1.0, 1.0],
    }
    assert result.terminateds == [True, True]


@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=4, max_size=4), min_size=1, max_size=5),
    st.data(),
)
def test_the_sum_is_linear_in_the_weights(values, data):
    weights = data.draw(st.lists(st.floats(0.01, 10), min_size=len(values), max_size=len(values)))
    rewards = {
        str(k): FunctionalRewardWrapper(lambda prompts, responses, of=of: of, name=str(k))
        for k, of in enumerate(values)
    }
    total = WeightedRewards(rewards, weights).step([LOG] * 4, [{}] * 4).rewards
    assert total == pytest.approx(
        [sum(w * of[i] for w, of in zip(weights, values, strict=True)) for i in range(4)], abs=1e-9
    )
    doubled = WeightedRewards(rewards, [2 * w for w in weights]).step([LOG] * 4, [{}] * 4).rewards
    assert doubled == pytest.approx([2 * reward for reward in total], abs=1e-9)


def test_without_weights_each_counts_one():
    assert make_environment([exact_match, brief]).step([LOG], ROWS[:1]).rewards == [0.0]


def test_names():
    imported = "nemorl.rollout.answers:contains_answer"
    for rewards, names in (
        (
            [exact_match, "exact_match", lambda response: 0.0, exact_match],
            ["exact_match", "exact_match_2", "lambda", "exact_match_3"],
        ),
        (
            [imported, FunctionalRewardWrapper(brief, name="length")],
            ["contains_answer", "length"],
        ),
    ):
        assert list(make_environment(rewards).weights) == names


def test_an_error_calls_a_reward_as_the_metrics_do():
    with pytest.raises(ValueError, match="reward 'lambda_2' must be a finite number"):
        make_environment([lambda response: 0.0, lambda response: None]).step([LOG], [{}])


def test_one_reward_is_itself_unless_it_is_weighted():
    assert isinstance(make_environment(["exact_match"]), FunctionalRewardWrapper)
    assert isinstance(make_environment(("exact_match",), ()), FunctionalRewardWrapper)
    for weighted in (
        make_environment("exact_match", (2.0,)),
        make_environment(["exact_match"], (2.0,)),
    ):
        result = weighted.step([LOG], ROWS[:1])
        assert (result.rewards, result.components) == ([2.0], {"exact_match": [1.0]})


def test_environments_among_functions():
    environment = make_environment(
        [FunctionalRewardWrapper(exact_match, name="right"), Counting(brief)], (1.0, 0.5)
    )
    result = environment.step([LOG, LONG], ROWS)
    assert result.answers == ["2", "2"]
    batch = {
        "rewards": result.rewards,
        "components": result.components,
        "texts": ["", ""],
        "truncated": [False, True],
    }
    changed, metrics = environment.global_post_process_and_metrics(batch)
    assert changed["components"] == {"right": [1.0, 0.0], "brief": [1.0, 0.0]}
    assert changed["rewards"] == [1.5, 0.0]
    assert changed["truncated"] == [False, True]
    assert metrics == {"brief/best": -1.0}


def test_an_environment_of_several_turns_stays_alone():
    environment = make_environment([exact_match, TwoTurns(brief)])
    with pytest.raises(ValueError, match="'brief' must end every conversation after the first"):
        environment.step([LOG], ROWS[:1])


@pytest.mark.parametrize(
    ("reward", "weights", "message"),
    [
        ([], (), "reward must be at least one reward, but there is none"),
        (
            "exact_match",
            (1.0, 2.0),
            "reward_weights must be one number per reward, but there are 2 for exact_match: give 1",
        ),
        (
            ["exact_match", brief],
            (0.0, 0.0),
            "reward_weights must be finite numbers that are not all 0",
        ),
    ],
)
def test_rewards_that_do_not_go_together_are_refused(reward, weights, message):
    with pytest.raises(ValueError, match=message):
        make_environment(reward, weights)
