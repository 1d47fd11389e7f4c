"""Rows as people have them (a hub name, files, lists, `datasets`), the order in which training visits them, and examples made of them."""

import csv
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from nemorl.data.batch import Example
from nemorl.data.messages import tokenize_messages, tokenize_prompt, tokenize_prompt_response

Row = dict[str, Any]
COLUMNS = ("prompt", "response", "answer", "messages")


@runtime_checkable
class DataModule(Protocol):
    """Any object with these two methods is a source of rows."""

    def train_rows(self) -> Sequence[Mapping[str, Any]]:
        """What split="train" reads."""
        ...

    def validation_rows(self) -> Sequence[Mapping[str, Any]]:
        """What split="validation" reads."""
        ...


def load_rows(
    source: Any,
    *,
    split: str = "train",
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
    prompt_column: str = "prompt",
    response_column: str = "response",
    answer_column: str = "answer",
    messages_column: str = "messages",
) -> list[Row]:
    """All rows of a source as plain dicts.

    `source` is a path to a .jsonl, .json, .csv or .parquet file, a folder (with such files, or written by `save_to_disk`), the name of a data set on
    the hub (`data_files` chooses among its files), a list of dicts, a list of paths, a `datasets.Dataset` or `DatasetDict`, or a `DataModule`. A
    source without splits is all "train". Values of CSV files are text. The `*_column` arguments say under which name a source has its `prompt`,
    `response`, `answer` or `messages`; all columns keep their own names besides.

    Raises ValueError that names file and line of a malformed row, the columns there are where one is missing, and the splits there are.

    >>> load_rows([{"question": "1+1", "answer": "2"}], prompt_column="question")
    [{'question': '1+1', 'answer': '2', 'prompt': '1+1'}]
    """
    rows = _read(source, split, data_files)
    if not rows:
        raise ValueError(f"{_name(source)} holds no rows (split {split!r}): training needs at least one")
    columns = dict(zip(COLUMNS, (prompt_column, response_column, answer_column, messages_column), strict=True))
    return [_mapped(row, number, columns, source) for number, row in enumerate(rows)]


