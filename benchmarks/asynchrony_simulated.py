"""A simulation, not a measurement: what sampling ahead would win in runs that others published.

    python benchmarks/asynchrony_simulated.py [--small]

`nemorl.rollout.admission.decide`, which decides for nemorl's own runs, gets its events here from a
simulated clock. Step times, GPUs and groups are those that verl and AReaL publish, see `SYSTEMS`;
lengths and the engines' behavior in a batch are assumptions, see `Options`.

- Lengths are log-normal with a cap. A group is done with its longest response.
- Each GPU of the engines decodes up to `concurrent` responses, and the others wait in one queue. In
  a batch of n each is decoded at a speed in proportion to 1 / (1 + n / half_speed). Responses are
  spread evenly over GPUs.
- The speed is such that the synchronous run, in which all GPUs generate and then all train, takes
  its published time for generation. What else its step takes is published, too.
- Asynchronously the GPUs are divided as published. The trainer takes the published time of a step
  without its wait for samples, then engines stop for as long as a transfer of weights takes. With K
  a response may be K steps older than the step that trains on it, and goes on with new weights.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np
from common import command

from nemorl.data.rows import RowOrder
from nemorl.rollout.admission import Ended, LoopState, Updated, Wanted, decide


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is assumed beside the published times."""

    staleness: tuple[int, ...] = (1, 2, 4)
    """Each K that is compared with the synchronous run."""
    steps: int = 30
    """Simulated steps of each run; those after the first third count."""
    mean: float = 0.2
    """Mean length of a response, before the cap, as a share of the cap."""
    spread: float = 1.0
    """Standard deviation of the logarithm of the lengths."""
    half_speed: float = 64.0
    """Responses on a GPU at which each is decoded half as fast as alone."""
    concurrent: int = 256
    """Most responses that a GPU decodes at a time."""
    seed: int = 0
    """Of the lengths."""
    scale: int = 1
    """Divides GPUs and groups, for a quick run."""
    others: bool = True
    """Also vary each assumption by itself, with an eighth of the GPUs and of the groups."""


@dataclass(frozen=True, kw_only=True)
class System:
    """What is published of a synchronous run and of an asynchronous one on as many GPUs."""

    name: str
    model: str
    gpus: int
    """Of the synchronous run, which generates and trains on all."""
    engine_gpus: int
    """Of the asynchronous one, which generate."""
    generate_s: float
    """Generation in a step of the synchronous run."""
    train_s: float
    """The rest of that step."""
    train_alone_s: float
    """A step of the asynchronous trainer, without its wait for samples."""
    sync_s: float
    """A transfer of weights, while engines stop."""
    published: float
    """Time of a synchronous step over that of an asynchronous one."""
    groups: int = 512
    """Of a step."""
    size: int = 16
    """Responses of a group."""


def verl(
    model: str, gpus: str, step: float, generate: float, ahead: float, wait: float, sync: float
) -> System:
    """Return a row of verl's documentation, advance/fully_async: the columns step and gen of the
    synchronous run and of the asynchronous one. The latter's gen is the trainer's wait.
    """
    engines, trainer = map(int, gpus.split(":"))
    return System(
        name="verl",
        model=model,
        gpus=engines + trainer,
        engine_gpus=engines,
        generate_s=generate,
        train_s=step - generate,
        train_alone_s=ahead - wait,
        sync_s=sync,
        published=step / ahead,
    )


def areal(model: str, nodes: int, hours: float, ahead: float, sync: float) -> System:
    """Return a row of AReaL's blog, AReaL_v0_3: hours of 1,000 steps on nodes of 8 GPUs.

    How a step divides is not published. Assumed: three quarters of the GPUs generate, as in AReaL's
    example for 16 nodes; the asynchronous trainer hardly waits, and all GPUs train four times as
    fast as a quarter. So nothing can be faster than what is published, and the question is whether
    K holds it up.
    """
    gpus, step, alone = 8 * nodes, 3.6 * hours, 3.6 * ahead
    return System(
        name="AReaL",
        model=model,
        gpus=gpus,
        engine_gpus=gpus * 3 // 4,
        generate_s=step - alone / 4,
        train_s=alone / 4,
        train_alone_s=alone - sync,
        sync_s=sync,
        published=hours / ahead,
    )


