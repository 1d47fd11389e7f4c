"""Environments and rewards that rows choose by name."""

import asyncio
from dataclasses import replace

import pytest

from nemorl.data.rows import Row
from nemorl.rollout.collect import join, select
from nemorl.rollout.config import GenerationConfig, RolloutConfig
from nemorl.rollout.conversation import Outcome
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.environments import check_limits, make_environment
from nemorl.rollout.episodes import judge_of
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.rollout.counting import PROMPTS, ROWS, TOKENIZER, Batched, Count, collected, tokens
from tests.tiny_models import tiny_model

NAMES = ("count", "sum", "count", "batched", "twice", "sum")
MIXED = replace(
    PROMPTS.take([0, 1, 2, 0, 1, 2]),
    rows=[{**ROWS[i % 3], "environment": name} for i, name in enumerate(NAMES)],
    groups=range(6),
)


@pytest.fixture(scope="module")
def generator() -> TorchGenerationBackend:
    backend = TorchGenerationBackend(model=tiny_model(scale=2.0), tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    return backend


class Length(FunctionalRewardWrapper):
    """The length of a response; notes how many it judges at once."""

    def __init__(self) -> None:
        super().__init__(lambda response: len(response), name="length")
        self.sizes: list[int] = []

    def step(self, message_log_batch, metadata):
        self.sizes.append(len(message_log_batch))
        return super().step(message_log_batch, metadata)

    def global_post_process_and_metrics(self, batch):
        return batch, {"longest": float(max(batch["rewards"]))}


async def twice(row, policy) -> Outcome:
    for _ in range(2):
        await policy.sample(policy.prompt)
    return Outcome(reward=7.0, metrics={"asked": 2.0})


def digits(response: str) -> float:
    return float(sum(map(str.isdigit, response)))


def test_each_row_is_led_and_judged_as_by_its_environment_alone(generator):
    length, batched = Length(), Batched()
    parts = {"sum": [length, digits], "batched": batched}
    led = {"count": Count, "twice": twice}
    environment = make_environment(parts, {"sum": (1.0, 0.5)}, environment=led)
    found = collected(generator, environment, MIXED)
    assert [each.row["environment"] for each in found.conversations] == [
        name for name in NAMES for _ in range(3)
    ]
    assert length.sizes == [6] and set(batched.sizes) == {3}, "judged together, by environment"
    alone = {
        "sum": make_environment([Length(), digits], (1.0, 0.5)),
        "batched": Batched(),
        "count": make_environment(Count),
        "twice": twice,
    }
    for name, one in alone.items():
        places = [place for place, own in enumerate(NAMES) if own == name]
        expected = collected(generator, one, MIXED.take(places))
        mine = select(found, [3 * place + member for place in places for member in range(3)])
        assert tokens(mine.completions) == tokens(expected.completions)
        assert mine.rewards.tolist() == expected.rewards.tolist()
        assert mine.reward_metrics() == expected.reward_metrics()
        for index in range(len(mine)):
            assert mine.rewards_of(index) == expected.rewards_of(index)
            assert mine.judged(index) == expected.judged(index)
    assert found.metrics["sum/length/longest"] > 0 and found.metrics["asked"] == 2
    assert found.correct is None and "accuracy" not in found.reward_metrics()
    again = join([select(found, range(6)), select(found, range(6, 18))])
    assert again.rewards.tolist() == found.rewards.tolist()
    assert [again.rewards_of(i) for i in range(18)] == [found.rewards_of(i) for i in range(18)]


def test_an_error_of_the_engine_ends_all(generator, monkeypatch):
    async def sample(prompt, params):
        await asyncio.sleep(0.01 * (prompt != MIXED.token_ids[1]))
        raise RuntimeError("lost")

    monkeypatch.setattr(generator, "sample", sample)
    environment = make_environment({"sum": digits, "batched": Batched()}, environment=None)
    with pytest.raises(RuntimeError, match="lost"):
        collected(generator, environment, MIXED.take([1, 3]))


def test_what_is_no_mapping_is_for_each_name():
    tools = {"calc": "calculator", "code": "python"}
    made = make_environment("last_number", environment=tools)
    judges = [judge_of(each) for each in made.environments.values()]
    assert [judge.name for judge in judges] == ["last_number"] * 2
    made = make_environment({"a": "math", "b": "last_number"}, environment="calculator")
    assert [judge_of(each).name for each in made.environments.values()] == ["math", "last_number"]
    check_limits(made, RolloutConfig(max_turns=3))
    settings = {"a": {"share": True}}
    made = make_environment({"a": "code", "b": "math"}, settings=settings)
    assert [each.signature.settings for each in made.environments.values()] == [settings["a"], {}]
    with pytest.raises(
        ValueError, match=r"max_turns has no effect on the environments a, b, but it is"
    ):
        check_limits(make_environment({"a": "code", "b": "math"}), RolloutConfig(max_turns=3))


class Get(Count):
    step = None  # type: ignore[assignment]

    def get(self) -> str:
        """Return it."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (({"a": "math"}, (1.0,)), r"reward_weights must have some of the names a, .* as a list"),
        (({"a": "math"}, (), {"share": True}), r"reward_kwargs must have some of the names a, as"),
        (({"a": ["math", "code"]}, {"a": (1.0,)}), r"environment 'a': reward_weights must be one"),
        (({"a": {"b": "math"}},), r"reward 'a' must be a name, a function or a list of them"),
        (({},), r"reward must be a mapping of one name or more"),
        (({"b": "math"}, (), {"b": {"share": True}}), r"'b': reward_kwargs must name parameters"),
        (({"a": "math"}, (), {}, {"get": Get}), r"environment 'get': .*must have get_reward\(\)"),
        (("math", (), {}, {"count": Count, "get": Get}), r"'count': reward must be left out"),
    ],
)
def test_mappings_that_are_refused(given, message):
    *given, led = (*given, None) if len(given) < 4 else given
    with pytest.raises(ValueError, match=message):
        make_environment(*given, environment=led)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "digits",
            "line 2: environment must name the row's .*sum, digit.*'digits'; did you mean digit",
        ),
        (
            None,
            "but it is None: add the column, set data.environments, or add up several rewards as a",
        ),
        (3, "but it is 3: correct it, or set data.environment_column"),
    ],
)
def test_rows_without_a_known_name_are_refused(name, message):
    made = make_environment({"sum": digits, "digit": digits})
    rows = [Row({"environment": "sum"}, origin="rows.jsonl, line 1")]
    made.check(rows)
    with pytest.raises(ValueError, match=message):
        made.check([*rows, Row({"environment": name}, origin="rows.jsonl, line 2")])
    with pytest.raises(
        ValueError, match=r"names that rows choose, which name sum, .*'digit'.*remove"
    ):
        made.require_used(rows)
