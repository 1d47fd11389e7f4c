"""Environments of tools, as TRL documents its `environment_factory`, and classes of SkyRL-Gym."""

from dataclasses import replace
from datetime import date
from functools import partial
from typing import ClassVar

import pytest
import torch
from skyrl_gym.envs.gsm8k.env import GSM8kEnv
from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv

from nemorl.rollout.collect import Rollouts, collect
from nemorl.rollout.conversation import ConversationFailed, Prompts
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.environments import make_environment
from nemorl.rollout.environments.classes import TurnResult
from nemorl.rollout.environments.tools import as_json
from nemorl.rollout.wrapped import as_generation_backend
from tests.rollout.chats import SAMPLING, TOKENIZER, Scripted, call, played


class IncrementEnv:
    """After the example in TRL's documentation."""

    def reset(self, **kwargs) -> str | None:
        self.start = self.counter = kwargs["start"]
        return f" It begins at {self.counter}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        if step < 0:
            raise ValueError("Game over.")
        self.counter += step
        return self.counter


class Scored(IncrementEnv):
    def get_reward(self) -> float:
        return float(self.counter)


def reward_func(environments, **kwargs) -> list[float]:
    return [env.counter / 2 for env in environments]


def rows(*starts: int) -> list[dict]:
    return [{"start": start} for start in starts]


def twice(prompt: str) -> str:
    """Increment two times, the second time in vain."""
    turn = prompt.count("<tool_response>")
    return (call("increment", step=2), call("increment", step=-1), "done")[turn]


def test_trls_environment_and_its_reward_function():
    environment = make_environment(reward_func, environment=IncrementEnv)
    found = played(environment, twice, *rows(1, 5))
    assert not found.failed and found.num_turns.tolist() == [3] * 4
    assert found.rewards.tolist() == [1.5] * 2 + [3.5] * 2
    assert found.answers == [None] * 4  # the reward read none
    assert found.metrics == {"tool_calls": 2.0, "tool_errors": 0.5}
    last = TOKENIZER.decode(list(found.conversations[2].turns[-1].prompt))
    assert "Go. It begins at 5.<|im_end|>" in last
    assert '"name": "increment"' in last and "Value to add to the counter." in last
    assert "<tool_response>\n7\n</tool_response>" in last
    assert "<tool_response>\nError: ValueError: Game over.\n</tool_response>" in last
    assert last.count(call("increment", step=2)) == 1


def test_get_reward_is_the_reward_or_adds_to_it():
    alone = make_environment("exact_match", environment=Scored, chosen=False)
    assert played(alone, twice, *rows(1)).rewards.tolist() == [3.0] * 2
    both = make_environment(reward_func, environment=Scored)
    found = played(both, twice, *rows(1))
    assert found.rewards.tolist() == [4.5] * 2
    assert {name: values.tolist() for name, values in found.components.items()} == {
        "reward_func": [1.5] * 2,
        "get_reward": [3.0] * 2,
    }
    wrong = make_environment("exact_match", environment=Scored)
    found = played(wrong, twice, {"start": 1, "answer": "4"})
    assert found.rewards.tolist() == [3.0] * 2 and found.correct is None


def test_a_tool_that_fails_its_conversation_is_not_told_to_the_model():
    class Down(IncrementEnv):
        def increment(self, step: int) -> int:
            """Increment.

            Args:
                step: By.
            """
            if self.start:
                raise ConversationFailed("the server is down")
            return step

    environment = make_environment(lambda response: 1.0, environment=Down)
    found = played(environment, twice, *rows(0, 1, 0, 0))
    assert {each.outcome.reason for each in found.failed} == {
        "ConversationFailed: the server is down"
    }
    assert [each.group for each in found.failed] == [1, 1] and found.rewards.tolist() == [1.0] * 6


def test_calls_without_an_end_are_limited():
    environment = make_environment(reward_func, environment=IncrementEnv)
    again = played(environment, lambda prompt: call("increment", step=1), *rows(0))
    assert again.num_turns.tolist() == [16] * 2 and again.truncated.all()
    few = played(environment, lambda prompt: call("increment", step=1), *rows(0), max_turns=3)
    assert few.num_turns.tolist() == [3] * 2 and few.rewards.tolist() == [1.5] * 2
    assert few.answers == [None] * 2


