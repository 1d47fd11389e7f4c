"""`nemorl plan`: all plans for a model on so many GPUs, with their memory and time."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.checks import require
from nemorl.models.hub import loading
from nemorl.parallel.backends import check_settings, implements, limits_of
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.cost import RECOMPUTED, Traffic, step_traffic
from nemorl.parallel.planner.megatron import Stage
from nemorl.parallel.planner.memory import Memory, Step, engine_memory
from nemorl.parallel.planner.model_shape import ModelShape, model_shape
from nemorl.parallel.planner.moves import Move, step_moves
from nemorl.parallel.planner.sharing import (
    GB,
    Sharing,
    cache_of,
    host_of,
    sharing,
    stages_of,
    states_of,
    with_offloading,
)
from nemorl.parallel.planner.timing import Times, step_times
from nemorl.rollout.config import GenerationConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Candidate:
    """A plan, and what it costs each device."""

    plan: ParallelPlan
    fullest: Memory
    """The fullest moment of training or generation."""
    host: int
    """Bytes of main memory of a machine that offloading takes."""
    traffic: Traffic
    times: Times
    """Estimated times of an optimizer step."""
    sharing: Sharing | None = None
    """How the model shares the device with engines, if it does and they fit."""

    @property
    def seconds(self) -> float:
        """Estimated time of an optimizer step."""
        return self.times.total

    @property
    def flags(self) -> str:
        """The settings that make a run use this plan."""
        return _flags(parallel=self.plan)


def _flags(**sections: Any) -> str:
    """Return the flags of what is not a run's default in sections."""
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
    """What `nemorl plan` found."""

    step: Step
    """The step of the first plan."""
    fitting: tuple[Candidate, ...]
    """The fastest first."""
    too_large: tuple[Candidate, ...]
    """The smallest first."""
    refused: tuple[str, ...]
    """Why some plans don't suit the model, whatever the memory."""


def find_plans(config: PlanConfig) -> Planned:
    """Find every plan for the model, in order. Raises ValueError where none suits it."""
    model, steps, refused = read_shape(config.model.path), [], dict[str, None]()
    backend, limits = config.trainer.backend, limits_of(config.trainer.backend)
    require(
        "parallel.ep" in limits.traits.experts or not model.num_local_experts,
        "trainer.backend",
        f"must be megatron for {model.model_type}, a mixture of experts, whose memory on {backend}"
        " is not known",
        backend,
        "add --trainer.backend megatron",
    )
    sections = {name: getattr(config, name) for name in ("trainer", "optimizer", "lora")}
    for plan in candidates(config, model):
        run = BackendConfig(**sections, parallel=plan)
        problems = list(plan.problems(model, traits=limits.traits))
        try:
            check_settings(run, None, plan, limits)
        except ValueError as error:
            problems.append(str(error))
        refused |= dict.fromkeys(problems)
        if not problems:
            steps.append(Step(model, plan, config))
    if not steps:
        divides = " and a divisor of it" * (config.gpus > config.gpus_per_node)
        given = (
            f"the degrees given do not multiply to a divisor of {config.gpus}, with tp within"
            f" {config.gpus_per_node}{divides} and a pipeline if there is vpp"
        )
        reason = "; ".join(refused) or given
        raise ValueError(f"gpus must allow a plan that suits the model, but none does: {reason}")
    found, room = list(map(estimate, steps)), GB * config.gpu_memory * (1 - config.reserve)
    fitting = sorted((each for each in found if each.fullest.total <= room), key=_order)
    large = [each for each in found if each.fullest.total > room]
    large.sort(key=lambda each: (each.fullest.total, each.seconds))
    return Planned(steps[0], tuple(fitting), tuple(large), tuple(refused))


def read_shape(name: str) -> ModelShape:
    """Read the sizes of a folder, a config.json or a model on the hub."""
    with loading(name):
        path = Path(name)
        if not path.exists():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        path = path / "config.json" if path.is_dir() else path
        content = json.loads(path.read_text(encoding="utf-8"))
    return model_shape(content, source=str(path))


def candidates(config: PlanConfig, model: ModelShape) -> Iterator[ParallelPlan]:
    """Yield the plans that the settings allow, even if they don't suit the model."""
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
        if model.num_local_experts:
            eps = _degrees(asked.ep, shard * cp * tp)
        for ep, checkpointing in product(eps, RECOMPUTED):
            if asked.recompute_modules and checkpointing != "selective":
                continue
            if asked.activation_checkpointing in (None, checkpointing):
                plan = ParallelPlan(
                    **asdict(asked)
                    | {
                        **{"dp_replicate": replicate, "dp_shard": shard},
                        **{"tp": tp, "pp": pp, "ep": ep, "cp": cp},
                        "cp_method": asked.cp_method or ("ulysses" if divides else "allgather"),
                        "activation_checkpointing": checkpointing,
                    }
                )
                yield plan.with_precision(accelerator=True)


def _degrees(given: int | None, number: int, *, free: bool = True) -> list[int]:
    """Return the divisors of a number, or the one that is given, or 1 unless they are free."""
    wanted = given or (None if free else 1)
    return [n for n in range(1, number + 1) if number % n == 0 and wanted in (None, n)]


