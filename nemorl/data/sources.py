"""Where rows come from: files, folders, the hub, `datasets`, lists and data modules."""

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from string import ascii_uppercase
from typing import Any, Protocol, runtime_checkable
from urllib.parse import parse_qsl

import yaml

from nemorl.checks import closest, require, short
from nemorl.data.rows import FIRST, Row

BOXED = "{prompt}\n\nReason step by step, and put your final answer within \\boxed{{}}."
LETTER = '{prompt}\n\nThink step by step, then end with a line "Answer: " and the right letter.'
CODE = "Write this Python function, all of it, in one code block.\n\n{prompt}"
BEGUN = CODE.replace("{prompt}", "```python\n{prompt}\n```")


@dataclass(frozen=True, kw_only=True)
class KnownSet:
    """What holds for a data set where the settings have their defaults."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Our names of columns, and the set's."""
    build: Callable[[Row], Mapping[str, Any]] | None = None
    """Makes more columns of a row."""
    template: str | None = None
    reward: str | None = None
    configuration: str = ""
    train: str = "train"
    validation: str = "test"
    category: str | None = None


def known_set(source: Any) -> KnownSet | None:
    """Return what is known of a source: None unless it is a known name of the hub.

    >>> known_set("openai/gsm8k").reward, known_set("rows.jsonl")
    ('last_number', None)
    """
    if not isinstance(source, str) or Path(source).exists():
        return None
    return KNOWN.get(source.partition(":")[0])


def as_known(row: Row, known: KnownSet, *, given: Collection[str] = ()) -> Row:
    """Return a row with our columns besides its own, but for the `given` ones.

    >>> as_known(Row({"question": "1+1", "answer": "#### 2"}), KNOWN["openai/gsm8k"])["prompt"]
    '1+1'
    """
    try:
        found = {ours: row[own] for ours, own in known.columns.items() if ours not in given}
        if known.build is not None and "prompt" not in given:
            found |= {k: value for k, value in known.build(row).items() if k not in given}
    except KeyError as error:
        raise ValueError(
            f"{row.origin} must have the column {error} (docs/evaluation.md), but has"
            f" {', '.join(row)}: name its columns (data.prompt_column, data.answer_column)"
        ) from None
    return row.but(**found)


def _lettered(question: str, options: Sequence[str], right: int) -> dict[str, str]:
    lines = map("{}. {}".format, ascii_uppercase, options)
    return {"prompt": "\n".join([f"{question}\n", *lines]), "answer": ascii_uppercase[right]}


def _gpqa(row: Row) -> dict[str, str]:
    texts = [row["Correct Answer"], *(row[f"Incorrect Answer {n}"] for n in (1, 2, 3))]
    order = Random(row["Question"]).sample(range(4), 4)  # the same in every run
    return _lettered(
        row["Question"].strip(), [texts[place].strip() for place in order], order.index(0)
    )


def _arc(row: Row) -> dict[str, str]:
    choices = row["choices"]
    return _lettered(row["question"], choices["text"], choices["label"].index(row["answerKey"]))


def _mbpp(row: Row) -> dict[str, Any]:
    task = row["text"] if "text" in row else row["prompt"]  # of the sanitized ones
    first = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return {
        "prompt": "\n".join([f"{task}\n\nIt must pass these tests:\n", *row["test_list"]]),
        "answer": [f"{first}\n{test}" if first else test for test in row["test_list"]],
    }


def _maths(columns: Mapping[str, str] | None = None, **others: Any) -> KnownSet:
    columns = {"prompt": "problem", "answer": "answer", **(columns or {})}
    return KnownSet(columns=columns, reward="math", **{"template": BOXED, **others})


def _choices(build: Callable[[Row], dict[str, str]], **others: Any) -> KnownSet:
    return KnownSet(build=build, template=LETTER, reward="choice", **others)


