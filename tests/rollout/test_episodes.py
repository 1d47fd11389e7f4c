"""Conversations: episodes, environments as episodes, and their tokens."""

import asyncio
import gc
import inspect
import pickle
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch

from nemorl.data.packing import segments_apart
from nemorl.losses import masks
from nemorl.parallel.tokens import once
from nemorl.rollout.collect import turn_numbers
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import Failure, Outcome, Prompts, Turn, examples_of, segments_of
from nemorl.rollout.environment import EnvironmentReturn, FunctionalRewardWrapper
from nemorl.rollout.episodes import judged
from nemorl.rollout.generation import Completion, checked_requests
from nemorl.rollout.random import derive_seed
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.rollout.counting import PROMPTS, ROWS, SAMPLING, TOKENIZER, collected, talks, tokens
from tests.tiny_models import tiny_model


class Counting(TorchGenerationBackend):
    calls = 0
    """Steps that begin requests."""

    def _step(self, new, dropped):
        self.calls += bool(new)
        super()._step(new, dropped)


@pytest.fixture
def generator() -> Counting:
    backend = Counting(model=tiny_model(scale=2.0), tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    return backend


def first_digit(prompt: str, response: str, answer: str) -> float:
    return float(response[:1] == answer)


async def one_turn(row, policy) -> Outcome:
    completion = await policy.sample(policy.prompt)
    return Outcome(reward=first_digit("", completion.text, row["answer"]), answer=completion.text)


def test_an_episode_gives_what_an_environment_gives(generator):
    """The same responses, those of one request for each group, and one call of the engine."""
    environment = FunctionalRewardWrapper(first_digit)
    prompts = replace(PROMPTS, groups=range(5, 8))
    expected = collected(generator, environment, prompts)
    found = collected(generator, one_turn, prompts)
    requests = [replace(SAMPLING, seed=derive_seed(1, 5 + i)) for i in range(3)]
    assert found.completions == generator.generate(PROMPTS.token_ids, requests)
    assert found.completions == expected.completions
    assert found.rewards.tolist() == expected.rewards.tolist()
    assert found.answers == [c.text for c in found.completions]
    assert found.to_batch().input_ids.tolist() == expected.to_batch().input_ids.tolist()
    members = [(each.group, each.member) for each in found.conversations]
    assert members == [(5 + i, j) for i in range(3) for j in range(3)]
    assert generator.calls == 3


def test_a_step_may_run_a_loop_and_a_notebook_may_collect(generator):
    def judge(response):
        return asyncio.run(asyncio.sleep(0, 1.0))

    async def in_a_notebook():
        return collected(generator, one_turn)

    found = collected(generator, FunctionalRewardWrapper(judge))
    assert found.rewards.tolist() == [1.0] * 9
    assert asyncio.run(in_a_notebook()).completions == found.completions


async def three_turns(row, policy) -> Outcome:
    first = await policy.sample(policy.prompt)
    await asyncio.sleep(0)
    more = [*policy.prompt, *first.token_ids, *TOKENIZER("+1=")["input_ids"]]
    second = await policy.sample(more, stop=["3"])
    if row["answer"] == "1":
        await policy.sample(TOKENIZER(row["prompt"] + second.text)["input_ids"])
    return Outcome(reward=float(len(second.text)))


def test_turns_are_recorded_as_the_engine_made_them(generator):
    found = talks(generator, three_turns)
    assert [len(each.turns) for each in found] == [3] * 3 + [2] * 6
    for each in found:
        one, two = each.turns[:2]
        assert list(two.prompt[: len(one.prompt)]) == list(one.prompt)
        assert "3" not in two.completion.text
        examples = examples_of(each.turns)
        assert len(examples) == len(each.turns) - 1  # the third turn rewrites
        given, said = len(two.prompt), two.completion
        assert examples[0].input_ids == [*two.prompt, *said.token_ids]
        sampled = [len(one.prompt) + i for i in range(len(one.completion.token_ids))]
        sampled += [given + i for i in range(len(said.token_ids))]
        assert [i for i, flag in enumerate(examples[0].loss_mask) if flag] == sampled
        logprobs = [*one.completion.logprobs, *said.logprobs]
        assert [examples[0].generation_logprobs[i] for i in sampled] == logprobs
        versions = [-1] * len(examples[0].input_ids)
        for i, version in zip(
            sampled, (*one.completion.policy_versions, *said.policy_versions), strict=True
        ):
            versions[i] = version
        assert examples[0].policy_versions == versions


def test_a_conversation_depends_on_no_other(generator):
    found = talks(generator, three_turns)
    alone = talks(generator, three_turns, replace(PROMPTS, groups=range(3)).take([2]))

    def sampled(conversations):
        return [tokens([turn.completion for turn in each.turns]) for each in conversations]

    assert sampled(alone) == sampled(found[6:])
    assert len({each.turns[1].completion.token_ids for each in found}) > 3


def test_a_failure_is_the_conversations_own_until_a_batch_needs_it(generator):
    async def sometimes(row, policy):
        outcome = await one_turn(row, policy)
        if row["answer"] == "2":
            raise KeyError("lost")
        return outcome

    found = talks(generator, sometimes)
    failed = [isinstance(each.outcome, Failure) for each in found]
    assert failed == [False] * 3 + [True] * 3 + [False] * 3
    assert found[3].outcome.reason == "KeyError: 'lost'" and len(found[3].turns) == 1
    kept = collected(generator, sometimes)
    assert kept.group_id.tolist() == [0] * 3 + [2] * 3 and len(kept.failed) == 3
    with pytest.raises(KeyError, match="lost") as error:
        collected(generator, sometimes, PROMPTS.take([0, 1, 1]))
    ended = "This ended 6 of 9 conversations, the first about the row of group 1, in"
    assert error.value.__notes__ == [f"{ended} turn 1 (episode 'sometimes')."]


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (0.5, "episode 'wrong' must return an Outcome, but it is 0.5"),
        (Outcome(reward=float("nan")), "episode 'wrong' must return finite rewards"),
        (SystemExit(1), "episode 'wrong' must not end the run, but it called sys.exit"),
    ],
)
def test_a_wrong_outcome_is_refused(generator, outcome, message):
    async def wrong(row, policy):
        await policy.sample(policy.prompt)
        if isinstance(outcome, SystemExit):
            raise outcome
        return outcome

    with pytest.raises((ValueError, RuntimeError), match=message):
        collected(generator, wrong)


