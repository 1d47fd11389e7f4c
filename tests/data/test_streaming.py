"""Streams: an order that neither repeats nor drops a row across a resume, of rows that are read as
they are needed.
"""

import json
import random
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import nemorl
from nemorl.data import rows as module
from nemorl.data.datasets import load_rows, stream_rows, to_examples
from nemorl.data.rows import for_rows
from nemorl.runtime.cli.commands import inspect_data
from nemorl.runtime.cli.settings import InspectConfig
from nemorl.runtime.run.data import within_limit
from tests.data.known_samples import hub
from tests.data.tokenizers_small import character_tokenizer
from tests.data.written import Module, sources, write
from tests.runtime.killed import assert_equal_outcomes
from tests.runtime.runs import addition_rows, grpo_config, sft_config, start

STREAM = partial(nemorl.DataConfig, max_total_sequence_length=32, streaming=True)
CUTS = st.lists(st.integers(0, 30), min_size=1, max_size=4)


def lists(sizes):
    """Data sets of those sizes, whose rows are numbered through."""
    ends = list(accumulate(sizes))
    return [
        [{"n": n} for n in range(end - size, end)] for end, size in zip(ends, sizes, strict=True)
    ]


def numbers(rows, begin, end):
    return [rows[place]["n"] for place in rows.take(begin, end - begin)]


def jsonl(path: Path, rows) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 12), CUTS)
def test_stopping_and_resuming_anywhere_changes_nothing(sizes, shuffle_buffer, cuts):
    """Over epochs; each resume is a new process's, which knows the place alone."""
    fresh = partial(stream_rows, lists(sizes), seed=3, shuffle_buffer=shuffle_buffer)
    ends = list(accumulate(cuts))
    parts = [
        n
        for begin, end in zip([0, *ends], ends, strict=False)
        for n in numbers(fresh(), begin, end)
    ]
    assert parts == numbers(fresh(), 0, ends[-1])
    for begin in range(0, ends[-1] - sum(sizes) + 1, sum(sizes)):
        assert sorted(parts[begin : begin + sum(sizes)]) == list(range(sum(sizes)))
    assert shuffle_buffer or parts == [n % sum(sizes) for n in range(ends[-1])]


def test_places_may_be_asked_for_in_any_order():
    rows = stream_rows(lists([7]), seed=1, shuffle_buffer=3)
    wanted = [random.Random(0).randrange(20) for _ in range(30)]
    straight = numbers(rows, 0, 20)
    assert [rows[place]["n"] for place in wanted] == [straight[place] for place in wanted]


def test_no_more_is_read_than_is_needed():
    read = []

    class Counted:
        def train_rows(self):
            return ({"n": read.append(n) or n} for n in range(1000))

        validation_rows = train_rows

    rows = stream_rows(Counted(), shuffle_buffer=10)
    assert [rows[place]["n"] < 15 for place in range(5)] == [True] * 5
    assert len(read) <= 16


def test_every_source_streams_the_rows_that_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    found = sources(tmp_path)
    found["stream"] = found["dataset"].to_iterable_dataset(num_shards=2)
    found["several"] = [found["jsonl"], str(found["csv"])]
    jsonl(found["folder"] / "train-2.jsonl", [{"prompt": "3+3", "answer": "6"}])
    for name, source in found.items():
        rows = stream_rows(source)
        listed = load_rows(source)
        assert [rows[place] for place in range(len(listed))] == listed, name
        assert [rows[place].source for place in range(len(listed))] == [r.source for r in listed]
    assert stream_rows(found["jsonl"])[1].origin == f"{found['jsonl']}, line 2"
    assert stream_rows(found["folder"])[2].origin == f"{found['folder']}, shard 2, row 2"
    assert (
        stream_rows(Module(), split="validation")[1] == load_rows(Module(), split="validation")[0]
    )


@pytest.mark.parametrize("name", ["openai/gsm8k", "cais/mmlu", "nvidia/OpenMathInstruct-2"])
def test_columns_and_prompt_of_a_known_set_are_known(name, tmp_path, monkeypatch):
    hub(tmp_path, monkeypatch)
    rows = stream_rows(name, system_prompt="s", chat=True)
    listed = load_rows(name, system_prompt="s", chat=True)
    assert [rows[place] for place in range(4)] == listed
    assert rows[3].origin == listed[3].origin == f"{name}, row 4"


