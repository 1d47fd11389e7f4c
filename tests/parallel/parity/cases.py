"""The matrix: what is compared with the reference, and what of it in every test run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from nemorl.parallel.plan import ParallelPlan
from tests.parallel.parity.golden import PACKED_ROW, Problem
from tests.tiny_models import EXPERTS

PLANS: dict[str, ParallelPlan | None] = {
    "one process": None,
    "FSDP2 1": ParallelPlan(),
    "FSDP2 2": ParallelPlan(dp_shard=2),
    "FSDP2 2 + CPU offload": ParallelPlan(dp_shard=2, cpu_offload=True),
    "FSDP2 3": ParallelPlan(dp_shard=3),
    "FSDP2 4": ParallelPlan(dp_shard=4),
    "HSDP 2×2": ParallelPlan(dp_replicate=2, dp_shard=2),
    "TP 2": ParallelPlan(dp_shard=1, tp=2, sequence_parallel=False),
    "TP 2 + SP": ParallelPlan(dp_shard=1, tp=2),
    "CP 2 ulysses": ParallelPlan(dp_shard=1, cp=2),
    "CP 2 allgather": ParallelPlan(dp_shard=1, cp=2, cp_method="allgather"),
    "FSDP2 2 × TP 2": ParallelPlan(dp_shard=2, tp=2, sequence_parallel=False),
    "FSDP2 2 × TP 2 + SP": ParallelPlan(dp_shard=2, tp=2),
    "FSDP2 3 × TP 2 + SP": ParallelPlan(dp_shard=3, tp=2),
    "FSDP2 2 × CP 2 ulysses": ParallelPlan(dp_shard=2, cp=2),
    "FSDP2 2 × CP 2 allgather": ParallelPlan(dp_shard=2, cp=2, cp_method="allgather"),
    "CP 2 × TP 2 + SP": ParallelPlan(dp_shard=1, cp=2, tp=2),
    "TP 4 + SP": ParallelPlan(dp_shard=1, tp=4),
    "CP 4 ulysses": ParallelPlan(dp_shard=1, cp=4),
    "HSDP 2×2 × TP 2 + SP": ParallelPlan(dp_replicate=2, dp_shard=2, tp=2),
    "FSDP2 2 × CP 2 ulysses × TP 2 + SP": ParallelPlan(dp_shard=2, cp=2, tp=2),
    "FSDP2 2 × CP 2 allgather × TP 2 + SP": ParallelPlan(
        dp_shard=2, cp=2, tp=2, cp_method="allgather"
    ),
    "megatron 1": ParallelPlan(dp_shard=1),
    "megatron DP 2": ParallelPlan(dp_shard=2),
    "megatron TP 2": ParallelPlan(dp_shard=1, tp=2, sequence_parallel=False),
    "megatron TP 2 + SP": ParallelPlan(dp_shard=1, tp=2),
    "megatron PP 2": ParallelPlan(dp_shard=1, pp=2),
    "megatron CP 2 ulysses": ParallelPlan(dp_shard=1, cp=2),
    "megatron CP 2 allgather": ParallelPlan(dp_shard=1, cp=2, cp_method="allgather"),
    "megatron PP 4": ParallelPlan(dp_shard=1, pp=4),
    "megatron PP 2 × VPP 2": ParallelPlan(dp_shard=1, pp=2, vpp=2),
    "megatron PP 2 × VPP 2 × CP 2 allgather": ParallelPlan(
        dp_shard=1, pp=2, vpp=2, cp=2, cp_method="allgather"
    ),
    "megatron TP 2 × PP 2 × VPP 2 + SP": ParallelPlan(dp_shard=1, tp=2, pp=2, vpp=2),
    "megatron TP 2 × PP 2": ParallelPlan(dp_shard=1, tp=2, pp=2, sequence_parallel=False),
    "megatron TP 2 × PP 2 + SP": ParallelPlan(dp_shard=1, tp=2, pp=2),
    "megatron DP 2 × PP 2": ParallelPlan(dp_shard=2, pp=2),
    "megatron DP 2 × TP 2 + SP": ParallelPlan(dp_shard=2, tp=2),
    "megatron TP 2 × PP 2 × CP 2 + SP": ParallelPlan(dp_shard=1, tp=2, pp=2, cp=2),
    "megatron EP 2": ParallelPlan(dp_shard=2, ep=2),
    "megatron EP 2 × TP 2 + SP": ParallelPlan(dp_shard=2, ep=2, tp=2),
    "megatron EP 2 × PP 2": ParallelPlan(dp_shard=2, ep=2, pp=2),
    "megatron EP 2 × CP 2": ParallelPlan(dp_shard=1, ep=2, cp=2),
    "megatron EP 2 × PP 2 × CP 2": ParallelPlan(dp_shard=1, ep=2, pp=2, cp=2),
}
"""By the names of the table; those of trainer.backend megatron begin with it.

