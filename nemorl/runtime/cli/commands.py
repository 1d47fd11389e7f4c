"""What the commands besides the algorithms do and print."""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemorl.checks import require, warn
from nemorl.data.datasets import load_rows, stream_rows, to_examples, to_prompts, warn_of_strings
from nemorl.data.example import Example
from nemorl.data.lengths import num_tokens
from nemorl.data.preferences import Pair, labelled_rows, pair_rows, to_labelled, to_pairs
from nemorl.data.rows import Row, first_of
from nemorl.data.sources import read_rows, sources_of
from nemorl.data.statistics import Lengths, LengthStatistics, length_statistics
from nemorl.data.templates import with_chat_template
from nemorl.models.hub import check_supported, load_tokenizer, loading, model_folder, read_config
from nemorl.parallel.planner.config import PlanConfig
from nemorl.runtime.cli.settings import (
    CheckConfig,
    CompareConfig,
    EvalConfig,
    ExampleConfig,
    ExportConfig,
    GenerateConfig,
    InspectConfig,
    ReportConfig,
    ServeConfig,
    VerifyConfig,
)
from nemorl.runtime.watch.display import print_lengths

if TYPE_CHECKING:
    from nemorl.runtime.watch.report import Gathered

PLACES = ("data", "category")


def evaluate(config: EvalConfig) -> None:
    """Answer a data set, and print and write the result."""
    from nemorl.runtime.cli import inference
    from nemorl.runtime.store.files import write_atomically, writing

    output = Path(config.output or ".")
    if config.output is not None:
        require(not output.is_dir(), "output", "must be a file", config.output, "name one")
        with writing("the answers", output):
            output.parent.mkdir(parents=True, exist_ok=True)
    result = inference.evaluate_config(config)
    if config.json:
        print(json.dumps({key: value for key, value in result.items() if key != "answers"}))
    else:
        _print_evaluation(config, result)
    if config.output is not None:
        rows = (json.dumps(answer, ensure_ascii=False) + "\n" for answer in result["answers"])
        write_atomically(output, "".join(rows), "the answers")
        if not config.json:
            print(f"answers written to {config.output}")


def _print_evaluation(config: EvalConfig, result: dict[str, Any]) -> None:
    answers, columns = result["answers"], ("prompt", "response", "answer")
    shown = answers[:8]
    title = f"the first {len(shown)} of {len(answers)} answers"
    table = _table(*columns, right=("reward",), title=title)
    for row in shown:
        color = "green" if row["reward"] > 0 else "red"
        cells = (Text(_short(row[name])) for name in columns)
        table.add_row(*cells, Text(f"{row['reward']:g}", style=color))
    Console().print(table)
    temperature = config.generation.temperature
    sampling = f"temperature {temperature:g}, {config.n} per prompt" if temperature else "greedy"
    sampling = sampling if config.choices is None else "the likeliest choice"
    title = f"{config.model.path} on {', '.join(map(str, sources_of(config.data.validation)))}"
    lines = result["summaries"]
    _print_lines(
        [{name: v for name, v in line.items() if "@" not in name} for line in lines],
        f"{title} ({sampling}), with 95 % confidence intervals",
    )
    for kind in ("pass@", "cons@"):
        kept = [
            {name: v for name, v in line.items() if name.startswith((*PLACES, kind, "left_out@"))}
            for line in lines
            if line["category"] is None
        ]
        if any(name.startswith(kind) for line in kept for name in line):
            _print_lines(kept, "")
    others = {name: value for name, value in result.items() if name.startswith("reward/")}
    others |= {**result["metrics"], "response_length": result["response_length"]}
    parts = (f"{name.replace('_', ' ')} {value:.4f}" for name, value in others.items())
    Console().print(*parts, sep=", ")


