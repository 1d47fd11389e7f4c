"""Rows from everywhere, each with its place, and errors that name file and line."""

import csv
import json
import pickle
from pathlib import Path

import datasets
import pytest

from nemorl.data.datasets import load_rows
from nemorl.data.rows import Row
from nemorl.data.sources import has_splits, shards_of, sources_of
from tests.data.written import ROWS, Module, sources, write


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What `datasets` converts stays in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_every_source_gives_the_same_rows(tmp_path):
    for name, source in sources(tmp_path).items():
        assert load_rows(source) == ROWS, name
    assert load_rows([tmp_path / "rows.jsonl", str(tmp_path / "rows.csv")]) == ROWS + ROWS
    assert load_rows("json", data_files=str(tmp_path / "plain" / "train.jsonl")) == ROWS, (
        "a loader of `datasets`"
    )


def test_splits():
    assert load_rows(Module(), split="validation") == ROWS[:1]
    assert (
        load_rows(datasets.DatasetDict(dev=datasets.Dataset.from_list(ROWS)), split="dev") == ROWS
    )


def test_a_name_goes_to_the_hub(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("owner/sums", split="test[:2]", data_files="main.parquet") == ROWS
    options = {"data_files": "main.parquet", "split": "test[:2]", "streaming": False}
    assert asked == [(("owner/sums",), options)]


class Runs:
    def __reduce__(self):
        return Path("marker").touch, ()


def test_a_name_runs_no_code_of_a_pickle_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.pkl").write_bytes(pickle.dumps(Runs()))
    for read in (load_rows, lambda name: shards_of(name, "train")):
        with pytest.raises(ValueError, match=r"must be a \.jsonl.*'pandas': name the file, or"):
            read("pandas")
    assert not Path("marker").exists()


def test_an_unreachable_hub_is_an_error_that_names_the_set(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"can't load 'owner/sums'.*offline$"):
        load_rows("owner/sums")


def test_text_that_looks_like_lines_stays_in_its_row(tmp_path):
    rows = [{"prompt": "a\nb", "answer": "\u2028x"}]
    path = write(tmp_path / "rows.jsonl", json.dumps(rows[0], ensure_ascii=False) + "\n")
    assert load_rows(path) == rows
    assert load_rows(write(tmp_path / "rows.csv", 'prompt,answer\n"a\nb",\u2028x\n')) == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.jsonl", '{"a": 1}\n\n{"a": \n', r"bad\.jsonl, line 3: not JSON"),
        ("bad.jsonl", '{"a": 1}\n[1]\n', r"bad\.jsonl, line 2: a row must be a dict"),
        ("bad.jsonl", "", r"bad\.jsonl' holds no rows .*: name another"),
        ("bad.json", '[{"a": 1},\n{"a"}]', r"bad\.json, line 2: not JSON"),
        ("bad.json", '{"a": 1}\n{"a": 2}', r"bad\.json, line 2: .* name it \.jsonl"),
        ("bad.csv", "a,b\n1,2\n3\n", r"bad\.csv, line 3: the header has 2 columns, this row has 1"),
        ("bad.csv", 'a,b\n1,"2\n', r"bad\.csv, line 2: not CSV"),
        (
            "bad.jsonl",
            '{"a": 1}\n{"a": %s}\n' % ("9" * 5000),
            r"bad\.jsonl, line 2: can't be read \(Exceeds the limit \(4300 digits",
        ),
        (
            "bad.jsonl",
            '{"a": %s}\n' % ("[" * 10**5),
            r"bad\.jsonl, line 1: can't be read \(maximum recursion",
        ),
        ("bad.parquet", "PAR0", r"bad\.parquet: not a Parquet file"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        load_rows(write(tmp_path / name, text))


def test_a_csv_field_may_be_long(tmp_path):
    limit = csv.field_size_limit()
    rows = load_rows(write(tmp_path / "rows.csv", "prompt,answer\n1+1," + "x" * 200_000 + "\n"))
    assert len(rows[0]["answer"]) == 200_000 and csv.field_size_limit() == limit


def test_text_that_is_not_utf8_is_named(tmp_path):
    for name in ("bad.jsonl", "bad.json", "bad.csv"):
        (tmp_path / name).write_bytes(b'{"a": "\xff"}\n')
        with pytest.raises(ValueError, match=f"{name}: not UTF-8 text .*: convert the file"):
            load_rows(tmp_path / name)


def test_errors_say_what_is_wrong(tmp_path):
    jsonl = write(tmp_path / "rows.jsonl", '{"question": 1}\n')
    cases = [
        (lambda: load_rows(tmp_path / "missing.jsonl"), "no file .*missing.jsonl"),
        (lambda: load_rows(jsonl, split="test"), "has no splits, but the split 'test' is"),
        (lambda: load_rows(Module(), split="test"), 'split of a Module must be "train" or'),
        (
            lambda: load_rows(datasets.DatasetDict(dev=datasets.Dataset.from_list(ROWS))),
            "split 'train' is not in a DatasetDict, which has dev",
        ),
        (lambda: load_rows(jsonl, data_files="x"), "data_files chooses files"),
        (lambda: load_rows([{"a": 1}, 5]), "^row 2: a row must be a dict"),
        (lambda: load_rows(5), "a source of rows must be"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_row_knows_its_file_and_line(tmp_path):
    (tmp_path / "gaps.jsonl").write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    found = {
        name: [row.origin for row in load_rows(source)]
        for name, source in {**sources(tmp_path), "gaps": tmp_path / "gaps.jsonl"}.items()
    }
    path = {
        name: str(tmp_path / name)
        for name in ("rows.jsonl", "rows.csv", "rows.json", "rows.parquet", "saved", "gaps.jsonl")
    }
    assert found["gaps"] == [f"{path['gaps.jsonl']}, line 2", f"{path['gaps.jsonl']}, line 4"]
    assert found["csv"] == [f"{path['rows.csv']}, line 2", f"{path['rows.csv']}, line 3"]
    for name, file in (("json", "rows.json"), ("parquet", "rows.parquet"), ("saved", "saved")):
        assert found[name] == [f"{path[file]}, row 1", f"{path[file]}, row 2"]
    for name in ("list", "dataset", "dict", "module"):
        assert found[name] == ["row 1", "row 2"], name


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    for name, text in (
        ("rows.jsonl", json.dumps(ROWS[0])),
        ("rows.json", json.dumps(ROWS[:1])),
        ("rows.csv", "prompt,answer\n1+1,2\n"),
    ):
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        assert load_rows(tmp_path / name) == ROWS[:1], name


def test_several_sources_stand_one_behind_the_other_and_are_told_apart(tmp_path):
    path = write(tmp_path / "rows.jsonl", json.dumps(ROWS[0]) + "\n")
    rows = load_rows([path, ROWS, datasets.Dataset.from_list(ROWS[1:])])
    assert rows == [ROWS[0], *ROWS, ROWS[1]]
    assert [row.source for row in rows] == [0, 1, 1, 2]
    assert [row.origin for row in rows[:2]] == [f"{path}, line 1", "row 1 of data set 2"]
    assert [row.source for row in load_rows([ROWS])] == [0, 0], "one of one"
    assert sources_of(ROWS) == [ROWS]


def test_a_data_set_with_several_configurations_is_named_with_a_colon(monkeypatch, tmp_path):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append(args)
        if len(args) == 1:
            raise ValueError(
                "Config name is missing. Please pick one among the available configs: ['main',"
                " 'socratic']"
            )
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("owner/sums:main") == ROWS
    assert asked == [("owner/sums", "main")]
    with pytest.raises(ValueError, match=r"pick one among .*main.* \(as owner/sums:NAME\)"):
        load_rows("owner/sums")


def test_what_has_a_validation_split_by_custom(tmp_path):
    assert [
        has_splits(source) for source in ("owner/name", tmp_path, Module(), datasets.DatasetDict())
    ] == [True] * 4
    assert [
        has_splits(source)
        for source in ("a.jsonl", tmp_path / "a.parquet", ROWS, datasets.Dataset.from_list(ROWS))
    ] == [False] * 4


def test_rows_survive_pickling_and_keep_their_place():
    row = Row({"prompt": "a"}, origin="a.jsonl, line 3", source=1)
    for same in (pickle.loads(pickle.dumps(row)), row.but(prompt="a")):
        assert (same, same.origin, same.source) == ({"prompt": "a"}, "a.jsonl, line 3", 1)
    assert row.but(prompt="b") == {"prompt": "b"} and row == {"prompt": "a"}


def test_line_ends_within_a_csv_field_stay_as_they_are(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b'prompt,answer\r\n"a\r\nb",c\r\n')
    assert load_rows(tmp_path / "rows.csv") == [{"prompt": "a\r\nb", "answer": "c"}]


def test_a_saved_dict_of_splits_is_one_source_and_so_is_a_list_that_is_not_all_sources(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    both = datasets.DatasetDict(train=table, test=table.select([1]))
    both.save_to_disk(tmp_path / "saved")
    assert load_rows(tmp_path / "saved", split="test") == ROWS[1:]
    assert len(sources_of([both, tmp_path / "saved"])) == 2
    mixed = ["a.jsonl", ROWS[0]]
    assert sources_of(mixed) == [mixed]


def test_a_file_of_another_kind_is_refused_without_asking_the_hub(tmp_path):
    (tmp_path / "rows.txt").write_text("1+1=2")
    with pytest.raises(ValueError, match=r"rows.txt' must be a \.jsonl, .* file: convert it"):
        load_rows(tmp_path / "rows.txt")
