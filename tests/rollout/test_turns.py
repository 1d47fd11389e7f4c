"""Conversations of several turns: contexts, environments of batches and of classes, failures."""

import asyncio
import threading
import time
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from nemorl.losses import advantages
from nemorl.rollout.collect import Rollouts, collect, join, turn_numbers, turn_returns
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import ContextFull, ConversationFailed, Limits, Outcome
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.environments import make_environment
from nemorl.rollout.environments.classes import TurnResult
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.rollout.counting import PROMPTS, SAMPLING, TOKENIZER, Batched, Count
from tests.tiny_models import tiny_model


def collected(
    environment, prompts=PROMPTS, sampling=SAMPLING, *, engine=TorchGenerationBackend, **limits
) -> Rollouts:
    generator = engine(model=tiny_model(scale=2.0), tokenizer=TOKENIZER)
    generator.setup(GenerationConfig())
    if limits:
        prompts = replace(prompts, limits=Limits(**limits))
    led = make_environment(environment) if isinstance(environment, type) else environment
    return collect(generator, led, prompts, sampling, seed=1)


def test_what_a_class_is_told_follows_what_it_heard():
    Count.opened = Count.closed = 0
    found = collected(Count)
    assert found.num_turns.tolist() == [3] * 9 and Count.opened == Count.closed == 9
    assert found.rewards.tolist() == [6.0] * 9 and found.metrics == {"turn": 3.0}
    assert not found.failed
    batch = found.to_batch()
    turns = turn_numbers(found, batch)
    assert turns.amax(-1).tolist() == [3] * 9
    assert torch.equal(turns > 0, batch.loss_mask)
    for number, each in enumerate(found.conversations):
        prompt, *_ = (turn.prompt for turn in each.turns)
        assert list(prompt) == [*PROMPTS.token_ids[number // 3], *TOKENIZER("7")["input_ids"]]
        tokens = list(prompt)
        for before, after in zip(each.turns, each.turns[1:], strict=False):
            tokens += [*before.completion.token_ids, *TOKENIZER("1+")["input_ids"]]
            assert list(after.prompt) == tokens
        assert found.answers[number] == each.turns[-1].completion.text
    response = batch.response_mask.sum(-1) - batch.loss_mask.sum(-1)
    assert response.tolist() == [4] * 9  # two observations of two tokens


def test_an_environment_of_batches_has_turns():
    environment = Batched()
    found = collected(environment)
    assert found.num_turns.tolist() == [3] * 9
    assert found.rewards.tolist() == [6.0] * 9
    assert environment.sizes[0] == 9 and sum(environment.sizes) == 27


def test_a_limit_on_turns_or_tokens_ends_a_conversation():
    for environment in (Batched(), Count):
        found = collected(environment, max_turns=2, max_tokens=60)
        assert found.num_turns.tolist() == [2] * 9 and found.truncated.all()
        assert found.rewards.tolist() == [3.0] * 9
        found = collected(environment, max_tokens=13)
        assert found.truncated.all() and found.num_turns.max() <= 3
        assert found.to_batch().lengths.max() <= 13


def test_an_episode_whose_context_is_full_is_truncated():
    async def talks(row, policy) -> Outcome:
        log = list(policy.messages)
        while True:
            log += [await policy.chat(log), {"role": "user", "content": "1+"}]

    found = collected(talks, max_tokens=20)
    assert found.truncated.all() and found.rewards.tolist() == [0.0] * 9
    with pytest.raises(ContextFull, match=r"4 tokens, and the longest sequence is 4 \(data\.max"):
        collected(talks, max_tokens=4)


def test_returns_of_turns_and_their_groups():
    found = collected(Count)
    returns, groups = turn_returns(found, discount=0.5)
    assert returns.tolist() == [1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3.0] * 9
    assert groups.tolist() == [*[0, 1, 2] * 3, *[3, 4, 5] * 3, *[6, 7, 8] * 3]
    found = collected(Count, max_tokens=60, discount=0.5)
    assert found.rewards.tolist() == [2.75] * 9


def test_a_turns_advantage_is_at_its_tokens():
    found = collected(Count)
    batch = found.to_batch()
    turns = turn_numbers(found, batch)
    values = torch.arange(27.0)
    placed = advantages.to_turns(values, turns, batch.loss_mask)
    for row in range(9):
        for turn in (1, 2, 3):
            assert (placed[row][turns[row] == turn] == 3 * row + turn - 1).all()
    assert (placed[~batch.loss_mask] == 0).all()


def test_a_last_turn_without_a_token_shifts_no_advantage():
    """As where a backend of texts answers with none."""
    turns = torch.tensor([[0, 1], [0, 1]])
    placed = advantages.to_turns(
        torch.tensor([1.0, 2.0, 3.0]), turns, turns > 0, torch.tensor([2, 1])
    )
    assert placed.tolist() == [[0.0, 1.0], [0.0, 3.0]]


class Unlucky(Count):
    failing: tuple[str, ...] = ()

    def step(self, response: str) -> TurnResult:
        if self.answer in self.failing and self.turn == 1:
            raise KeyError("lost")
        return super().step(response)


def test_a_conversation_that_fails_ends_alone():
    class Alone(TorchGenerationBackend):
        """Rounding depends on what else is computed."""

        def setup(self, config):
            super().setup(replace(config, max_batch_size=1))

    class Second(Unlucky):
        failing = ("2",)

    Count.opened = Count.closed = 0
    found = collected(Second, engine=Alone)
    expected = collected(Count, engine=Alone)
    assert found.group_id.tolist() == [0] * 3 + [2] * 3
    assert {each.outcome.reason for each in found.failed} == {"KeyError: 'lost'"}
    assert [len(each.turns) for each in found.failed] == [2] * 3
    kept = [each for each in expected.conversations if each.group != 1]
    assert [each.turns for each in found.conversations] == [each.turns for each in kept]
    assert Count.closed == Count.opened == 9 + 3 * 2 + 9  # the second group three times


def test_a_group_gets_replacements_where_less_than_two_are_left():
    begun: dict[str, int] = {}

    async def at_first(row, policy) -> Outcome:
        begun[row["answer"]] = number = begun.get(row["answer"], 0) + 1
        said = await policy.sample(policy.prompt)
        if row["answer"] == "4" and number <= 3:
            raise ConversationFailed("no judge")
        return Outcome(reward=float(len(said.text)))

    found = collected(at_first)
    assert begun == {"1": 3, "2": 3, "4": 6} and not found.failed
    first = collected(make_environment(lambda response: 0.0))
    assert found.conversations[0].turns == first.conversations[0].turns
    assert found.conversations[6].turns != first.conversations[6].turns


def test_rewards_that_fail_for_one_response_leave_it_out():
    def reward(response: str, answer: str) -> float:
        if answer == "2":
            raise ConversationFailed("the judge is down")
        return 1.0

    async def awaited(response: str, answer: str) -> float:
        return reward(response, answer)

    for fn in (reward, awaited):
        for environment in (make_environment(fn), make_environment([fn, "exact_match"])):
            found = collected(environment)
            assert found.group_id.tolist() == [0] * 3 + [2] * 3
            reasons = {each.outcome.reason for each in found.failed}
            assert reasons == {"ConversationFailed: the judge is down"}
    assert len(join([found, found]).failed) == 6


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (TurnResult(reward=float("nan"), done=True), "must return finite rewards.* nan"),
        ("done", "step must return a TurnResult, or .* but it returned 'done'"),
        (
            TurnResult(done=True, metrics={"hp": float("nan")}),
            "metric 'hp' must be a finite number",
        ),
    ],
)
def test_nonsense_of_an_environment_is_named(result, message):
    class Odd:
        def step(self, response):
            return result

    with pytest.raises(ValueError, match=message):
        collected(Odd)


