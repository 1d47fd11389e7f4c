"""`nemorl plan`: all plans for a model on so many GPUs, with their memory, the best one first."""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from nemorl.checks import require
from nemorl.models.capabilities import ASSUMED, known
from nemorl.parallel.backends import check_settings, implements, limits_of
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.dtensor.limits import settled
from nemorl.parallel.plan import ParallelPlan, Recomputation
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.megatron import PlannedStage
from nemorl.parallel.planner.memory import BYTES, STATE, Memory, PlannedStep, engine_memory
from nemorl.parallel.planner.model_shape import ModelShape, read_shape, shard_ranks
from nemorl.parallel.planner.sharing import (
    GB,
    Sharing,
    cache_of,
    host_of,
    moments_of,
    sharing,
    stages_of,
    states_of,
    training_of,
    with_offloading,
)
from nemorl.rollout.config import GenerationConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Sent:
    """What a device sends in groups of `size` ranks that are `stride` apart."""

    nbytes: float
    stride: int
    size: int
    exchanged: bool = False
    """Whether to all others, not to the next in a ring."""

    def slow(self, machine: int) -> float:
        """Return the bytes that leave a machine of so many devices."""
        # A group whose span does not divide a machine may lie on two.
        together = max(1, min(self.size, math.gcd(machine, self.stride * self.size) // self.stride))
        if together == self.size:
            return 0
        out = (self.size - together) / (self.size - 1) if self.exchanged else 1 / together
        return self.nbytes * out


def traffic(stage: PlannedStep | PlannedStage) -> tuple[float, float]:
    """Return the bytes that a device sends in a step, and of these over the slow link.

    Ranks of tp are neighbors, then those of cp, dp_shard, dp_replicate and pp; experts are divided
    between neighbors.
    """
    if isinstance(stage, PlannedStage):
        work, found = stage.step.work, _of_stage(stage)
    else:
        work, found = stage.work, _of_step(stage)
    total = sum(each.nbytes for each in found)
    if work.gpus <= work.gpus_per_node:
        return total, total
    return total, sum(each.slow(work.gpus_per_node) for each in found)


def _of_step(step: PlannedStep) -> list[Sent]:
    plan, model = step.plan, step.model
    if not plan.needs_ranks:
        return []
    ranks, count, layers = shard_ranks(plan), step.micro_batches, model.num_hidden_layers
    # All but the head's parameters are gathered twice.
    once = sum(each.shard(plan) for each in (model.ends if model.tied else model.ends[1:]))
    gradients = BYTES[plan.reduce_dtype] * step.trained()
    sharded = BYTES[plan.precision] * (2 * step.kept() - once) + gradients
    array = step.tokens * model.hidden_size * step.dtype_size
    return [
        Sent(count * sharded * (ranks - 1), plan.tp, ranks),
        Sent(_part(2 * count * gradients, plan.dp_replicate), plan.tp * ranks, plan.dp_replicate),
        Sent(_part(count * array, plan.tp) * (layers * _tensor_sends(step) + 4), 1, plan.tp),
        _context(step, layers),
    ]


def _of_stage(stage: PlannedStage) -> list[Sent]:
    """Return what megatron-core sends, which reduces gradients at a step's end."""
    step, plan, model = stage.step, stage.step.plan, stage.step.model
    layers = stage.num_layers
    stream = step.micro_batches * step.tokens * model.hidden_size * step.dtype_size
    per_parameter = BYTES[plan.reduce_dtype] + step.dtype_size
    tensor = layers * _tensor_sends(step) + (stage.index == 0) + 3 * stage.is_last
    again = plan.recomputes == "full" or "moe" in plan.recompute_modules
    routed = stage.rows_of_experts * layers * (6 if again else 4)
    handed = (2 * plan.vpp - (stage.index == 0) - stage.is_last) * stream // step.token_split()
    if model.tied and plan.pp > 1 and (stage.index == 0 or stage.is_last):
        handed += STATE * model.vocab_size // plan.tp * model.hidden_size
    (together, alike), near = stage.shares(), plan.ep if plan.ep > 1 else plan.tp
    return [
        Sent(_part(per_parameter * stage.parameters, together), plan.tp, together),
        Sent(_part(per_parameter * stage.of_experts, alike), near, alike),
        Sent(_part(stream, plan.tp) * tensor, 1, plan.tp),
        Sent(_part(stream, near) * routed, 1, near, exchanged=True),
        Sent(handed, plan.num_ranks // plan.pp, plan.pp),
        _context(step, layers),
    ]


def _part(array: float, devices: int) -> float:
    return array * (devices - 1) / devices


def _tensor_sends(step: PlannedStep) -> int:
    """Return how often a layer sends its tokens over tp."""
    parts, how = step.plan.sequence_parallel, step.plan.recomputes
    if not step.shards_optimizer:
        # Selective checkpointing keeps what reduce-scatter gave.
        forward, backward, kept = (4, 4, 2) if parts else (4, 10, 0)
        if step.model.num_experts and parts:
            forward, backward = 5, 5
        return forward + backward + {"none": 0, "selective": forward - kept, "full": forward}[how]
    # With sequence parallelism the backward pass gathers the inputs of products again.
    half = 5 if parts else 4
    if step.model.num_experts:  # counted in `_of_stage`
        return half + 2 * (how == "full")
    selected = how == "selective" and "mlp" in step.recomputed_modules
    return 2 * half + (4 if how == "full" else 2 * selected)


def _context(step: PlannedStep, layers: int) -> Sent:
    """Return what attention exchanges over cp."""
    plan, (q, kv, _), how = step.plan, step.heads_width, step.plan.recomputes
    gathers = plan.cp_method == "allgather"
    width = 2 * (kv * plan.cp if gathers else q + (q if step.kv_heads % plan.cp else kv))
    again = how == "full" or (how == "selective" and "core_attn" in step.recomputed_modules)
    array = step.micro_batches * layers * (2 + again) * step.tokens * width * step.dtype_size
    return Sent(_part(array, plan.cp), plan.tp, plan.cp, exchanged=not gathers)


RECOMPUTED = get_args(Recomputation)
"""The least first."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and its costs."""

    plan: ParallelPlan
    fullest: Memory
    """The fullest moment of training or generation."""
    sent: float
    """Bytes that a device sends in a step."""
    slow: float
    """Of these over the link between machines; on a single machine all."""
    host: int = 0
    """Bytes of a machine's main memory that offloading takes."""
    sharing: Sharing | None = None
    apart: dict[str, int] = field(default_factory=dict)
    """Each model's fullest moment on GPUs of its own, in bytes."""

    @property
    def flags(self) -> str:
        return _flags(parallel=self.plan)


def ranked(found: Iterable[Candidate], *, room: float) -> list[Candidate]:
    """Order plans, the best first.

    1. Those that fit into `room` bytes; the others follow, the smallest first.
    2. Those that recompute less.
    3. Those that send fewer bytes over the slow link: between machines, or the only one.
    4. Of those within 10 % of the least, those that send less in all.
    5. Those that split in fewer ways, then the smallest.
    """

    def simplest(each: Candidate) -> tuple[float, ...]:
        plan = each.plan
        degrees = (plan.tp, plan.pp, plan.ep, plan.cp, plan.dp_replicate)
        return each.sent, sum(degree > 1 for degree in degrees), each.fullest.total, each.slow

    found = sorted(found, key=lambda each: each.fullest.total)
    fits = [each for each in found if each.fullest.total <= room]
    result: list[Candidate] = []
    for how in RECOMPUTED:
        left = [each for each in fits if each.plan.recomputes == how]
        while left:
            most = 1.1 * min(each.slow for each in left)
            result += sorted((each for each in left if each.slow <= most), key=simplest)
            left = [each for each in left if each.slow > most]
    return result + found[len(fits) :]


def _flags(**sections: Any) -> str:
    found = []
    for section, config in sections.items():
        for item in fields(config):
            value = getattr(config, item.name)
            if value not in (item.default, {}):
                name = f"no-{item.name}" if value is False else item.name
                values = value if isinstance(value, tuple) else (value,)
                found.append(f"--{section}.{name}".replace("_", "-"))
                found += [str(each) for each in values if not isinstance(each, bool)]
    return " ".join(found)


@dataclass(frozen=True)
class Planned:
    """What `nemorl plan` found, best first."""

    step: PlannedStep
    """The step of some plan."""
    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[str, ...]
    """Why some plans don't suit the model."""


HEADS: dict[str, Any] = {"teacher": "lm", "critic": "scalar"}
"""Of other models, by their settings."""


def find_plans(config: PlanConfig) -> Planned:
    """Find every plan for the model, in order. Raises ValueError where none suits it."""
    model, steps, refused = read_shape(config.model.path), [], dict[str, None]()
    linear = [each.module for layer in model.layers for each in layer.linear]
    for name in config.lora.target_modules:
        require(
            any(f".{module}".endswith(f".{name}") for module in linear),
            "lora.target_modules",
            "must name linear layers",
            name,
            f"there are {', '.join(sorted({module.rpartition('.')[2] for module in linear}))}",
        )
    beside = {
        name: read_shape(path, head, field=name)
        for name, head in HEADS.items()
        if (path := getattr(config, name))
    }
    limits, trainer = limits_of(config.trainer.backend), config.trainer
    proved = {
        name: (each.config.model_type, known(each.config) or ASSUMED)
        for name, each in {"policy": model, **beside}.items()
    }
    if limits.traits.proves:
        trainer = settled(BackendConfig(trainer=trainer), *proved["policy"]).trainer
    own = BackendConfig(trainer=trainer, optimizer=config.optimizer)
    usual = type(trainer)().share_prompts  # which has no effect on a plan
    config = replace(config, trainer=replace(trainer, share_prompts=usual))
    for plan in candidates(config, model):
        step, problems = PlannedStep(model, plan, config, beside=beside), list[str]()
        for name, each in step.models.items():
            problems += plan.problems(each.model.config, traits=limits.traits)
            head = HEADS.get(name, "lm")
            run = replace(own, parallel=plan, lora=each.work.lora, head=head)
            try:
                check_settings(run, each.model.config, plan, limits)
                if limits.traits.proves:
                    settled(run, *proved[name])
            except ValueError as error:
                problems.append(str(error))
        refused |= dict.fromkeys(problems)
        if not problems:
            steps.append(step)
    if not steps:
        reason = "; ".join(refused) or (
            f"the degrees given do not multiply to a divisor of {config.gpus}, with tp a divisor of"
            f" {config.gpus_per_node} and a pipeline if there is vpp"
        )
        raise ValueError(f"gpus must allow a plan that suits the model, but none does: {reason}")
    room = GB * config.gpu_memory * (1 - config.reserve)
    found = ranked(map(estimate, steps), room=room)
    fitting = tuple(each for each in found if each.fullest.total <= room)
    return Planned(steps[0], fitting, tuple(found[len(fitting) :]), tuple(refused))


def candidates(config: PlanConfig, model: ModelShape) -> Iterator[ParallelPlan]:
    """Yield the plans that the settings allow, whether they suit the model or not."""
    gpus, asked, traits = config.gpus, config.parallel, limits_of(config.trainer.backend).traits
    for tp, pp, cp, shard in product(
        _degrees(asked.tp, gpus),
        _degrees(asked.pp, gpus, free=traits.pipelines),
        _degrees(asked.cp, gpus),
        _degrees(asked.dp_shard, gpus),
    ):
        replicate, left = divmod(gpus, tp * pp * cp * shard)
        copies = _degrees(asked.dp_replicate, gpus, free=traits.shards == "parameters")
        across = gpus > config.gpus_per_node and config.gpus_per_node % tp
        if left or tp > config.gpus_per_node or across or replicate not in copies:
            continue
        ends = asked.num_layers_in_first_pipeline_stage, asked.num_layers_in_last_pipeline_stage
        if pp == 1 and (asked.vpp > 1 or any(ends)):
            continue
        divides = cp == 1 or model.num_attention_heads % (tp * cp) == 0
        eps = [asked.ep or 1]
        if model.num_experts and "parallel.ep" in traits.experts:
            eps = _degrees(asked.ep, shard * cp * tp)
        for ep, checkpointing in product(eps, RECOMPUTED):
            if asked.recompute_modules and checkpointing != "selective":
                continue
            if asked.activation_checkpointing in (None, checkpointing):
                chosen: dict[str, Any] = {
                    "dp_replicate": replicate,
                    "dp_shard": shard,
                    "tp": tp,
                    "pp": pp,
                    "ep": ep,
                    "cp": cp,
                    "cp_method": asked.cp_method or ("ulysses" if divides else "allgather"),
                }
                if checkpointing != "none":
                    chosen["activation_checkpointing"] = checkpointing
                yield ParallelPlan(**asdict(asked) | chosen).with_precision(accelerator=True)


def _degrees(given: int | None, number: int, *, free: bool = True) -> list[int]:
    wanted = given or (None if free else 1)
    return [n for n in range(1, number + 1) if number % n == 0 and wanted in (None, n)]


def estimate(step: PlannedStep) -> Candidate:
    """Return a plan with its costs on the device that has the highest."""
    sent, slow = map(max, zip(*map(traffic, stages_of(step)), strict=True))
    moments, shared, apart = [*moments_of(step)], None, {}
    if step.beside:
        apart = {name: training_of(each) for name, each in step.models.items()}
        apart["policy"] = estimate(replace(step, beside={})).fullest.total
    if step.work.engines:
        can_empty = implements(step.work.trainer.backend, "empty_cache")
        card, engine = GB * step.work.gpu_memory, engine_memory(step, 1)
        with suppress(ValueError):  # the plan is too large
            shared = sharing(step, card=card, can_offload=step.can_offload, can_empty=can_empty)
        if shared:
            step = with_offloading(step, shared.offloads)
            wanted = engine_memory(step, step.work.generation.max_batch_size)
            engine = max(engine, min(wanted, int(shared.share * card)))
        elif step.work.trainer.offload_during_generation is None:
            step = with_offloading(step, step.can_offload)
        cache = cache_of(step, can_empty=can_empty)
        moments.append(step.generation_memory(states_of(step), generation=engine, cache=cache))
    return Candidate(
        plan=step.plan,
        fullest=max(moments, key=lambda moment: moment.total),
        sent=sent,
        slow=slow,
        host=min(step.work.gpus, step.work.gpus_per_node) * host_of(step),
        sharing=shared,
        apart=apart,
    )


def print_plans(found: Planned, console: "Console | None" = None) -> None:
    """Print the plans that fit, and why the first is best. Raises ValueError if none does."""
    from rich.console import Console
    from rich.text import Text

    console, config = console or Console(highlight=False), found.step.work
    shown = (found.fitting or found.too_large)[: config.show]
    adapter = found.step.adapter_parameters()
    trains = f", {quantity(adapter)} in adapters that train," if adapter else ""
    model = found.step.model
    active = f" ({quantity(model.active_parameters)} per token)" * bool(model.num_experts)
    beside = found.step.beside.items()
    others = "".join(f", {name} {quantity(each.num_parameters)}" for name, each in beside)
    console.print(
        Text(
            f"{config.model.path}: {quantity(model.num_parameters)} parameters{active}{trains}"
            f"{others} on {config.gpus} GPU{'s' * (config.gpus > 1)} of {config.gpu_memory:g} GB,"
            f" rows of {config.row_tokens} tokens",
            style="bold",
        )
    )
    lines, width = table(config, shown), console.width
    # A narrow terminal costs no number.
    console.width = max(
        width, console.measure(lines, options=console.options.update(max_width=1000)).maximum
    )
    console.print(lines)
    console.width = width
    room = _gigabytes(GB * config.gpu_memory * (1 - config.reserve))
    link = " slow: of these over the link between machines." * (config.gpus > config.gpus_per_node)
    link += f" {', '.join(shown[0].apart)}: each on GPUs of its own." * bool(beside)
    console.print(
        f"GB per GPU at its fullest moment; {room} of {config.gpu_memory:g} GB may be used"
        f" (--reserve {config.reserve:g}). sent: GB per GPU and optimizer step.{link}"
    )
    for reason in found.refused[:3]:
        console.print(f"left out: {reason}")
    if not found.fitting:
        raise ValueError(nothing_fits(config, found.too_large[0]))
    console.print(f"\nrecommended, of {len(found.fitting)} that fit, as {_why(found)}")
    if found.fitting[0].sharing:
        console.print(str(found.fitting[0].sharing))
    flags = " ".join(filter(None, [found.fitting[0].flags, _other_flags(config)]))
    console.print(Text(flags, style="bold green"), soft_wrap=True)


def _why(found: Planned) -> str:
    first, how = found.fitting[0], found.fitting[0].plan.recomputes
    alike = [each.slow for each in found.fitting if each.plan.recomputes == how]
    less = {"none": "nothing", "selective": "some products", "full": "whole layers"}[how]
    over = " over the link between machines" * (first.slow != first.sent)
    least = "within 10 % of the least" if first.slow > min(alike) else "least"
    return f"it recomputes {less}, and of {len(alike)} such plans sends {least}{over}"


def _other_flags(config: PlanConfig) -> str:
    trainer = replace(
        config.trainer,
        train_micro_batch_size=config.micro_batch_rows,
        micro_batch_tokens=None,
        packed_row_tokens=config.row_tokens if config.trainer.sequence_packing else None,
    )
    generation = GenerationConfig()
    if config.engines:
        generation = replace(
            config.generation, num_replicas=config.gpus // config.generation.devices_per_replica
        )
    return _flags(
        trainer=trainer, optimizer=config.optimizer, lora=config.lora, generation=generation
    )


def nothing_fits(config: PlanConfig, smallest: Candidate) -> str:
    """Return the error for a model that no plan fits."""
    given, traits = config.gpu_memory, limits_of(config.trainer.backend).traits
    sharded = traits.shards == "parameters"
    remedies = "--parallel.cpu-offload, " * (sharded and not config.parallel.cpu_offload)
    remedies += "--lora.rank 16, " * (traits.adapters and not config.lora.rank)
    remedies += "--generation.no-colocated, " * config.engines
    remedies += "GPUs of its own for each model, " * bool(smallest.apart)
    return (
        f"gpu_memory must hold a plan, but it is {given:g}, of which"
        f" {given * (1 - config.reserve):.1f} GB may be used: the smallest needs"
        f" {max(smallest.fullest.total / GB, 0.1):.1f} GB ({smallest.flags or 'one device'}); try"
        f" {remedies}more --gpus, or a shorter --seq-len"
    )


DEGREES = {"repl": "dp_replicate", "shard": "dp_shard"}
DEGREES |= {name: name for name in ("tp", "pp", "vpp", "ep", "cp")}
TITLES = ("param", "grads", "optim", "ref", "activ", "logit", "whole", "gener", "cache")
"""Of the parts of `Memory`."""


def table(config: PlanConfig, shown: tuple[Candidate, ...]) -> "Table":
    """Return a table of plans, without empty columns."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    parts = {
        title: name
        for title, name in zip(TITLES, vars(Memory()), strict=True)
        if any(getattr(each.fullest, name) for each in shown)
    }
    host = ["host"] * any(candidate.host for candidate in shown)
    unused = [n for n in ("pp", "vpp", "ep") if all(getattr(each.plan, n) == 1 for each in shown)]
    unused += ["repl"] * (limits_of(config.trainer.backend).traits.shards == "optimizer")
    degrees = {title: name for title, name in DEGREES.items() if title not in unused}
    slow = ["slow"] * (config.gpus > config.gpus_per_node)
    for title in (*degrees, "recompute", *parts, "total", *shown[0].apart, *host, "sent", *slow):
        result.add_column(title, justify="right", no_wrap=True)
    for candidate in shown:
        plan, memory = candidate.plan, candidate.fullest
        cells: list[Any] = [getattr(plan, name) for name in degrees.values()]
        if plan.cp_method == "allgather":
            cells[-1] = f"{plan.cp}*"
        sizes = [
            *(getattr(memory, name) for name in parts.values()),
            memory.total,
            *candidate.apart.values(),
            *[candidate.host] * len(host),
            *[candidate.sent, candidate.slow][: 1 + len(slow)],
        ]
        cells += [plan.recomputes, *map(_gigabytes, sizes)]
        result.add_row(*map(str, cells))
    return result


def quantity(count: float) -> str:
    """Write a number of parameters in billions, millions or thousands.

    >>> [quantity(x) for x in (70.55e9, 494e6, 812_345, 999)]
    ['70.55 B', '494.0 M', '812.3 k', '999']
    """
    for unit, size, digits in (("B", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f}"


def _gigabytes(size: float) -> str:
    value = size / GB
    digits = ".0f" if value >= 99.95 or value == 0 else ".1f" if value >= 0.95 else ".2g"
    return f"{value:{digits}}"
