"""Whether a response has come to one of its stop strings, from its newest tokens."""

from collections.abc import Sequence
from typing import Any

MARGIN = 8
"""Characters that a text may begin with wrongly where it is decoded from the middle of a response:
parts of a character, or a space that is left out.
"""


class StopStrings:
    """Finds stop strings in growing responses, decoding only as much of their end as it takes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lengths: dict[int, int | None] = {}

    def end(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        """Return whether the newest token completes a stop string, special tokens left out.

        >>> from transformers import ByT5Tokenizer
        >>> stops, tokenizer = StopStrings(ByT5Tokenizer()), ByT5Tokenizer()
        >>> [stops.end(tokenizer("a.b")["input_ids"][:n], ["."]) for n in (1, 2)]
        [False, True]
        """
        newest = self._length(token_ids[-1])
        if newest is None or not stop_strings:
            return False
        # It ends in the newest token's text. Most tokens have a byte or more; special ones, of
        # which there may be any number in between, have none.
        enough = max(map(len, stop_strings)) + newest + MARGIN
        count = max(len(stop.encode()) for stop in stop_strings) + newest + MARGIN
        while True:
            text = self._decode(token_ids[-count:])
            if any(stop in text for stop in stop_strings):
                return True
            if len(text) >= enough or count >= len(token_ids):
                return False
            count *= 2

    def _length(self, token: int) -> int | None:
        """The most characters that a token adds to a text; None: it is special, and adds none."""
        if token not in self._lengths:
            twice = [token, token]  # the first may lose its space
            length = len(self._decode(twice))
            special = not length and self.tokenizer.decode(twice) != ""
            self._lengths[token] = None if special else length
        return self._lengths[token]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
