"""Rows from everywhere, errors that name file and line, and an order that neither repeats nor drops a row across a resume."""

import json
from pathlib import Path

import datasets
import hypothesis.strategies as st
import pytest
from hypothesis import given

from nemorl.data.datasets import load_rows, rows_at, split_rows, to_examples, to_prompts
from tests.data.tokenizers_small import character_tokenizer, trained_text

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]
TOKENIZER = character_tokenizer()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What `datasets` converts stays in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


class Module:
    def train_rows(self):
        return ROWS

    def validation_rows(self):
        return ROWS[:1]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def sources(folder: Path) -> dict:
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(folder / "rows.parquet")
    table.save_to_disk(folder / "saved")
    (folder / "plain").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    write(folder / "plain" / "train.jsonl", lines)
    return {
        "jsonl": write(folder / "rows.jsonl", lines + "\n"),
        "json": str(write(folder / "rows.json", json.dumps(ROWS))),
        "csv": write(folder / "rows.csv", "prompt,answer\n1+1,2\n2+2,4\n"),
        "parquet": folder / "rows.parquet",
        "saved": folder / "saved",
        "folder": folder / "plain",
        "list": ROWS,
        "dataset": table,
        "dict": datasets.DatasetDict(train=table),
        "module": Module(),
    }


def test_every_source_gives_the_same_rows(tmp_path):
    for name, source in sources(tmp_path).items():
        assert load_rows(source) == ROWS, name
    assert load_rows([tmp_path / "rows.jsonl", str(tmp_path / "rows.csv")]) == ROWS + ROWS
    assert load_rows("json", data_files=str(tmp_path / "plain" / "train.jsonl")) == ROWS, "a loader of `datasets`"


def test_splits():
    assert load_rows(Module(), split="validation") == ROWS[:1]
    assert load_rows(datasets.DatasetDict(dev=datasets.Dataset.from_list(ROWS)), split="dev") == ROWS


