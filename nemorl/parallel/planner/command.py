"""`nemorl plan`: all plans for a model on so many GPUs, judged by memory and time from sizes alone.

Free of torch.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.models.hub import require_hub
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.cost import RECOMPUTED, seconds
from nemorl.parallel.planner.memory import (
    Memory,
    Workload,
    adapters,
    generation_memory,
    host_memory,
    plain,
    training_memory,
)
from nemorl.parallel.planner.model_shape import ModelShape, model_shape
from nemorl.parallel.planner.traffic import Traffic, micro_batches, step_traffic

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, and what it costs each device."""

    plan: ParallelPlan
    training: Memory
    generation: Memory | None
    host: int
    """Bytes of main memory of the fullest machine that cpu_offload takes."""
    traffic: Traffic
    micro_batches: int
    seconds: float
    """Of an optimizer step, as reckoned with round numbers."""

    @property
    def fullest(self) -> Memory:
        """The fullest moment of training or generation."""
        return max(
            (self.training, self.generation or self.training), key=lambda memory: memory.total
        )

    @property
    def flags(self) -> str:
        """The settings that make a run use this plan."""
        default, parts = ParallelPlan(), []
        for item in fields(ParallelPlan):
            value = getattr(self.plan, item.name)
            if value != getattr(default, item.name):
                name = f"--parallel.{item.name.replace('_', '-')}"
                parts.append(name if value is True else f"{name} {value}")
        if self.plan.num_ranks == 1 and not plain(self.plan):
            parts.append("--runtime.launcher processes")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What `nemorl plan` found."""

    model: ModelShape
    fitting: tuple[Candidate, ...]
    """The fastest first."""
    too_large: tuple[Candidate, ...]
    """The smallest first."""
    refused: tuple[str, ...]
    """Why some plans don't suit the model, whatever the memory."""


def find_plans(config: PlanConfig) -> Planned:
    """Every plan for the model, in order.

    Raises ValueError where there is no such model, or no plan suits it.
    """
    model = read_shape(config.model)
    found: list[Candidate] = []
    refused: dict[str, None] = {}
    for plan in candidates(config, model):
        problems = list(plan.problems(model))
        if problems:
            refused |= dict.fromkeys(problems)
        else:
            found.append(judge(config, model, plan))
    if not found:
        reason = (
            "; ".join(refused) or f"the degrees given do not multiply to a divisor of {config.gpus}"
        )
        raise ValueError(
            f"gpus must allow a plan that suits the model, but there is none: {reason}"
        )
    fits = [not lacking(config, candidate) for candidate in found]
    fitting = sorted(
        (candidate for candidate, fit in zip(found, fits, strict=True) if fit), key=_order
    )
    too_large = sorted(
        (candidate for candidate, fit in zip(found, fits, strict=True) if not fit),
        key=lambda each: _excess(config, each),
    )
    return Planned(
        model=model, fitting=tuple(fitting), too_large=tuple(too_large), refused=tuple(refused)
    )


def lacking(config: PlanConfig, candidate: Candidate) -> tuple[str, ...]:
    """The settings that give too little memory for a plan, that of the GPUs last."""
    share = 1 - config.reserve
    host = config.host_memory is not None and candidate.host > config.host_memory * GB * share
    return ("host_memory",) * host + ("gpu_memory",) * (
        candidate.fullest.total > config.gpu_memory * GB * share
    )


