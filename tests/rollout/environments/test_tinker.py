"""Environments of Tinker's cookbook, as they are: of one turn, of several, and of groups."""

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
from tinker import ModelInput
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import (
    GuessNumberEnv,
    GuessNumberEnvGroupBuilder,
)
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import TwentyQuestionsEnv
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, InitialObservationOverflow, StepResult

from nemorl.rollout.collect import collect, to_token_batch
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import Limits
from nemorl.rollout.environment import check_rows
from nemorl.rollout.environments import make_environment
from nemorl.rollout.environments.tinker import TinkerEnvironment, _outcome
from nemorl.rollout.generation import Completion, SamplingParams
from nemorl.rollout.prompts import Prompts
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.data.tokenizers_small import character_tokenizer
from tests.tiny_models import tiny_model

TOKENIZER = character_tokenizer()
CHAT = get_renderer("qwen3_instruct", TOKENIZER)
COLON = get_renderer("role_colon", TOKENIZER)
SAMPLING = SamplingParams(n=3, max_new_tokens=6, temperature=1.0)


def about(*rows: dict, **limits) -> Prompts:
    rows = [{"prompt": "Play.", **row} for row in rows]
    ids = [TOKENIZER(row["prompt"])["input_ids"] for row in rows]
    return Prompts(rows, ids, tokenizer=TOKENIZER, limits=Limits(**limits))