def _print_lines(lines: Sequence[dict[str, Any]], title: str) -> None:
    places = [name for name in PLACES if any(line[name] for line in lines)]
    every = dict.fromkeys(name for line in lines for name in line)
    names = [name for name in every if name not in PLACES and not name.endswith("_ci")]
    table = _table(*places, right=names, box=None)
    for line in lines:
        cells = [Text(line[name] or "all") for name in places]
        table.add_row(*cells, *(_cell(line, name) for name in names))
    console = Console(highlight=False)
    console.print(Text(title), soft_wrap=True)
    console.print(table)


def _cell(line: dict[str, Any], name: str) -> str:
    value, spread = line.get(name), line.get(f"{name}_ci")
    if value is None or isinstance(value, str | int):
        return str(value or "")
    raw = "reward" in (name, line.get("metric")) or name == "p_value"
    scale, digits, unit = (1, 4, "") if raw else (100, 1, "%")
    shown = f"{scale * value:.{digits}f}"
    if isinstance(spread, tuple):
        low, high = (f"{scale * end:.{digits}f}" for end in spread)
        return f"{shown}{unit} ({low} … {high})"
    return shown + ("" if spread is None else f" ± {scale * spread:.{digits}f}") + unit


def _table(
    *columns: str, right: Sequence[str] = (), title: str | None = None, **options: Any
) -> Table:
    table = Table(title=title, title_justify="left", pad_edge="box" not in options, **options)
    for name in columns:
        table.add_column(name.replace("_", " "), overflow="fold")
    for name in right:
        table.add_column(name.removeprefix("num_").replace("_", " "), justify="right")
    return table


def compare(config: CompareConfig) -> None:
    """Print how two evaluations differ."""
    from nemorl.rollout.evaluation import comparison

    wanted = ("data", "group", "prompt", "reward")
    both = [read_rows(file, split="train") for file in (config.first, config.second)]
    for row in (*both[0], *both[1]):
        require(
            {*wanted} <= row.keys(),
            row.origin,
            f"must have {', '.join(wanted)}",
            sorted(row),
            "name files that nemorl eval --output has written",
        )
    found = comparison(*both, seed=config.seed)
    if config.json:
        _print_json(found)
        return
    _print_lines(found, f"{config.first} and {config.second}, paired by prompt, ± 95 % confidence")


def _print_json(lines: Iterable[Any]) -> None:
    for line in lines:
        print(json.dumps(line, ensure_ascii=False))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "" if value is None else text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 200 else text[:199] + "…"


def generate(config: GenerateConfig) -> None:
    """Answer prompts, and print a table of the answers or one JSON object a line."""
    from nemorl.runtime.cli import inference

    completions = inference.generate_config(config)
    if config.json:
        _print_json(completions)
        return
    table = _table("prompt", "response", right=("logprob", "tokens"))
    table.add_column("finish")
    previous = None
    for row in completions:
        if row["prompt"] != previous:
            table.add_section()
        table.add_row(
            Text("" if row["prompt"] == previous else row["prompt"]),
            Text(row["response"]),
            f"{row['logprob']:.2f}",
            str(row["num_tokens"]),
            row["finish_reason"],
        )
        previous = row["prompt"]
    Console().print(table)


def serve(config: ServeConfig) -> None:
    """Serve a model until Ctrl-C, with a table of what is asked."""
    from rich.live import Live

    from nemorl.runtime.cli import inference
    from nemorl.runtime.watch.callbacks import signals_raise

    with signals_raise(), inference.served(config) as (endpoint, made):
        url, name, before = endpoint.url, config.name or config.model.path, 0.0
        kind = "TINKER" if config.tinker else "OPENAI"
        others = f"/v1\nANTHROPIC_BASE_URL={url}" * (not config.tinker)
        print(f"{kind}_BASE_URL={url}{others}")
        for role, key in made.items():
            print(f"{kind}_API_KEY={key}   # role {role}; it is not shown again")
        print(f"model {name!r}; Ctrl-C ends", flush=True)
        if not config.tls_key and config.host not in ("127.0.0.1", "localhost", "::1"):
            warn("keys and texts go over the network as they are: add --tls-certificate, --tls-key")
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            for seconds in range(0, sys.maxsize, 2):
                now = endpoint.traffic.totals()
                rate, before = (now["completion tokens"] - before) / 2, now["completion tokens"]
                table = _table(*now, "tokens/s", "minutes", box=None)
                cells = (f"{each:.0f}" for each in (*now.values(), rate))
                table.add_row(*cells, f"{seconds / 60:.1f}")
                live.update(table, refresh=True)
                time.sleep(2)