None: plain tensors in a process without a process group; FSDP2 1: the whole machinery in a single
rank.
"""

LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sequence_packing": True, "packed_row_tokens": PACKED_ROW},
    "one packed row": {"sequence_packing": True, "packed_row_tokens": 4 * PACKED_ROW},
    "microbatched": {"train_micro_batch_size": 2},
    "token budget": {"micro_batch_tokens": PACKED_ROW},
}
"""Settings of the trainer.

One packed row would hold the batch; it is as many as there are ranks with rows of their own.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Three steps of a plan on the golden batch."""

    plan: str
    layout: str = "padded"
    problem: Problem = field(default_factory=Problem)
    activation_checkpointing: str = "none"
    compile: bool = False
    varlen: bool = False
    """Whether attention is by the kernel of GPUs, or its definition where there is none."""
    settings: tuple[tuple[str, Any], ...] = ()
    """More of the plan's, by name."""
    sabotage: str = ""
    """What is broken on purpose, a name in sabotage.py: then the comparison has to fail."""

    @property
    def ranks(self) -> int:
        plan = PLANS[self.plan]
        return 0 if plan is None else plan.num_ranks

    @property
    def backend(self) -> str:
        return "megatron" if is_megatron(self.plan) else "dtensor"

    @property
    def parallel(self) -> ParallelPlan:
        options: dict[str, Any] = {
            "param_dtype": self.problem.dtype,
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compile,
            **dict(self.settings),
        }
        return replace(PLANS[self.plan] or ParallelPlan(), **options)

    def __str__(self) -> str:
        problem, how = self.problem, self.activation_checkpointing
        tied = "tied" if problem.tied else "untied"
        words = {
            f"{problem.logprobs} logprobs": problem.logprobs,
            "LoRA": problem.lora,
            "two rows": problem.few,
            "router replay": problem.replay,
            f"{problem.layers} layers": problem.layers != 3,
            f"{how} checkpointing": how != "none",
            "compiled": self.compile,
            "varlen attention": self.varlen,
            problem.dtype: problem.dtype != "float32",
            **{f"{name} {value}": True for name, value in self.settings},
            f"without: {self.sabotage}": self.sabotage,
        }
        settings = (word for word, is_on in words.items() if is_on)
        return ", ".join([self.plan, problem.model, tied, self.layout, problem.loss, *settings])


@cache
def matrix() -> tuple[Case, ...]:
    """Every case of `make parity`."""
    return tuple(
        case
        for case in dict.fromkeys((*_matrix(), *_uneven()))
        if case.ranks or not (case.compile or case.activation_checkpointing == "selective")
    )