def test_two_calls_of_one_turn():
    said = call("increment", step=1) + "\n" + call("increment", step=10)
    environment = make_environment(reward_func, environment=IncrementEnv)
    found = played(
        environment, lambda prompt: "end" if "<tool_response>" in prompt else said, *rows(0)
    )
    assert found.rewards.tolist() == [5.5] * 2 and found.num_turns.tolist() == [2] * 2


def test_methods_that_are_async_or_a_factory():
    class Awaited(IncrementEnv):
        async def increment(self, step: int) -> int:
            """
            Increment the counter.

            Args:
                step: Value to add.
            """
            return IncrementEnv.increment(self, step)

    def make():
        return Awaited()

    for factory in (Awaited, make, partial(Awaited)):
        environment = make_environment(reward_func, environment=factory)
        assert environment.kind is Awaited
        assert played(environment, twice, *rows(1)).rewards.tolist() == [1.5] * 2


class Ranked(FunctionalRewardWrapper):
    def global_post_process_and_metrics(self, batch):
        best = max(batch["rewards"])
        return {**batch, "rewards": [float(each == best) for each in batch["rewards"]]}, {
            "best": best
        }


def test_a_judge_changes_the_rewards_of_all_and_measures_them():
    def judged(kind, *given) -> Rollouts:
        reward = given if given[1:] else given[0]
        columns = [{**row, "answer": "9"} for row in rows(1, 5)]
        return played(make_environment(reward, environment=kind), twice, *columns)

    alone = judged(IncrementEnv, Ranked(reward_func))
    assert alone.rewards.tolist() == [0.0] * 2 + [1.0] * 2 and alone.metrics["best"] == 3.5
    several = judged(Scored, Ranked(reward_func), "exact_match")
    assert several.rewards.tolist() == [3.0] * 2 + [8.0] * 2
    assert {name: values.tolist() for name, values in several.components.items()} == {
        "reward_func": [0.0] * 2 + [1.0] * 2,
        "exact_match": [0.0] * 4,
        "get_reward": [3.0] * 2 + [7.0] * 2,
    }


def test_a_factory_is_tried_once_and_what_it_makes_is_closed():
    open_ones = []

    class Opens(Scored):
        def __init__(self):
            open_ones.append(self)

        async def close(self):
            open_ones.remove(self)

    def make():
        assert not open_ones
        return Opens()

    environment = make_environment("exact_match", environment=make, chosen=False)
    assert environment.kind is Opens and not open_ones


class Searches:
    """As SkyRL-Gym's SearchEnv, which looks for the end of a call in what it gets."""

    heard: ClassVar[list[str]] = []

    def __init__(self, extras: dict) -> None:
        pass

    def init(self, prompt):
        return prompt, {}

    def step(self, action: str) -> dict:
        self.heard.append(action)
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


def test_skyrl_environments_get_the_stop_string():
    class Stopped(Scripted):
        async def sample(self, prompt, params):
            said = await super().sample(prompt, params)
            return [replace(each, text="<search>42") for each in said]

    sampling = replace(SAMPLING, stop_strings=("</search>",))
    engine = as_generation_backend(Stopped(lambda prompt: "<search>42</search>", TOKENIZER))
    row = {"prompt": [{"role": "user", "content": "Go."}]}
    ids = TOKENIZER.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
    prompts = Prompts([row], [ids], tokenizer=TOKENIZER)
    environment = make_environment("exact_match", environment=Searches, chosen=False)
    Searches.heard.clear()
    assert not collect(engine, environment, prompts, sampling, seed=1).failed
    assert Searches.heard == ["<search>42</search>"] * 2


def test_skyrl_environments_of_one_turn():
    gsm8k = make_environment("exact_match", environment=GSM8kEnv, chosen=False)
    row = {"reward_spec": {"method": "rule", "ground_truth": "72"}}
    for said, reward in (("so #### 72", 1.0), ("so #### 71", 0.0), ("72", 0.0)):
        found = played(gsm8k, lambda prompt, said=said: said, row)
        assert found.rewards.tolist() == [reward] * 2 and not found.failed
        assert found.num_turns.tolist() == [1] * 2


