"""Traces of training steps by torch.profiler: one file per rank, for https://ui.perfetto.dev or
chrome://tracing.

The profiler belongs to the process, so what is open is kept here, in one place. A process that
ended while it is open would crash: it is closed at exit.
"""

import atexit
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from nemorl.checks import require
from nemorl.parallel.config import ProfileConfig


@dataclass(frozen=True)
class _Recording:
    profiler: Any
    config: ProfileConfig
    folder: Path
    rank: int
    first: int
    last: int
    """The step that was recorded last, whole or not."""


_recording: _Recording | None = None

QUIET_S = 0.1
"""How long operations of other threads, which have just begun to be recorded, are given before a
recording ends.
"""


@contextmanager
def profiled(config: ProfileConfig, *, step: int, rank: int) -> Iterator[None]:
    """The block, which is optimizer step `step` (from 1), recorded if it is one of `config.steps`.

    Recording begins with the first of these steps and ends with the last, and the trace then lies
    in `config.dir` as rank0_steps10-12.json. What goes on between the steps is in it, too. Where
    the run ends earlier, by an error or otherwise, `close_profile` writes the steps that there are.

    Raises ValueError if the folder can't be written to.
    """
    global _recording
    span = config.span()
    if _recording is not None and (_recording.config, _recording.rank) != (config, rank):
        close_profile()
    if span is None or not span[0] <= step <= span[1]:
        close_profile()
        yield
        return
    if _recording is None:
        _recording = _begin(config, step, rank)
    _recording = replace(_recording, last=step)
    with record_function(f"optimizer step {step}"):
        yield
    if step == span[1]:
        close_profile()


def close_profile() -> None:
    """Write the trace that is open, if one is; from any thread.

    A disk that is full is a warning: a trace is not worth a run.
    """
    global _recording
    recording, _recording = _recording, None
    if recording is None:
        return
    # The other threads go on, and torch (2.13: pytorch pull request 187483) would read what one is
    # just writing, and crash: none may record any more.
    recording.profiler.toggle_collection_dynamic(False, [ProfilerActivity.CPU])
    time.sleep(QUIET_S)
    recording.profiler.stop()
    name = f"rank{recording.rank}_steps{recording.first}-{recording.last}.json"
    path, unfinished = recording.folder / name, recording.folder / f".{name}.part"
    try:
        recording.profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"the trace {path} could not be written: {error}", stacklevel=2)
    finally:  # Ctrl-C, too, leaves no half of a file
        unfinished.unlink(missing_ok=True)


def profile_folder(config: ProfileConfig) -> Path | None:
    """The folder of the traces, made if it is not there; None where nothing is recorded.

    Raises ValueError if it can't be written to: ask early, not in step 10.
    """
    if config.steps is None:
        return None
    require(
        config.dir is not None,
        "profile.dir",
        "must be given where no run has a directory for it",
        None,
        "name a folder (--profile.dir)",
    )
    folder = Path(str(config.dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"profile.dir must be a folder that can be written to, but {config.dir} can't"
            f" ({reason}): name another (--profile.dir)"
        ) from error
    return folder


def _begin(config: ProfileConfig, step: int, rank: int) -> _Recording:
    folder = profile_folder(config)
    assert folder is not None
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    # Of all threads: otherwise only the thread that began could end it, and any other would crash.
    profiler = profile(
        activities=activities,
        record_shapes=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()
    return _Recording(profiler, config, folder, rank, step, step)


atexit.register(close_profile)
