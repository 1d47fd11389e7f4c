"""Rewards that are `async def`: of one response, of a batch, in scripts and in notebooks."""

import asyncio

import pytest

import nemorl
from nemorl.rollout.environment import AT_ONCE, FunctionalRewardWrapper
from nemorl.rollout.environments import make_environment
from tests.runtime.runs import addition_rows
from tests.tiny_models import tiny_model, tiny_tokenizer

LOGS = [
    [{"role": "user", "content": f"{i}="}, {"role": "assistant", "content": str(i)}]
    for i in range(3 * AT_ONCE)
]


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


def test_an_error_names_prompt_and_response():
    async def judge(response):
        if response == "5":
            raise KeyError("no verdict")
        return None if response == "0" else 1.0

    def judged(number):
        FunctionalRewardWrapper(judge).step([LOGS[1], LOGS[number]], [{}] * 2)

    with pytest.raises(KeyError, match="no verdict") as error:
        judged(5)
    assert error.value.__notes__ == ["This was reward 'judge' for prompt '5=' and response '5'."]
    with pytest.raises(ValueError, match="it is None for prompt '0=' and response '0'"):
        judged(0)


def test_an_async_reward_is_one_of_several():
    environment = make_environment({"right": right, "long": lambda response: len(response)})
    result = environment.step(LOGS[:2], [{"answer": "0"}] * 2)
    assert result.components == {"right": [1.0, 0.0], "long": [1.0, 1.0]}


def test_training_takes_async_rewards(tmp_path):
    """The same step as with a plain function."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    model, rows = str(tmp_path / "model"), addition_rows(8)

    async def brief(prompts, responses):
        return [float(response.count("1")) for response in responses]

    async def alike(response, answer):
        return float(sum(map(ord, response + answer)) % 7)

    def plain(response, answer):
        return float(sum(map(ord, response + answer)) % 7)

    def trained(reward, name):
        return nemorl.train(
            model=model,
            dataset=rows,
            reward_fn={"alike": reward, "brief": brief},
            max_num_steps=2,
            num_prompts_per_step=4,
            num_generations_per_prompt=2,
            max_new_tokens=4,
            device="cpu",
            run={"dir": tmp_path / name, "display": "none", "plots": False, "export": False},
        ).metrics

    one, other = trained(alike, "async"), trained(plain, "plain")
    for name in ("reward", "reward/alike", "reward/brief", "loss", "grad_norm"):
        assert one[name] == other[name]


def test_an_answer_that_nobody_awaits_is_named():
    environment = FunctionalRewardWrapper(lambda response: right("", response, "0"))
    with pytest.raises(ValueError, match=r"it is <coroutine .*: write the function as async def"):
        environment.step(LOGS[:1], [{}])