SYSTEMS = (
    verl("7B", "16:16", 790.10, 357.41, 294.77, 21.26, 0.02),
    verl("7B", "32:32", 365.28, 150.72, 189.26, 28.46, 0.02),
    verl("7B", "64:64", 356.30, 177.85, 150.63, 33.14, 0.02),
    verl("30B-A3B", "96:32", 497.89, 348.05, 282.75, 22.06, 4.38),
    areal("1.5B", 16, 41.0, 14.8, 0.02),
    areal("7B", 24, 57.7, 25.4, 0.02),
)


class Engines:
    """Responses that are decoded on GPUs that share one queue, on a clock of its own.

    All have the same speed at a time, so a response ends when the tokens that each has been given
    since the start have grown by its length.
    """

    def __init__(self, gpus: int, options: Options, *, speed: float) -> None:
        """speed: tokens per second of a response that is alone on its GPU, in units of the cap."""
        self.gpus, self.options, self.speed = gpus, options, speed
        self.time = self.busy_s = self.given = 0.0
        self._decoding: list[tuple[float, int]] = []
        self._queue: list[tuple[int, float]] = []
        self._first = 0

    def add(self, group: int, lengths: np.ndarray) -> None:
        """Begin the responses of a group."""
        self._queue += [(group, float(length)) for length in lengths]
        self._fill()

    def advance(self, until: float) -> Iterator[tuple[float, int]]:
        """Go on to a time; yield the time and the group of each response that ends before it."""
        while self._decoding:
            count = len(self._decoding) / self.gpus
            pace = self.speed / (1 + max(1.0, count) / self.options.half_speed)
            end = self.time + (self._decoding[0][0] - self.given) / pace
            now = min(end, until)
            self.busy_s += min(1.0, count) * (now - self.time)
            self.given += (now - self.time) * pace
            self.time = now
            if end > until:
                return
            self.given, group = heapq.heappop(self._decoding)
            self._fill()
            yield now, group
        self.time = until

    def stop(self, seconds: float) -> None:
        """Decode nothing for some time."""
        self.time += seconds

    def _fill(self) -> None:
        most = self.options.concurrent * self.gpus
        while len(self._decoding) < most and self._first < len(self._queue):
            group, length = self._queue[self._first]
            self._first += 1
            heapq.heappush(self._decoding, (self.given + length, group))


@dataclass(frozen=True)
class Found:
    """What a simulated run took, over the steps that count."""

    seconds: float
    """Of a step, mean."""
    generate_s: float
    """The trainer's wait for samples, mean of a step."""
    trainer_idle: float
    engines_idle: float
    mean_age: float
    most_age: int


