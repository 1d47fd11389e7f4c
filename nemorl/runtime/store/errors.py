"""What goes wrong with workers and memory, in words for those who run them."""

import builtins
import contextlib
import traceback
from collections.abc import Mapping
from pathlib import Path

LOG_LINES = 10


class WorkerError(RuntimeError):
    """A worker raised an exception of a class that is not built in."""


class WorkerDied(ChildProcessError):
    """A worker's process is gone."""


class WorkerTimeout(TimeoutError):
    """A worker has not answered in time."""


class FailedAlone(RuntimeError):
    """A rank raised while the others wait for it: they are of no more use."""


MEMORY_ADVICE = (
    "To take less memory: fewer tokens at a time (--trainer.micro-batch-tokens), recomputed"
    " activations (--parallel.activation-checkpointing full), the model over more devices"
    " (--parallel.dp-shard; with megatron --parallel.tp or --parallel.pp), or, with dtensor,"
    " adapters (--lora.rank 16); nemorl plan shows what fits."
)


def memory_advice(error: BaseException) -> str | None:
    """Return advice for a failed allocation."""
    texts = ("out of memory", "can't allocate memory")
    failed = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return MEMORY_ADVICE if failed else None


def in_words(error: BaseException) -> dict[str, str]:
    """Return an exception for another process."""
    builtin = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return {
        "kind": type(error).__name__,
        "builtin": builtin,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def raised(error: Mapping[str, str], rank: int) -> Exception:
    """Return a worker's exception, its traceback as a note."""
    kind = getattr(builtins, error["builtin"], Exception)
    found: Exception = WorkerError(f"{error['kind']}: {error['message']}")
    if kind not in (Exception, BaseException, SystemExit, KeyboardInterrupt, GeneratorExit):
        with contextlib.suppress(TypeError):  # some can't be made of a message
            found = kind(error["message"])
    found.add_note(f"in worker {rank}:\n{error['traceback']}")
    return found


def death(who: str, said: str, log: Path | None, doing: str = "") -> WorkerDied:
    """Return the error for a worker that died."""
    return WorkerDied(with_log(f"{who} died{doing}: {reason_of(said)}", log))


def with_log(text: str, log: Path | None) -> str:
    """Return a text with a log's end."""
    lines = last_lines(log) if log else []
    return "\n  | ".join([f"{text}; its log ends:", *lines] if lines else [text])


def reason_of(told: str) -> str:
    """Return Ray's account of a death, in a line.

    >>> reason_of("The actor died. Worker unexpectedly exits with a connection error code 2.")
    'it was killed (the kernel does so, too, when memory is short) or it crashed'
    """
    if "running low on memory" in told:
        return "Ray killed it, because memory was short on its machine"
    if "connection error code" in told:
        return "it was killed (the kernel does so, too, when memory is short) or it crashed"
    if "ray.kill" in told:
        return "it was ended by us"
    if "unavailable" in told:
        return "it doesn't answer any more, or its node doesn't"
    return (told.strip().splitlines() or ["for a reason unknown"])[-1].strip()


def last_lines(log: Path) -> list[str]:
    """Return the end of a log, if any."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return []