def test_a_completion_leaves_its_tokenizer_when_it_goes_to_another_process(generator):
    found = generator.generate([[3, 4]], SAMPLING)[0]
    assert found.raw_text == TOKENIZER.decode(found.token_ids)
    arrived = pickle.loads(pickle.dumps(found))
    assert arrived == found and arrived.tokenizer is None


def test_a_function_is_not_an_episode(generator):
    with pytest.raises(
        ValueError, match="must be an EnvironmentInterface or an episode, async def"
    ):
        collected(generator, first_digit)


def test_an_interrupt_ends_all_at_once(generator, caplog):
    class Interrupted(FunctionalRewardWrapper):
        def step(self, message_log_batch, metadata):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collected(generator, Interrupted(first_digit))
    gc.collect()
    assert not caplog.records, "asyncio logs errors that nobody has seen"


def test_tokens_of_a_conversation_keep_the_experts_that_computed_them_first():
    """The next turn computes them again; only the last token of a turn is new to it."""

    def turn(prompt: list[int], tokens: tuple[int, ...], number: int | None) -> Turn:
        shape = (len(prompt) + len(tokens) - 1, 2, 1)
        said = Completion(
            token_ids=tokens,
            logprobs=(0.0,) * len(tokens),
            finish_reason="stop",
            text="",
            routed_experts=None if number is None else torch.full(shape, number).short(),
        )
        return Turn(prompt=prompt, completion=said)

    first, second = turn([1, 2], (3, 4), 0), turn([1, 2, 3, 4, 5], (6, 7), 1)
    rewritten = turn([1, 9], (8,), 2)
    found = [each.routed_experts for each in examples_of([first, second, rewritten])]
    assert [each[:, 0, 0].tolist() for each in found] == [[0, 0, 0, 1, 1, 1, -1], [2, 2, -1]]
    unrecorded = turn([1, 2], (3, 4), None)
    assert examples_of([unrecorded, second])[0].routed_experts is None


