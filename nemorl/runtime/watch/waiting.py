"""What standard error and the log say while engines and ranks start."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console

from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.watch.log import event


@contextmanager
def waiting(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Announce something slow, and how long it took."""
    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    event("waiting", what)
    console.print(f"{what} …")
    start = time.perf_counter()
    with console.status("waiting …") if console.is_terminal and not quiet else nullcontext():
        yield
    seconds = time.perf_counter() - start
    event("ready", f"{what}: ready after {seconds:.1f} s", seconds=seconds)
    console.print(f"ready after {seconds:.0f} s")


def waiting_for_engines(
    config: GenerationConfig, *, quiet: bool = False
) -> AbstractContextManager[None]:
    """`waiting` for engines, if any."""
    if not config.traits.engines:
        return nullcontext()
    logs = f", whose logs are in {config.log_dir}" if config.log_dir else ""
    what = f"starting {config.num_replicas} x {config.backend} through Ray{logs}"
    return waiting(what, quiet=quiet)


def waiting_for_ranks(
    plan: ParallelPlan, who: str, *, quiet: bool = False
) -> AbstractContextManager[None]:
    """`waiting` for a trainer on ranks."""
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep")
    degrees = {name: getattr(plan, name) for name in axes}
    spread = [f"{name} {degree}" for name, degree in degrees.items() if degree and degree > 1]
    devices = f"{plan.num_ranks} device{'s' * (plan.num_ranks > 1)}"
    how = ", ".join(spread) or "one rank"
    return waiting(f"training on {devices} ({how}; {plan.precision}), {who}", quiet=quiet)
