"""How reward functions are called: by the names of their parameters, else by place, one response or
a whole batch at a time.
"""

import inspect
from functools import partial

import pytest

from nemorl.data.datasets import load_rows
from nemorl.rollout.calls import read_signature
from nemorl.rollout.environment import FunctionalRewardWrapper

LOG = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
seen: list[tuple] = []


def see(*values) -> float:
    seen.append(values)
    return 0.5


class Judge:
    """A callable object, as a reward model is."""

    def __call__(self, prompt, response, answer):
        return see(prompt, response, answer)


def with_middle(prompt, response, answer, weight=1.0):
    return see(prompt, response, answer)


CALLS = {
    "as usual": lambda prompt, response, answer: see(prompt, response, answer),
    "the other way round": lambda response, prompt, answer: see(prompt, response, answer),
    "as TRL calls it": lambda completion, answer, prompt: see(prompt, completion, answer),
    "by place": lambda question, text, answer: see(question, text, answer),
    "own name for the response, in front": lambda text, answer, prompt: see(prompt, text, answer),
    "any columns": lambda prompt, response, **columns: see(prompt, response, columns["answer"]),
    "any columns and the prompt among them": lambda response, **more: see(
        more["prompt"], response, more["answer"]
    ),
    "an object": Judge(),
    "a partial": partial(with_middle, weight=2.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_parameter_gets_what_it_means(name: str):
    seen.clear()
    assert FunctionalRewardWrapper(CALLS[name]).step(
        [LOG], [{"answer": "two", "level": 3}]
    ).rewards == [0.5]
    assert seen == [("1+1=", "2", "two")]


def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    return see(data_source, solution_str, ground_truth, extra_info)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def test_a_function_of_verl_gets_its_columns():
    seen.clear()
    rows = load_rows([VERL, {**VERL, "extra_info": None}, {**VERL, "ground_truth": "two"}])
    environment = FunctionalRewardWrapper(verl_score)
    environment.check(rows)
    assert environment.step([LOG] * 3, rows).rewards == [0.5] * 3
    info = VERL["extra_info"]
    given = [("2", info), ("2", None), ("two", info)]
    assert seen == [("openai/gsm8k", "2", truth, more) for truth, more in given]


BESIDE_COLUMNS = {
    "the prompt's place": lambda source, text, answer: (source, text, answer),
    "beside the prompt": lambda source, text, answer, prompt: (source, text, answer),
}


@pytest.mark.parametrize("name", BESIDE_COLUMNS)
def test_a_parameter_that_is_a_column_gets_the_column(name: str):
    found = []
    fn = BESIDE_COLUMNS[name]

    def reward(*args, **kwargs):
        found.append(fn(*args, **kwargs))
        return 0.0

    reward.__signature__ = inspect.signature(fn)
    FunctionalRewardWrapper(reward).step([LOG], [{"source": "web", "answer": "two"}])
    assert found == [("web", "2", "two")]


@pytest.mark.parametrize(
    ("fn", "what", "column"),
    [
        (lambda question, text: 1.0, "prompt", "question"),
        (lambda prompt, answer: 1.0, "response", "answer"),
    ],
)
def test_a_column_that_only_later_rows_have_takes_no_place(fn, what: str, column: str):
    """Whether `answer` is what the model answered or what is right can't be known."""
    environment = FunctionalRewardWrapper(fn)
    environment.check([{"level": 2, "response": "2"}])
    with pytest.raises(ValueError, match=f"would get the {what} as its parameter '{column}', but"):
        environment.check([{column: "?"}])


def test_completions_of_conversations_are_messages_as_in_trl():
    """With calls of tools and their results. Of a prompt that is text, or by another name, they are
    texts.
    """
    found = []

    def keep(prompts, completions):
        found.extend(zip(prompts, completions, strict=True))
        return [float(len(c[0]["content"])) for c in completions]

    chat, text = {"prompt": LOG[:1]}, {"prompt": "1+1="}
    talk = [*LOG, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "two"}]
    environment = FunctionalRewardWrapper(keep)
    assert environment.step([talk, LOG], [chat, {"messages": LOG}]).rewards == [1.0, 1.0]
    assert found == [(LOG[:1], talk[1:]), (LOG[:1], LOG[1:])]
    texts = FunctionalRewardWrapper(lambda completions: list(map(len, completions)))
    assert texts.step([LOG], [text]).rewards == [1.0]
    texts = FunctionalRewardWrapper(lambda responses: [float(r == "2") for r in responses])
    assert texts.step([LOG], [chat]).rewards == [1.0]
    with pytest.raises(AttributeError) as error:
        FunctionalRewardWrapper(lambda completions: [c.strip() for c in completions]).step(
            [LOG], [chat]
        )
    assert "a parameter called responses gets texts" in error.value.__notes__[-1]


def optional_columns(prompt, response, a=0.0, b=0.0):
    return 10 * a + b


@pytest.mark.parametrize(
    ("row", "expected"),
    [({"b": 1.0}, 1.0), ({"a": 1.0}, 10.0)],
)
def test_a_missing_column_moves_no_other(row, expected):
    assert FunctionalRewardWrapper(optional_columns).step([LOG], [row]).rewards == [expected]


BATCHES = {
    "plural": lambda prompts, responses, answer: (prompts, responses, answer),
    "as TRL calls it": lambda completions, prompts, answer: (prompts, completions, answer),
    "without prompts, with any columns": lambda completions, **more: (
        more["prompts"],
        completions,
        more["answer"],
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_plural_makes_it_a_function_of_the_batch(name: str):
    fn = BATCHES[name]
    signature = read_signature(fn)
    assert signature.batch
    given = signature.arguments(["a", "b"], ["c", "d"], {"answer": [1, 2]})
    assert fn(**given) == (["a", "b"], ["c", "d"], [1, 2])


def test_batch_can_be_said_and_denied():
    assert FunctionalRewardWrapper(lambda prompt, response: [1, 2], batch=True).step(
        [LOG, LOG], [{}, {}]
    ).rewards == [1.0, 2.0]
    assert FunctionalRewardWrapper(lambda prompts, responses: 3, batch=False).step(
        [LOG, LOG], [{}, {}]
    ).rewards == [3.0, 3.0]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (0.5, r"reward must be a function fn\(prompt, response\), but it is 0.5"),
        (
            lambda text: 1.0,
            r"must take at least \(prompt, response\), but its parameters are \['text'\]",
        ),
        (
            lambda *texts, answer: 1.0,
            r"must take its parameters by name, but it has \(\*texts\): .* needs functools.wraps",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(fn, message):
    with pytest.raises(ValueError, match=message):
        read_signature(fn)