def test_an_error_names_the_row_and_does_not_lose_it(tmp_path):
    rows = stream_rows(write(tmp_path / "rows.jsonl", '{"n": 1}\n{"n": "x"}\n{"n": 3}\n{\n'))
    items = for_rows(rows, lambda row: int(row["n"]))
    assert (items[0], items[2]) == (1, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rows.jsonl, line 2: invalid literal"):
            items[1]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"rows.jsonl, line 4: not JSON"):
                items[3]
    assert rows[2] == {"n": 3}


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_rows_that_are_too_long_have_no_place_or_are_cut(policy):
    lengths = [2, 9, 3, 3, 7, 2]
    rows = [{"prompt": "a", "response": "b" * length, "n": length} for length in lengths]
    config = nemorl.SFTConfig(
        data=STREAM(max_total_sequence_length=6, too_long=policy), max_num_steps=1
    )
    tokenizer = character_tokenizer()
    with pytest.warns(UserWarning, match="first examples: "):
        examples, kept, _ = within_limit("examples", config, *both(stream_rows(rows), tokenizer))
    with pytest.warns(UserWarning, match="^examples: "):
        listed, listed_rows, _ = within_limit("examples", config, *both(load_rows(rows), tokenizer))
    places = range(2 * len(listed))
    assert [examples[place] for place in places] == listed * 2
    assert [kept[place]["n"] for place in places] == [row["n"] for row in listed_rows] * 2
    assert len(listed) == (4 if policy == "drop" else 6)


def both(rows, tokenizer):
    return rows, to_examples(rows, tokenizer)


@pytest.mark.slow
def test_a_bad_row_ends_the_run_with_its_name_and_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST", 4)
    rows = addition_rows(100)
    options = {"data": STREAM(shuffle=False), "steps": 6, "num_prompts_per_step": 6}
    path = jsonl(tmp_path / "rows.jsonl", rows)
    start(grpo_config(tmp_path / "good", **options), rows=path)
    jsonl(path, [*rows[:20], {"answer": "2", "response": "2"}, *rows[21:]])
    config = grpo_config(tmp_path / "run", **options)
    with pytest.raises(ValueError, match=r"rows.jsonl, line 21: a row needs a prompt") as caught:
        start(config, rows=path)
    assert "has a checkpoint of step 3" in "".join(caught.value.__notes__)
    jsonl(path, rows)
    start(replace(config, run=replace(config.run, resume=True)), rows=path)
    assert_equal_outcomes(tmp_path / "good", tmp_path / "run")


def test_a_resumed_run_notices_other_rows_or_another_order(tmp_path):
    def run(rows=None, **data):
        resume = (tmp_path / "run").exists()
        config = sft_config(tmp_path / "run", data=STREAM(**data), run={"resume": resume})
        start(config, rows=rows or addition_rows())

    run()
    with pytest.raises(ValueError, match=r"data.train.*data\.shuffle is False, was True"):
        run(shuffle=False)
    with pytest.raises(ValueError, match=r"data.train and data.validation must be the rows"):
        run(addition_rows()[1:])


def test_data_inspect_shows_the_first_rows(monkeypatch):
    monkeypatch.setattr(module, "FIRST", 5)
    config = InspectConfig(data=STREAM(shuffle=False))
    tokenizer = character_tokenizer()
    found = inspect_data(config, tokenizer=tokenizer, train=addition_rows())
    assert [row["prompt"] for row in found.rows] == [r["prompt"] for r in addition_rows()[:5]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nemorl.SFTConfig(data=STREAM()), "max_num_steps must be given with data.stream"),
        (lambda: STREAM(held_out=0.1), "data.held_out is not for data.streaming"),
        (lambda: list(stream_rows([{"n": 1}])), "data.streaming is for sft, grpo"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_stream_is_an_error(text, tmp_path):
    path = write(tmp_path / "rows.jsonl", text)
    with pytest.raises(ValueError, match=r"data.train holds no rows"):
        start(sft_config(tmp_path / "run", data=STREAM()), rows=path)
    with pytest.raises(ValueError, match=r"data.train holds no rows"):
        stream_rows(path)[0]
