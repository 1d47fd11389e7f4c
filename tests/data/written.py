"""The same two rows in every kind of source."""

import json
from pathlib import Path

import datasets

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]


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