def estimate(step: Step) -> Candidate:
    """Return the memory, traffic and time of a step."""
    stages = stages_of(step)
    if pipeline := [stage for stage in stages if isinstance(stage, Stage)]:
        traffic = max((stage.traffic() for stage in pipeline), key=lambda sent: sent.total)
    else:
        traffic = step_traffic(step)
    moments, shared = [stage.training_memory() for stage in stages], None
    if step.work.engines:
        can_offload = step.can_offload
        can_empty = implements(step.work.trainer.backend, "empty_cache")
        asked, card = step.work.trainer.offload_during_generation, GB * step.work.gpu_memory
        with suppress(ValueError):  # the plan is too large
            shared = sharing(step, card=card, can_offload=can_offload, can_empty=can_empty)
        # An engine that starts has room for a sequence, and as many as fit into its share.
        engine = engine_memory(step, 1)
        if shared:
            step = with_offloading(step, shared.offloads)
            wanted = engine_memory(step, step.work.generation.max_batch_size)
            engine = max(engine, min(wanted, int(shared.share * card)))
        elif asked is None:
            step = with_offloading(step, can_offload)
        cache = cache_of(step, can_empty=can_empty)
        moments.append(step.generation_memory(states_of(step), generation=engine, cache=cache))
    return Candidate(
        step.plan,
        fullest=max(moments, key=lambda moment: moment.total),
        host=min(step.work.gpus, step.work.gpus_per_node) * host_of(step),
        traffic=traffic,
        times=step_times(step),
        sharing=shared,
    )


def _order(candidate: Candidate) -> tuple[float, int, int]:
    """Order plans by time, to three digits, then the simplest and then the smallest first."""
    plan = candidate.plan
    degrees = (plan.tp, plan.pp, plan.ep, plan.cp, plan.dp_replicate)
    splits = sum(degree > 1 for degree in degrees)
    return float(f"{candidate.seconds:.2e}"), splits, candidate.fullest.total