class Run:
    """A simulated run of a system, driven by `decide`."""

    def __init__(
        self, system: System, options: Options, *, staleness: int, speed: float, gpus: int
    ) -> None:
        self.system, self.options, self.staleness = system, options, staleness
        self.engines = Engines(gpus, options, speed=speed)
        self.state, self.order = LoopState(options.seed), RowOrder(sizes=(system.groups,))
        self.missing: dict[int, int] = {}
        """Responses that a group still waits for."""
        self.begun: dict[int, int] = {}
        """Steps behind the weights with which a group began."""
        self.trained: list[int] = []
        self.ages: list[list[int]] = []
        """Of the groups of each step: steps since they began."""
        self.given: tuple[int, ...] = ()

    def feed(self, event: Wanted | Ended | Updated) -> None:
        self.state, actions = decide(
            self.state,
            event,
            stream="train",
            order=self.order,
            batch=self.system.groups,
            staleness=self.staleness,
        )
        assert not actions.stop, f"groups {actions.stop} are stale"
        for group in actions.begin:
            self.missing[group.ordinal] = self.system.size
            self.begun[group.ordinal] = group.begun
            self.engines.add(group.ordinal, self.lengths(group.ordinal))
        self.given = actions.give or self.given

    def lengths(self, group: int) -> np.ndarray:
        """Return the lengths of a group's responses as shares of the cap: the same for each K."""
        draw = np.random.default_rng([self.options.seed, group])
        center = math.log(self.options.mean) - self.options.spread**2 / 2
        drawn = draw.lognormal(center, self.options.spread, self.system.size)
        return np.clip(drawn, 1e-4, 1.0)

    def go(self, until: float = math.inf, *, wait: bool = False) -> None:
        """Let the engines go on to a time; wait: only until the step has its groups."""
        if wait and self.given:
            return
        for _, group in self.engines.advance(until):
            self.missing[group] -= 1
            if not self.missing[group]:
                self.feed(Ended((group,)))
                if wait and self.given:
                    return

    def found(self, train_s: float, sync_s: float) -> Found:
        """Simulate all steps."""
        engines, marks, waits = self.engines, [], []
        self.feed(Updated())
        for step in range(self.options.steps):
            marks.append((engines.time, engines.busy_s))
            self.feed(Wanted(self.system.groups))
            self.go(wait=True)
            waits.append(engines.time - marks[-1][0])
            assert self.given, "the run does not stand still"
            self.trained.extend(self.given)
            self.ages.append([step - self.begun[number] for number in self.given])
            self.given = ()
            self.go(engines.time + train_s)
            self.state = self.state.advance()[0]
            engines.stop(sync_s)
            self.feed(Updated())
        marks.append((engines.time, engines.busy_s))
        self.check()
        first = self.options.steps // 3
        (start, busy), (end, busy_end) = marks[first], marks[-1]
        counted = self.options.steps - first
        ages = [age for each in self.ages[first:] for age in each]
        return Found(
            seconds=(end - start) / counted,
            generate_s=mean(waits[first:]),
            trainer_idle=1 - train_s * counted / (end - start),
            engines_idle=1 - (busy_end - busy) / (end - start),
            mean_age=mean(ages),
            most_age=max(ages),
        )

    def check(self) -> None:
        """Check that each group was trained on once, in order, and none was too old."""
        assert self.trained == [*range(self.options.steps * self.system.groups)]
        assert max(map(max, self.ages)) <= self.staleness
        ahead = {group.ordinal for group in self.state.ahead("train")}
        assert {*self.begun} == {*self.trained} | ahead, "none was lost"
        assert len(ahead) <= (self.staleness + 1) * self.system.groups


