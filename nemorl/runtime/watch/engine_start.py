"""What is said while engines, and the ranks of a model that is spread, start, which takes seconds
to minutes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.watch.log import event

if TYPE_CHECKING:
    from rich.console import Console

    from nemorl.runtime.ranks.group import Status

LINE_S = 30.0
"""How often those who wait are told, where there is no terminal for a clock."""
LOOK_S = 5.0
"""How often it is looked what is going on."""
STAGES = {
    "start_process_group": "finding each other",
    "snapshot_download": "fetching the model",
    "on_meta": "building the model",
    "shard": "spreading the model",
    "materialize": "spreading the model",
    "load_causal_lm": "loading the whole model",
    "load_folder": "reading weights",
    "copy_whole": "spreading weights",
    "fingerprint": "checking weights",
}
"""What a rank is at, by functions that it may be in."""


@contextmanager
def told(config: GenerationConfig, *, quiet: bool = False) -> Iterator[None]:
    """Around the set-up of a generation backend: a line before it and one after, on standard error
    and in the log; none for the embedded one.
    """
    if config.backend == "torch":
        yield
        return
    from rich.console import Console

    console, start = (
        Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True),
        time.perf_counter(),
    )
    what = (
        f"{config.num_replicas} x {config.backend} through Ray"
        if config.num_replicas
        else f"{config.backend} in this process"
    )
    event(
        "engines_start",
        f"starting {what}",
        num_replicas=config.num_replicas,
        log_dir=config.log_dir,
    )
    console.print(
        f"starting {what}"
        + (f", whose logs are in {config.log_dir}" if config.log_dir else "")
        + " …"
    )
    with waiting(console, lambda: f"starting {what}"):
        yield
    seconds = time.perf_counter() - start
    event("engines_ready", f"ready after {seconds:.1f} s", seconds=seconds)
    console.print(f"ready after {seconds:.0f} s")


@contextmanager
def told_of_ranks(
    plan: ParallelPlan,
    who: str,
    statuses: Callable[[], Mapping[int, Status]],
    *,
    quiet: bool = False,
) -> Iterator[None]:
    """Around the set-up of a trainer on ranks: a line before it, which says how the model is spread
    and who starts them, and one after.

    In between it is said what the ranks are at, as far as `statuses` knows; it is called on another
    thread.
    """
    from rich.console import Console

    console, start = (
        Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True),
        time.perf_counter(),
    )
    degrees = {name: getattr(plan, name) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    how = (
        ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree and degree > 1)
        or "one rank"
    )
    what = (
        f"training on {plan.num_ranks} device{'s' * (plan.num_ranks > 1)} ({how};"
        f" {plan.param_dtype}), {who}"
    )
    event("ranks_start", what, num_ranks=plan.num_ranks, **degrees)
    console.print(f"{what} …")
    with waiting(console, lambda: stages(statuses(), plan.num_ranks)):
        yield
    seconds = time.perf_counter() - start
    event("ranks_ready", f"loaded after {seconds:.1f} s", seconds=seconds)
    console.print(f"loaded after {seconds:.0f} s")


def stages(statuses: Mapping[int, Status], num_ranks: int) -> str:
    """What so many ranks are at while they are set up, by what those say that answer.

    >>> stages({}, 2)
    'ranks starting'
    """
    found = Counter(
        _stage(statuses[rank]) if rank in statuses else "starting" for rank in range(num_ranks)
    )
    return (
        f"ranks {next(iter(found))}"
        if len(found) == 1
        else "ranks: " + ", ".join(f"{count} {stage}" for stage, count in found.items())
    )


def _stage(status: Status) -> str:
    if status.phase != "setup":
        return "ready"
    functions = (frame.rpartition(" ")[2] for frame in status.frames)
    return next((STAGES[name] for name in functions if name in STAGES), "setting up")


@contextmanager
def waiting(
    console: Console, doing: Callable[[], str], *, look_s: float = LOOK_S, line_s: float = LINE_S
) -> Iterator[None]:
    """A block that may take long: in a terminal a clock with what is being done, elsewhere a line
    about it every `line_s` seconds.

    `doing` is asked every `look_s` seconds, on another thread; where it fails nothing is said.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if console.quiet:
        yield
        return
    live, over, speaking, start = (
        console.is_terminal and not console.is_dumb_terminal,
        threading.Event(),
        threading.Lock(),
        time.perf_counter(),
    )
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    clock = Progress(
        *columns, console=console, transient=True, disable=not live, redirect_stdout=False
    )
    task = clock.add_task("starting", total=None)

    def look() -> None:
        while not over.wait(look_s if live else line_s):
            try:
                now = doing()
            except Exception:  # those who are waited for are being ended
                continue
            with speaking:
                if live:
                    clock.update(task, description=now)
                elif not over.is_set():
                    console.print(f"{now}, for {time.perf_counter() - start:.0f} s now …")

    threading.Thread(target=look, name="nemorl-waiting", daemon=True).start()
    try:
        with clock:
            yield
    finally:
        with speaking:
            over.set()
