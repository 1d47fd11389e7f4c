"""The sample log's rows and the metrics of conversations of several turns that may fail."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count

import pytest

import nemorl
from nemorl.rollout.collect import collect, select
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import ConversationFailed, Limits, Outcome
from nemorl.rollout.environments import make_environment
from nemorl.rollout.environments.classes import TurnResult
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.run.samples import (
    MOST_FAILURES,
    compared,
    failures_of,
    informative,
    measured,
    samples_of,
)
from nemorl.runtime.watch.report import Gathered
from tests.rollout.counting import PROMPTS, SAMPLING, TOKENIZER, Count
from tests.runtime.runs import digits, grpo_config, start
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def generator() -> TorchGenerationBackend:
    backend = TorchGenerationBackend(model=tiny_model(scale=2.0), tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    return backend


class Ends(Count):
    """The row whose answer is 1 has one turn; 2, two turns; 4, three, or an error in the second."""

    fails = False

    def step(self, response: str) -> TurnResult:
        if self.fails and self.answer == "4" and self.turn == 1:
            raise KeyError("lost")
        found = super().step(response)
        return replace(found, done=self.turn == {"1": 1, "2": 2, "4": 3}[self.answer])


class Fails(Ends):
    fails = True


def test_turns_are_measured_over_the_conversations_that_had_them(generator):
    rollouts = collect(generator, make_environment(Ends), PROMPTS, SAMPLING, seed=1)
    found = measured(rollouts)
    turns = {name: value for name, value in found.items() if "turn" in name}
    cut = [turn.completion.truncated for each in rollouts.conversations for turn in each.turns]
    assert 9 < sum(cut) < len(cut) == 18
    assert turns == {"turns": 2, "turn": 2, "reward/turn_1": 1, "reward/turn_2": 2} | {
        "reward/turn_3": 3,
        "truncated_turns": sum(cut) / 18,
    }
    assert found["failed_fraction"] == 0 and not any("failed/" in name for name in found)
    single = measured(
        collect(generator, make_environment(Ends), PROMPTS.take([0]), SAMPLING, seed=1)
    )
    assert single["turns"] == 1 and "reward/turn_1" not in single, "it would be the reward again"


def test_a_row_has_the_turns_as_the_model_saw_them(generator):
    found = collect(generator, make_environment(Ends), PROMPTS, SAMPLING, seed=1)
    one, *_, three = samples_of(found, None, range(len(found)))
    assert "turns" not in one and "sampled" not in one
    assert [turn["reward"] for turn in three["turns"]] == [1, 2, 3]
    assert [turn["given"] for turn in three["turns"]] == ["4=7", "1+", "1+"]
    assert not any(turn["rewritten"] for turn in three["turns"])
    own = [i for i, sampled in enumerate(three["sampled"]) if sampled]
    ends = [turn["tokens"] for turn in three["turns"]]
    assert own == [i for begin, end in ends for i in range(begin, end)]
    for (begin, end), turn in zip(ends, found.conversations[-1].turns, strict=True):
        assert tuple(three["token_ids"][begin:end]) == turn.completion.token_ids
        assert tuple(three["logprobs"][begin:end]) == turn.completion.logprobs
    assert three["response"] == three["turns"][-1]["response"]
    assert three["columns"] == {"prompt": "4=", "answer": "4"}


def test_failed_conversations_are_logged_a_few_for_each_reason(generator):
    found = collect(generator, make_environment(Fails), PROMPTS, SAMPLING, seed=1)
    (sample,) = failures_of(found, 8)
    assert sample["failure"] == "KeyError: 'lost'" and "reward" not in sample
    assert [turn["reward"] for turn in sample["turns"]] == [None, None]
    assert sample["group"] == 2 and sample["prompt"] == "4="
    assert failures_of(found, 0) == []

    async def never(row, policy) -> Outcome:
        if row["answer"] == "4":
            never.number += 1
            raise ConversationFailed(f"no judge {never.number}")
        await policy.sample(policy.prompt)
        return Outcome()

    never.number = 0
    found = collect(generator, never, PROMPTS, replace(SAMPLING, n=6), seed=1)
    assert len(failures_of(found, 100)) == MOST_FAILURES < len(found.failed)


def test_the_limit_that_cut_a_conversation_is_named(generator):
    def cuts(kind, **limits):
        limited = replace(PROMPTS, limits=Limits(**{"max_tokens": 60, **limits}))
        found = collect(generator, kind, limited, SAMPLING, seed=1)
        assert [each.cut_by is not None for each in found.conversations] == found.truncated.tolist()
        return {(len(each.turns), each.cut_by) for each in found.conversations}

    class Gym(Count):
        def step(self, response):
            return "1+", 0.0, False, True, {}

    async def one(row, policy) -> Outcome:
        await policy.sample(policy.prompt)
        return Outcome()

    ended = {(3, None), (3, "generation.max_new_tokens")}
    assert cuts(make_environment(Count)) <= ended
    assert cuts(make_environment(Count), max_turns=2) == {(2, "rollout.max_turns")}
    assert cuts(make_environment(Gym)) == {(1, "environment")}
    full = cuts(make_environment(Count), max_tokens=13)
    assert {cut for _, cut in full} == {"data.max_total_sequence_length"}
    assert cuts(one, max_tokens=5) == {(1, "data.max_total_sequence_length")}
    assert (1, "generation.max_new_tokens") in cuts(one)


def test_the_log_has_every_chosen_group_where_members_have_failed(tmp_path):
    """Groups are not of one size then, and rewards shaped by length belong to the same rows."""

    class Reward:
        called = 0

        def __call__(self, response: str) -> float:
            place, self.called = self.called, self.called + 1
            if place >= 4 and place % 4 == 3:
                raise ConversationFailed("the last of a group")
            return digits("", response)

    overlong = nemorl.OverlongConfig(buffer=0.5, penalty=0.5)
    config = grpo_config(tmp_path, steps=1, run={"samples_per_step": 8}, overlong=overlong)
    start(config, reward=Reward())
    samples = [each for each in Gathered(tmp_path).samples[1] if "failure" not in each]
    sizes = Counter(each["group"] for each in samples)
    assert sorted(sizes.values()) == [3, 4] and all("shaped_reward" in each for each in samples)


def test_groups_count_the_same_whatever_their_size(generator):
    def reward(prompt: str, response: str) -> float:
        return float(sum(map(ord, response)) % 7) if prompt == "4=" else 1.0

    found = collect(generator, make_environment(reward), PROMPTS, SAMPLING, seed=1)
    assert len(set(found.rewards[found.group_id == 2].tolist())) > 1
    one_less = select(found, [0, 1, *range(3, 9)])
    assert compared(found)["informative_groups"] == compared(one_less)["informative_groups"]
    assert compared(found)["informative_groups"] == pytest.approx(1 / 3)


def test_groups_are_informative_by_what_is_compared(generator):
    """[1, 0] and [0, 1] are equal rewards, but not equal turns."""

    made = defaultdict(count)  # of each row: resets come in any order

    class Turns(Count):
        def reset(self, answer: str) -> str:
            self.first = next(made[answer]) % 2
            return super().reset(answer)

        def step(self, response: str) -> TurnResult:
            found = super().step(response)
            return replace(found, reward=float(self.turn % 2 == self.first), done=self.turn == 2)

    sampling = replace(SAMPLING, n=2)
    found = collect(generator, make_environment(Turns), PROMPTS, sampling, seed=1)
    assert found.rewards.tolist() == [1.0] * 6
    by_turn = nemorl.GRPOConfig(advantage=nemorl.GroupAdvantage(level="turn"))
    assert not informative(found, nemorl.GRPOConfig()).any() and informative(found, by_turn).all()
    assert compared(found, by_turn)["informative_groups"] == 1
    assert compared(found)["informative_groups"] == 0


def test_metrics_of_environments_replace_none_of_ours(generator):
    given = {"reward": 9.0, "reward_std": 8.0, "own": 1.0}

    class Wins(Ends):
        def step(self, response: str) -> TurnResult:
            return replace(super().step(response), metrics=given)

    rollouts = collect(generator, make_environment(Wins), PROMPTS, SAMPLING, seed=1)
    found = measured(rollouts)
    assert found["environment/reward"] == 9 and found["own"] == 1 and found["reward"] < 9
    found = compared(rollouts)
    assert found["environment/reward_std"] == 8 and found["reward_std"] < 8
