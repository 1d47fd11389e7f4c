"""`nemorl plan`: all plans for a model on so many GPUs, with their memory and time."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.checks import require
from nemorl.models.hub import loading
from nemorl.parallel.backends import limits_of
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.cost import RECOMPUTED, Traffic, seconds, step_traffic
from nemorl.parallel.planner.megatron import Stage
from nemorl.parallel.planner.memory import Memory, Step
from nemorl.parallel.planner.model_shape import ModelShape, model_shape

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GB = 1e9


@dataclass(frozen=True)
class Candidate:
    """A plan, and what it costs each device."""

    plan: ParallelPlan
    fullest: Memory
    """The fullest moment of training or generation."""
    host: int
    """Bytes of main memory of a machine that offloading takes."""
    traffic: Traffic
    seconds: float
    """Estimated time of an optimizer step; only for comparing plans."""

    @property
    def flags(self) -> str:
        """The settings that make a run use this plan."""
        parts = []
        for item in fields(ParallelPlan):
            value = getattr(self.plan, item.name)
            if value != item.default:
                flag = f"--parallel.{item.name.replace('_', '-')}"
                parts.append(flag if value is True else f"{flag} {value}")
        return " ".join(parts)


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
    model, steps, refused = read_shape(config.model), [], dict[str, None]()
    traits = limits_of(config.backend).traits
    require(
        traits.experts or not model.num_local_experts,
        "backend",
        f"must be megatron for {model.model_type}, a mixture of experts, which {config.backend}"
        " neither trains nor plans",
        config.backend,
        "add --backend megatron",
    )
    for plan in candidates(config, model):
        problems = list(plan.problems(model, traits=traits))
        refused |= dict.fromkeys(problems)
        if not problems:
            steps.append(Step(model, plan, config))
    if not steps:
        given = f"the degrees given do not multiply to a divisor of {config.gpus}"
        reason = "; ".join(refused) or given
        raise ValueError(f"gpus must allow a plan that suits the model, but none does: {reason}")
    found, room = list(map(estimate, steps)), GB * config.gpu_memory * (1 - config.reserve)
    fitting = sorted((each for each in found if each.fullest.total <= room), key=_order)
    large = [each for each in found if each.fullest.total > room]
    large.sort(key=lambda each: (each.fullest.total, each.seconds))
    return Planned(steps[0], tuple(fitting), tuple(large), tuple(refused))


def read_shape(name: str) -> ModelShape:
    """Read the sizes of a folder, a config.json or a model on the hub."""
    with loading(name, field="model"):
        path = Path(name)
        if not path.exists():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        path = path / "config.json" if path.is_dir() else path
        content = json.loads(path.read_text(encoding="utf-8"))
    return model_shape(content, source=str(path))


def candidates(config: PlanConfig, model: ModelShape) -> Iterator[ParallelPlan]:
    """Yield the plans that the settings allow, even if they don't suit the model."""
    gpus, traits = config.gpus, limits_of(config.backend).traits
    for tp, pp, cp, shard in product(
        _degrees(1 if config.lora_rank else config.tp, gpus),
        _degrees(config.pp if traits.pipelines else 1, gpus),
        _degrees(config.cp, gpus),
        _degrees(config.dp_shard, gpus),
    ):
        replicate, left = divmod(gpus, tp * pp * cp * shard)
        copies = config.dp_replicate if traits.shards == "parameters" else 1
        allowed = copies in (None, replicate)
        if left or tp > config.gpus_per_node or not replicate or not allowed:
            continue
        if config.vpp > 1 and pp == 1:
            continue
        divides = cp == 1 or model.num_attention_heads % (tp * cp) == 0
        eps = [config.ep or 1]
        if model.num_local_experts:
            eps = _degrees(config.ep, shard * cp * tp)
        for ep, checkpointing in product(eps, RECOMPUTED):
            if config.activation_checkpointing in (None, checkpointing):
                yield ParallelPlan(
                    dp_replicate=replicate,
                    dp_shard=shard,
                    tp=tp,
                    pp=pp,
                    vpp=config.vpp,
                    ep=ep,
                    cp=cp,
                    cp_method=config.cp_method or ("ulysses" if divides else "allgather"),
                    param_dtype=config.param_dtype,
                    activation_checkpointing=checkpointing,  # type: ignore[arg-type]
                    cpu_offload=config.cpu_offload,
                )


def _degrees(given: int | None, number: int) -> list[int]:
    """Return the divisors of a number, or the one that is asked for."""
    return [n for n in range(1, number + 1) if number % n == 0 and given in (None, n)]