def test_segments_are_those_of_comparing_all_turns():
    random, turns, whole = Random(1), list[Turn](), list[list[int]]()
    for _ in range(300):
        before = random.choice([[], *whole[-20:]])
        given, own = (random.choices(range(3), k=random.randrange(4)) for _ in range(2))
        ids, zeros = tuple(own), (0.0,) * len(own)
        said = Completion(token_ids=ids, logprobs=zeros, finish_reason="stop", text="")
        turns.append(Turn(prompt=before + given, completion=said))
        whole.append(before + given + own)
    segments = segments_of(turns)
    begins, continued = [], set[int]()
    for number, turn in enumerate(turns):
        found = [i for i in range(number) if turn.prompt[: len(whole[i])] == whole[i]]
        before = max(found, key=lambda i: (len(whole[i]), i), default=None)
        if before is None or before in continued:
            begins.append((number + 1, [] if before is None else [turns[before]]))
        continued.add(before)
    for (number, shared), segment in zip(begins, segments, strict=True):
        assert segment.numbers[0] == number
        assert segment.shared[-1:] == shared
    assert sorted(n for each in segments for n in each.numbers) == [*range(1, 301)]


async def branches(row, policy) -> Outcome:
    """Three answers go on with the first, of which the second goes on with itself."""
    first = await policy.sample(policy.prompt)
    begun = [*policy.prompt, *first.token_ids]
    for given in ("1+", "2+", "3+"):
        prompt = [*begun, *TOKENIZER(given)["input_ids"]]
        said = await policy.sample(prompt)
        if given == "2+":
            await policy.sample([*prompt, *said.token_ids, *TOKENIZER("=")["input_ids"]])
    return Outcome(reward=float(len(said.text)))


def test_what_branches_share_is_trained_on_once(generator):
    found = collected(generator, branches)
    weights = masks.sequence_mean_weights
    batch = found.to_batch(torch.arange(1.0, 10.0), weights)
    assert batch.segment_ids.amax(-1).tolist() == [3] * 9
    assert batch.loss_mask.sum(-1).tolist() == found.lengths.tolist()
    assert torch.equal(batch.sampled_hashes != 0, batch.loss_mask)
    torch.testing.assert_close(batch.loss_weights.sum(-1), torch.full((9,), 1 / 9))
    advantages = batch.advantages[batch.loss_mask].unique_consecutive()
    assert advantages.tolist() == [*range(1, 10)], "one of all segments"
    apart, _ = segments_apart(replace(batch, sampled_hashes=None))
    for number, each in enumerate(found.conversations):
        first = each.turns[0]
        given, end = len(first.prompt), len(first.prompt) + len(first.completion.token_ids)
        trained = apart.loss_mask[3 * number : 3 * number + 3, given:end]
        assert trained.all(-1).tolist() == [True, False, False] and not trained[1:].any()
        assert apart.response_mask[3 * number : 3 * number + 3, given:end].all()
    kept, _ = once(apart)
    assert len(kept) <= batch.loss_mask.sum() + sum(map(len, PROMPTS.token_ids)) + 9 * 7
    (numbers,) = turn_numbers(found, batch)[:1]
    assert numbers[numbers > 0].unique_consecutive().tolist() == [1, 2, 3, 4, 5]


def test_groups_of_one_number_keep_their_own_prompts(generator):
    alike = Prompts(ROWS[:2], PROMPTS.token_ids[:2], groups=[5, 5])
    found = collected(generator, one_turn, alike)
    for index, prompt in enumerate(alike.token_ids):
        request = replace(SAMPLING, seed=derive_seed(1, 5))
        expected = generator.generate([prompt], request)
        assert tokens(found.completions[3 * index :][:3]) == tokens(expected)


def test_an_episode_that_goes_on_after_the_engines_error_ends(generator):
    class Broken(Counting):
        async def sample(self, prompt, params):
            raise OSError("gone")

    async def stubborn(row, policy) -> Outcome:
        try:
            await policy.sample(policy.prompt)
        except BaseException:
            await policy.sample(policy.prompt)
        return Outcome(reward=0.0)

    backend = Broken(model=generator.model, tokenizer=TOKENIZER)
    with pytest.raises(OSError, match="gone"):
        collected(backend, stubborn)