def export(config: ExportConfig) -> None:
    """Export a checkpoint, and say how to try it."""
    from nemorl.runtime.cli import inference
    from nemorl.runtime.store.state import POLICY

    path = inference.export_config(config)
    hint = f'; try it: nemorl generate --model {path} --prompt "…"'
    print(f"exported to {path}{hint if config.backend == POLICY else ''}")


def report(config: ReportConfig) -> None:
    """Write the web page of runs, and print how they stand."""
    from nemorl.runtime.watch.report import read_runs, watch_runs, write_page

    runs = read_runs(config.runs)
    path = write_page(runs, config.output)
    _print_runs(runs)
    print(f"written to {path}; open it in a browser")
    if config.watch:
        print("the page follows the run until its end, or Ctrl-C")
        watch_runs(config.runs, config.output)


def _print_runs(runs: Sequence["Gathered"]) -> None:
    from nemorl.runtime.watch.metrics import course_of, headline, number
    from nemorl.runtime.watch.report import ends

    names = headline(*(line for run in runs for line in run.metrics))[:3]
    table = _table("run", "status", "step", *names, box=None)
    for run in runs:
        found = [ends(course_of(run.metrics, name)) for name in names]
        values = [f"{number(end['first'])} → {number(end['last'])}" if end else "" for end in found]
        table.add_row(Text(run.name), run.status, str(run.step), *values)
    Console().print(table)


def verify(config: VerifyConfig) -> None:
    """Print a run's receipts as recorded. Raises: SystemExit (1) where one does not hold."""
    from nemorl.runtime.store.verify import verify_run

    receipts = verify_run(config.run)
    if config.json:
        _print_json(map(vars, receipts))
    else:
        verdicts = {True: "[green]holds[/]", False: "[bold red]does not hold[/]", None: "[dim]–[/]"}
        table = _table("receipt", "", "found", box=None)
        for each in receipts:
            table.add_row(each.name, verdicts[each.holds], Text(each.found))
        Console(highlight=False).print(table)
    if wrong := [each.name for each in receipts if each.holds is False]:
        verb = "does" if len(wrong) == 1 else "do"
        print(f"{' and '.join(wrong)} of {config.run} {verb} not hold", file=sys.stderr)
        raise SystemExit(1)


def inspect(config: InspectConfig) -> None:
    """Print training data as a model sees them."""
    if sys.argv[1:3] == ["data", "inspect"]:
        # In a process for this alone, torch, which transformers loads, would take half of the time.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        sys.modules.setdefault("torch", cast(Any, None))

    print_inspection(config, inspect_data(config))


