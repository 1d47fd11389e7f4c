"""Prompts of a data set, as a generator gets them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemorl.checks import require
from nemorl.data.datasets import as_messages, prompt_of
from nemorl.data.templates import Message
from nemorl.rollout.conversation import Limits


@dataclass(frozen=True)
class Prompts:
    """Rows of a data set and their prompts as token ids."""

    rows: Sequence[Mapping[str, Any]]
    token_ids: Sequence[Sequence[int]]
    groups: Sequence[int] = ()
    """The number of each prompt's group in the run; empty: not numbered yet."""
    tokenizer: Any = None
    """The one that made `token_ids`, with its chat template: for the messages of later turns."""
    limits: Limits = Limits()
    """Of the conversations about them."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Of the environment, which `token_ids` have instead of the rows' own."""

    def __post_init__(self) -> None:
        for name in ("token_ids", "groups") if self.groups else ("token_ids",):
            count = len(getattr(self, name))
            fits = f"must have an entry for each of the {len(self.rows)} rows"
            require(count == len(self.rows), name, fits, count, "take them from one data set")

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int]) -> "Prompts":
        found = [(self.rows[i], self.token_ids[i]) for i in indices]  # a stream is at one place
        return replace(
            self,
            rows=[row for row, _ in found],
            token_ids=[ids for _, ids in found],
            groups=[self.groups[i] for i in indices] if self.groups else (),
        )


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """Return a row's prompt as messages; none of a row without a prompt."""
    if row.get("prompt") is None and row.get("messages") is None:
        return []
    return as_messages(prompt_of(row), "prompt", "user")


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return the text of a row's prompt, a message a line."""
    return "\n".join(str(message.get("content") or "") for message in messages_of(row))
