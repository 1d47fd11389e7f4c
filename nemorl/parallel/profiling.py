"""Traces of training steps by torch.profiler: a file per rank, for ui.perfetto.dev.

A process has one profiler, which is closed at exit, as an open one would crash the process.
"""

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

# Private, but the only way to record all threads: otherwise no thread but the one that began a
# recording could end it, and any other would crash (torch 2.13).
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from nemorl.checks import require
from nemorl.parallel.config import ProfileConfig
from nemorl.warn import warn


@dataclass(frozen=True)
class _Recording:
    profiler: Any
    config: ProfileConfig
    folder: Path
    rank: int
    first: int
    last: int


_recording: _Recording | None = None

QUIET_S = 0.1
"""How long other threads get to finish what they are recording."""


@contextmanager
def profiled(config: ProfileConfig, *, step: int, rank: int, last: bool = True) -> Iterator[None]:
    """Record the block as part of optimizer step `step` (from 1), if `config.steps` includes it.

    last: whether the step ends with the block.

    One recording holds all of these steps and what goes on between them; it is then in `config.dir`
    as rank0_steps10-12.json.
    """
    global _recording
    span = config.span()
    if span is None:
        yield
        return
    if _recording is not None and (_recording.config, _recording.rank) != (config, rank):
        close_profile()
    if not span[0] <= step <= span[1]:
        close_profile()
        yield
        return
    if _recording is None:
        _recording = _begin(config, step, rank)
    _recording = replace(_recording, last=step)
    with record_function(f"optimizer step {step}"):
        yield
    if last and step == span[1]:
        close_profile()


def close_profile(of: ProfileConfig | None = None) -> None:
    """Write the open trace, if there is one; from any thread. An error is a warning.

    of: only one with this configuration.
    """
    global _recording
    recording = _recording
    if recording is None or of not in (None, recording.config):
        return
    _recording = None
    # torch would crash on reading what another thread is writing (pytorch pull request 187483).
    recording.profiler.toggle_collection_dynamic(False, [ProfilerActivity.CPU])
    time.sleep(QUIET_S)
    recording.profiler.stop()
    name = f"rank{recording.rank}_steps{recording.first}-{recording.last}.json"
    path, unfinished = recording.folder / name, recording.folder / f".{name}.part"
    try:
        recording.profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        warn(f"the trace {path} could not be written: {error}")
    finally:  # Ctrl-C leaves no half file
        unfinished.unlink(missing_ok=True)


def profile_folder(config: ProfileConfig) -> Path | None:
    """Return the folder of the traces, made if necessary; None where nothing is recorded.

    Raises: ValueError if it can't be written to.
    """
    if config.steps is None:
        return None
    requirement = "must be given where no run has a directory for it"
    require(bool(config.dir), "profile.dir", requirement, None, "name a folder (--profile.dir)")
    folder = Path(str(config.dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"profile.dir must be a folder that can be written to, but {config.dir} can't"
            f" ({error.strerror}): name another (--profile.dir)"
        ) from error
    return folder


def _begin(config: ProfileConfig, step: int, rank: int) -> _Recording:
    folder = profile_folder(config)
    assert folder is not None
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(
        activities=[ProfilerActivity.CPU, *gpu],
        record_shapes=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()
    return _Recording(profiler, config, folder, rank, step, step)


atexit.register(close_profile)
