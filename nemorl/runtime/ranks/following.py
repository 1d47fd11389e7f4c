"""What torchrun's processes other than rank 0 do: they serve it with their parts of the model, and
leave it to speak.
"""

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemorl.runtime.config.base import BaseConfig

if TYPE_CHECKING:
    from nemorl.runtime.run.result import TrainResult

FAREWELL_S = 30.0
"""torchrun ends all processes as soon as one has failed, which should be the one that tells why."""


class FollowedRunFailed(SystemExit):
    """The run that this process had a part in has ended with an error on rank 0, which tells it.

    Uncaught it ends the process without a word.
    """

    def __init__(self) -> None:
        super().__init__(1)


def follows() -> bool:
    """Whether this is one of torchrun's processes, but not rank 0."""
    if "RANK" not in os.environ:
        return False
    from nemorl.runtime.ranks.make import is_follower

    return is_follower()


def wait_for_rank_zero() -> None:
    """Give rank 0 the time to fail first, as it does where all ranks are told the same nonsense.

    This process is ended meanwhile, by torchrun: without fault, so that its report is of rank 0
    alone.
    """
    if threading.current_thread() is not threading.main_thread():
        time.sleep(FAREWELL_S)
        return
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        time.sleep(FAREWELL_S)
    finally:
        signal.signal(signal.SIGTERM, before)


def tell_torchrun(message: str) -> None:
    """Have torchrun's report of the failed processes say why this one has failed; nothing where it
    was not torchrun that started it.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8"
            )


@contextmanager
def errors_for_torchrun() -> Iterator[None]:
    """A program whose last words on standard error, or whose traceback, torchrun's report repeats
    where it fails.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        yield
        return
    said = _Copy(sys.stderr)
    try:
        with redirect_stderr(cast(Any, said)):
            yield
    except SystemExit as stop:
        if stop.code and (words := said.last_words()):
            tell_torchrun(words)
        raise
    except Exception:
        tell_torchrun(traceback.format_exc())
        raise


class _Copy:
    """A stream that remembers the end of what is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._end = stream, ""

    def write(self, text: str) -> int:
        self._end = (self._end + text)[-4000:]
        return self._stream.write(text)

    def last_words(self) -> str:
        """From the last line that begins like an error of ours; otherwise the last lines."""
        lines = re.sub(r"\x1b\[[\d;]*m", "", self._end).strip().splitlines()[-12:]
        first = max(
            (number for number, line in enumerate(lines) if line.startswith("nemorl")), default=0
        )
        return "\n".join(lines[first:]).replace(": error: ", ": ", 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def follow(config: BaseConfig) -> "TrainResult":
    """Serve rank 0 until its run is over, and return what the run returned there.

    Raises FollowedRunFailed.
    """
    from nemorl.runtime.ranks.make import serve_as_follower

    result = serve_as_follower(
        config.trainer.backend, config.runtime.timeout_s, device=config.trainer.device
    )
    if result is None:
        wait_for_rank_zero()
        raise FollowedRunFailed
    return result