def test_a_skyrl_environment_of_several_turns():
    environment = make_environment("exact_match", environment=GSM8kMultiTurnEnv, chosen=False)
    row = {"reward_spec": {"ground_truth": "72"}, "max_turns": 3}

    def late(prompt: str) -> str:
        return "#### 72" if "Now provide only the final" in prompt else "#### 1"

    found = played(environment, late, row)
    assert found.num_turns.tolist() == [3] * 2 and not found.truncated.any()
    for each in found.conversations:
        assert each.outcome.turn_rewards == pytest.approx([0.2 / 3, 0.2 / 3, 1.0])
    assert found.metrics == {"steps": 3.0}
    short = played(environment, lambda prompt: "#### 1", row, max_turns=2)
    assert short.num_turns.tolist() == [2] * 2 and short.truncated.all()


def test_a_result_of_a_tool_is_no_answer():
    """Nor are the arguments of a call, where a conversation is cut after it."""

    class Answers(IncrementEnv):
        def increment(self, step: int) -> int:
            """Increment.

            Args:
                step: By.
            """
            return 42

    environment = make_environment("last_number", environment=Answers)
    asked = {"start": 0, "answer": "42"}
    cut = played(environment, lambda prompt: call("increment", step=42), asked, max_turns=2)
    assert cut.rewards.tolist() == [0.0] * 2 and cut.truncated.all()
    assert cut.answers == [None] * 2


def test_what_the_reward_read_is_the_answer():
    environment = make_environment("last_number", environment=IncrementEnv)
    found = played(environment, lambda prompt: "It is 42.", {"start": 1, "answer": "42"})
    assert found.rewards.tolist() == [1.0] * 2 and found.answers == ["42"] * 2


def test_metrics_of_turns_and_of_the_end_are_both_kept():
    class Both:
        def step(self, response):
            return TurnResult(done=True, metrics={"moves": 3.0})

        def get_metrics(self):
            return {"score": 1.0}

    found = played(make_environment(Both), lambda prompt: "x")
    assert found.metrics == {"moves": 3.0, "score": 1.0}


class Bare(IncrementEnv):
    def add(self, a, b):
        return a + b


class Many(IncrementEnv):
    def add(self, *numbers: int) -> int:
        return sum(numbers)


class Twice(IncrementEnv):
    add = IncrementEnv.increment


def unsaid(number):
    return IncrementEnv()


@pytest.mark.parametrize(
    ("reward", "given", "message"),
    [
        (reward_func, {"environment": Bare}, "'add' must have annotated parameters, and a docst"),
        (reward_func, {"environment": Many}, "'add' must have parameters with names"),
        (
            reward_func,
            {"environment": Twice},
            "of their own, but there are two 'increment'",
        ),
        (reward_func, {"environment": unsaid}, "missing 1 required .* annotate it, as -> MyEnv"),
        (reward_func, {"environment": IncrementEnv()}, ": give the class itself"),
        (IncrementEnv, {}, "must have get_reward"),
        (Scored, {"weights": (2.0, 3.0)}, "^reward_weights must be left out with an environment"),
    ],
)
def test_refusals(reward, given, message):
    with pytest.raises(ValueError, match=message):
        make_environment(reward, **given)


def test_results_of_tools_are_told_as_they_are():
    assert as_json({"city": "Zürich"}) == '{"city": "Zürich"}'
    assert as_json([torch.tensor(3), torch.tensor([1, 2])]) == "[3, [1, 2]]"
    assert as_json({"when": date(2026, 1, 2)}) == '{"when": "2026-01-02"}'


def test_annotations_that_are_text():
    space = {"IncrementEnv": IncrementEnv}
    code = "from __future__ import annotations\ndef make() -> IncrementEnv:\n    raise OSError"
    exec(code, space)
    assert make_environment(reward_func, environment=space["make"]).kind is IncrementEnv
