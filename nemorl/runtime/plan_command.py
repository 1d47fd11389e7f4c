"""`nemorl plan`: all plans for a model on so many GPUs, judged by memory and time from sizes alone. Free of torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.parallel.memory import Memory, Workload, generation_memory, plain, training_memory
from nemorl.parallel.model_shape import ModelShape, model_shape
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.traffic import Traffic, micro_batches, step_traffic
from nemorl.runtime.plan_config import PlanConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GB = 1e9
FLOPS = {"bfloat16": 400e12, "float32": 50e12}
NODE_BANDWIDTH, NETWORK_BANDWIDTH = 300e9, 40e9
"""Operations and bytes per second of a device in a machine of the H100's kind. They put the plans in order, and promise nothing."""
RECOMPUTED = {"none": 0.0, "selective": 0.15, "full": 1 / 3}
"""Of the time of forward and backward pass, what recomputation adds."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, and what it costs each device."""

    plan: ParallelPlan
    training: Memory
    generation: Memory | None
    traffic: Traffic
    micro_batches: int
    seconds: float
    """Of an optimizer step, as reckoned with round numbers."""

    @property
    def fullest(self) -> Memory:
        """The fullest moment of training or generation."""
        return max((self.training, self.generation or self.training), key=lambda memory: memory.total)

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
    """Every plan for the model, in order. Raises ValueError where there is no such model, or no plan suits it."""
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
        reason = "; ".join(refused) or f"the degrees given do not multiply to a divisor of {config.gpus}"
        raise ValueError(f"gpus must allow a plan that suits the model, but there is none: {reason}")
    budget = config.gpu_memory * GB * (1 - config.reserve)
    fits = [candidate.fullest.total <= budget for candidate in found]
    fitting = sorted((candidate for candidate, fit in zip(found, fits, strict=True) if fit), key=_order)
    too_large = sorted((candidate for candidate, fit in zip(found, fits, strict=True) if not fit), key=lambda candidate: candidate.fullest.total)
    return Planned(model=model, fitting=tuple(fitting), too_large=tuple(too_large), refused=tuple(refused))


def read_shape(name: str) -> ModelShape:
    """The sizes in the config.json of a folder, a file or a model on the hub. Raises ValueError where there is none."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(name, "config.json"))
        except Exception as error:  # of many kinds: no such name, no network, no access
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"model must be a folder, a config.json or a name on the hub, but {name!r} is none ({reason}): check it") from error
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model must have a config.json, but {str(path)!r} can't be read ({error}): check it") from error
    return model_shape(content, source=str(path))


def candidates(config: PlanConfig, model: ModelShape) -> Iterator[ParallelPlan]:
    """All plans that the settings leave, whether they suit the model or not."""
    for tp in _degrees(config.tp, config.gpus):
        for cp in _degrees(config.cp, config.gpus // tp):
            for shard in _degrees(config.dp_shard, config.gpus // (tp * cp)):
                replicate = config.gpus // (tp * cp * shard)
                if config.dp_replicate not in (None, replicate) or tp > config.gpus_per_node:
                    continue
                for checkpointing in (config.activation_checkpointing,) if config.activation_checkpointing else RECOMPUTED:
                    yield ParallelPlan(
                        dp_replicate=replicate,
                        dp_shard=shard,
                        tp=tp,
                        cp=cp,
                        cp_method=config.cp_method or ("allgather" if cp > 1 and model.num_attention_heads % (tp * cp) else "ulysses"),
                        param_dtype=config.param_dtype,
                        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
                        cpu_offload=config.cpu_offload,
                    )


def judge(config: PlanConfig, model: ModelShape, plan: ParallelPlan) -> Candidate:
    """What a plan costs."""
    work = Workload(
        rows=config.micro_batch_rows,
        seq_len=config.seq_len,
        packed=config.packed,
        logprob_chunk=config.logprob_chunk,
        entropy_gradient=config.entropy,
        keep_reference=config.reference,
    )
    batch_rows = config.batch_rows or 2 * config.gpus * config.micro_batch_rows
    count = micro_batches(plan, work, batch_rows=batch_rows)
    generation = None
    if config.colocated_generation:
        generation = generation_memory(model, plan, work, tokens=config.generation_sequences * config.seq_len,
                                       tensor_parallel_size=config.generation_tp)  # fmt: skip
    traffic = step_traffic(model, plan, work, micro_batches=count)
    return Candidate(
        plan=plan,
        training=training_memory(model, plan, work),
        generation=generation,
        traffic=traffic,
        micro_batches=count,
        seconds=seconds(config, model, plan, work, traffic, count),
    )


def seconds(config: PlanConfig, model: ModelShape, plan: ParallelPlan, work: Workload, traffic: Traffic, count: int) -> float:
    """Of an optimizer step, to compare plans by: parameters travel while the layers compute, activations while they wait.

    Axes of the mesh lie in a machine from the innermost on: tp, cp, then dp_shard.
    """
    weights = model.num_parameters() - (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size)
    attention = 2 * model.num_hidden_layers * model.q_size * work.width(plan) / (4 if work.packed else 1)
    compute = count * work.tokens(plan) * 6 * (weights + attention) / plan.tp * (1 + RECOMPUTED[plan.activation_checkpointing])

    def speed(span: int) -> float:
        return NODE_BANDWIDTH if span <= config.gpus_per_node else NETWORK_BANDWIDTH

    inner, shards = plan.tp * plan.cp, plan.model_ranks * (plan.dp_shard or 1)
    hidden = traffic.shard / speed(shards) + traffic.replicate / speed(plan.num_ranks)
    return max(compute / FLOPS[plan.param_dtype], hidden) + traffic.tensor / NODE_BANDWIDTH + traffic.context / speed(inner)


def print_plans(config: PlanConfig, found: Planned, console: "Console | None" = None) -> None:
    """The plans that fit, and the flags of the first. Raises ValueError where none fits, once the smallest are shown."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    budget = config.gpu_memory * (1 - config.reserve)
    shown = (found.fitting or found.too_large)[: config.show]
    title = f"{config.model}: {found.model.num_parameters() / GB:.2f} B parameters on {config.gpus} GPUs of {config.gpu_memory:g} GB"
    console.print(Text(title, style="bold"))
    lines = table(config, shown)
    # Rather too wide for a terminal than without its numbers.
    console.width = max(console.width, console.measure(lines, options=console.options.update(max_width=1000)).maximum)
    console.print(lines)
    console.print(f"GB per device at its fullest moment; {budget:.1f} of {config.gpu_memory:g} GB may be used (--reserve {config.reserve:g}). "
                  "sent: GB per device and optimizer step. time: of a step, reckoned from sizes, against the first.")  # fmt: skip
    for reason in found.refused[:3]:
        console.print(f"left out: {reason}")
    if not found.fitting:
        smallest = found.too_large[0]
        sampling = smallest.fullest.generation > 0
        remedies = ["fewer --generation-sequences", "a larger --generation-tp"] if sampling else ["--cpu-offload"] * (not config.cpu_offload)
        remedies += ["more --gpus", "a shorter --seq-len"]
        raise ValueError(f"gpu_memory must hold a plan, but it is {config.gpu_memory:g}, of which {budget:.1f} GB may be used: the smallest needs "
                         f"{smallest.fullest.total / GB:.1f} GB ({smallest.flags or 'one device'}); try {' or '.join(remedies)}")  # fmt: skip
    best = found.fitting[0]
    rest = [f"--trainer.train-micro-batch-size {config.micro_batch_rows}"]
    rest += [f"--trainer.sequence-packing --trainer.packed-row-tokens {config.seq_len}"] * config.packed
    rest += [f"--trainer.logprob-chunk {config.logprob_chunk}"] * (config.logprob_chunk != 1024)
    console.print(f"\nrecommended, of {len(found.fitting)} that fit:")
    console.print(Text(" ".join(filter(None, [best.flags, *rest])), style="bold green"), soft_wrap=True)