def print_plans(config: PlanConfig, found: Planned, console: "Console | None" = None) -> None:
    """Print the plans that fit, the flags of the first, and with `moves` what its step moves; else
    the smallest, and an error.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    shown = (found.fitting or found.too_large)[: config.show]
    adapter = found.step.adapter_parameters()
    trains = f", {quantity(adapter)} in adapters that train," if adapter else ""
    model = found.step.model
    active = f" ({quantity(model.active_parameters())} per token)" * bool(model.num_local_experts)
    title = (
        f"{config.model.path}: {quantity(model.num_parameters())} parameters{active}{trains} on"
        f" {config.gpus} GPU{'s' * (config.gpus > 1)} of {config.gpu_memory:g} GB, rows of"
        f" {config.row_tokens} tokens"
    )
    console.print(Text(title, style="bold"))
    _print_whole(console, table(config, shown))
    room = _gigabytes(GB * config.gpu_memory * (1 - config.reserve))
    console.print(
        f"GB per GPU at its fullest moment; {room} of {config.gpu_memory:g} GB may be used"
        f" (--reserve {config.reserve:g}). sent: GB per GPU and optimizer step. time: of a step,"
        " estimated, relative to the first."
    )
    if any(candidate.host for candidate in shown):
        console.print("host: GB of a machine's main memory, besides what processes need.")
    if any(candidate.plan.cp_method == "allgather" for candidate in shown):
        console.print("cp *: by cp_method allgather.")
    for reason in found.refused[:3]:
        console.print(f"left out: {reason}")
    if not found.fitting:
        raise ValueError(nothing_fits(config, found.too_large[0]))
    console.print(f"\nrecommended, of {len(found.fitting)} that fit:")
    if found.fitting[0].sharing:
        console.print(str(found.fitting[0].sharing))
    flags = " ".join(filter(None, [found.fitting[0].flags, other_flags(config)]))
    console.print(Text(flags, style="bold green"), soft_wrap=True)
    if config.moves:
        step = Step(model, found.fitting[0].plan, config)
        console.print("\nwhat a step of this plan moves; seconds are estimates (docs/scale.md):")
        _print_whole(console, table_of_moves(step_moves(step)))
        for note in notes_on_moves(step):
            console.print(note)


def _print_whole(console: "Console", lines: "Table") -> None:
    """Print a table; one that is wider than the terminal keeps its numbers."""
    width = console.width
    needed = console.measure(lines, options=console.options.update(max_width=1000)).maximum
    console.width = max(width, needed)
    console.print(lines)
    console.width = width


def other_flags(config: PlanConfig) -> str:
    """Return the settings of a run, besides its plan, that the estimate is for."""
    trainer = replace(
        config.trainer,
        train_micro_batch_size=config.micro_batch_rows,
        micro_batch_tokens=None,
        packed_row_tokens=config.row_tokens if config.trainer.sequence_packing else None,
    )
    generation = GenerationConfig()
    if config.engines:
        replicas = config.gpus // config.generation.devices_per_replica
        generation = replace(config.generation, num_replicas=replicas)
    return _flags(
        trainer=trainer, optimizer=config.optimizer, lora=config.lora, generation=generation
    )


def nothing_fits(config: PlanConfig, smallest: Candidate) -> str:
    """Return what the smallest plan lacks, and which settings take less memory."""
    given, needed, generates = config.gpu_memory, smallest.fullest.total, config.engines
    traits = limits_of(config.trainer.backend).traits
    sharded = traits.shards == "parameters"
    remedies = ["--parallel.cpu-offload"] * (sharded and not config.parallel.cpu_offload)
    remedies += ["--lora.rank 16"] * (traits.adapters and not config.lora.rank)
    resident = config.trainer.offload_during_generation is False
    able = generates and implements(config.trainer.backend, "offload")
    remedies += ["--trainer.offload-during-generation"] * (able and resident)
    fewer = "a larger --generation.tensor-parallel-size", "--generation.no-colocated"
    remedies += [*fewer] * generates
    return (
        f"gpu_memory must hold a plan, but it is {given:g}, of which"
        f" {given * (1 - config.reserve):.1f} GB may be used: the smallest needs"
        f" {max(needed / GB, 0.1):.1f} GB ({smallest.flags or 'one device'}); try"
        f" {', '.join([*remedies, 'more --gpus'])}, or a shorter --seq-len"
    )


DEGREES = {"repl": "dp_replicate", "shard": "dp_shard"}
DEGREES |= {name: name for name in ("tp", "pp", "vpp", "ep", "cp")}
PARTS = {
    "param": "parameters",
    "grads": "gradients",
    "optim": "optimizer",
    "ref": "reference",
    "activ": "activations",
    "logit": "logits",
    "whole": "gathered",
    "gener": "generation",
    "cache": "cache",
}


def table(config: PlanConfig, shown: tuple[Candidate, ...]) -> "Table":
    """Return a table with a line for each plan, without columns that are all 0."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    parts = {
        title: name
        for title, name in PARTS.items()
        if any(getattr(each.fullest, name) for each in shown)
    }
    host = ["host"] * any(candidate.host for candidate in shown)
    traits = limits_of(config.trainer.backend).traits
    unused = ["repl"] * (traits.shards == "optimizer") + ["pp"] * (not traits.pipelines)
    unused += [
        name for name in ("vpp", "ep") if all(getattr(each.plan, name) == 1 for each in shown)
    ]
    degrees = {title: name for title, name in DEGREES.items() if title not in unused}
    for title in (*degrees, "recompute", *parts, "total", *host, "sent", "time"):
        result.add_column(title, justify="right", no_wrap=True)
    for candidate in shown:
        plan, memory = candidate.plan, candidate.fullest
        cells: list[Any] = [getattr(plan, name) for name in degrees.values()]
        if plan.cp_method == "allgather":
            cells[-1] = f"{plan.cp}*"
        sizes = [getattr(memory, name) for name in parts.values()] + [memory.total]
        sizes += [candidate.host] * len(host) + [candidate.traffic.total]
        cells += [plan.activation_checkpointing, *map(_gigabytes, sizes)]
        ratio = candidate.seconds / shown[0].seconds
        result.add_row(*map(str, cells), f"{ratio:.2f}×")
    return result


def table_of_moves(moves: tuple[Move, ...]) -> "Table":
    """Return a table with a line for each of what a step moves."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for title in Move.COLUMNS:
        justify: Any = "left" if title in ("what", "through") else "right"
        result.add_column(title, justify=justify, no_wrap=True)
    for move in moves:
        result.add_row(*move.cells)
    return result


def notes_on_moves(step: Step) -> Iterator[str]:
    """Yield what a reader of `table_of_moves` has to know."""
    received = "batch and routes" if step.model.num_local_experts else "batch"
    yield (
        f"busiest rank: what it sends; of {received} what it receives, of a checkpoint what it"
        " writes. in all: of all ranks; of what passes the object store, of all machines that"
        " fetch it."
    )
    merged = ", with adapters merged" if step.adapted() else ""
    yield f"weights{merged}: by one of the three ways, gathering included."
    if step.adapted():
        yield "adapters: instead of weights, with generation.adapter_rank."
    if step.model.num_local_experts:
        yield "routes: with trainer.router_replay."


def quantity(count: float) -> str:
    """Write a number of parameters in billions, millions or thousands.

    >>> [quantity(x) for x in (70.55e9, 1.5e9, 494e6, 812_345, 999)]
    ['70.55 B', '1.50 B', '494.0 M', '812.3 k', '999']
    """
    for unit, size, digits in (("B", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f}"


def _gigabytes(size: float) -> str:
    """Write bytes in GB without its unit, with two digits where they are few.

    >>> [_gigabytes(x) for x in (112.4e9, 72e9, 0.34e9, 1.2e6, 0)]
    ['112', '72.0', '0.34', '0.0012', '0']
    """
    value = size / GB
    digits = ".0f" if value >= 99.95 or value == 0 else ".1f" if value >= 0.95 else ".2g"
    return f"{value:{digits}}"
