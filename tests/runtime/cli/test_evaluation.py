"""`nemorl eval` on several and on known data sets, its statistics, and `nemorl compare`."""

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

import nemorl
from nemorl import TurnResult
from nemorl.rollout.evaluation import (
    comparison,
    mean_by_prompt,
    pass_at_k,
    share_interval,
    summaries,
)
from nemorl.runtime.cli.main import main, parse
from nemorl.runtime.run import registry
from nemorl.runtime.store.directory import read_lines
from tests.data.known_samples import hub
from tests.rollout.backends import reference_logprobs
from tests.runtime.runs import addition_rows, grpo_config, rows_file, saved_model
from tests.tiny_models import tiny_model, tiny_tokenizer

CPU = ["--device", "cpu", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved_model(tmp_path_factory.mktemp("model"), scale=1.0))


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    rows = addition_rows()[:6]
    kinds = [{**row, "kind": ("easy", "hard")[n % 2]} for n, row in enumerate(rows)]
    plain = [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows[:3]]
    return [rows_file(tmp_path / "sums.jsonl", kinds), rows_file(tmp_path / "more.jsonl", plain)]


def answer(group: int, correct: bool, **others: Any) -> dict[str, Any]:
    own = {"data": "sums", "group": group, "prompt": f"{group}="}
    return {**own, "correct": correct, "reward": float(correct), **others}