@pytest.fixture(scope="module")
def generator() -> TorchGenerationBackend:
    model = tiny_model(vocab_size=len(TOKENIZER), max_position_embeddings=4096)
    backend = TorchGenerationBackend(model=model, tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    return backend


def led(make: Callable) -> TinkerEnvironment:
    environment = make_environment("exact_match", environment=make, chosen=False)
    assert isinstance(environment, TinkerEnvironment)
    return environment


def guess(gold_answer: int) -> GuessNumberEnv:
    return GuessNumberEnv(gold_answer, COLON)


def test_a_game_of_several_turns(generator):
    """Ten guesses, none of which can be read; each costs a point."""
    prompts = about({"gold_answer": 7}, {"gold_answer": 8})
    found = collect(generator, led(guess), prompts, SAMPLING, seed=1)
    assert not found.failed and found.num_turns.tolist() == [10] * 6
    assert found.rewards.tolist() == [-10.0] * 6
    assert not any(each.outcome.truncated for each in found.conversations)
    for each in found.conversations:
        env = GuessNumberEnv(7, COLON)
        expected = asyncio.run(env.initial_observation())[0]
        for turn in each.turns:
            assert list(turn.prompt) == expected.to_ints()
            result = asyncio.run(env.step(list(turn.completion.token_ids)))
            expected = result.next_observation
    assert to_token_batch(found).loss_mask.sum(-1).tolist() == found.lengths.tolist()


def test_limits_end_a_conversation(generator):
    environment = led(guess)
    found = collect(
        generator, environment, about({"gold_answer": 7}, max_turns=2), SAMPLING, seed=1
    )
    assert found.rewards.tolist() == [-2.0] * 3 and found.truncated.all()
    limited = about({"gold_answer": 7}, max_tokens=500)
    found = collect(generator, environment, limited, SAMPLING, seed=1)
    assert found.truncated.all() and 1 <= found.num_turns.min() <= found.num_turns.max() < 10
    with pytest.raises(Exception, match=r"data\.max_total_sequence_length"):
        limited = about({"gold_answer": 7}, max_tokens=50)
        collect(generator, environment, limited, SAMPLING, seed=1)


def test_its_stop_conditions_are_tokens_or_strings(generator):
    assert CHAT.get_stop_sequences() == [TOKENIZER.eos_token_id]

    class Stops(Env):
        seen: ClassVar[list] = []

        def __init__(self, stop):
            self.stop = stop

        async def initial_observation(self):
            return ModelInput.from_ints([5, 6, 7]), self.stop

        async def step(self, action, *, extra=None):
            Stops.seen.append((action, extra["stop_reason"]))
            return StepResult(1.0, True, ModelInput.empty(), [])

    everything = list(range(4, len(TOKENIZER)))
    for stop in (everything, [TOKENIZER.decode([token]) for token in everything]):
        collect(generator, led(Stops), about({"stop": stop}), SAMPLING, seed=1)
    assert len(Stops.seen) == 6
    assert all(len(action) == 1 and why == "stop" for action, why in Stops.seen if action[0] > 3)
    assert sum(action[0] > 3 for action, _ in Stops.seen) > 3


def test_a_problem(generator):
    """The rewards are those of its own `step`."""
    make = partial(ArithmeticEnv, renderer=COLON)
    found = collect(generator, led(make), about({"x": 2, "y": 3}), SAMPLING, seed=1)
    for each, reward in zip(found.conversations, found.rewards.tolist(), strict=True):
        env = ArithmeticEnv(2, 3, COLON)
        result = asyncio.run(env.step(list(each.turns[0].completion.token_ids)))
        assert reward == pytest.approx(result.reward)
        assert each.outcome.metrics == result.metrics
    assert set(found.metrics) == {"format", "correct"}


def test_twenty_questions_are_more_than_a_default(generator):
    class Yes:
        async def __call__(self, messages):
            return {"role": "assistant", "content": "yes"}

    def make(answer: str) -> TwentyQuestionsEnv:
        return TwentyQuestionsEnv(Yes(), answer, COLON)

    found = collect(generator, led(make), about({"answer": "dog"}), SAMPLING, seed=1)
    assert not found.failed and found.num_turns.tolist() == [20] * 3


def test_a_builder_of_the_cookbook(generator):
    def problems(x: int, y: int, group_size: int) -> ProblemGroupBuilder:
        return ProblemGroupBuilder(partial(ArithmeticEnv, x, y, COLON), group_size)

    def numbers(x: int, group_size: int) -> GuessNumberEnvGroupBuilder:
        return GuessNumberEnvGroupBuilder(answer=x, renderer=COLON, num_envs=group_size)

    prompts = about({"x": 2, "y": 3}, {"x": 5, "y": 1})
    alone = collect(
        generator, led(partial(ArithmeticEnv, renderer=COLON)), prompts, SAMPLING, seed=1
    )
    found = collect(generator, led(problems), prompts, SAMPLING, seed=1)
    assert found.rewards.tolist() == alone.rewards.tolist()
    assert [c.turns for c in found.conversations] == [c.turns for c in alone.conversations]
    found = collect(generator, led(numbers), prompts, SAMPLING, seed=1)
    assert found.rewards.tolist() == [-10.0] * 6


class Ranked(EnvGroupBuilder):
    """Two turns; the reward is a member's place by the tokens it said. Some members may fail."""

    cleaned = 0

    def __init__(self, size: int, fails: Callable[[int], bool]) -> None:
        self.size, self.fails, self.seen = size, fails, []

    async def make_envs(self):
        return [Two(self.fails(place)) for place in range(self.size)]

    async def compute_group_rewards(self, trajectory_group, env_group):
        assert [env.said for env in env_group] == [
            [t.ac.tokens for t in each.transitions] for each in trajectory_group
        ]
        assert all(t.ac.maybe_logprobs for each in trajectory_group for t in each.transitions)
        assert {each.stop_reason for each in trajectory_group} == {"completed"}
        said = [env.said for env in env_group]
        return [(float(sorted(said).index(each)), {"of": len(said)}) for each in said]

    async def cleanup(self):
        Ranked.cleaned += 1


class Two(Env):
    def __init__(self, fails: bool) -> None:
        self.fails, self.said = fails, []

    async def initial_observation(self):
        return ModelInput.from_ints([5, 6]), []

    async def step(self, action, *, extra=None):
        self.said.append(action)
        over = len(self.said) == 2
        if over and self.fails:
            raise KeyError("lost")
        metrics = {"turn": len(self.said), "stop/completed": float(over)}
        return StepResult(0.5, over, ModelInput.from_ints([5, 6, *action, 7]), [], metrics)


def test_a_groups_rewards_are_of_those_that_ended_well(generator):
    made = []

    def make(size: int, group_size: int) -> Ranked:
        made.append(group_size)
        return Ranked(size, lambda place: size == 5 and place == 1)

    Ranked.cleaned = 0
    sampling = SamplingParams(n=4, max_new_tokens=6)
    prompts = about({"size": 4}, {"size": 5})
    found = collect(generator, led(make), prompts, sampling, seed=1)
    assert made == [4, 4] and Ranked.cleaned == 2
    assert found.group_id.tolist() == [0] * 4 + [1] * 3
    assert [each.member for each in found.failed] == [1]
    assert found.failed[0].outcome.reason == "KeyError: 'lost'"
    assert sorted(found.rewards[:4].tolist()) == [1.0, 2.0, 3.0, 4.0]
    assert sorted(found.rewards[4:].tolist()) == [1.0, 2.0, 3.0]
    for each in found.conversations:
        assert each.outcome.turn_rewards[0] == 0.5
        own = {"turn": 2.0, "stop/completed": 1.0, "of": 4.0 if each.group == 0 else 3.0}
        assert each.outcome.metrics == own


def test_a_member_that_ends_the_program_fails_alone(generator):
    class Exits(Ranked):
        async def make_envs(self):
            made = await super().make_envs()
            made[1].step = step
            return made

    async def step(action, *, extra=None):
        sys.exit(0)

    def make() -> Exits:
        return Exits(3, lambda place: False)

    found = collect(generator, led(make), about({}), SAMPLING, seed=1)
    assert [each.member for each in found.failed] == [1] and len(found) == 2
    assert "must not end the run, but it called sys.exit(0)" in found.failed[0].outcome.reason


def test_members_that_begin_again_are_a_group_of_their_own(generator):
    made = []

    def once(group_size: int) -> Ranked:
        made.append(group_size)
        first = len(made) == 1
        return Ranked(group_size, lambda place: first and place > 0)

    found = collect(generator, led(once), about({}, {}, {}), SAMPLING, seed=1)
    assert made == [3, 3, 3, 2] and not found.failed
    assert found.group_id.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert [each.outcome.metrics["of"] for each in found.conversations[:3]] == [1.0, 2.0, 2.0]


def test_a_builder_that_fails_fails_its_members(generator):
    def make(size: int) -> Ranked:
        return Ranked(size, lambda place: False)

    prompts = about({"size": 1}, {"size": 3}, {"size": 3})
    found = collect(generator, led(make), prompts, SAMPLING, seed=1)
    (reason,) = {each.outcome.reason for each in found.failed}
    assert reason == (
        "ValueError: environments of make_envs must be at least 3, one for each conversation, but"
        " it is 1: have the factory take group_size"
    )
    assert found.group_id.tolist() == [1] * 3 + [2] * 3


def test_an_initial_observation_that_is_too_long_fails(generator):
    class Long(Env):
        async def initial_observation(self):
            return InitialObservationOverflow(reward=-1.0, logs={"why": "4096 tokens"})

        async def step(self, action, *, extra=None):
            raise AssertionError

    with pytest.raises(Exception, match=r"its first observation too long: .*4096 tokens"):
        collect(generator, led(Long), about({}), SAMPLING, seed=1)


def test_limits_of_its_own_hold_or_are_an_error(generator):
    class Limited(Two):
        def __init__(self):
            super().__init__(fails=False)
            self.rollout_limits = RolloutLimits(max_turns=1)

    found = collect(generator, led(Limited), about({}), SAMPLING, seed=1)
    assert found.num_turns.tolist() == [1] * 3

    class Budgeted(Two):
        def __init__(self):
            super().__init__(fails=False)
            self.rollout_limits = RolloutLimits(max_sampled_tokens=64)

    with pytest.raises(ValueError, match=r"rollout_limits of Budgeted must leave these to the run"):
        collect(generator, led(Budgeted), about({}), SAMPLING, seed=1)


def test_rows_lack_a_column():
    with pytest.raises(
        ValueError, match=r"'guess' must be made of the columns of a row.*'gold_ans"
    ):
        check_rows(led(guess), about({}).rows)
    check_rows(led(guess), about({"gold_answer": 1}).rows)


def test_a_reward_beside_it_is_an_error():
    with pytest.raises(ValueError, match="reward must be left out with an environment that gives"):
        make_environment("exact_match", environment=guess)


def test_a_builder_whose_task_was_cancelled_fails_its_members(generator):
    class Cancels(Ranked):
        async def make_envs(self):
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            await task

    def make(size: int) -> Ranked:
        return (Cancels if size == 2 else Ranked)(3, lambda place: False)

    prompts = about({"size": 2}, {"size": 3}, {"size": 3})
    found = collect(generator, led(make), prompts, SAMPLING, seed=1)
    (reason,) = {each.outcome.reason for each in found.failed}
    assert "a task that was cancelled" in reason
    assert found.group_id.tolist() == [1] * 3 + [2] * 3


def test_metrics_of_any_name_are_measured():
    result = SimpleNamespace(reward=0.5, metrics={"steps": 3.0}, episode_done=True)
    said = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", text="")
    found = _outcome([(None, said, result)], 1.0, **{"reward": 2.0})
    assert found.turn_rewards == [1.5] and found.metrics == {"steps": 3.0, "reward": 2.0}