def _matrix() -> Iterator[Case]:
    # In bfloat16 with losses that don't clip: rounding would decide on which side of the clip a
    # ratio falls, and that is no small difference.
    for plan in PLANS:
        of = partial(Problem, layers=4 if is_megatron(plan) else 3)
        yield from _mixtures(plan)
        if is_megatron(plan) and of_megatron(plan).ep > 1:
            continue
        for layout in LAYOUTS:
            for tied in (True, False):
                for checkpointing in ("none", "selective", "full"):
                    yield Case(
                        plan=plan,
                        layout=layout,
                        problem=of(tied=tied),
                        activation_checkpointing=checkpointing,
                    )
                yield Case(
                    plan=plan,
                    layout=layout,
                    problem=of(tied=tied, loss="nll" if tied else "pairs", dtype="bfloat16"),
                )
        for layout in ("padded", "packed"):
            for model in ("llama", "qwen3", "mistral"):
                for tied in (True, False):
                    yield Case(plan=plan, layout=layout, problem=of(model=model, tied=tied))
            for loss in ("pairs", "nll"):
                yield Case(plan=plan, layout=layout, problem=of(loss=loss))
            for logprobs in ("temperature", "filtered", "min-p"):
                yield Case(plan=plan, layout=layout, problem=of(logprobs=logprobs))
            if has_lora(plan):
                yield Case(plan=plan, layout=layout, problem=of(lora=True))
        for layout in ("padded", "microbatched"):
            yield Case(plan=plan, layout=layout, problem=of(few=True))
        if is_megatron(plan):  # which compiles nothing
            continue
        yield Case(plan=plan, layout="packed", compile=True)
        yield Case(
            plan=plan,
            layout="padded",
            problem=of(tied=False),
            activation_checkpointing="full",
            compile=True,
        )
        yield Case(
            plan=plan,
            layout="microbatched",
            problem=of(model="qwen3", tied=False),
            activation_checkpointing="selective",
            compile=True,
        )


def _mixtures(plan: str) -> Iterator[Case]:
    """Of experts, which megatron-core splits by tp only together with sequence parallelism."""
    spread = PLANS[plan] or ParallelPlan()
    if is_megatron(plan) and spread.tp > 1 and not plan.endswith("SP"):
        return
    for model in EXPERTS:
        for tied in (True, False):
            for layout in LAYOUTS if spread.ep > 1 else ("packed",):
                problem = Problem(layers=4, model=model, tied=tied)
                yield Case(plan=plan, layout=layout, problem=problem)
        problem = Problem(layers=4, model=model, loss="pairs")
        yield Case(plan=plan, problem=problem, activation_checkpointing="full")
        for layout in ("padded", "packed", "microbatched"):
            problem = Problem(layers=4, model=model, replay=True)
            yield Case(plan=plan, layout=layout, problem=problem, activation_checkpointing="full")


def of_ends(first: int, last: int) -> tuple[tuple[str, Any], ...]:
    ends = {"first": first, "last": last}
    return tuple((f"num_layers_in_{end}_pipeline_stage", count) for end, count in ends.items())


def _uneven() -> Iterator[Case]:
    for plan, layers in (
        *(("PP 2", 3), ("PP 2", 5), ("PP 4", 5), ("PP 4", 6), ("PP 4", 7), ("DP 2 × PP 2", 5)),
        *(("PP 2 × VPP 2", 5), ("PP 2 × VPP 2", 6), ("PP 2 × VPP 2", 7)),
        *(("TP 2 × PP 2 + SP", 5), ("TP 2 × PP 2 × VPP 2 + SP", 7)),
        *(("TP 2 × PP 2 × CP 2 + SP", 3), ("PP 2 × VPP 2 × CP 2 allgather", 7)),
        ("EP 2 × PP 2 × CP 2", 5),
    ):
        for tied in (True, False) if of_megatron(f"megatron {plan}").ep == 1 else ():
            problem = Problem(layers=layers, tied=tied)
            yield Case(plan=f"megatron {plan}", layout="microbatched", problem=problem)
        for model in EXPERTS:
            if model == "mixtral" and layers == 5:  # off by almost the limit in one process
                continue
            problem = Problem(layers=layers, model=model, replay=True)
            yield Case(plan=f"megatron {plan}", layout="packed", problem=problem)
    for plan, layers, settings in (
        ("PP 2", 6, of_ends(2, 4)),
        ("PP 4", 7, of_ends(3, 1)),
        ("PP 2 × VPP 2", 8, of_ends(2, 6)),
        ("PP 2 × VPP 2", 7, of_ends(4, 4)[:1]),
    ):
        for model in ("qwen2", "qwen3_moe"):
            problem = Problem(layers=layers, model=model)
            yield Case(plan=f"megatron {plan}", problem=problem, settings=settings)


