"""Reward functions as environments, `async def` or not, rewards by name, and what is refused."""

import asyncio
import sys
import threading
from fractions import Fraction
from itertools import repeat

import numpy as np
import pytest
import torch

from nemorl.checks import short
from nemorl.rollout.answers import REWARDS, contains_answer, exact_match
from nemorl.rollout.config import RolloutConfig
from nemorl.rollout.environment import (
    AT_ONCE,
    EnvironmentReturn,
    FunctionalRewardWrapper,
    check_counts,
    check_rows,
    reward_tensor,
    text_of,
)
from nemorl.rollout.environments import check_limits, make_environment
from tests.rollout import talk
from tests.rollout.counting import Batched, Count

LOG, OTHER = talk("1+1=", "2"), talk("1+2=", "3")


def test_rewards_by_hand():
    assert exact_match("", " 12\n", 12) == 1.0
    assert exact_match("", "112", 12) == 0.0
    system = {"role": "system", "content": "Add."}
    assert text_of([system, LOG[0]]) == "system: Add.\nuser: 1+1="


NUMBERS = [
    2,
    2.0,
    True + 1,
    np.float32(2),
    np.array(2),
    torch.tensor(2),
    torch.tensor([2.0], requires_grad=True),
    Fraction(2),
]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_a_reward_may_be_any_number(value):
    rewards = FunctionalRewardWrapper(lambda prompt, response: value).step([LOG], [{}]).rewards
    assert rewards == [2.0]
    assert type(rewards[0]) is float


NO_NUMBERS = [
    float("nan"),
    float("inf"),
    "x",
    None,
    [1.0],
    1j,
    torch.ones(2),
    np.float64(-1e39),
    10**5000,
]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: short(value, 20))
def test_a_reward_must_be_finite(value):
    async def later(prompt, response):
        return value

    message = r"^reward '\w+' must be a finite number, but it is .+ for prompt '1\+{}=' and"
    for fn in (later, lambda prompt, response: value):
        with pytest.raises(ValueError, match=message.format(1)):
            FunctionalRewardWrapper(fn).step([LOG], [{}])
    batch = FunctionalRewardWrapper(lambda prompts, responses: [1.0, value])
    with pytest.raises(ValueError, match=message.format(2) + r" response '3': return 0\.0"):
        batch.step([LOG, OTHER], [{}, {}])


LISTS = [
    [1, 0.5],
    (1, 0.5),
    np.array([1, 0.5]),
    torch.tensor([1, 0.5]),
    [torch.tensor(1), np.float64(0.5)],
    iter([True, 0.5]),
]


@pytest.mark.parametrize("values", LISTS, ids=lambda values: type(values).__name__)
def test_a_batch_function_returns_a_list_or_an_array(values):
    environment = FunctionalRewardWrapper(lambda prompts, responses: values)
    rewards = environment.step([LOG, OTHER], [{}, {}]).rewards
    assert rewards == [1.0, 0.5]
    assert all(type(reward) is float for reward in rewards)


@pytest.mark.parametrize("values", [[1.0], np.ones(3), repeat(1.0)], ids=str)
def test_a_batch_function_returns_one_number_per_response(values):
    message = (
        r"one number per response, but it returned \d for a batch of 2 responses, of which the"
        r" first is for prompt '1\+1=' and response '2'"
    )
    with pytest.raises(ValueError, match=message):
        FunctionalRewardWrapper(lambda prompts, responses: values).step([LOG, OTHER], [{}, {}])


@pytest.mark.parametrize("batch", [False, True])
def test_a_reward_that_changes_a_column_changes_its_own_copy(batch):
    def change(prompt, response, tags, **columns):
        for kept in (tags, columns["info"]) if not batch else (*tags, *columns["info"]):
            assert kept == ["a"]
            kept.append("b")
        return [0.0, 0.0] if batch else 0.0

    rows = [{"tags": ["a"], "info": ["a"], "lock": threading.Lock()} for _ in "12"]
    FunctionalRewardWrapper(change, batch=batch).step([LOG, OTHER], rows)
    assert all(row["tags"] == row["info"] == ["a"] for row in rows)


def test_a_batch_function_gets_columns_as_lists():
    seen = []

    def reward(prompts, responses, answer, level=0, unknown="default", **columns):
        seen.append((prompts, responses, answer, level, unknown, columns))
        return [0, 0]

    FunctionalRewardWrapper(reward).step(
        [LOG, OTHER],
        [{"answer": "2", "level": 1, "source": "a"}, {"answer": "4", "prompt": "1+2="}],
    )
    assert seen == [
        (["1+1=", "1+2="], ["2", "3"], ["2", "4"], [1, None], "default", {"source": ["a", None]})
    ]