def estimate(step: Step) -> Candidate:
    """Return the memory, traffic and time of a step."""
    stages: Sequence[Step | Stage] = [step]
    traffic = step_traffic(step)
    if step.traits.shards == "optimizer":
        stages = pipeline = [Stage(step, index) for index in range(step.plan.pp)]
        traffic = max((stage.traffic() for stage in pipeline), key=lambda sent: sent.total)
    moments = [stage.training_memory() for stage in stages]
    if step.work.colocated_generation:
        moments += [step.generation_memory(stage.states()) for stage in stages]
    return Candidate(
        step.plan,
        fullest=max(moments, key=lambda moment: moment.total),
        host=min(step.work.gpus, step.work.gpus_per_node) * step.host_memory(),
        traffic=traffic,
        seconds=seconds(step, traffic),
    )


def _order(candidate: Candidate) -> tuple[float, int, int]:
    """Order plans by time, to three digits, then the simplest and then the smallest first."""
    plan = candidate.plan
    degrees = (plan.tp, plan.pp, plan.ep, plan.cp, plan.dp_replicate)
    splits = sum(degree > 1 for degree in degrees)
    return float(f"{candidate.seconds:.2e}"), splits, candidate.fullest.total


def print_plans(config: PlanConfig, found: Planned, console: "Console | None" = None) -> None:
    """Print the plans that fit, and the flags of the first; else the smallest, and an error."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    shown = (found.fitting or found.too_large)[: config.show]
    adapter = found.step.adapter_parameters()
    trains = f", {quantity(adapter)} in adapters that train," if adapter else ""
    model = found.step.model
    active = f" ({quantity(model.active_parameters())} per token)" * bool(model.num_local_experts)
    title = (
        f"{config.model}: {quantity(model.num_parameters())} parameters{active}{trains} on"
        f" {config.gpus} GPU{'s' * (config.gpus > 1)} of {config.gpu_memory:g} GB"
    )
    console.print(Text(title, style="bold"))
    lines, width = table(config, shown), console.width
    # A table wider than the terminal keeps its numbers.
    needed = console.measure(lines, options=console.options.update(max_width=1000)).maximum
    console.width = max(width, needed)
    console.print(lines)
    console.width = width
    room = _gigabytes(GB * config.gpu_memory * (1 - config.reserve))
    console.print(
        f"GB per GPU at its fullest moment; {room} of {config.gpu_memory:g} GB may be used"
        f" (--reserve {config.reserve:g}). sent: GB per GPU and optimizer step. time: of a step,"
        " estimated, relative to the first."
    )
    if config.cpu_offload or config.offload_during_generation:
        console.print("host: GB of a machine's main memory, besides what processes need.")
    if any(candidate.plan.cp_method == "allgather" for candidate in shown):
        console.print("cp *: by cp_method allgather.")
    for reason in found.refused[:3]:
        console.print(f"left out: {reason}")
    if not found.fitting:
        raise ValueError(nothing_fits(config, found.too_large[0]))
    console.print(f"\nrecommended, of {len(found.fitting)} that fit:")
    flags = " ".join(filter(None, [found.fitting[0].flags, *other_flags(config)]))
    console.print(Text(flags, style="bold green"), soft_wrap=True)


def other_flags(config: PlanConfig) -> Iterator[str]:
    """Yield the settings of a run, besides its plan, that the estimate is for."""
    if config.backend != TrainerConfig.backend:
        yield f"--trainer.backend {config.backend}"
    yield f"--trainer.train-micro-batch-size {config.micro_batch_rows}"
    if config.packed:
        yield f"--trainer.sequence-packing --trainer.packed-row-tokens {config.seq_len}"
    if config.logprob_chunk != 1024:
        yield f"--trainer.logprob-chunk {config.logprob_chunk}"
    if config.colocated_generation:
        sequences, replicas = config.generation_sequences, config.gpus // config.generation_tp
        yield f"--generation.backend vllm --generation.max-batch-size {sequences}"
        yield f"--generation.num-replicas {replicas}" if config.gpus > 1 else ""
    if config.offload_during_generation:
        yield "--trainer.offload-during-generation"
    if config.generation_tp > 1:
        yield f"--generation.tensor-parallel-size {config.generation_tp}"
    if config.lora_rank:
        yield f"--lora.rank {config.lora_rank}"
    if config.lora_target_modules:
        yield f"--lora.target-modules {' '.join(config.lora_target_modules)}"


def nothing_fits(config: PlanConfig, smallest: Candidate) -> str:
    """Return what the smallest plan lacks, and which settings take less memory."""
    given, needed = config.gpu_memory, smallest.fullest.total
    generates, traits = config.colocated_generation, limits_of(config.backend).traits
    offloads = config.offload_during_generation or config.cpu_offload
    sharded = traits.shards == "parameters"
    remedies = ["--cpu-offload"] * sharded + ["--lora-rank 16"] * traits.adapters
    remedies += ["--offload-during-generation"] * (sharded and generates and not offloads)
    remedies += ["fewer --generation-sequences"] * generates
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
    host = ["host"] * (config.cpu_offload or config.offload_during_generation)
    traits = limits_of(config.backend).traits
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
