"""What is said while engines, and the ranks of a model that is spread, start, which takes seconds to minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.generation_config import GenerationConfig
from nemorl.runtime.structured_log import event


@contextmanager
def told(config: GenerationConfig, *, quiet: bool = False) -> Iterator[None]:
    """Around the set-up of a generation backend: a line before it and one after, on standard error and in the log; none for the embedded one."""
    if config.backend == "torch":
        yield
        return
    from rich.console import Console

    console, start = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True), time.perf_counter()
    what = f"{config.num_replicas} x {config.backend} through Ray" if config.num_replicas else f"{config.backend} in this process"
    event("engines_start", f"starting {what}", num_replicas=config.num_replicas, log_dir=config.log_dir)
    console.print(f"starting {what}" + (f", whose logs are in {config.log_dir}" if config.log_dir else "") + " …")
    yield
    seconds = time.perf_counter() - start
    event("engines_ready", f"ready after {seconds:.1f} s", seconds=seconds)
    console.print(f"ready after {seconds:.0f} s")


@contextmanager
def told_of_ranks(plan: ParallelPlan, who: str, *, quiet: bool = False) -> Iterator[None]:
    """Around the set-up of a trainer on ranks: a line before it, which says how the model is spread and who starts them, and one after."""
    from rich.console import Console

    console, start = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True), time.perf_counter()
    degrees = {name: getattr(plan, name) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    how = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree and degree > 1) or "one rank"
    what = f"training on {plan.num_ranks} device{'s' * (plan.num_ranks > 1)} ({how}; {plan.param_dtype}), {who}"
    event("ranks_start", what, num_ranks=plan.num_ranks, **degrees)
    console.print(f"{what} …")
    yield
    seconds = time.perf_counter() - start
    event("ranks_ready", f"loaded after {seconds:.1f} s", seconds=seconds)
    console.print(f"loaded after {seconds:.0f} s")