def test_an_empty_batch_needs_no_call():
    assert FunctionalRewardWrapper(lambda prompts, responses: 1 / 0).step([], []).rewards == []


def broken(prompt, response):
    if response == "3":
        raise KeyError("score")
    return 1.0


async def broken_later(prompt, response):
    return broken(prompt, response)


@pytest.mark.parametrize("fn", [broken, broken_later])
def test_what_a_reward_raises_comes_with_prompt_and_response(fn):
    with pytest.raises(KeyError) as caught:
        FunctionalRewardWrapper(fn).step([LOG, OTHER], [{}] * 2)
    assert caught.value.__notes__ == [
        f"This was reward {fn.__name__!r} for prompt '1+2=' and response '3'."
    ]


def test_an_exit_in_a_reward_is_its_error():
    """It would end the run with code 0 and no word."""
    environment = FunctionalRewardWrapper(lambda prompt, response: sys.exit(0))
    with pytest.raises(
        RuntimeError, match=r"reward 'lambda' must not end the run, but it called sys\.exit\(0\)"
    ) as caught:
        environment.step([LOG], [{}])
    assert "for prompt '1+1=' and response '2'" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("reward", "answer", "message"),
    [
        ("last_number", "none", "last_number needs an answer with a number in it"),
        ("contains_answer", " ", "contains_answer needs an answer"),
        ("math", "", "math needs an answer that can be read"),
        *(
            ("choice", text, "choice needs a letter from A to J, but .*: correct")
            for text in ("K", "AB", "")
        ),
    ],
)
def test_answers_are_looked_at_before_a_run(reward, answer, message):
    sound = {"answer": "B" if reward == "choice" else "2"}
    check_rows(make_environment(reward), [sound])
    with pytest.raises(ValueError, match=f"row 2: {message}"):
        check_rows(make_environment(reward), [sound, {"answer": answer}])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"rewards": [1.0]},
            (
                "'mine' must return one of rewards per conversation, but it returned 1 for 2"
                " conversations"
            ),
        ),
        ({"answers": ["2"]}, "one of answers per conversation, but it returned 1 for 2"),
        (
            {"components": {"right": [1.0]}},
            "one of right per conversation, but it returned 1 for 2",
        ),
        (
            {"rewards": [1.0, float("nan")]},
            "'mine' must return finite rewards, but it returned nan for conversation 1",
        ),
    ],
)
def test_what_an_environment_returns_is_checked(part, message):
    sound = {
        "observations": [{"role": "environment", "content": ""}] * 2,
        "metadata": [None] * 2,
        "next_stop_strings": [None] * 2,
        "rewards": [1, 0.5],
        "terminateds": [True, True],
    }
    check_counts(EnvironmentReturn(**sound), 2, "mine")
    assert reward_tensor(sound["rewards"], 2, "environment 'mine'").tolist() == [1.0, 0.5]
    with pytest.raises(ValueError, match=message):
        wrong = EnvironmentReturn(**{**sound, **part})
        check_counts(wrong, 2, "mine")
        reward_tensor(wrong.rewards, 2, "environment 'mine'")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 1e39], r"finite rewards, but it returned 1e\+39 for conversation 1: return 0"),
        (torch.zeros(2, 2), r"returned \[0\.0, 0\.0\] for conversation 0"),
        (repeat(1.0), r"return rewards as a list, but it returned repeat\(1\.0\)"),
    ],
    ids=lambda value: short(value, 20),
)
def test_rewards_of_an_environment_are_numbers(values, message):
    with pytest.raises(ValueError, match=message):
        reward_tensor(values, 2, "environment 'mine'")


def test_a_missing_column_is_named():
    with pytest.raises(
        ValueError,
        match=(
            r"reward 'exact_match' wants the column 'answer', but row 1 has only \['solution'\]:"
            r" add it"
        ),
    ):
        FunctionalRewardWrapper(exact_match).step([LOG], [{"solution": 2}])
    with pytest.raises(
        ValueError, match=r"but row 2 has only \['Answer'\]; did you mean Answer\?: add it"
    ):
        FunctionalRewardWrapper(exact_match).check([{"answer": "2"}, {"Answer": 2}])