def example(config: ExampleConfig) -> None:
    """Write rows of sums: as prompts with answers, demonstrations, pairs or labels."""
    draw = random.Random(config.seed)
    rows = []
    for number in range(config.rows):
        first, second = draw.randrange(100), draw.randrange(100)
        right, wrong = str(first + second), str(first + second + draw.choice((1, 2, 10)))
        answers: dict[str, dict[str, Any]] = {
            "grpo": {"answer": right},
            "sft": {"response": right},
            "dpo": {"chosen": right, "rejected": wrong},
            "kto": {"response": wrong if number % 2 else right, "label": number % 2 == 0},
        }
        rows.append({"prompt": f"{first}+{second}=", **answers[config.kind]})
    try:
        with Path(config.file).open("x", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
    except OSError as error:
        raise ValueError(f"file must be new, but {config.file}: {error.strerror}") from None
    print(f"{config.file}: {config.rows} rows such as {json.dumps(rows[0])}")


def plan(config: PlanConfig) -> None:
    """Print the ways to spread a model that fit."""
    from nemorl.parallel.planner.command import find_plans, print_plans

    model = replace(config.model, path=model_folder(config.model.path))
    print_plans(find_plans(replace(config, model=model)))


def check_model(config: CheckConfig) -> None:
    """Print what a model can do here, found on a tiny model of its configuration."""
    from nemorl.models.capabilities import CAPABILITIES
    from nemorl.parallel.proving import LIMIT, proved_now
    from nemorl.runtime.engines.backend import prove_engine

    with loading(config.model, field="model"):
        path = Path(config.model)
        of_model = read_config(
            model_folder(str(path.parent) if path.name == "config.json" else config.model),
            trust_remote_code=config.trust_remote_code,
        )
    check_supported(of_model)
    console = Console(highlight=False)
    with console.status(f"computing a tiny {of_model.model_type} in each way …"):
        found = proved_now(of_model)
        rows = [(CAPABILITIES[name], proof) for name, proof in found.items()]
        if config.vllm:
            rows.append(("vLLM's log-probabilities, also after an update", prove_engine(of_model)))
    title = f"{of_model.model_type}: largest difference from transformers (at most {LIMIT:g})"
    table = _table("capability", "", "difference or reason", title=title)
    for name, proof in rows:
        table.add_row(name, "[green]yes[/]" if proof.holds else "[red]no[/]", Text(str(proof)))
    console.print(table)
    if not found["alone"].holds:
        raise ValueError(f"the model must be trained elsewhere: {found['alone'].reason}")


class Command(NamedTuple):
    config: type[Any]
    execute: Callable[[Any], None]


COMMANDS = {
    "eval": Command(EvalConfig, evaluate),
    "compare": Command(CompareConfig, compare),
    "generate": Command(GenerateConfig, generate),
    "serve": Command(ServeConfig, serve),
    "export": Command(ExportConfig, export),
    "report": Command(ReportConfig, report),
    "verify": Command(VerifyConfig, verify),
    "data example": Command(ExampleConfig, example),
    "data inspect": Command(InspectConfig, inspect),
    "plan": Command(PlanConfig, plan),
    "models check": Command(CheckConfig, check_model),
}


Kind = Literal["prompt", "sft", "pairs", "labels"]
KINDS: dict[Kind, tuple[str, Callable[..., Sequence[Any]]]] = {
    "prompt": ("prompts", to_prompts),
    "sft": ("demonstrations", to_examples),
    "pairs": ("preference pairs", to_pairs),
    "labels": ("answers with a verdict", to_labelled),
}
"""What rows are called, and the function that makes tokens of them."""


@dataclass(frozen=True)
class Inspection:
    kind: Kind
    rows: Sequence[Row]
    items: Sequence[Any]
    """Token ids, Examples, Pairs, or Examples with their verdicts."""
    statistics: LengthStatistics
    tokenizer: Any


def inspect_data(config: InspectConfig, *, tokenizer: Any = None, train: Any = None) -> Inspection:
    """Return the rows of `data.train` (or `train`) as tokens; nothing is cut."""
    model, data = config.model, config.data
    source = data.train if train is None else train
    require(bool(source), "data.train", "must be given", source, "add --data.train FILE")
    read: Any = stream_rows if data.streaming else load_rows
    rows = first_of(read(source, split=data.split, **data.reading()))
    if tokenizer is None:
        require(
            bool(model.path or model.tokenizer),
            "model.path",
            "must be given",
            model.path,
            "add --model.path, or --model.tokenizer",
        )
        tokenizer = load_tokenizer(
            model.tokenizer or model_folder(model.path), trust_remote_code=model.trust_remote_code
        )
    tokenizer = with_chat_template(tokenizer, model.chat_template, model.chat_template_kwargs)
    warn_of_strings(rows, tokenizer)
    kind = kind_of(rows[0]) if config.kind == "auto" else config.kind
    rows = pair_rows(rows) if kind == "pairs" else labelled_rows(rows) if kind == "labels" else rows
    items = KINDS[kind][1](rows, tokenizer)
    tokens = [*map(num_tokens, items)]
    statistics = length_statistics(Lengths(tokens=tokens, limit=data.max_total_sequence_length))
    return Inspection(kind, rows, items, statistics, tokenizer)


def kind_of(row: Mapping[str, Any]) -> Kind:
    """Return what a row looks like it is for."""
    if row.get("chosen") is not None or row.get("completions") is not None:
        return "pairs"
    if row.get("response") is not None:
        return "labels" if row.get("label") is not None else "sft"
    last = (row.get("messages") or [{}])[-1]
    return "sft" if isinstance(last, Mapping) and last.get("role") == "assistant" else "prompt"


def print_inspection(
    config: InspectConfig, found: Inspection, console: Console | None = None
) -> None:
    """Print the first rows, trained tokens in color or brackets, and the lengths of all."""
    console = console or Console(highlight=False)
    styled = console.is_terminal and console.color_system is not None
    like = Text("like this", style="bold green") if styled else Text("⟦like this⟧")
    legend = Text("trained on: ") + like
    if found.kind == "prompt":
        legend = Text("prompts are not trained on")
    title, _ = KINDS[found.kind]
    console.print(Text(f"{len(found.items)} {title}; ") + legend)
    for row, item in list(zip(found.rows, found.items, strict=True))[: config.rows]:
        for name, example in _parts(found.kind, item):
            count = f"{example.num_tokens} tokens"
            if any(example.loss_mask):
                count += f", {sum(example.loss_mask)} trained on"
            console.print(Text(f"\n{row.origin}{name}: {count}", style="bold cyan"), soft_wrap=True)
            console.print(shown(example, found.tokenizer, styled=styled), soft_wrap=True)
    console.print()
    print_lengths(console, {title: found.statistics})
    most = max((count for _, count in found.statistics.histogram), default=0)
    below = 0
    for edge, number in found.statistics.histogram:
        bar = "█" * max(round(40 * number / most), int(number > 0))
        console.print(f"{below + 1:>7} - {edge:<7} {number:>8} {bar}")
        below = edge
    if found.kind != "prompt" and found.statistics.count > 1:
        padded, packed = found.statistics.padded_fill, found.statistics.packed_fill
        console.print(
            f"rows padded to the longest are {padded:.0%} full, with --trainer.sequence-packing"
            f" {packed:.0%}"
        )


def shown(example: Example, tokenizer: Any, *, styled: bool) -> Text:
    """Return an example as text, what is trained on green if `styled`, else in brackets."""
    text, begin = Text(), 0
    for trained, places in groupby(example.loss_mask):
        end = begin + len(list(places))
        part = _decoded(tokenizer, example.input_ids, begin, end)
        part = part.replace("\x1b", "␛").replace("\n", "↵\n")
        text.append(
            f"⟦{part}⟧" if trained and not styled else part,
            style="bold green" if trained else "" if example.response_mask[begin] else "dim",
        )
        begin = end
    return text


def _parts(kind: Kind, item: Any) -> list[tuple[str, Example]]:
    if isinstance(item, Pair):
        return [(", chosen", item.chosen), (", rejected", item.rejected)]
    if kind == "labels":
        return [(", wanted" if item[1] else ", not wanted", item[0])]
    if isinstance(item, Example):
        return [("", item)]
    nothing = [False] * len(item)
    return [("", Example(input_ids=item, loss_mask=nothing, response_mask=nothing))]


def _decoded(tokenizer: Any, ids: Sequence[int], begin: int, end: int) -> str:
    """Return the text of some tokens, which alone might lose their first space."""

    def decode(first: int, last: int) -> str:
        return tokenizer.decode(
            list(ids[first:last]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    before, through = decode(0, begin), decode(0, end)
    return through[len(before) :] if through.startswith(before) else decode(begin, end)