def test_what_was_sampled_from_stays_as_it_was(generator):
    """An agent goes on with the list that it sampled from."""

    async def with_one_list(row, policy) -> Outcome:
        tokens = list(policy.prompt)
        for _ in range(2):
            tokens += (await policy.sample(tokens)).token_ids
        return Outcome(reward=0.0)

    found = talks(generator, with_one_list, PROMPTS.take([0]))
    first, second = found[0].turns
    assert list(first.prompt) == list(PROMPTS.token_ids[0])
    assert second.prompt == (*first.prompt, *first.completion.token_ids)


def test_an_episode_that_cancels_itself_fails_alone(generator):
    async def cancels(row, policy) -> Outcome:
        if row["answer"] == "2":
            asyncio.current_task().cancel()
        return await one_turn(row, policy)

    found = talks(generator, cancels)
    failed = [isinstance(each.outcome, Failure) for each in found]
    assert failed == [False] * 3 + [True] * 3 + [False] * 3


def test_an_episode_must_sample(generator):
    async def silent(row, policy) -> Outcome:
        return Outcome()

    with pytest.raises(ValueError, match="'silent' must sample a response: await policy"):
        collected(generator, silent)


def test_members_that_ask_one_after_the_other_share_a_request(generator):
    """Each sample is drawn once, whenever the conversations come to it."""
    turn = asyncio.Semaphore(1)

    async def in_turn(row, policy) -> Outcome:
        async with turn:
            return await one_turn(row, policy)

    drawn = []

    class Drawn(Counting):
        async def sample(self, prompt, params):
            drawn.append(params.n)
            return await super().sample(prompt, params)

    backend = Drawn(model=generator.model, tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    found = collected(backend, in_turn)
    expected = collected(generator, one_turn)
    assert drawn == [3, 3, 3]
    assert tokens(found.completions) == tokens(expected.completions)


def test_a_prompt_that_is_text_is_refused():
    check = inspect.unwrap(checked_requests)  # without the types, which the tests check
    with pytest.raises(ValueError, match=r"must be token ids, but prompt 0 is .*\[\"input_ids\"\]"):
        check(["1+2="], SAMPLING, vocab_size=42, max_positions=64)


def test_turns_are_in_the_order_in_which_they_were_asked_for(generator):
    stops = {}

    class Slow(Counting):
        async def sample(self, prompt, params):
            found = await super().sample(prompt, params)
            await asyncio.sleep(0.05 if prompt == (3,) else 0)
            stops[prompt] = params.stop_strings
            return found

    async def both(row, policy) -> Outcome:
        await asyncio.gather(policy.sample([3]), policy.sample([4], stop="</a>"))
        return Outcome()

    backend = Slow(model=generator.model, tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    (found,) = talks(backend, both, PROMPTS.take([0]), replace(SAMPLING, n=1))
    assert [turn.prompt for turn in found.turns] == [(3,), (4,)]
    assert stops == {(4,): ("</a>",), (3,): ()} and [*stops] == [(4,), (3,)]


@pytest.mark.parametrize("nothing", [[], None])
@pytest.mark.parametrize("part", ["observations", "metadata", "next_stop_strings"])
def test_what_follows_may_be_left_out_where_all_is_over(part, nothing):
    log, said = [{"role": "user", "content": "?"}], [{"role": "user", "content": "go on"}] * 2

    def found(ends, **parts):
        usual = {"observations": said, "metadata": [{}, {}], "next_stop_strings": [None] * 2}
        result = EnvironmentReturn(**{**usual, **parts}, rewards=[1.0, 0.5], terminateds=ends)
        methods = dict.fromkeys(("step", "global_post_process_and_metrics"), lambda *_: result)
        return judged(SimpleNamespace(**methods), [(log, {})] * 2)

    assert [each.reward for each in found([True, True], **{part: nothing})] == [1.0, 0.5]
    with pytest.raises(ValueError, match=f"return .*{part}"):
        raise found([True, False], **{part: nothing})[0]
    assert found([True, False], observations=[None, said[0]])[1].observation == said[0]
    with pytest.raises(ValueError, match="observation must be a message where a conversation goes"):
        raise found([True, False], observations=[said[0], None])[0]