def read_shape(name: str) -> ModelShape:
    """The sizes in the config.json of a folder, a file or a model on the hub.

    Raises ValueError where there is none.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file():
        from huggingface_hub import hf_hub_download

        require_hub(name, "config.json")
        try:
            path = Path(hf_hub_download(name, "config.json"))
        except Exception as error:  # of many kinds: no such name, no network, no access
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"model must be a folder, a config.json or a name on the hub, but {name!r} is none"
                f" ({reason}): check it"
            ) from error
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model must have a config.json, but {str(path)!r} can't be read ({error}): check it"
        ) from error
    return model_shape(content, source=str(path))


def candidates(config: PlanConfig, model: ModelShape) -> Iterator[ParallelPlan]:
    """All plans that the settings leave, whether they suit the model or not."""
    for tp in _degrees(1 if config.lora_rank else config.tp, config.gpus):
        for cp in _degrees(config.cp, config.gpus // tp):
            for shard in _degrees(config.dp_shard, config.gpus // (tp * cp)):
                replicate = config.gpus // (tp * cp * shard)
                if config.dp_replicate not in (None, replicate) or tp > config.gpus_per_node:
                    continue
                for checkpointing in (
                    (config.activation_checkpointing,)
                    if config.activation_checkpointing
                    else RECOMPUTED
                ):
                    yield ParallelPlan(
                        dp_replicate=replicate,
                        dp_shard=shard,
                        tp=tp,
                        cp=cp,
                        cp_method=config.cp_method
                        or (
                            "allgather"
                            if cp > 1 and model.num_attention_heads % (tp * cp)
                            else "ulysses"
                        ),
                        param_dtype=config.param_dtype,
                        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
                        cpu_offload=config.cpu_offload,
                    )


def workload(config: PlanConfig) -> Workload:
    """What a device is given to do."""
    return Workload(
        rows=config.micro_batch_rows,
        seq_len=config.seq_len,
        packed=config.packed,
        logprob_chunk=config.logprob_chunk,
        entropy_gradient=config.entropy,
        keep_reference=config.reference,
        lora_rank=config.lora_rank,
        lora_targets=config.lora_target_modules,
    )


def judge(config: PlanConfig, model: ModelShape, plan: ParallelPlan) -> Candidate:
    """What a plan costs."""
    work = workload(config)
    batch_rows = config.batch_rows or 2 * config.gpus * config.micro_batch_rows
    count = micro_batches(plan, work, batch_rows=batch_rows)
    generation = None
    if config.colocated_generation:
        generation = generation_memory(model, plan, work, tokens=config.generation_sequences * config.seq_len,
                                       tensor_parallel_size=config.generation_tp)  # fmt: skip
    sent = step_traffic(model, plan, work, micro_batches=count)
    return Candidate(
        plan=plan,
        training=training_memory(model, plan, work),
        generation=generation,
        host=min(config.gpus, config.gpus_per_node) * host_memory(model, plan, work),
        traffic=sent,
        micro_batches=count,
        seconds=seconds(
            model, plan, work, sent, micro_batches=count, gpus_per_node=config.gpus_per_node
        ),
    )


def print_plans(config: PlanConfig, found: Planned, console: "Console | None" = None) -> None:
    """The plans that fit, and the flags of the first.

    Raises ValueError where none fits, once the smallest are shown.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    budget = config.gpu_memory * (1 - config.reserve)
    shown = (found.fitting or found.too_large)[: config.show]
    gpus = f"{config.gpus} GPU{'s' * (config.gpus > 1)} of {config.gpu_memory:g} GB"
    adapter = found.model.num_hidden_layers * sum(
        matrix.size for matrix in adapters(found.model, workload(config))
    )
    trains = f", {adapter / 1e6:.1f} M in adapters that train," if adapter else ""
    console.print(
        Text(
            f"{config.model}: {found.model.num_parameters() / GB:.2f} B parameters{trains} on"
            f" {gpus}",
            style="bold",
        )
    )
    lines, width = table(config, shown), console.width
    # Rather too wide for a terminal than without its numbers.
    console.width = max(
        width, console.measure(lines, options=console.options.update(max_width=1000)).maximum
    )
    console.print(lines)
    console.width = width
    console.print(f"GB per GPU at its fullest moment; {budget:.1f} of {config.gpu_memory:g} GB may be used (--reserve {config.reserve:g}). "
                  "sent: GB per GPU and optimizer step. time: of a step, reckoned from sizes, against the first.")  # fmt: skip
    if config.cpu_offload:
        console.print(
            f"host: GB of main memory of a machine with {min(config.gpus, config.gpus_per_node)}"
            " GPUs, besides what its processes need."
        )
    if any(candidate.plan.cp_method == "allgather" for candidate in shown):
        console.print("cp *: by cp_method allgather.")
    for reason in found.refused[:3]:
        console.print(f"left out: {reason}")
    if not found.fitting:
        raise ValueError(nothing_fits(config, found))
    console.print(f"\nrecommended, of {len(found.fitting)} that fit:")
    console.print(
        Text(
            " ".join(filter(None, [found.fitting[0].flags, *other_flags(config)])),
            style="bold green",
        ),
        soft_wrap=True,
    )


def other_flags(config: PlanConfig) -> list[str]:
    """The settings of a run besides its plan that the estimate is of."""
    rest = [f"--trainer.train-micro-batch-size {config.micro_batch_rows}"]
    rest += [
        f"--trainer.sequence-packing --trainer.packed-row-tokens {config.seq_len}"
    ] * config.packed
    rest += [f"--trainer.logprob-chunk {config.logprob_chunk}"] * (config.logprob_chunk != 1024)
    rest += [
        f"--generation.backend vllm --generation.max-batch-size {config.generation_sequences}"
    ] * config.colocated_generation
    rest += [f"--generation.num-replicas {config.gpus // config.generation_tp}"] * (
        config.colocated_generation and config.gpus > 1
    )
    rest += [f"--generation.tensor-parallel-size {config.generation_tp}"] * (
        config.generation_tp > 1
    )
    rest += [f"--lora.rank {config.lora_rank}"] * (config.lora_rank > 0)
    rest += [f"--lora.target-modules {' '.join(config.lora_target_modules)}"] * bool(
        config.lora_target_modules
    )
    return rest