def of_megatron(plan: str) -> ParallelPlan:
    found = PLANS[plan]
    assert found is not None
    return found


def is_megatron(plan: str) -> bool:
    return plan.startswith("megatron")


def has_lora(plan: str) -> bool:
    return not is_megatron(plan)


def of_modules(*modules: str) -> dict[str, Any]:
    settings = (("recompute_modules", modules),)
    return {"activation_checkpointing": "selective", "settings": settings}


def varlen(plan: str, layout: str, problem: Problem, recomputed: str = "none") -> Case:
    how: dict[str, Any] = {"activation_checkpointing": recomputed, "varlen": True}
    return Case(plan=plan, layout=layout, problem=problem, **how)


UNTIED = Problem(tied=False)
REPLAYED = Problem(layers=4, model="qwen3_moe", replay=True)
SOFT = Problem(loss="soft")
QUICK = (
    Case(plan="one process", layout="packed"),
    Case(
        plan="FSDP2 2",
        layout="one packed row",
        problem=UNTIED,
        activation_checkpointing="selective",
    ),
    Case(plan="TP 2", layout="padded", problem=UNTIED, activation_checkpointing="full"),
    Case(plan="TP 2 + SP", layout="packed"),
    Case(plan="TP 2 + SP", layout="packed", problem=Problem(lora=True)),
    Case(plan="TP 2 + SP", layout="packed", problem=Problem(layers=4, model="qwen3_moe")),
    Case(plan="megatron TP 2 + SP", layout="packed", problem=Problem(model="qwen3")),
    Case(plan="megatron PP 2", layout="microbatched", problem=Problem(layers=5)),
    Case(plan="megatron EP 2", layout="packed", problem=Problem(model="qwen3_moe")),
    Case(plan="megatron EP 2", layout="packed", problem=Problem(model="mixtral", replay=True)),
    Case(plan="one process", layout="packed", problem=SOFT),
    Case(plan="TP 2 + SP", layout="microbatched", problem=SOFT),
    varlen("one process", "packed", Problem(loss="nll", dtype="bfloat16")),
    varlen("one process", "token budget", Problem(loss="pairs")),
    varlen("one process", "packed", Problem(lora=True), "full"),
    varlen("FSDP2 2", "padded", UNTIED, "selective"),
    varlen("CP 2 ulysses", "packed", Problem(loss="pairs")),
    varlen("megatron TP 2 + SP", "packed", Problem(model="qwen3")),
    varlen("megatron PP 2", "token budget", Problem(layers=4)),
)
"""Chosen by hand."""