def test_a_name_goes_to_the_hub(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("openai/gsm8k", split="test[:2]", data_files="main.parquet") == ROWS
    assert asked == [(("openai/gsm8k",), {"data_files": "main.parquet", "split": "test[:2]"})]


def test_an_unreachable_hub_is_an_error_that_names_the_set(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"can't load 'openai/gsm8k'.*offline"):
        load_rows("openai/gsm8k")


def test_columns_are_mapped_and_kept():
    rows = [{"question": "1+1", "gold": "2", "prompt": "old"}]
    assert load_rows(rows, prompt_column="question", answer_column="gold") == [{"question": "1+1", "gold": "2", "prompt": "1+1", "answer": "2"}]
    assert rows == [{"question": "1+1", "gold": "2", "prompt": "old"}], "the source stays as it was"


def test_text_that_looks_like_lines_stays_in_its_row(tmp_path):
    rows = [{"prompt": "a\nb", "answer": "\u2028x"}]
    path = write(tmp_path / "rows.jsonl", json.dumps(rows[0], ensure_ascii=False) + "\n")
    assert load_rows(path) == rows
    assert load_rows(write(tmp_path / "rows.csv", 'prompt,answer\n"a\nb",\u2028x\n')) == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.jsonl", '{"a": 1}\n\n{"a": \n', r"bad\.jsonl, line 3: not JSON"),
        ("bad.jsonl", '{"a": 1}\n[1]\n', r"bad\.jsonl, line 2: a row must be a JSON object"),
        ("bad.jsonl", '{"a": 1}\n{}\n', r"bad\.jsonl, line 2: .*at least one key"),
        ("bad.jsonl", "", r"bad\.jsonl' holds no rows"),
        ("bad.json", '[{"a": 1},\n{"a"}]', r"bad\.json, line 2: not JSON"),
        ("bad.json", '{"a": 1}\n{"a": 2}', r"bad\.json, line 2: .* name it \.jsonl"),
        ("bad.json", '{"a": 1}', r"bad\.json, line 1: a \.json file must hold a list"),
        ("bad.json", "[1]", r"row 0 of .*bad\.json.* must be a dict"),
        ("bad.csv", "a,b\n1,2\n3\n", r"bad\.csv, line 3: the header has 2 columns, this row has 1"),
        ("bad.csv", "a,b\n1,2,3,4\n", r"bad\.csv, line 2: the header has 2 columns, this row has 4"),
        ("bad.csv", 'a,b\n1,"2\n', r"bad\.csv, line 2: not CSV"),
        ("bad.csv", "a,b\n", "holds no rows"),
        ("bad.parquet", "PAR0", r"bad\.parquet: not a Parquet file"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        load_rows(write(tmp_path / name, text))


def test_text_that_is_not_utf8_is_named(tmp_path):
    for name in ("bad.jsonl", "bad.json", "bad.csv"):
        (tmp_path / name).write_bytes(b'{"a": "\xff"}\n')
        with pytest.raises(ValueError, match=name):
            load_rows(tmp_path / name)


def test_errors_say_what_is_wrong(tmp_path):
    jsonl = write(tmp_path / "rows.jsonl", '{"question": 1}\n')
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [
        (lambda: load_rows(tmp_path / "missing.jsonl"), "no file .*missing.jsonl"),
        (lambda: load_rows(jsonl, prompt_column="qestion"), "has the columns question; did you mean 'question'"),
        (lambda: load_rows(jsonl, split="test"), "has no splits.*got 'test'"),
        (lambda: load_rows(ROWS, split="test"), "has no splits"),
        (lambda: load_rows(Module(), split="test"), "split of a DataModule"),
        (lambda: load_rows(datasets.DatasetDict(dev=datasets.Dataset.from_list(ROWS))), "split 'train' is not in a DatasetDict, which has dev"),
        (lambda: load_rows(ROWS, data_files="x"), "data_files chooses files"),
        (lambda: load_rows(jsonl, data_files="x"), "data_files chooses files"),
        (lambda: load_rows([]), "a list holds no rows"),
        (lambda: load_rows([{"a": 1}, 5]), "row 1 of a list must be a dict"),
        (lambda: load_rows(5), "a source of rows must be"),
        (lambda: load_rows(empty), "can't load"),
        (lambda: rows_at(0, 0, 1, 0), "num_rows"),
        (lambda: split_rows(ROWS, validation=2), "at least one of the 2 rows on each side"),
        (lambda: split_rows(ROWS, validation=0.1), "at least one of the 2 rows on each side"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@given(st.integers(1, 30), st.integers(0, 80), st.lists(st.integers(0, 25), max_size=6), st.integers(0, 2**40), st.booleans())
def test_a_resumed_order_is_the_uninterrupted_order(num_rows, start, counts, seed, shuffle):
    whole = rows_at(num_rows, start, sum(counts), seed, shuffle)
    parts, cursor = [], start
    for count in counts:
        parts += rows_at(num_rows, cursor, count, seed, shuffle)
        cursor += count
    assert parts == whole


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 1000), st.booleans())
def test_each_epoch_visits_each_row_once(num_rows, epochs, seed, shuffle):
    order = rows_at(num_rows, 0, num_rows * epochs, seed, shuffle)
    for epoch in range(epochs):
        assert sorted(order[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    if not shuffle:
        assert order == list(range(num_rows)) * epochs


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(rows_at(50, epoch * 50, 50, seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9


@given(st.integers(2, 30), st.data(), st.integers(0, 50))
def test_split_rows_shares_no_row(num_rows, data, seed):
    rows = [{"n": number} for number in range(num_rows)]
    count = data.draw(st.integers(1, num_rows - 1))
    train, held_out = split_rows(rows, validation=count, seed=seed)
    assert len(held_out) == count
    assert sorted([*train, *held_out], key=lambda row: row["n"]) == rows
    assert train == sorted(train, key=lambda row: row["n"])


def test_rows_become_prompts_and_examples():
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    rows = [{"prompt": "a"}, {"prompt": [user]}, {"messages": [user, assistant]}, {"messages": [user], "prompt": None}]
    assert [TOKENIZER.decode(ids) for ids in to_prompts(rows, TOKENIZER)] == ["a", asked, asked, asked]
    rows = [{"prompt": "a", "response": "b"}, {"prompt": [user], "response": "b"}, {"messages": [user, assistant]}]
    examples = to_examples(rows, TOKENIZER)
    assert [trained_text(TOKENIZER, example) for example in examples] == [["b<|im_end|>"]] * 3
    assert examples[1] == examples[2]
    assert trained_text(TOKENIZER, to_examples(rows, TOKENIZER, add_eos=False)[0]) == ["b"]


def test_keys_that_arrow_filled_with_none_do_not_reach_the_template():
    template = "{% for m in messages %}{{ m.role }}{{ ' CALLS' if 'tool_calls' in m }}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}"
    rows = [{"prompt": [{"role": "user", "content": "a", "tool_calls": None}]}]
    assert TOKENIZER.decode(to_prompts(rows, TOKENIZER, chat_template=template)[0]) == "usera>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "row 1: response must be text, got None"),
        ({"text": "a"}, "row 1: a row needs a prompt"),
        ({"messages": "hello"}, "row 1: messages must be a list of messages"),
        ({"messages": []}, "row 1: messages must be a list of messages"),
        ({"messages": [{"content": "a"}]}, "row 1: messages must be a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "row 1: messages must hold an assistant message"),
        ({"prompt": 5, "response": "a"}, "row 1: prompt must be a list of messages"),
    ],
)
def test_rows_that_make_no_example_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        to_examples([{"prompt": "a", "response": "b"}, row], TOKENIZER)