def nothing_fits(config: PlanConfig, found: Planned) -> str:
    """What the smallest plan lacks, and the changes with each of which some plan would fit."""
    smallest = found.too_large[0]
    name = lacking(config, smallest)[0]
    given, needed = (
        (config.host_memory or 0, smallest.host)
        if name == "host_memory"
        else (config.gpu_memory, smallest.fullest.total)
    )
    return (f"{name} must hold a plan, but it is {given:g}, of which {given * (1 - config.reserve):.1f} GB may be used: the smallest needs "
            f"{needed / GB:.1f} GB ({smallest.flags or 'one device'}); try {_remedies(config)}")  # fmt: skip


def _remedies(config: PlanConfig) -> str:
    """Settings with each of which alone some plan fits, those that can be turned further and
    further as little as does; else all, to be combined.
    """
    ladders: dict[str, list[Any]] = {
        "generation_sequences": (
            [config.generation_sequences >> times for times in range(1, 8)]
            if config.colocated_generation
            else []
        ),
        "generation_tp": (
            [2**times for times in range(1, 4) if 2**times > config.generation_tp]
            if config.colocated_generation
            else []
        ),
        "micro_batch_rows": [1] if config.micro_batch_rows > 1 else [],
        "cpu_offload": [True] if not config.cpu_offload else [],
        "lora_rank": [16] if not config.lora_rank else [],
        "gpus": [config.gpus << times for times in range(1, 4)],
        "seq_len": [
            config.seq_len >> times for times in range(1, 8) if config.seq_len >> times >= 1024
        ],
    }
    # Recomputing all takes the least memory, and one kind of plans the least time to look at.
    least = replace(config, activation_checkpointing=config.activation_checkpointing or "full")
    helps = []
    for name, values in ladders.items():
        fitting, value = next(
            ((found, value) for value in values if (found := _fitting(least, name, value))),
            ((), None),
        )
        if fitting and name == "cpu_offload":
            helps.append(
                f"{_flag(name)} (it takes {min(each.host for each in fitting) / GB:.0f} GB of a"
                " machine's main memory)"
            )
        elif fitting:
            helps.append(f"{_flag(name)} {value}")
    every = ", ".join(_flag(name) for name, values in ladders.items() if values)
    return " or ".join(helps) or f"several of {every} together"


def _fitting(config: PlanConfig, name: str, value: Any) -> tuple[Candidate, ...]:
    """The plans that fit once a setting is changed; none where that does not go with the others."""
    try:
        return find_plans(replace(config, **{name: value})).fitting
    except ValueError:
        return ()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def table(config: PlanConfig, shown: tuple[Candidate, ...]) -> "Table":
    """A line for each plan."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    degrees = {"repl": "dp_replicate", "shard": "dp_shard", "tp": "tp", "cp": "cp"}
    parts = {"param": "parameters", "grads": "gradients", "optim": "optimizer", "ref": "reference", "activ": "activations", "logit": "logits",
             "whole": "gathered", "gener": "generation"}  # fmt: skip
    parts = {
        title: name
        for title, name in parts.items()
        if any(getattr(candidate.fullest, name) for candidate in shown)
    }
    for title in (
        *degrees,
        "recompute",
        *parts,
        "total",
        *["host"] * config.cpu_offload,
        "sent",
        "time",
    ):
        result.add_column(title, justify="right", no_wrap=True)
    for candidate in shown:
        memory = candidate.fullest
        cells: list[Any] = [getattr(candidate.plan, name) for name in degrees.values()]
        if candidate.plan.cp_method == "allgather":
            cells[-1] = f"{candidate.plan.cp}*"
        sizes = [
            *(getattr(memory, name) for name in parts.values()),
            memory.total,
            *[candidate.host] * config.cpu_offload,
            candidate.traffic.total,
        ]
        ratio = candidate.seconds / shown[0].seconds
        result.add_row(
            *map(str, cells),
            candidate.plan.activation_checkpointing,
            *(_gigabytes(size) for size in sizes),
            f"{ratio:.2f}×",
        )
    return result


def _gigabytes(size: float) -> str:
    value = size / GB
    return (
        f"{value:.0f}"
        if value >= 99.95 or value == 0
        else f"{value:.1f}"
        if value >= 0.95
        else f"{value:.2g}"
    )


def _degrees(given: int | None, number: int) -> list[int]:
    """The degree that is asked for, or all divisors of a number."""
    return [
        degree
        for degree in range(1, number + 1)
        if number % degree == 0 and given in (None, degree)
    ]


def _order(candidate: Candidate) -> tuple[float, int, int]:
    """By time, to three digits, and of plans that take the same the simplest and then the smallest."""
    plan = candidate.plan
    return (
        float(f"{candidate.seconds:.2e}"),
        sum(degree > 1 for degree in (plan.tp, plan.cp, plan.dp_replicate)),
        candidate.fullest.total,
    )


def _excess(config: PlanConfig, candidate: Candidate) -> tuple[tuple[str, ...], float, float]:
    """The order of plans that don't fit: by how much they need of what there is too little of, and
    of the same the fastest.
    """
    lacks = lacking(config, candidate)
    return (
        lacks,
        candidate.host if lacks[0] == "host_memory" else candidate.fullest.total,
        candidate.seconds,
    )