OTHERS = (
    Case(plan="FSDP2 2", layout="packed", compile=True),
    *(
        Case(plan=plan, layout=layout, problem=replace(SOFT, **options))
        for plan, layout, options in (
            ("FSDP2 2", "padded", {"tied": False}),
            ("TP 2", "packed", {"logprobs": "temperature"}),
            ("CP 2 ulysses", "packed", {}),
            ("CP 2 allgather", "padded", {}),
            ("FSDP2 2 × CP 2 ulysses × TP 2 + SP", "packed", {}),
            ("megatron 1", "packed", {}),
            ("megatron TP 2 + SP", "packed", {"tied": False}),
            ("megatron PP 2", "microbatched", {"layers": 4}),
            ("megatron CP 2 ulysses", "packed", {}),
            ("megatron DP 2 × PP 2", "padded", {"layers": 4}),
            ("megatron EP 2", "packed", {"model": "mixtral"}),
        )
    ),
    Case(plan="megatron PP 2", problem=REPLAYED, **of_modules("core_attn", "moe")),
    Case(plan="megatron TP 2 + SP", layout="packed", **of_modules("core_attn", "mlp")),
    varlen("FSDP2 1", "packed", Problem(loss="nll", dtype="bfloat16")),
    varlen("FSDP2 2", "one packed row", Problem(loss="pairs")),
    varlen("TP 2 + SP", "padded", Problem(model="qwen3"), "full"),
    varlen("CP 2 × TP 2 + SP", "packed", UNTIED),
    varlen("megatron 1", "padded", Problem(layers=4, loss="pairs")),
    varlen("megatron CP 2 ulysses", "packed", Problem(), "full"),
    varlen("megatron TP 2", "packed", Problem(loss="nll", dtype="bfloat16")),
    varlen("megatron EP 2", "packed", Problem(model="mixtral")),
)
"""What is not in the matrix, or slow there."""


def drawn() -> Iterator[Case]:
    """Yield five cases of the matrix of each plan, one for eight ranks; the same in every run."""
    for plan in PLANS:
        own = [case for case in matrix() if case.plan == plan and not case.compile]
        yield from random.Random(plan).sample(own, 1 if own[0].ranks > 4 else 5)


REST = tuple(case for case in dict.fromkeys((*OTHERS, *drawn())) if case not in QUICK)


def subset() -> tuple[Case, ...]:
    return QUICK + REST


CONTROLS = (
    Case(plan="FSDP2 2", layout="packed", sabotage="the reduction of gradients"),
    Case(plan="FSDP2 2", layout="microbatched", sabotage="the sum of gradients (a mean instead)"),
    Case(plan="TP 2 + SP", layout="padded", sabotage="the tied weight"),
    Case(plan="CP 2 ulysses", layout="packed", sabotage="the packed mask"),
    Case(plan="FSDP2 2", layout="packed", sabotage="the packed mask"),
    Case(plan="TP 2", layout="packed", sabotage="the packed mask"),
    Case(plan="CP 2 allgather", layout="packed", sabotage="the packed mask"),
    Case(plan="CP 2 ulysses", layout="packed", sabotage="the reduction of gradients"),
    Case(plan="HSDP 2×2", layout="packed", sabotage="the reduction over replicas"),
    Case(plan="TP 2", layout="padded", sabotage="the gradient of the others' vocabulary"),
    Case(plan="CP 2 ulysses", layout="padded", sabotage="counting the loss once"),
    Case(plan="FSDP2 2", layout="padded", sabotage="which prompts are the same"),
    Case(plan="megatron DP 2", layout="packed", sabotage="the reduction of gradients"),
    Case(plan="megatron DP 2", layout="packed", sabotage="the sum of gradients (a mean instead)"),
    Case(plan="megatron TP 2", layout="packed", sabotage="the packed mask"),
    Case(plan="megatron TP 2", layout="padded", sabotage="the gradient of the others' vocabulary"),
    Case(plan="megatron TP 2 + SP", layout="packed", sabotage="the gradients of norms"),
    Case(plan="megatron CP 2 ulysses", layout="padded", sabotage="counting the loss once"),
    Case(plan="megatron CP 2 allgather", layout="packed", sabotage="the packed mask"),
    Case(
        plan="megatron PP 2",
        layout="packed",
        problem=Problem(layers=4),
        sabotage="the gradient of the other stage's embedding",
    ),
    Case(plan="megatron EP 2", layout="packed", problem=REPLAYED, sabotage="the sampler's experts"),
)
"""Negative controls: each must be found to be wrong."""
