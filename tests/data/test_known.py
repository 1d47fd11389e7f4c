"""Known data sets, by generated samples that have the sets' own columns."""

from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from nemorl.data.datasets import load_rows, prompt_of, to_examples
from nemorl.data.preferences import pair_rows
from nemorl.data.sources import KNOWN, known_set
from nemorl.rollout.answers import REWARDS
from tests.data.known_samples import SAMPLES, hub, judged

RIGHT = {
    "last_number": "So she has {answer} eggs.",
    "math": "Thus $\\boxed{{{answer}}}$.",
    "choice": "Since this is so,\n**Answer: {answer}**",
}
WRONG = {"last_number": "It is 1000.", "math": "$\\boxed{1000}$", "choice": "Answer: none"}


@pytest.fixture(autouse=True)
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(tmp_path, monkeypatch)


def name(key: tuple[str, str | None]) -> str:
    """A set's name with its configuration, where the table has another."""
    own = key[1] or ""
    return key[0] if own == KNOWN[key[0]].configuration else f"{key[0]}:{own}"


def final(row: Any) -> str:
    text = str(row["answer"]).rpartition("####")[2].strip()
    return text.rpartition("\\boxed{")[2].partition("}")[0] if "boxed" in text else text


def test_every_known_set_has_a_sample():
    assert {key[0] for key in SAMPLES} == set(KNOWN)
    assert {one.reward for one in KNOWN.values() if one.reward} <= {*REWARDS, "code"}


@pytest.mark.parametrize("key", SAMPLES, ids=str)
def test_a_known_set_needs_no_settings(key):
    known = KNOWN[key[0]]
    split = known.validation if known.validation in SAMPLES[key][1] else "train"
    rows = load_rows(name(key), split=split)
    make = SAMPLES[key][0]
    assert len(rows) == 4
    for number, row in enumerate(rows):
        kept = {k: v for k, v in make(number).items() if k not in ("prompt", "answer")}
        assert dict(row) | kept == row
        assert prompt_of(row)
        assert known.category is None or row[known.category]
    if known.reward in RIGHT:
        right = [RIGHT[known.reward].format(answer=final(row)) for row in rows]
        assert judged(known.reward, rows, right) == [1.0] * 4
        assert judged(known.reward, rows, [WRONG[known.reward]] * 4) == [0.0] * 4
    elif known.reward == "code":
        programs = [
            row.get("code") or row["prompt"] + row["canonical_solution"]
            for row in map(make, range(4))
        ]
        answers = [f"```python\n{program}\n```" for program in programs]
        assert judged("code", rows, answers) == [1.0] * 4
        assert judged("code", rows, answers[1:] + answers[:1]) == [0.0] * 4


@pytest.mark.parametrize(
    "key", [k for k, (_, splits) in SAMPLES.items() if len(splits) > 1], ids=str
)
def test_the_split_to_train_on(key):
    assert KNOWN[key[0]].train in SAMPLES[key][1]
    assert len(load_rows(name(key))) == 4


def test_what_the_prompts_say():
    def first(source: str, **options: Any) -> Any:
        return prompt_of(load_rows(source, **options)[0])

    assert first("openai/gsm8k") == "Ann has 0 eggs and gets 1. How many?"
    assert first("math-ai/aime25", split="test") == (
        "What is $0+1$?\n\nReason step by step, and put your final answer within \\boxed{}."
    )
    assert first("cais/mmlu", split="test").startswith("What is 0+2?\n\nA. 0\nB. 1\nC. 2\nD. 3\n\n")
    for name in ("mbpp", "mbpp:sanitized"):
        prompt = first(f"google-research-datasets/{name}", split="test")
        assert "add_0 that adds 0.\n" in prompt and "assert add_0(1) == 1\nassert" in prompt
    assert 'def add_0(x: int) -> int:\n    """Add 0."""' in first(
        "openai/openai_humaneval", split="test"
    )


def test_options_are_shuffled_the_same_way_in_every_run():
    rows = [load_rows("Idavidrein/gpqa") for _ in range(2)]
    assert rows[0] == rows[1]
    assert len({row["answer"] for row in rows[0]}) > 1
    for number, row in enumerate(rows[0]):
        assert f"\n{row['answer']}. {number} eV\n" in row["prompt"]


def test_settings_win_over_the_table():
    rows = load_rows("openai/gsm8k", prompt_column="answer", prompt_template="Check: {prompt}")
    assert rows[0]["prompt"].startswith("Check: 0+1=<<0+1=1>>1.")
    rows = load_rows("HuggingFaceH4/MATH-500", split="test", answer_column="level")
    assert rows[0]["answer"] == 1
    own = load_rows("math-ai/aime25", split="test", prompt_template="{problem} Briefly.")
    assert own[0]["prompt"] == "What is $0+1$? Briefly."
    chat = load_rows("cais/mmlu", split="dev", chat=True)[0]["prompt"]
    assert chat[0]["role"] == "user" and "A. 0" in chat[0]["content"]


def test_a_known_set_beside_rows_with_other_columns():
    rows = load_rows(["openai/gsm8k", [{"q": "1+1", "answer": "2"}]], prompt_column="q")
    assert [row["prompt"][:3] for row in rows] == ["Ann"] * 4 + ["1+1"]
    assert [row.source for row in rows] == [0] * 4 + [1]


def test_a_set_without_a_default_configuration_says_so():
    with pytest.raises(ValueError, match="as EleutherAI/hendrycks_math:NAME"):
        load_rows("EleutherAI/hendrycks_math")
    with pytest.raises(ValueError, match=r"Unknown split \"train\""):
        load_rows("HuggingFaceH4/MATH-500")


def test_changed_columns_are_an_error_that_names_the_missing_one(monkeypatch):
    monkeypatch.setitem(SAMPLES, ("math-ai/aime25", None), (lambda n: {"q": "?"}, ("test",)))
    with pytest.raises(ValueError, match=r"row 1 must have the column 'problem' .* but has q"):
        load_rows("math-ai/aime25", split="test")


def test_demonstrations_and_preferences():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    for source, text in (("openai/gsm8k", "#### 1"), ("open-r1/OpenR1-Math-220k", "2")):
        example = to_examples(load_rows(source), tokenizer)[0]
        trained = [i for i, on in zip(example.input_ids, example.loss_mask, strict=True) if on]
        assert text in tokenizer.decode(trained, skip_special_tokens=True)
    pair = pair_rows(load_rows("HuggingFaceH4/ultrafeedback_binarized"))[0]
    assert pair["chosen"][-1]["content"] == "2" and pair["rejected"][-1]["content"] == "3"


def test_a_file_is_never_a_known_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert known_set("openai/gsm8k") is known_set("openai/gsm8k:socratic") is KNOWN["openai/gsm8k"]
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert known_set("openai/gsm8k") is None
    assert known_set([{"prompt": "a"}]) is known_set("gsm8k") is None


def test_the_table_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    expected = []
    for name, known in KNOWN.items():
        configuration = f" (`{known.configuration}`)" * bool(known.configuration)
        reward = f"`{known.reward}`" if known.reward else "–"
        expected.append((f"| `{name}`{configuration}", reward))
    assert [(line[0], line[3]) for line in lines] == expected
