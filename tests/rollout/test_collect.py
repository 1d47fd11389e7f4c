"""Prompts to judged responses to a batch; random numbers by counting."""

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemorl.losses.logprobs import LogprobKind
from nemorl.rollout.collect import Rollouts, join, select, turn_returns
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import Limits, Outcome, Prompts
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.environments import make_environment
from nemorl.rollout.random import _GOLDEN, _mix, _shift_right, derive_seed, stream, uniform
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.rollout.counting import PROMPTS, ROWS, TOKENIZER, collected, tokens
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def generator() -> TorchGenerationBackend:
    backend = TorchGenerationBackend(model=tiny_model(scale=2.0), tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    return backend


def first_digit(prompt: str, response: str, answer: str) -> float:
    return float(response[:1] == answer)


@pytest.fixture(scope="module")
def rolled(generator) -> Rollouts:
    return collected(generator, FunctionalRewardWrapper(first_digit))


def test_a_batch_holds_what_was_sampled(rolled):
    batch = rolled.to_batch()
    assert rolled.group_id.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert batch.logprob_kind == LogprobKind(temperature=0.8) == rolled.kind
    for i, completion in enumerate(rolled.completions):
        prompt = PROMPTS.token_ids[i // 3]
        total = len(prompt) + len(completion.token_ids)
        assert batch.input_ids[i, :total].tolist() == [*prompt, *completion.token_ids]
        assert batch.loss_mask[i].tolist() == [False] * len(prompt) + [True] * len(
            completion.token_ids
        ) + [False] * (batch.input_ids.shape[1] - total)
        assert batch.generation_logprobs[i, len(prompt) : total].tolist() == pytest.approx(
            completion.logprobs
        )
        assert rolled.rewards[i] == first_digit("", completion.text, ROWS[i // 3]["answer"])
        assert rolled.rows[i] is ROWS[i // 3]


def test_a_batch_holds_the_version_that_sampled_each_token(rolled):
    found = rolled.to_batch()
    assert found.policy_versions is not None
    assert torch.equal(found.policy_versions, torch.where(found.loss_mask, 0, -1))
    (turn,) = rolled.conversations[1].turns
    count = len(turn.completion.token_ids)
    assert count > 1
    for versions in (range(4, 4 + count), (), (4,)):  # of an engine that keeps no record, or part
        completion = replace(turn.completion, policy_versions=tuple(versions))
        changed = list(rolled.conversations)
        changed[1] = replace(changed[1], turns=(replace(turn, completion=completion),))
        found = replace(rolled, conversations=changed).to_batch()
        if len(versions) == count:
            assert found.policy_versions[1][found.loss_mask[1]].tolist() == [*versions]
        else:
            assert found.policy_versions is None


def test_a_group_draws_from_its_own_seed(generator, rolled):
    """In parts, in another order, with other numbers: a group's responses follow its number."""
    environment = FunctionalRewardWrapper(first_digit)
    numbered = replace(PROMPTS, groups=range(3))
    parts = {i: collected(generator, environment, numbered.take([i])) for i in (2, 0, 1)}
    joined = join([parts[i] for i in range(3)])
    assert tokens(joined.completions) == tokens(rolled.completions)
    assert joined.group_id.tolist() == rolled.group_id.tolist()
    far = replace(PROMPTS, groups=[2**40, 7, 1])
    others = collected(generator, environment, far)
    assert others.group_id.tolist() == [2**40] * 3 + [7] * 3 + [1] * 3
    assert others.completions[:3] != rolled.completions[:3]
    reseeded = collected(generator, environment, seed=2)
    assert reseeded.completions != rolled.completions


def test_an_engine_computes_in_the_thread_that_waits():
    """As the trainer does: PyTorch's threads of two that compute take the cores from each other."""
    threads = set()

    class Noted(TorchGenerationBackend):
        def _draw(self, work):
            threads.add(threading.current_thread())
            return super()._draw(work)

    generator = Noted(model=tiny_model(), tokenizer=TOKENIZER)
    generator.setup(GenerationConfig())
    collected(generator, FunctionalRewardWrapper(first_digit))
    assert threads == {threading.current_thread()}


def test_select_and_join(rolled):
    some = select(rolled, [3, 4, 5])
    assert some.group_id.tolist() == [1, 1, 1]
    assert some.completions == rolled.completions[3:6]
    again = join([select(rolled, [0, 1, 2]), select(rolled, range(3, 9))])
    assert torch.equal(again.rewards, rolled.rewards)
    assert again.completions == rolled.completions
    with pytest.raises(ValueError, match="must be sampled alike"):
        join([rolled, replace(rolled, kind=LogprobKind(temperature=0.5))])


def in_parts(generator, environment, prompts: Prompts = PROMPTS) -> list[Rollouts]:
    numbered = replace(prompts, groups=range(3))
    return [collected(generator, environment, numbered.take([i])) for i in range(3)]


def test_metrics_of_some_conversations_do_not_depend_on_parts(generator):
    async def measures(row, policy) -> Outcome:
        await policy.sample(policy.prompt)
        value = int(row["answer"])  # 1, 2 or 4, by the first so many members of three
        return Outcome(metrics={"seen": value} if policy.member < value else {})

    whole = collected(generator, measures)
    assert whole.metrics == {"seen": (1 + 2 * 2 + 3 * 4) / 6}
    assert join(in_parts(generator, measures)).metrics == whole.metrics


def test_a_conversation_that_a_limit_cut_has_components_of_0(generator):
    async def talks(row, policy) -> Outcome:
        prompt = list(policy.prompt)
        while row["answer"] != "4":  # until the context is full
            prompt += (await policy.sample(prompt)).token_ids
        await policy.sample(prompt)
        return Outcome(reward=1.0, components={"a": 1.0, "b": 2.0})

    limited = replace(PROMPTS, limits=Limits(max_tokens=20))
    whole = collected(generator, talks, limited)
    parts = in_parts(generator, talks, limited)
    assert [each.components.keys() for each in parts] == [set(), set(), {"a", "b"}]
    for found in (whole, join(parts), join([select(whole, range(3)), *parts[1:]])):
        assert found.rewards.tolist() == [0.0] * 6 + [1.0] * 3
        assert list(found.components) == ["a", "b"]
        assert found.components["a"].tolist() == [0.0] * 6 + [1.0] * 3
        assert found.components["b"].tolist() == [0.0] * 6 + [2.0] * 3
    with pytest.raises(ValueError, match=r"same reward components .* \[\('a', 'b'\), \('c',\)\]"):
        join([parts[2], replace(parts[2], components={"c": parts[2].rewards})])


def test_components_come_along(generator):
    length = FunctionalRewardWrapper(lambda response: len(response), name="length")
    environment = make_environment([first_digit, length], (-0.5, 0.25))
    rolled = collected(generator, environment)
    assert list(rolled.components) == ["first_digit", "length"]
    assert rolled.components["length"].tolist() == [len(c.text) for c in rolled.completions]
    torch.testing.assert_close(
        rolled.rewards, 0.25 * rolled.components["length"] - 0.5 * rolled.components["first_digit"]
    )
    parts = [select(rolled, [0, 1, 2]), select(rolled, [8, 3])]
    assert parts[1].components["length"].tolist() == [
        len(rolled.completions[i].text) for i in (8, 3)
    ]
    again = join(parts)
    assert again.components["length"].tolist() == [len(c.text) for c in again.completions]
    assert rolled.reward_metrics() == {
        "reward": pytest.approx(float(rolled.rewards.mean())),
        "reward/first_digit": pytest.approx(float(rolled.components["first_digit"].mean())),
        "reward/length": pytest.approx(float(rolled.components["length"].mean())),
    }


def test_the_environment_sees_the_batch_and_changes_it(generator):
    class Ranked(FunctionalRewardWrapper):
        """Rewards by rank among all, and a metric."""

        def global_post_process_and_metrics(self, batch):
            assert list(batch) == ["rewards", "components", "texts", "truncated"]
            ranks = batch["rewards"].argsort().argsort()
            return {**batch, "rewards": ranks}, {"best": max(batch["rewards"])}

    rolled = collected(generator, Ranked(lambda response: len(response)))
    assert sorted(rolled.rewards.tolist()) == list(range(9))
    assert rolled.metrics == {"best": max(len(c.text) for c in rolled.completions)}


class Doubled(FunctionalRewardWrapper):
    def global_post_process_and_metrics(self, batch):
        return {**batch, "rewards": 2 * batch["rewards"]}, {}


def test_returns_of_turns_are_of_the_changed_rewards(generator):
    rolled = collected(generator, Doubled(lambda response: len(response)))
    assert rolled.rewards.tolist() == [2.0 * len(c.text) for c in rolled.completions]
    returns, groups = turn_returns(rolled, discount=0.5)
    assert torch.equal(returns, rolled.rewards) and torch.equal(groups, rolled.group_id)


@pytest.mark.parametrize("reward", [0.1, 0.0])
def test_changed_rewards_of_several_turns_have_no_returns(generator, reward):
    class Two(Doubled):
        max_turns = 2

        def step(self, message_log_batch, metadata):
            found = super().step(message_log_batch, metadata)
            return replace(found, terminateds=[False] * len(found.rewards))

    rolled = collected(generator, Two(lambda response: reward))
    assert rolled.num_turns.tolist() == [2] * 9
    if not reward:  # which doubling does not change
        assert turn_returns(rolled, discount=1.0)[0].tolist() == [0.0] * 18
        return
    message = (
        "advantage.level is not for rewards of several turns that global_post_process_and_metrics"
        " changes, but it is 'turn': use conversation"
    )
    with pytest.raises(ValueError, match=message):
        turn_returns(rolled, discount=1.0)


def test_an_environment_that_changes_a_row_changes_its_own_copy(generator):
    class Changing(FunctionalRewardWrapper):
        def step(self, message_log_batch, metadata):
            for row in metadata:
                row["answer"] = row.pop("answer") + "x"
                assert len(row["answer"]) == 2
            return super().step(message_log_batch, metadata)

    rolled = collected(generator, Changing(lambda prompt, response: 0.0))
    assert [row["answer"] for row in rolled.rows[::3]] == ["1", "2", "4"]


def drawn(seed: torch.Tensor, number: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    return uniform(stream(seed, number), counter)


@given(
    st.integers(0, 2**62),
    st.integers(0, 2**20),
    st.integers(0, 2**20),
    st.lists(st.integers(0, 2**62), max_size=4),
)
def test_uniform_depends_on_its_own_row_alone(
    seed: int, number: int, counter: int, others: list[int]
):
    alone = drawn(*(torch.tensor([x]) for x in (seed, number, counter)))
    among = drawn(
        torch.tensor([*others, seed]),
        torch.tensor([0] * len(others) + [number]),
        torch.tensor([1] * len(others) + [counter]),
    )
    assert alone[0] == among[-1]
    assert 0 <= alone[0] < 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_is_uniform_along_each_of_its_arguments(axis):
    """Kolmogorov-Smirnov against the uniform distribution, and no correlated neighbors."""
    arguments = [torch.full((20000,), 7), torch.full((20000,), 3), torch.full((20000,), 5)]
    arguments[axis] = torch.arange(20000)
    values = drawn(*arguments)
    distance = (values.sort().values - torch.linspace(0, 1, 20000, dtype=torch.float64)).abs().max()
    assert distance < 1.63 / 20000**0.5  # the 1 % point
    assert abs(float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])) < 0.02


def test_derived_seeds_do_not_meet():
    seeds = {
        derive_seed(seed, step, row) for seed in range(3) for step in range(50) for row in range(20)
    }
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**62 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, 2**63 - 1])
def test_derived_seeds_are_of_64_bits(seed):
    """An int has no overflow; the lowest bits are those of SplitMix64 on int64."""
    state = _mix(torch.tensor([seed]) + _GOLDEN)
    for part in (3, 2**61):
        state = _mix(state ^ ((part + 1) * _GOLDEN & 0x7FFFFFFFFFFFFFFF)) + _GOLDEN
    assert derive_seed(seed, 3, 2**61) == int(_shift_right(_mix(state), 2))


class OfTensors(FunctionalRewardWrapper):
    """An environment that works with tensors: what it returns, and what it gets."""

    def step(self, message_log_batch, metadata):
        found = super().step(message_log_batch, metadata)
        ended = torch.ones(len(metadata), dtype=torch.bool)
        return replace(found, rewards=torch.arange(float(len(ended))), terminateds=ended)

    def global_post_process_and_metrics(self, batch):
        return batch, {"mean": batch["rewards"].mean().item()}


def test_an_environment_of_tensors(generator):
    rollouts = collected(generator, OfTensors(first_digit))
    assert rollouts.rewards.tolist() == list(range(9))
    assert rollouts.metrics == {"mean": 4.0}
