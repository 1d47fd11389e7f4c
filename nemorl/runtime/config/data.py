"""The section `data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemorl.checks import at_least, refuse_unused, require
from nemorl.data.prompts import parts_of
from nemorl.data.rows import COLUMNS
from nemorl.data.sources import READERS, sources_of


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows come from and which of their columns are used."""

    train: str | tuple[str, ...] | None = None
    """Training rows: .jsonl, .json, .parquet or .csv files, or data sets on the hub (by NAME, or
    NAME:CONFIGURATION; of known ones the columns are known, too: docs/evaluation.md).
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
    prompt_template: str | None = None
    """Text that a prompt which is a string is put into: "Question: {prompt}", or with other columns
    in braces.
    """
    system_prompt: str | None = None
    """System message put before chat messages that have none."""
    chat: bool = False
    """Give a prompt that is a string to the chat template, as the user's message."""
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
    """Shuffle the rows again in every epoch, by run.seed."""
    streaming: bool = False
    """Read training rows as they are needed, for data sets too large to list; shuffled, each is
    drawn among the next 10,000.
    """

    def __post_init__(self) -> None:
        at_least(2, data__max_total_sequence_length=self.max_total_sequence_length)
        at_least(0, data__held_out=self.held_out)
        unused = ["weights", "held_out"] * self.streaming
        refuse_unused("data", self, "is not for data.streaming", "remove it", names=unused)
        if self.prompt_template is not None:
            parts_of(self.prompt_template)

    def reading(self) -> dict[str, Any]:
        """Return the arguments of `load_rows` about what a row is."""
        names = (
            *(f"{name}_column" for name in COLUMNS),
            "prompt_template",
            "system_prompt",
            "chat",
        )
        return {name: getattr(self, name) for name in names}


def require_files(field_name: str, source: Any) -> None:
    """Raise ValueError if a source of rows is a missing file."""
    for path in (Path(part) for part in sources_of(source) if isinstance(part, str | Path)):
        require(
            path.suffix not in READERS or path.is_file(),
            field_name,
            "must name an existing file",
            str(path),
            f"check the path (relative to {Path.cwd()})",
        )


def require_rows(rows: object) -> None:
    """Raise ValueError where there is nothing to train on."""
    if not rows:
        raise ValueError(
            "data.train must name rows to train on: add --data.train FILE, or in Python dataset="
        )
