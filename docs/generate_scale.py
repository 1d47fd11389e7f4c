"""Write the tables of docs/scale.md: what a step moves, by `nemorl plan`'s numbers.

python docs/generate_scale.py
"""

from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from nemorl.parallel.planner.command import Candidate, find_plans, quantity
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import Step
from nemorl.parallel.planner.moves import Move, batch_tokens, brief, step_moves
from nemorl.parallel.planner.timing import Times
from nemorl.runtime.cli.api import from_keywords

PAGE, MODELS = (Path(__file__).with_name(name) for name in ("scale.md", "models-of-plans"))
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
WHOLE: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
CASES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {"gpus": 8, "seq_len": 8192},
    "llama-3.1-70b": {"gpus": 64, "seq_len": 8192, "trainer__backend": "megatron"},
    "qwen3-235b-a22b": {"gpus": 512, "seq_len": 4096, "trainer__backend": "megatron"},
}


def found(name: str, **options: Any) -> tuple[Candidate, Step]:
    """Return the first plan for a model of the guides, and its step."""
    path = str(MODELS / f"{name}.json")
    config = from_keywords(PlanConfig, "plan", {"model__path": path, **options})
    planned = find_plans(config)
    best = planned.fitting[0]
    return best, Step(planned.step.model, best.plan, config)


def parts(times: Times) -> str:
    """Write what a step's time is made of."""
    values = {name: value for name, value in asdict(times).items() if name != "overlaps"}
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items() if value >= 0.005)


def section(name: str, options: dict[str, Any]) -> str:
    best, step = found(name, **options)
    rows = [f"| {' | '.join(move.cells)} |" for move in step_moves(step)]
    lines = [
        f"### {name} on {options['gpus']} GPUs",
        "",
        "```text",
        *wrap(f"--trainer.backend {step.work.trainer.backend} {best.flags}", 100, **WHOLE),
        "```",
        "",
        f"{quantity(step.model.num_parameters())} parameters, {batch_tokens(step):,} tokens in"
        f" rows of {step.width:,}. An optimizer step takes {brief(best.seconds)} s:",
        f"{parts(best.times)}.",
        "",
        f"| {' | '.join(Move.COLUMNS)} |",
        "|---" * len(Move.COLUMNS) + "|",
        *rows,
    ]
    return "\n".join(lines)


def page() -> str:
    """Return the page with tables as they are now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    sections = "\n\n".join(section(name, options) for name, options in CASES.items())
    return f"{before}{BEGIN}\n\n{sections}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