KNOWN: dict[str, KnownSet] = {
    "openai/gsm8k": KnownSet(
        columns={"prompt": "question", "response": "answer"},
        reward="last_number",
        configuration="main",
    ),
    "HuggingFaceH4/MATH-500": _maths(category="subject"),
    "EleutherAI/hendrycks_math": _maths(
        {"answer": "solution", "response": "solution"}, category="type"
    ),
    "HuggingFaceH4/aime_2024": _maths(validation="train"),
    "AI-MO/aimo-validation-aime": _maths(validation="train"),
    "math-ai/aime25": _maths(),
    "Idavidrein/gpqa": _choices(
        _gpqa, configuration="gpqa_diamond", validation="train", category="High-level domain"
    ),
    "cais/mmlu": _choices(
        lambda row: _lettered(row["question"], row["choices"], row["answer"]),
        configuration="all",
        train="auxiliary_train",
        category="subject",
    ),
    "TIGER-Lab/MMLU-Pro": _choices(
        lambda row: _lettered(row["question"], row["options"], row["answer_index"]),
        train="validation",
        category="category",
    ),
    "allenai/ai2_arc": _choices(_arc, configuration="ARC-Challenge"),
    "google/IFEval": KnownSet(reward="ifeval", validation="train"),
    "openai/openai_humaneval": KnownSet(columns={"answer": "test"}, template=BEGUN, reward="code"),
    "google-research-datasets/mbpp": KnownSet(
        columns={"response": "code"}, build=_mbpp, template=CODE, reward="code"
    ),
    "nvidia/OpenMathInstruct-2": _maths(
        {"answer": "expected_answer", "response": "generated_solution"}, category="problem_source"
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": KnownSet(
        build=lambda row: {"answer": row["reward_model"]["ground_truth"]}, reward="math"
    ),
    # No template: SFT reads its messages, which one would replace.
    "open-r1/OpenR1-Math-220k": _maths(template=None, category="problem_type"),
    "zwhe99/DeepMath-103K": _maths(
        {"prompt": "question", "answer": "final_answer", "response": "r1_solution_1"},
        category="topic",
    ),
    "HuggingFaceH4/ultrafeedback_binarized": KnownSet(train="train_prefs", validation="test_prefs"),
}
"""By name; `NAME:CONFIGURATION` has another configuration."""


PREFIX = "reasoning_gym:"
APART = 10**9
"""Row i is made of the seed + i; the rows of "validation" of seeds that are so much larger."""


def task_of(name: str, **settings: Any) -> Any:
    """Return a task of reasoning-gym: `name`, or `name?setting=value&…`.

    >>> task_of("basic_arithmetic?max_terms=2", size=3).config.max_terms
    2
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ImportError(
            f"{PREFIX}{name} needs reasoning-gym ({error}): pip install reasoning-gym"
        ) from error
    task, _, given = name.partition("?")
    require(
        task in DATASETS,
        "task",
        "must be one of reasoning-gym's",
        task,
        f"see reasoning_gym.factory.DATASETS{closest(task, DATASETS)}",
    )
    own = {key: yaml.safe_load(text) for key, text in parse_qsl(given, keep_blank_values=True)}
    try:
        return create_dataset(task, **{"size": 1000, "seed": 0} | own | settings)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{PREFIX}{name}: {error}: change the setting") from error


def _generated(source: str, split: str) -> list[dict[str, Any]]:
    task = task_of(name := source.removeprefix(PREFIX))
    if split == "validation":
        task = task_of(name, seed=task.seed + APART)
    rows = map(task.__getitem__, range(len(task)))
    return [{"prompt": row.pop("question"), "task": name, **row} for row in rows]


Placed = tuple[str, Any]
"""A place, and what should be a row."""


@runtime_checkable
class DataModule(Protocol):
    """Any object with these two methods is a source of rows."""

    def train_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of split="train"."""

    def validation_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of split="validation"."""


def sources_of(source: Any) -> list[Any]:
    """Return the sources of a list of sources, or itself.

    >>> sources_of(("a.jsonl", "b.jsonl")), sources_of([{"prompt": "a row"}])
    (['a.jsonl', 'b.jsonl'], [[{'prompt': 'a row'}]])
    """
    several = isinstance(source, list | tuple) and all(
        # Any other mapping is a row.
        hasattr(part, "column_names") or isinstance(part, str | Path | list | tuple | DataModule)
        for part in source
    )
    return list(source) if several and source else [source]


def has_splits(source: Any) -> bool:
    """Return whether a source may have a split "validation": of the hub, a folder, a `DataModule`.

    >>> has_splits("openai/gsm8k"), has_splits("test.jsonl")
    (True, False)
    """
    if isinstance(source, str | Path):
        return Path(source).suffix not in READERS
    return isinstance(source, Mapping | DataModule)


def read_rows(source: Any, *, split: str, data_files: Any = None, number: int = 0) -> list[Row]:
    """Return all rows of one source, which is number `number` among several.

    >>> [row.origin for row in read_rows([{"prompt": "a"}, {"prompt": "b"}], split="train")]
    ['row 1', 'row 2']
    """
    rows = list(Shard(source, split, number, data_files=data_files)())
    if not rows:
        raise ValueError(
            f"{name_of(source)} holds no rows (split {split!r}): name another source or split"
        )
    return rows


@dataclass(frozen=True)
class Shard:
    """Rows of a source, read when it is called."""

    source: Any
    split: str = "train"
    number: int = 0
    before: str = ""
    """Begins its rows' places."""
    data_files: Any = None

    def __call__(self) -> Iterator[Row]:
        for place, row in _read(self.source, self.split, self.data_files):
            place = self.before + place
            if not isinstance(row, Mapping) or not row:
                raise ValueError(
                    f"{place}: a row must be a dict with at least one column, got {short(row)}"
                )
            yield Row(row, origin=getattr(row, "origin", "") or place, source=self.number)

    def __getstate__(self) -> None:
        """Have `datasets` hash nothing, for a cache that is not used."""