def table(config: PlanConfig, shown: tuple[Candidate, ...]) -> "Table":
    """A line for each plan."""
    from rich.table import Table

    result = Table()
    degrees = {"replicate": "dp_replicate", "shard": "dp_shard", "tp": "tp", "cp": "cp"}
    parts = {"weights": "parameters", "grads": "gradients", "optim": "optimizer", "ref": "reference", "activ": "activations", "logits": "logits",
             "whole": "gathered", "gener": "generation"}  # fmt: skip
    parts = {title: name for title, name in parts.items() if any(getattr(candidate.fullest, name) for candidate in shown)}
    for title in (*degrees, "recompute"):
        result.add_column(title, justify="right")
    for title in (*parts, "total", "sent", "time"):
        result.add_column(title, justify="right", no_wrap=True)
    for candidate in shown:
        memory = candidate.fullest
        cells: list[Any] = [getattr(candidate.plan, name) for name in degrees.values()]
        if candidate.plan.cp > 1 and candidate.plan.cp_method == "allgather":
            cells[-1] = f"{candidate.plan.cp} allgather"
        sizes = [*(getattr(memory, name) for name in parts.values()), memory.total, candidate.traffic.total]
        ratio = candidate.seconds / shown[0].seconds
        result.add_row(*map(str, cells), candidate.plan.activation_checkpointing, *(_gigabytes(size) for size in sizes), f"{ratio:.2f}×")
    return result


def _gigabytes(size: float) -> str:
    value = size / GB
    return f"{value:.1f}" if value >= 0.95 or value == 0 else f"{value:.2g}"


def _degrees(given: int | None, number: int) -> list[int]:
    """The degree that is asked for, or all divisors of a number."""
    return [degree for degree in range(1, number + 1) if number % degree == 0 and given in (None, degree)]


def _order(candidate: Candidate) -> tuple[float, int, int]:
    """By time, to three digits, and of plans that take the same the simplest and then the smallest."""
    plan = candidate.plan
    return float(f"{candidate.seconds:.2e}"), sum(degree > 1 for degree in (plan.tp, plan.cp, plan.dp_replicate)), candidate.fullest.total