def test_a_module_in_the_working_directory(tmp_path, monkeypatch):
    """An installed command has no working directory on its path."""
    (tmp_path / "my_rewards_here.py").write_text("def half(prompt, response):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert make_environment("my_rewards_here:half").step([LOG], [{}]).rewards == [0.5]


def test_by_name_by_import_and_as_it_is():
    assert make_environment("exact_match").fn is REWARDS["exact_match"]
    assert make_environment("nemorl.rollout.answers:contains_answer").fn is contains_answer
    environment = FunctionalRewardWrapper(exact_match)
    assert make_environment(environment) is environment


def test_a_function_says_what_it_read_as_the_answer():
    def right(prompt: str, response: str) -> float:
        return 1.0

    log = talk("?", "so 2")
    assert FunctionalRewardWrapper(right).step([log], [{}]).answers == [None]
    right.answer_of = lambda response: response[-1]  # type: ignore[attr-defined]
    assert FunctionalRewardWrapper(right).step([log], [{}]).answers == ["2"]


LOGS = [talk(f"{i}=", str(i)) for i in range(3 * AT_ONCE)]


async def right(prompt, response, answer):
    await asyncio.sleep(0)
    return float(response == answer)


async def right_of_batch(prompts, responses, answer):
    await asyncio.sleep(0)
    return [float(a == b) for a, b in zip(responses, answer, strict=True)]


class Judge:
    async def __call__(self, response, answer):
        return await right("", response, answer)


@pytest.mark.parametrize("fn", [right, right_of_batch, Judge()], ids=["one", "batch", "object"])
def test_an_async_reward_is_awaited_also_where_a_loop_runs(fn):
    rows = [{"answer": str(i % 2)} for i in range(len(LOGS))]
    environment = FunctionalRewardWrapper(fn)
    expected = [1.0, 1.0] + [0.0] * (len(LOGS) - 2)

    async def in_a_notebook():
        return environment.step(LOGS, rows).rewards

    assert environment.step(LOGS, rows).rewards == expected
    assert asyncio.run(in_a_notebook()) == expected
    assert environment.step(LOGS, rows).rewards == expected


def test_responses_are_judged_at_once_up_to_a_limit():
    running, most = set(), 0

    async def judge(response):
        nonlocal most
        running.add(response)
        most = max(most, len(running))
        for _ in range(3):
            await asyncio.sleep(0)
        running.discard(response)
        return float(response)

    rewards = FunctionalRewardWrapper(judge).step(LOGS, [{}] * len(LOGS)).rewards
    assert rewards == list(range(len(LOGS))) and most == AT_ONCE


def test_all_calls_have_one_event_loop():
    """What keeps connections is bound to a loop."""
    loops = set()

    async def judge(response):
        loops.add(asyncio.get_running_loop())
        return 1.0

    environment = FunctionalRewardWrapper(judge)
    for _ in range(3):
        environment.step(LOGS, [{}] * len(LOGS))
    assert len(loops) == 1 and not loops.pop().is_closed()


def test_an_answer_that_nobody_awaits_is_named():
    environment = FunctionalRewardWrapper(lambda response: right("", response, "0"))
    with pytest.raises(ValueError, match=r"it is <coroutine .*: write the function as async def"):
        environment.step(LOGS[:1], [{}])


class Once(Batched):
    max_turns = 1


async def an_episode(row, policy): ...


@pytest.mark.parametrize(
    ("environment", "unread", "what"),
    [
        (exact_match, {"max_turns", "discount"}, "a reward, which judges one"),
        ([exact_match, contains_answer], {"max_turns", "discount"}, "a reward"),
        (Once(), {"max_turns", "discount"}, "a reward"),
        (Batched(), set(), ""),
        (an_episode, {"max_turns"}, "episode 'an_episode'"),
        (Count, set(), ""),
        ("calculator", {"discount"}, "environment 'Calculator'"),
    ],
)
def test_a_limit_that_an_environment_does_not_read_is_refused(environment, unread, what):
    led = environment if environment in (an_episode, "calculator") else None
    made = make_environment(
        "math" if led else environment, environment=led, chosen=led != an_episode
    )
    for name, value in {"max_turns": 3, "timeout_s": 5.0, "discount": 0.9}.items():
        rollout = RolloutConfig(**{name: value})
        if name in unread:
            with pytest.raises(ValueError, match=f"rollout.{name} has no effect on {what}.*remove"):
                check_limits(made, rollout)
        else:
            check_limits(made, rollout)
    check_limits(made, RolloutConfig())


def test_a_discount_acts_on_advantages_of_turns():
    tools = make_environment("math", environment="calculator")
    check_limits(tools, RolloutConfig(discount=0.9), by_turn=True)