def shards_of(source: Any, split: str) -> list[Shard]:
    """Return the shards of one or several sources; a file is one.

    >>> [shard.number for shard in shards_of(["sums.jsonl", "more.jsonl"], "train")]
    [0, 1]
    """
    found = []
    for number, part in enumerate(sources_of(source)):
        data, before, own = part, "", split
        if _is_set(part):
            data = _named(_load_dataset(part, split, streaming=True), split, part)
            before, own = f"{part}, ", "train"
        for n in range(size := getattr(data, "num_shards", 1)):
            shard = data.shard(size, n) if size > 1 else data
            found.append(Shard(shard, own, number, before + f"shard {n + 1}, " * (size > 1)))
    return found


def first_rows(source: Any) -> list[list[Row]]:
    """Return the first 1,000 rows of each file that can be read row by row: .jsonl and .csv.

    >>> first_rows([{"prompt": "1+1="}])  # no file
    []
    """
    return [
        [*islice(Shard(part)(), FIRST)]
        for part in sources_of(source)
        if isinstance(part, str | Path) and Path(part).suffix in (".jsonl", ".csv")
    ]


def set_names(source: Any) -> list[str]:
    """Return a short name for each of one or several sources, all different.

    >>> set_names(["data/test.jsonl", "openai/gsm8k", "more/test.jsonl", [{"prompt": "1+1="}]])
    ['test', 'gsm8k', 'test_3', 'set_4']
    """
    names: list[str] = []
    for number, part in enumerate(sources_of(source), start=1):
        name = Path(part).name if isinstance(part, str | Path) else f"set_{number}"
        name = Path(name).stem if Path(name).suffix in READERS else name
        while name in names:
            name = f"{name}_{number}"
        names.append(name)
    return names


def name_of(source: Any) -> str:
    """Return what an error calls a source.

    >>> name_of("rows.jsonl"), name_of([])
    ("'rows.jsonl'", 'a list')
    """
    return repr(str(source)) if isinstance(source, str | Path) else f"a {type(source).__name__}"


def _is_task(source: Any) -> bool:
    return isinstance(source, str) and source.startswith(PREFIX)


def _is_set(source: Any) -> bool:
    return isinstance(source, str | Path) and has_splits(source) and not _is_task(source)


def _read(source: Any, split: str, data_files: Any) -> Iterator[Placed]:
    if _is_set(source):
        return _numbered(
            _named(_load_dataset(source, split, data_files), split, source), f"{source}, "
        )
    if data_files is not None:
        raise ValueError(
            "data_files chooses files on the hub or in a folder, but the source is"
            f" {name_of(source)}: remove it"
        )
    if isinstance(source, DataModule) or _is_task(source):
        require(
            split in ("train", "validation"),
            f"split of {name_of(source)}",
            'must be "train" or "validation"',
            split,
            "there is no other",
        )
    if _is_task(source):
        return _numbered(_generated(source, split), f"{source}, ")
    if isinstance(source, str | Path):
        _require_train(split, source)
        return _read_file(Path(source))
    if isinstance(source, DataModule):
        return _numbered(source.train_rows() if split == "train" else source.validation_rows())
    return _numbered(_named(source, split, source))