def rows_at(num_rows: int, cursor: int, count: int, seed: int, shuffle: bool = True) -> list[int]:
    """The rows at places cursor, cursor + 1, ... of an endless run through the data; each epoch visits each row once, in an order of its own.

    A pure function of its arguments: a run that knows its cursor goes on just where it stopped, also in the middle of an epoch or at its end.

    >>> rows_at(3, 0, 7, 0, shuffle=False)
    [0, 1, 2, 0, 1, 2, 0]
    >>> rows_at(3, 0, 2, seed=5) + rows_at(3, 2, 4, seed=5) == rows_at(3, 0, 6, seed=5)
    True
    """
    if num_rows < 1 or cursor < 0 or count < 0 or seed < 0:
        raise ValueError(f"num_rows must be at least 1, and cursor, count and seed at least 0, got {num_rows}, {cursor}, {count} and {seed}")
    places = range(cursor, cursor + count)
    if not shuffle:
        return [place % num_rows for place in places]
    return [int(_permutation(num_rows, seed, place // num_rows)[place % num_rows]) for place in places]


@lru_cache(maxsize=8)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def split_rows(rows: Sequence[Row], *, validation: int | float, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Training and validation rows without overlap, both in their first order. `validation` is a number of rows, or a share if it is a float below 1.

    >>> train, held_out = split_rows([{"n": n} for n in range(5)], validation=0.4)
    >>> len(train), len(held_out)
    (3, 2)
    """
    count = round(validation * len(rows)) if isinstance(validation, float) and validation < 1 else validation
    if count != int(count) or not 0 < count < len(rows):
        raise ValueError(f"validation must leave at least one of the {len(rows)} rows on each side, got {validation} ({count} rows)")
    held_out = set(rows_at(len(rows), 0, int(count), seed))
    return [row for i, row in enumerate(rows) if i not in held_out], [row for i, row in enumerate(rows) if i in held_out]


def prompt_of(row: Mapping[str, Any]) -> str | list[Mapping[str, Any]]:
    """A row's prompt: its `prompt` (text or messages), else its `messages` without the assistant's answer at their end. ValueError without either.

    >>> prompt_of({"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]})
    [{'role': 'user', 'content': '1+1'}]
    """
    if isinstance(row.get("prompt"), str):
        return row["prompt"]
    if row.get("prompt") is not None:
        return _messages(row["prompt"], "prompt")
    if row.get("messages") is None:
        raise ValueError(f"a row needs a prompt (text or messages) or messages, got columns {', '.join(row)}; name its column with prompt_column")
    messages = _messages(row["messages"], "messages")
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def to_prompts(rows: Sequence[Row], tokenizer: Any, **template: Any) -> list[list[int]]:
    """The token ids of each row's prompt, as `prompt_of` finds it.

    `template` takes `tokenize_prompt`'s arguments. Raises ValueError that names the row.

    >>> from transformers import ByT5Tokenizer
    >>> to_prompts([{"prompt": "ab"}], ByT5Tokenizer())
    [[100, 101]]
    """
    return [_row(number, row, lambda row: tokenize_prompt(tokenizer, prompt_of(row), **template)) for number, row in enumerate(rows)]


def to_examples(rows: Sequence[Row], tokenizer: Any, *, add_eos: bool = True, **template: Any) -> list[Example]:
    """Each row as an example to imitate: its `messages`, or its `prompt` and `response`.

    A prompt of messages goes through the chat template together with its response. `template` takes `tokenize_messages`'s arguments; `add_eos` is
    about plain text. Raises ValueError that names the row.

    >>> from transformers import ByT5Tokenizer
    >>> to_examples([{"prompt": "ab", "response": "c"}], ByT5Tokenizer())[0].input_ids
    [100, 101, 102, 1]
    """

    def example(row: Row) -> Example:
        if row.get("messages") is not None:
            return tokenize_messages(tokenizer, _messages(row["messages"], "messages"), **template)
        prompt, response = prompt_of(row), row.get("response")
        if not isinstance(response, str):
            raise ValueError(f"response must be text, got {response!r} (columns: {', '.join(row)}); name its column with response_column")
        if isinstance(prompt, str):
            return tokenize_prompt_response(tokenizer, prompt, response, add_eos=add_eos)
        return tokenize_messages(tokenizer, [*prompt, {"role": "assistant", "content": response}], **template)

    return [_row(number, row, example) for number, row in enumerate(rows)]


def _row(number: int, row: Row, build):
    try:
        return build(row)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from error


def _messages(value: Any, column: str) -> list[Mapping[str, Any]]:
    sound = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if not sound or not all(isinstance(message, Mapping) and "role" in message for message in value):
        raise ValueError(f'{column} must be a list of messages like {{"role": "user", "content": "..."}}, got {_short(value)}')
    # Arrow fills the keys that only some messages have with None, and templates ask `"tool_calls" in message`.
    return [{key: part for key, part in message.items() if part is not None or key == "content"} for message in value]


def _mapped(row: Any, number: int, columns: Mapping[str, str], source: Any) -> Row:
    if not isinstance(row, Mapping) or not row:
        raise ValueError(f"row {number} of {_name(source)} must be a dict with at least one column, got {_short(row)}")
    mapped = dict(row)
    for name, column in columns.items():
        if column != name:
            if column not in row:
                near = difflib.get_close_matches(column, map(str, row), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                there = ", ".join(map(str, row))
                raise ValueError(f"{name}_column is {column!r}, but row {number} of {_name(source)} has the columns {there}{hint}")
            mapped[name] = row[column]
    return mapped


def _read(source: Any, split: str, data_files: Any) -> Sequence[Any]:
    if data_files is not None and not (isinstance(source, str | Path) and Path(source).suffix not in READERS):
        raise ValueError(f"data_files chooses files of a data set on the hub or in a folder, but the source is {_name(source)}: leave it out")
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix in READERS:
            _require_train(split, source)
            return _read_file(path)
        return _named(_load_dataset(source, split, data_files), split, source)
    if isinstance(source, DataModule):
        if split not in ("train", "validation"):
            raise ValueError(f'split of a DataModule must be "train" or "validation", got {split!r}')
        return list(source.train_rows() if split == "train" else source.validation_rows())
    if isinstance(source, Sequence) and source and all(isinstance(part, str | Path) for part in source):
        return [row for part in source for row in _read(part, split, None)]
    return _named(source, split, source)


def _named(data: Any, split: str, source: Any) -> list[Any]:
    """The rows of something loaded: a `Dataset`, a `DatasetDict`, or a plain sequence."""
    if isinstance(data, Mapping):
        if split not in data:
            raise ValueError(f"split {split!r} is not in {_name(source)}, which has {', '.join(map(str, data))}")
        return list(data[split])
    if data is source:
        _require_train(split, source)
    if not isinstance(data, Sequence) and not hasattr(data, "column_names"):
        raise ValueError(f"a source of rows must be a path, a hub name, a list of dicts, a datasets.Dataset or a DataModule, got {_name(source)}")
    return list(data)


def _load_dataset(source: str | Path, split: str, data_files: Any) -> Any:
    import datasets

    path = Path(source)
    if path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_from_disk(str(path))
    try:
        return datasets.load_dataset(str(source), data_files=data_files, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"can't load {str(source)!r} (split {split!r}): it is no {', '.join(READERS)} file, and as a data set it can't be read: {error}"
        ) from error


def _require_train(split: str, source: Any) -> None:
    if split != "train":
        raise ValueError(
            f'{_name(source)} has no splits, so split must be "train", got {split!r}: name the file of that split as the source, or use split_rows'
        )


def _read_file(path: Path) -> list[Any]:
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}: check the path (relative to {Path.cwd()})")
    try:
        return list(READERS[path.suffix](path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}): convert the file") from error


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}): {_short(line.strip())}") from error
                if not isinstance(row, dict) or not row:
                    raise ValueError(f"{path}, line {number}: a row must be a JSON object with at least one key, got {_short(row)}")
                yield row


def _read_json(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: not JSON ({error.msg} at column {error.colno}); if it has one object per line, name it .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}, line 1: a .json file must hold a list of objects, got {_short(rows)}")
    return rows


def _read_csv(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    found = len(row) - 1 + len(row[None]) if None in row else sum(value is not None for value in row.values())
                    raise ValueError(f"{path}, line {reader.line_num}: the header has {len(reader.fieldnames or ())} columns, this row has {found}")
                yield row
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.reader.line_num}: not CSV ({error})") from error


def _read_parquet(path: Path) -> list[Any]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file that can be read ({error})") from error


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


def _name(source: Any) -> str:
    return repr(str(source)) if isinstance(source, str | Path) else f"a {type(source).__name__}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