def test_an_environment_of_batches_that_never_ends_fails():
    class Hangs(Batched):
        def step(self, message_log_batch, metadata):
            self.sizes.append(len(metadata))
            threading.Event().wait()

    environment = Hangs()
    with pytest.raises(TimeoutError, match=r"environment 'Hangs': step must end within 0.05 s"):
        collected(environment, timeout_s=0.05)
    assert len(environment.sizes) == 1, "it is not called again while the call goes on"


def test_batches_of_several_turns_get_the_stop_strings():
    """As in NeMo RL, where they are part of a response's text; tokens stay as they were sampled."""
    heard = []

    class Hears(Batched):
        def step(self, message_log_batch, metadata):
            heard.extend(log[-1]["content"] for log in message_log_batch)
            return super().step(message_log_batch, metadata)

    sampling = replace(SAMPLING, stop_strings=tuple("0123456789+="))
    found = collected(Hears(), sampling=sampling)
    assert any(text.endswith(sampling.stop_strings) for text in heard)
    assert len(found.to_batch()) == 9, "no turn was tokenized again"


class Hushes:
    """Ends the second response, and no other, at its first character."""

    stops: ClassVar[tuple[str, ...]] = tuple("0123456789+=")

    def __init__(self):
        self.turn = 0

    def step(self, response):
        self.turn += 1
        stop = self.stops if self.turn == 1 else ()
        return TurnResult(observation="1+", done=self.turn == 3, stop=stop)