def _numbered(rows: Any, before: str = "") -> Iterator[Placed]:
    return ((f"{before}row {number}", row) for number, row in enumerate(rows, start=1))


def _named(data: Any, split: str, source: Any) -> Any:
    if isinstance(data, Mapping):
        if split not in data:
            raise ValueError(
                f"split {split!r} is not in {name_of(source)}, which has"
                f" {', '.join(map(str, data))}: choose one with data.split"
            )
        return data[split]
    if data is source:
        _require_train(split, source)
    if not isinstance(data, Sequence) and not hasattr(data, "column_names"):
        raise ValueError(
            "a source of rows must be a path, a hub name, a list of dicts, a datasets.Dataset or a"
            f" DataModule, got {name_of(source)}"
        )
    return data


def _load_dataset(
    source: str | Path, split: str, data_files: Any = None, *, streaming: bool = False
) -> Any:
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    path = Path(source)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(path))
    if path.is_file():
        raise ValueError(f"{str(path)!r} must be a {', '.join(READERS)} file: convert it")
    name, _, configuration = (str(source), "", "") if path.exists() else str(source).partition(":")
    require(
        # Without files, pandas would unpickle those of this folder.
        data_files is not None or name not in _PACKAGED_DATASETS_MODULES,
        "a source of rows",
        f"must be a {', '.join(READERS)} file, a folder or a data set on the hub",
        name,
        f"name the file, or the folder as ./{name}",
    )
    if (known := known_set(source)) is not None:
        configuration = configuration or known.configuration
        split = known.train if split == "train" else split
    try:
        return datasets.load_dataset(
            *filter(None, (name, configuration)),
            data_files=data_files,
            split=split,
            streaming=streaming,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        hint = f" (as {name}:NAME)" if "config" in str(error).lower() and not configuration else ""
        raise ValueError(
            f"can't load {str(source)!r} (split {split!r}): it is not a {', '.join(READERS)} file,"
            f" nor a data set: {error}{hint}"
        ) from error


def _require_train(split: str, source: Any) -> None:
    if split != "train":
        raise ValueError(
            f"{name_of(source)} has no splits, but the split {split!r} is asked for: remove the"
            " setting, or name the file of that split"
        )


def _read_file(path: Path) -> Iterator[Placed]:
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}: check the path (relative to {Path.cwd()})")
    try:
        yield from READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}): convert the file") from error


def _read_jsonl(path: Path) -> Iterator[Placed]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}, line {number}", _parsed(line.rstrip(), path, number)


def _read_json(path: Path) -> Iterator[Placed]:
    rows = _parsed(
        path.read_text(encoding="utf-8-sig"), path, remedy="name it .jsonl if it has a row per line"
    )
    if not isinstance(rows, list):
        raise ValueError(
            f"{path}, line 1: a .json file must hold a list of objects, got {short(rows)}"
        )
    return _numbered(rows, f"{path}, ")


def _parsed(text: str, path: Path, line: int = 1, remedy: str = "") -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {line + error.lineno - 1}: not JSON ({error.msg} at column"
            f" {error.colno}): {remedy or short(text)}"
        ) from error
    except (ValueError, RecursionError) as error:  # of too many digits or brackets
        raise ValueError(f"{path}, line {line}: can't be read ({error}): {short(text)}") from error


def _read_csv(path: Path) -> Iterator[Placed]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        limit = csv.field_size_limit(2**31 - 1)  # instead of 128 KiB
        try:
            for row in reader:
                if None in row or None in row.values():
                    extra = row.pop(None, ())
                    found = sum(value is not None for value in row.values()) + len(extra)
                    raise ValueError(
                        f"{path}, line {reader.line_num}: the header has"
                        f" {len(reader.fieldnames or ())} columns, this row has {found}"
                    )
                yield f"{path}, line {reader.line_num}", row
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.reader.line_num}: not CSV ({error})") from error
        finally:
            csv.field_size_limit(limit)


def _read_parquet(path: Path) -> Iterator[Placed]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        yield from _numbered((row for batch in batches for row in batch.to_pylist()), f"{path}, ")
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file that can be read ({error})") from error


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