def smaller(system: System, scale: int) -> System:
    """Return a system with the same load of each GPU on fewer of them."""
    return replace(
        system,
        gpus=max(2, system.gpus // scale),
        engine_gpus=max(1, system.engine_gpus // scale),
        groups=max(8, system.groups // scale),
    )


def generation(system: System, options: Options, gpus: int) -> float:
    """Return the seconds in which synchronous engines of speed 1 generate, mean of a step."""
    return Run(system, options, staleness=0, speed=1.0, gpus=gpus).found(0.0, 0.0).generate_s


def compared(system: System, options: Options) -> tuple[Found, list[tuple[int, Found]]]:
    """Return the synchronous run, and the run of each K."""
    system = smaller(system, options.scale)

    def run(staleness: int, speed: float, gpus: int, train: float, sync: float) -> Found:
        made = Run(system, options, staleness=staleness, speed=speed, gpus=gpus)
        return made.found(train, sync)

    speed = generation(system, options, system.gpus) / system.generate_s
    together = run(0, speed, system.gpus, system.train_s, 0.0)
    assert math.isclose(together.generate_s, system.generate_s, rel_tol=1e-6)
    ahead = [
        (k, run(k, speed, system.engine_gpus, system.train_alone_s, system.sync_s))
        for k in options.staleness
    ]
    return together, ahead


def show(system: System, options: Options) -> None:
    """Print the rows of a system."""
    together, ahead = compared(system, options)
    gpus = f"{system.engine_gpus}:{system.gpus - system.engine_gpus}"
    best = (system.generate_s + system.train_s) / (system.train_alone_s + system.sync_s)
    first = f"{system.name:<6}{system.model:<9}{gpus:>7}{system.published:10.2f}{best:9.2f}"
    print(f"{first}  sync{row(together)}")
    for k, found in ahead:
        speed_up = together.seconds / found.seconds
        print(f"{'':41}  K={k:<2}{row(found)}{speed_up:9.2f}", flush=True)


def row(found: Found) -> str:
    idle = f"{found.trainer_idle:9.0%}{found.engines_idle:9.0%}"
    return f"{found.seconds:8.1f}{idle}{found.mean_age:7.2f}{found.most_age:5}"


VARIED: tuple[tuple[str, Callable[[Options], Options]], ...] = (
    ("as above", lambda options: options),
    ("lengths less skewed (spread 0.6)", lambda options: replace(options, spread=0.6)),
    ("lengths more skewed (spread 1.4)", lambda options: replace(options, spread=1.4)),
    ("shorter (mean 0.1 of the cap)", lambda options: replace(options, mean=0.1)),
    ("longer (mean 0.3 of the cap)", lambda options: replace(options, mean=0.3)),
    ("batches cost more (half speed at 32)", lambda options: replace(options, half_speed=32)),
    ("batches cost less (half speed at 128)", lambda options: replace(options, half_speed=128)),
)


def main(options: Options) -> None:
    print("SIMULATION with published step times; s/step, shares and staleness are simulated.")
    print("GPUs: engines:trainer. published: the source's speed-up. bound: a trainer that never")
    print("waits. idle: not training, not generating; of the synchronous run's GPUs both.")
    print(
        f"{'':<6}{'model':<9}{'GPUs':>7}{'published':>10}{'bound':>9}  run {'s/step':>8}"
        f"{'trainer':>9}{'engines':>9}{'mean':>7}{'max':>5}{'speed-up':>9}"
    )
    print(f"{'':53}{'idle':>9}{'idle':>9}{'staleness':>12}")
    for system in SYSTEMS:
        show(system, options)
    print(f"each group was trained on once, in order, at most K steps old: {len(SYSTEMS)} systems")
    scaling(options)
    if options.others:
        others(replace(options, scale=max(8, options.scale)))


def scaling(options: Options) -> None:
    """Print how generation scales in the model of the engines, beside what verl publishes."""
    *fewer, all_of_them = (smaller(system, options.scale) for system in SYSTEMS[:3])
    unit = generation(all_of_them, options, all_of_them.gpus)
    print(f"\ngeneration by fewer GPUs, times that by {SYSTEMS[2].gpus}, simulated and published")
    for system, small in zip(SYSTEMS[:2], fewer, strict=True):
        simulated = generation(small, options, small.gpus) / unit
        published = system.generate_s / SYSTEMS[2].generate_s
        print(f"  verl 7B on {system.gpus} GPUs{simulated:8.2f}{published:8.2f}")


def others(options: Options) -> None:
    """Print the speed-ups with other assumptions."""
    print("\nother assumptions: median speed-up over the systems, and least to most")
    for name, change in VARIED:
        each = [compared(system, change(options)) for system in SYSTEMS]
        texts = list[str]()
        for place, k in enumerate(options.staleness):
            ups = [sync.seconds / ahead[place][1].seconds for sync, ahead in each]
            texts.append(f"K={k} {median(ups):.2f} ({min(ups):.2f} to {max(ups):.2f})")
        print(f"  {name:<38}{'   '.join(texts)}", flush=True)


if __name__ == "__main__":
    command(main, Options, scale=32, steps=6, others=False)
