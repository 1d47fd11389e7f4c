"""The section `data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemorl.checks import at_least, require
from nemorl.data.sources import READERS, sources_of


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows come from and which of their columns are used."""

    train: str | tuple[str, ...] | None = None
    """Training rows: .jsonl, .json, .parquet or .csv files, or data sets on the hub (by NAME, or
    NAME:CONFIGURATION).
    """
    weights: tuple[float, ...] = ()
    """Relative share of each of several training sets. Default: each row once an epoch."""
    validation: str | tuple[str, ...] | None = None
    """Rows to validate on."""
    held_out: float = 0.0
    """Training rows kept for validation without a validation set: a share (below 1) or a count."""
    split: str = "train"
    """Split of a hub data set to train on."""
    validation_split: str | None = None
    """Split of a hub data set to validate on. Default: "validation"."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    response_column: str = "response"
    """Column of the demonstration (SFT)."""
    answer_column: str = "answer"
    """Column that rewards such as exact_match compare the response with."""
    messages_column: str = "messages"
    """Column of whole conversations, used for rows that have it (SFT)."""
    chosen_column: str = "chosen"
    """Column of the better answer of a pair (DPO)."""
    rejected_column: str = "rejected"
    """Column of the worse answer of a pair (DPO)."""
    label_column: str = "label"
    """Column that labels a single answer as desirable, true or false (KTO)."""
    max_total_sequence_length: int = 2048
    """Longest sequence, prompt and response together, in tokens."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """Longer rows are an error, dropped, or cut at the end (prompts at the beginning)."""
    shuffle: bool = True
    """Shuffle the rows anew in every epoch, by run.seed."""

    def __post_init__(self) -> None:
        at_least(2, data__max_total_sequence_length=self.max_total_sequence_length)
        at_least(0, data__held_out=self.held_out)


def require_files(field_name: str, source: Any) -> None:
    """Raise ValueError if a source of rows is a file that there is not."""
    for path in (Path(part) for part in sources_of(source) if isinstance(part, str | Path)):
        require(
            path.suffix not in READERS or path.is_file(),
            field_name,
            "must name a file that there is",
            str(path),
            f"check the path (relative to {Path.cwd()})",
        )


def require_rows(rows: object) -> None:
    """Raise ValueError where there is nothing to train on."""
    if not rows:
        raise ValueError("data.train must name rows to train on: add --data.train FILE")