def test_several_sets_by_category(model: str, sets: list[str], tmp_path: Path, capsys):
    output = tmp_path / "answers.jsonl"
    options = ["-n", "5", "--temperature", "1", "--reward", "last_number", "--by", "kind", *CPU]
    command = ["eval", "--model", model, "--validation", *sets, *options]
    assert main([*command, "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("95 % confidence", "more", "easy", "pass@4", "cons@5"))
    answers = read_lines(output)
    assert Counter(each["data"] for each in answers) == {"sums": 30, "more": 15}
    assert [each["group"] for each in answers] == [n // 5 for n in range(45)]
    assert all(each["correct"] == (each["reward"] >= 1) for each in answers)

    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    again = json.loads(json.dumps(summaries(answers)))
    assert result["summaries"] == again and "answers" not in result
    assert [line["num_prompts"] for line in result["summaries"]] == [9, 6, 3, 3, 3]


def test_the_answers_to_a_set_alone_are_those_beside_others(model: str, sets: list[str]):
    """A prompt's answers depend on its number, not on the other sets."""
    options: Any = {"n": 2, "temperature": 1.0, "device": "cpu", "max_new_tokens": 4}
    both, alone = (nemorl.evaluate(model, each, **options) for each in (sets, sets[0]))
    first = [each["response"] for each in both["answers"] if each["data"] == "sums"]
    assert first == [each["response"] for each in alone["answers"]]


@pytest.mark.parametrize("failing", [0, 4])
def test_a_conversation_that_fails_costs_no_other_answers(model: str, failing: int):
    rows = [{"prompt": f"{n}+1=", "answer": str(n)} for n in range(5)]

    def reward(response: str, answer: str) -> float:
        if answer == str(failing):
            raise nemorl.ConversationFailed("no judge")
        return float(len(response))

    options: Any = {"device": "cpu", "max_new_tokens": 4, "temperature": 1.0}
    said = "1 of 5 conversations failed and are not counted, the first with 'ConversationFailed: no"
    with pytest.warns(UserWarning, match=said):
        whole, *sliced = (
            nemorl.evaluate(model, rows, reward, max_batch_size=size, **options)
            for size in (256, 4, 1)
        )
    assert sliced == [whole] * 2
    assert whole["num_failed"] == 1 and len(whole["answers"]) == 4


def test_means_are_by_prompt_where_a_conversation_failed(model: str):
    """Not over the responses that are left: two of four answer 1+1= here."""
    calls = Counter[str]()

    def reward(response: str, answer: str) -> float:
        calls[answer] += 1
        if answer == "1" and calls[answer] > 2:
            raise nemorl.ConversationFailed("no judge")
        return float(answer)

    rows = [{"prompt": f"{n}+1=", "answer": str(n)} for n in range(2)]
    found = nemorl.evaluate(model, rows, reward, n=4, temperature=1.0, device="cpu")
    assert len(found["answers"]) == 6
    assert found["accuracy"] == found["reward"] == found["summaries"][0]["accuracy"] == 0.5


RIGHT = {"text": "113", "index": 2, "text of an index": "2", "letter": "C"}
"""Ways to say that of CHOICES the last one is right."""
CHOICES = ["3", "12", "113"]


def test_the_likeliest_choice_is_the_answer(tmp_path: Path, capsys):
    net = tiny_model(scale=2.0)
    model = str(saved_model(tmp_path / "model", scale=2.0))
    rows = [
        {"question": f"{n}+{n}=", "endings": CHOICES, "label": right, "kind": kind}
        for n, (kind, right) in enumerate(RIGHT.items(), start=3)
    ]
    data = rows_file(tmp_path / "choices.jsonl", rows)
    columns = ["--data.prompt-column", "question", "--data.answer-column", "label", "--by", "kind"]
    command = ["eval", "--model", model, "--validation", data, "--choices", "={endings}", *columns]
    answers = [str(tmp_path / f"{n}.jsonl") for n in range(2)]
    for output in answers:
        assert main([*command, "--device", "cpu", "--output", output]) == 0
    assert "the likeliest choice" in capsys.readouterr().out
    found, tokenizer = read_lines(Path(answers[0])), tiny_tokenizer()
    for row, record in zip(rows, found, strict=True):
        prompt = tokenizer(row["question"])["input_ids"]
        expected = []
        for text in CHOICES:
            ids = tuple(tokenizer(f"={text}", add_special_tokens=False)["input_ids"])
            expected.append(float(reference_logprobs(net, prompt, ids, 1.0).sum()))
        assert record["logprobs"] == pytest.approx(expected, abs=1e-4)
        by_byte = [value / len(text) for value, text in zip(expected, CHOICES, strict=True)]
        best, best_norm = (values.index(max(values)) for values in (expected, by_byte))
        assert record["response"] == CHOICES[best] and record["answer"] == "113"
        assert [record["correct"], record["correct_norm"]] == [best == 2, best_norm == 2]
    assert any(record["correct"] != record["correct_norm"] for record in found)
    line = summaries(found)[0]
    assert line["accuracy_norm"] == sum(each["correct_norm"] for each in found) / 4
    assert main(["compare", *answers, "--json"]) == 0
    compared = map(json.loads, capsys.readouterr().out.splitlines())
    assert {each["metric"] for each in compared} == {"accuracy", "accuracy_norm"}
    assert main(["compare", *answers]) == 0
    text = capsys.readouterr().out
    assert "p value" in text and "letter" in text


@pytest.mark.parametrize(
    ("row", "others", "message"),
    [
        ({"choices": ["2"]}, {}, "row 1: the column choices must be a list of at least two texts"),
        ({"choices": "23"}, {}, "must be a list of at least two texts, but it is '23'"),
        ({"choices": ["É", "3"]}, {}, "row 1: choices must have a token in each text, but it is"),
        ({"choices": ["", "2"]}, {}, "must be a list of at least two texts"),
        ({"answer": 3}, {}, "must be one of the choices, its index from 0, or its letter, but it"),
        ({"answer": "D"}, {}, "but it is 'D': name its column"),
        ({"answer": None}, {}, "row 1: answer .data.answer_column. must be one of the choices"),
        ({}, {"choices": "{prompt} {choices}"}, "choices must name one column"),
        ({}, {"reward": "contains_answer"}, "reward is not used with choices"),
        ({}, {"reward": lambda response: 1.0}, "choices must be given without reward"),
        ({}, {"temperature": 0.5}, "generation.temperature is not used with choices"),
        ({}, {"backend": "unscored"}, "generation.backend must have the method score for choices"),
    ],
)
def test_choices_that_cannot_be_scored_are_refused(
    row, others, message, tmp_path: Path, monkeypatch
):
    """Before the model, which is not there, is loaded."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("É", "")
    tokenizer.save_pretrained(tmp_path)
    unscored = type("Unscored", (), {"sample": print})
    monkeypatch.setitem(registry.GENERATION_BACKENDS, "unscored", unscored)
    rows = [{"prompt": "1+1=", "choices": CHOICES, "answer": "3", **row}]
    with pytest.raises(ValueError, match=message):
        nemorl.evaluate(str(tmp_path), rows, **{"choices": "choices", **others})


@pytest.mark.slow
def test_responses_that_the_limit_on_tokens_cut_are_counted(tmp_path: Path):
    model = saved_model(tmp_path / "model", scale=1.0, max_position_embeddings=512)
    sums = rows_file(tmp_path / "sums.jsonl", addition_rows()[:6])
    long = rows_file(tmp_path / "long.jsonl", [{"prompt": "1+" * 30, "answer": "1"}] * 2)
    options: Any = {"device": "cpu", "generation__ignore_eos": True}
    said = (
        r"^generation\.max_new_tokens 256 cut 6 of 6 responses to sums, 2 of 2 responses to long,"
    )
    with pytest.warns(UserWarning, match=said):
        found = nemorl.evaluate(model, [sums, long], **options)
    assert found["truncated_fraction"] == 1
    assert [line["truncated_fraction"] for line in found["summaries"]] == [1, 1, 1]
    for each in found["answers"]:
        assert (each["finish_reason"], each["cut_by"]) == ("length", "generation.max_new_tokens")
    with warnings.catch_warnings():  # the limit was chosen
        warnings.simplefilter("error")
        nemorl.evaluate(model, sums, max_new_tokens=4, **options)


@pytest.mark.parametrize(("cut", "warned"), [(1, False), (2, True)])
def test_a_share_of_more_than_one_percent_is_warned_of(
    model: str, cut: int, warned: bool, monkeypatch, recwarn
):
    """In each data set, however small beside others."""
    records = [
        {**answer(n, True, data=data), "num_tokens": 1}
        | ({"cut_by": "generation.max_new_tokens"} if data == "sums" and n < cut else {})
        for data, count in (("sums", 100), ("more", 200))
        for n in range(count)
    ]
    monkeypatch.setattr("nemorl.runtime.cli.inference._records", lambda *_: records)
    found = nemorl.evaluate(model, addition_rows()[:1], device="cpu")
    assert found["summaries"][1]["truncated_fraction"] == cut / 100
    said = f"cut {cut} of 100 responses to sums, maybe"
    assert any(said in str(each.message) for each in recwarn) == warned


class Guess:
    """Gives a reward in its second turn, and measures what it saw."""

    def reset(self, answer: str) -> str:
        self.answer, self.turn = answer, 0
        return "1+1="

    def step(self, response: str) -> TurnResult:
        self.turn += 1
        done, seen = self.turn == 2, {"guesses": float(self.turn)}
        return TurnResult(observation="2+2=", reward=float(done), done=done, metrics=seen)


def test_what_an_environment_measures_is_a_metric(model: str, sets: list[str]):
    options: Any = {"device": "cpu", "max_new_tokens": 4, "max_rows": 2}
    found = nemorl.evaluate(model, sets[0], environment_factory=Guess, **options)
    assert found["metrics"] == {"guesses": 2.0, "turns": 2.0}
    found = nemorl.evaluate(model, sets, environment_factory=Guess, **options)
    assert found["metrics"]["sums/guesses"] == found["metrics"]["more/turns"] == 2.0


def test_summaries_by_hand():
    rows = [
        *(answer(0, c, extracted_answer=a) for c, a in [(1, "2"), (1, "2"), (0, "3"), (0, None)]),
        *(answer(1, c, extracted_answer=a) for c, a in [(0, "5"), (0, "5"), (1, "4"), (0, "6")]),
    ]
    (found,) = summaries(rows)
    correct, groups = [r["correct"] for r in rows], [r["group"] for r in rows]
    assert found["accuracy"] == 0.375
    assert found["accuracy_ci"] == share_interval(mean_by_prompt(correct, groups))
    (graded,) = summaries([{**r, "reward": 2.0 * r["reward"]} for r in rows])
    assert graded["reward_ci"] == pytest.approx((0.75 - 2 * 0.245, 0.75 + 2 * 0.245), abs=1e-3)
    assert found["pass@2"] == pass_at_k(correct, groups, 2).mean()
    assert (found["cons@4"], found["pass@4"]) == (0.5, 1.0)
    assert found["cons@2"] == pytest.approx(((1 + 0) / 2 + (0 + 0.5) / 2) / 2)
    assert "pass@2" not in summaries(rows[:1])[0]


def test_a_prompt_with_few_responses_is_left_out_of_large_k_alone():
    """Once it lowered k for all prompts."""
    several = [answer(g, g == 0, extracted_answer=str(g)) for g in range(3) for _ in range(4)]
    rows = [*several[:-1], answer(3, True, data="more", extracted_answer="3")]
    everything, sums, more = summaries(rows)
    assert (everything["left_out@2"], everything["left_out@4"]) == (1, 2)
    assert everything["pass@2"] == everything["cons@2"] == pytest.approx(1 / 3)
    assert everything["pass@4"] == everything["cons@4"] == sums["pass@4"] == 0.5
    assert "left_out@2" not in sums and sums["left_out@4"] == 1
    assert {name: more[name] for name in more if "@" in name} == {"left_out@2": 1, "left_out@4": 1}


def test_all_sets_have_a_vote_only_where_answers_were_read_in_each():
    unread = [answer(0, True)] * 2
    read = [answer(1, True, data="more", extracted_answer="2")] * 2
    everything, first, second = summaries(unread + read)
    assert everything["accuracy"] == everything["pass@2"] == second["cons@2"] == 1
    assert "cons@2" not in everything and "cons@2" not in first


def test_known_sets_need_no_settings(model: str, tmp_path: Path, monkeypatch, capsys):
    hub(tmp_path, monkeypatch)
    names = ["openai/gsm8k", "TIGER-Lab/MMLU-Pro"]
    output = tmp_path / "answers.jsonl"
    command = ["eval", "--model", model, "--validation", *names, "--output", str(output), *CPU]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert (
        "openai/gsm8k is known; where no setting says otherwise: columns {'prompt': 'question'"
        in err
    )
    assert "reward 'choice'" in err and "law" in out
    answers = read_lines(output)
    assert Counter((a["data"], a.get("category")) for a in answers) == {
        ("gsm8k", None): 4,
        ("MMLU-Pro", "math"): 2,
        ("MMLU-Pro", "law"): 2,
    }
    assert main([*command, "--reward", "think_format"]) == 0
    assert not any(each["correct"] for each in read_lines(output)), "the table's reward gives way"


def test_a_known_set_has_its_own_columns_for_a_run_as_the_model(tmp_path: Path, monkeypatch):
    hub(tmp_path, monkeypatch)
    run = tmp_path / "run"
    (run / "hf").mkdir(parents=True)
    config = "reward: contains_answer\ndata: {prompt_column: q, chat: true}\n"
    (run / "config.yaml").write_text(config)
    (tmp_path / "d.jsonl").write_text('{"q": "1+1="}')
    command = ["--model", str(run), "--validation"]
    of_run = parse("eval", [*command, str(tmp_path / "d.jsonl")])
    assert (of_run.reward, of_run.data.prompt_column) == ("contains_answer", "q")
    known = parse("eval", [*command, "openai/gsm8k", "cais/mmlu"])
    assert (known.reward, known.data.prompt_column) == ("exact_match", "prompt")
    assert known.data.chat
    mixed = [*command, "openai/gsm8k", str(tmp_path / "d.jsonl")]
    with pytest.raises(ValueError, match="or others, but not both, with the run's reward, but it"):
        parse("eval", mixed)
    assert parse("eval", [*mixed, "--reward", "last_number"]).data.prompt_column == "q"


def test_evaluations_that_are_joined_keep_their_prompts():
    """Each numbers its prompts from 0; a set that was evaluated twice has each prompt once."""
    first = [answer(g, g < 30, prompt=f"{g}=") for g in range(40)]
    others = [{**each, "data": "more", "correct": False} for each in first]
    same_name = [{**each, "prompt": f"-{each['prompt']}"} for each in first]
    for joined in (first + others, first + same_name):
        apart = [{**each, "group": i} for i, each in enumerate(joined)]
        assert summaries(joined) == summaries(apart)
        assert summaries(joined)[0]["num_prompts"] == 80
        turned = [{**each, "correct": not each["correct"]} for each in joined]
        assert comparison(joined, turned)[0]["num_prompts"] == 80
    (twice,) = summaries(first + first)
    assert (twice["num_prompts"], twice["pass@2"]) == (40, 0.75)


# Comparison


def test_comparison_by_hand():
    first = [answer(g, g == 0, category="ab"[g % 2]) for g in range(4) for _ in range(2)]
    second = [answer(g, g != 3, category="ab"[g % 2]) for g in range(4)]
    everything, a, b = comparison(first, second)
    assert (everything["first"], everything["second"]) == (0.25, 0.75)
    assert everything["difference"] == 0.5
    assert everything["p_value"] == 0.5 and everything["num_prompts"] == 4
    assert (a["category"], a["difference"], b["difference"]) == ("a", 0.5, 0.5)
    graded = comparison(first, [{**each, "reward": 0.5} for each in second])
    assert (graded[1]["metric"], graded[1]["difference"]) == ("reward", 0.25)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([answer(0, True)], "it has 1 without '1=': evaluate both .* all failed is missing, too"),
        ([answer(0, True), answer(1, True, data="more")], "has 2 without '1=': evaluate"),
    ],
)
def test_only_evaluations_of_the_same_prompts_are_compared(second, message):
    with pytest.raises(ValueError, match=f"the 2 prompts of first, but .*{message}"):
        comparison([answer(0, False), answer(1, True)], second)


def test_prompts_are_compared_wherever_they_stand():
    """Equal prompts in their order."""
    first = [answer(0, True), answer(1, False), answer(2, False), answer(3, True, prompt="0=")]
    places = [(0, 2, "2="), (1, 0, "0="), (2, 3, "0="), (3, 1, "1=")]
    second = [{**first[old], "group": new, "prompt": text} for new, old, text in places]
    (line,) = comparison(first, second)
    assert (line["num_prompts"], line["difference"], line["difference_ci"]) == (4, 0, 0)


GAME = """
class Game:
    def reset(self, answer):
        self.turn = 0
    def step(self, response):
        self.turn += 1
        return "+1=", float(len(response)) / 4, self.turn == 2
"""


def test_a_run_of_turns_is_evaluated_by_its_environment(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    rollout = nemorl.RolloutConfig(environment="./game.py:Game", discount=0.5)
    config = grpo_config(tmp_path / "run", steps=1, rollout=rollout, run={"export": True})
    nemorl.run(config, model=tiny_model(), tokenizer=tiny_tokenizer(), train=addition_rows())
    rows = addition_rows()[:3]
    found = nemorl.evaluate(tmp_path / "run", rows, max_new_tokens=4, trust_code=True)
    assert "rollout.environment './game.py:Game'" in capsys.readouterr().err
    for each in found["answers"]:
        rewards = [turn["reward"] for turn in each["turns"]]
        assert len(rewards) == 2 and each["reward"] == pytest.approx(rewards[0] + rewards[1] / 2)
        assert each["num_tokens"] > 4