class HushesAll(Batched):
    def step(self, message_log_batch, metadata):
        found = super().step(message_log_batch, metadata)
        stops = [Hushes.stops if row["turn"] == 1 else None for row in found.metadata]
        return replace(found, next_stop_strings=stops)


@pytest.mark.parametrize("environment", [Hushes, HushesAll()], ids=["class", "batch"])
def test_an_environment_ends_the_next_response_at_a_string(environment):
    sampling = replace(SAMPLING, max_new_tokens=8, ignore_eos=True)
    found = collected(environment, sampling=sampling)
    for each in found.conversations:
        second = TOKENIZER.decode(each.turns[1].completion.token_ids)
        ends = [place for place, letter in enumerate(second) if letter in Hushes.stops]
        assert ends in ([], [len(second) - 1]), second
        assert len(each.turns[0].completion.token_ids) == 8
        assert len(each.turns[2].completion.token_ids) == 8
    assert any(len(each.turns[1].completion.token_ids) < 8 for each in found.conversations)


def test_each_response_has_the_limit_of_a_reward():
    """All together may take longer."""

    def slow(response: str) -> float:
        time.sleep(0.12)
        return 1.0

    found = collected(make_environment(slow), timeout_s=1.0, max_turns=3)
    assert not found.failed and found.rewards.tolist() == [1.0] * 9


OVER = threading.Event()
"""Set after a test, for which it never comes."""


@pytest.fixture
def endless():
    OVER.clear()
    yield
    OVER.set()
    for thread in threading.enumerate():
        if thread.name == "nemorl-rollouts":
            thread.join(30)


def waits(response: str) -> float:
    OVER.wait()
    return 0.0


def waits_for_all(prompts: list[str], responses: list[str]) -> list[float]:
    OVER.wait()
    return []


async def awaits(response: str) -> float:
    await asyncio.Event().wait()
    return 0.0


async def awaits_for_all(responses: list[str]) -> list[float]:
    return [await awaits(each) for each in responses]


async def blocks(response: str) -> float:
    return waits(response)


class Processes(FunctionalRewardWrapper):
    def global_post_process_and_metrics(self, batch):
        OVER.wait()


async def talks_on(row, policy) -> Outcome:
    await policy.sample(policy.prompt)
    await asyncio.Event().wait()
    return Outcome()


async def blocks_all(row, policy) -> Outcome:
    await policy.sample(policy.prompt)
    OVER.wait()
    return Outcome()


class Blocks:
    async def step(self, response):
        OVER.wait()


class Ponders(Blocks):
    @property
    def max_turns(self) -> int:
        OVER.wait()
        return 1


