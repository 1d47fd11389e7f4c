"""Reward functions as environments, rewards by name, and what is refused."""

import pytest

from nemorl.rollout.environment import EnvironmentInterface, EnvironmentReturn, FunctionalRewardWrapper, text_of
from nemorl.rollout.environments import REWARDS, contains_answer, exact_match, make_environment

LOG = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def test_columns_are_passed_by_name():
    def reward(prompt, response, answer, *, weight=1.0):
        return weight * (prompt == "1+1=" and response == answer)

    environment = FunctionalRewardWrapper(reward)
    assert environment.step([LOG, LOG], [{"answer": "2", "weight": 3.0, "other": None}, {"answer": "3"}]).rewards == [3.0, 0.0]


def test_all_columns_for_a_function_that_takes_any():
    seen = {}

    def reward(prompt, response, **columns):
        seen.update(columns)
        return 0.5

    FunctionalRewardWrapper(reward).step([LOG], [{"prompt": "1+1=", "answer": "2", "level": 3}])
    assert seen == {"answer": "2", "level": 3}


def test_a_conversation_is_over_after_one_response():
    result = FunctionalRewardWrapper(exact_match).step([LOG], [{"answer": 2}])
    assert isinstance(result, EnvironmentReturn)
    assert (result.terminateds, result.rewards) == ([True], [1.0])
    assert isinstance(FunctionalRewardWrapper(exact_match), EnvironmentInterface)


def test_rewards_by_hand():
    assert exact_match("", " 12\n", 12) == 1.0
    assert exact_match("", "112", 12) == 0.0
    assert contains_answer("", "so 12 it is", 12) == 1.0
    assert text_of([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]) == "system: Add.\nuser: 1+1="


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x", None])
def test_a_reward_must_be_finite(value):
    with pytest.raises(ValueError, match=r"must be a finite number, but it is (nan|inf|'x'|None) for prompt '1\+1=' and response '2'"):
        FunctionalRewardWrapper(lambda prompt, response: value).step([LOG], [{}])


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match=r"reward 'exact_match' wants the column 'answer', but row 1 has only \['solution'\]"):
        FunctionalRewardWrapper(exact_match).step([LOG], [{"solution": 2}])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda response: 1.0, r"must take at least \(prompt, response\)"),
        ("exact_macth", "did you mean 'exact_match'"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("json:no_such_function", "has no 'no_such_function'"),
    ],
)
def test_rewards_that_cannot_work_are_refused(reward, message):
    with pytest.raises(ValueError, match=message):
        make_environment(reward)


def test_a_module_in_the_working_directory(tmp_path, monkeypatch):
    """An installed command has no working directory on its path. What goes wrong inside the module is shown as it is."""
    (tmp_path / "my_rewards_here.py").write_text("def half(prompt, response):\n    return 0.5\n")
    (tmp_path / "my_broken_rewards.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    assert make_environment("my_rewards_here:half").step([LOG], [{}]).rewards == [0.5]
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        make_environment("my_broken_rewards:half")


def test_by_name_by_import_and_as_it_is():
    assert make_environment("exact_match").fn is REWARDS["exact_match"]
    assert make_environment("nemorl.rollout.environments:contains_answer").fn is contains_answer
    environment = FunctionalRewardWrapper(exact_match)
    assert make_environment(environment) is environment