ENDLESS = [
    *(
        (make_environment(fn), f"reward '{fn.__name__}' must end within 0.2 s")
        for fn in (waits, waits_for_all, awaits, awaits_for_all, blocks)
    ),
    (make_environment([waits, awaits]), "reward 'waits' must end within 0.2 s"),
    (Processes(lambda response: 0.0), "'Processes': global_post_process_and_metrics must end"),
    (talks_on, "episode 'talks_on' must end within 0.2 s"),
    (blocks_all, "episode 'blocks_all' must not block the event loop for 0.2 s"),
    (make_environment(Blocks), "environment 'Blocks' must not block the event loop for 0.2 s"),
    (make_environment(Ponders), "environment 'Ponders': max_turns must end within 0.2 s"),
]


@pytest.mark.parametrize(("environment", "message"), ENDLESS, ids=[each[1] for each in ENDLESS])
def test_code_of_the_users_that_never_ends_ends_the_run(endless, environment, message):
    with pytest.raises(TimeoutError, match=rf"{message}.*rollout\.timeout_s"):
        collected(environment, timeout_s=0.2)


def test_an_async_reward_that_never_ends_fails_its_conversation_alone():
    async def judge(response: str, answer: str) -> float:
        return await awaits(response) if answer == "2" else 1.0

    found = collected(make_environment(judge), timeout_s=0.5)
    assert found.group_id.tolist() == [0] * 3 + [2] * 3 and len(found.failed) == 3


def test_what_takes_long_is_shown(endless, monkeypatch):
    monkeypatch.setattr("nemorl.rollout.calls.SHOWN_S", 0.1)
    message = r"waiting for reward 'waits' for 0\.1 s \(9 conversations; rollout\.timeout_s is 0\.3"
    with pytest.warns(UserWarning, match=message), pytest.raises(TimeoutError):
        collected(make_environment(waits), timeout_s=0.3)


def test_an_environment_that_blocks_stops_no_other():
    """The others end while the threads of one row wait for them."""
    ended = threading.Barrier(4)

    class Waits(Count):
        def step(self, response: str) -> TurnResult:
            if self.turn == {"1": 0, "2": 2}[self.answer]:
                ended.wait(timeout=60)
            return super().step(response)

    one = replace(PROMPTS, groups=range(3)).take([1, 0])
    found = collected(Waits, one, replace(SAMPLING, n=2))
    assert not found.failed and found.num_turns.tolist() == [3] * 4


def test_tuples_are_results():
    class Gym:
        def reset(self):
            self.turn = 0

        def step(self, response):
            self.turn += 1
            return "1+", 0.5, False, self.turn == 2, {}

    found = collected(Gym)
    assert found.rewards.tolist() == [1.0] * 9 and found.truncated.all()


def test_teardown_runs_when_another_ends_all():
    Count.opened = Count.closed = 0

    class Broken(TorchGenerationBackend):
        async def sample(self, prompt, params):
            if len(prompt) > 12:
                raise OSError("gone")
            return await super().sample(prompt, params)

    with pytest.raises(OSError, match="gone"):
        collected(Count, engine=Broken)
    assert Count.opened == Count.closed == 9


def test_environments_of_batches_return_what_nemo_rls_have():
    """A result without our fields; empty metadata are metadata."""
    heard = []

    class Theirs(Batched):
        def step(self, message_log_batch, metadata):
            heard.extend(metadata)
            found = super().step(message_log_batch, metadata)
            theirs = {each.name for each in fields(found)} - {"components", "failures"}
            given = {name: getattr(found, name) for name in theirs}
            return SimpleNamespace(**{**given, "metadata": [{}] * len(metadata)})

    found = collected(Theirs())
    assert found.rewards.tolist() == [6.0] * 9
    assert heard.count({}) == 18


def test_parts_of_rewards_add_up_over_turns():
    class Parts(Batched):
        def step(self, message_log_batch, metadata):
            found = super().step(message_log_batch, metadata)
            has = self.always or all(found.terminateds)
            return replace(found, components={"all": found.rewards} if has else {})

    for always, parts in ((True, 1 + 0.5 * 2 + 0.25 * 3), (False, 0.25 * 3)):
        Parts.always = always
        found = collected(Parts(), discount=0.5)
        assert found.rewards.tolist() == [2.75] * 9
        assert found.components["all"].tolist() == [parts] * 9
