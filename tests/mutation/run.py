"""Mutation testing of `nemorl/losses` and `nemorl/data`: `make mutants`, or `python -m
tests.mutation.run --help`.

One process loads torch and forks. A first child runs every test once and notes which lines each
executes (`.mutants/coverage.json`). A second imports nemorl, collects the tests, and forks per
mutant: there the mutated function's code takes the place of the original's, and the tests that
execute its lines run, quickest first, until one fails. What runs at import (constants, defaults,
decorators) is mutated in forks that have not imported nemorl yet. Results are appended to
`.mutants/results.jsonl`; the next run takes up what is there, as far as the files are still the
same.
"""

import argparse
import importlib
import json
import os
import random
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.mutation.mutate import Mutant, mutants_of

ROOT = Path(__file__).parent.parent.parent
STATE = ROOT / ".mutants"
MUTATED = ("nemorl/losses", "nemorl/data")
TESTS = ("tests/losses", "tests/data", "nemorl/losses", "nemorl/data")
LEFT_OUT = ("tests/losses/test_compile.py",)
"""Minutes of compilation per mutant. It compares with the eager result, which other tests judge."""
IN_OTHER_PROCESSES = {
    "tests/losses/test_logprobs.py::test_vocabulary_parallel_over_two_processes": (
        "nemorl/losses/logprobs.py",
        "nemorl/losses/vocab_parallel.py",
    ),
    "tests/losses/test_vocab_parallel.py::test_it_is_what_a_whole_head_gives": (
        "nemorl/losses/logprobs.py",
        "nemorl/losses/vocab_parallel.py",
    ),
}
"""Tests whose lines are executed where nobody counts them, and the files that they are about."""
REASONS = Path(__file__).parent / "survivors.toml"
GOAL = 0.90
DEAD = ("killed", "timeout", "crash")


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What each test executes, from the run without a mutant."""

    lines: dict[str, dict[str, set[int]]]
    seconds: dict[str, float]
    at_import: set[tuple[str, str]]
    examples: int

    def tests_for(self, mutant: Mutant) -> list[str]:
        """The tests that execute the mutated lines, quickest first; for what runs at import all
        that touch the file, or all there are.
        """
        first, last = mutant.lines
        wanted = set(range(first, last + 1))
        touching = [test for test, lines in self.lines.items() if mutant.path in lines]
        chosen = (
            touching
            if not mutant.where
            else [test for test in touching if wanted & self.lines[test][mutant.path]]
        )
        if not mutant.where and not chosen:
            chosen = list(self.lines)
        chosen += [
            test
            for test in self.lines
            if mutant.path in IN_OTHER_PROCESSES.get(test.partition("[")[0], ())
            and test not in chosen
        ]
        return sorted(chosen, key=lambda test: self.seconds[test])

    def from_import(self, mutant: Mutant) -> bool:
        return not mutant.in_body or (mutant.path, mutant.where) in self.at_import


def digest(*paths: Path) -> str:
    files = sorted(
        file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])
    )
    return sha256(
        b"".join(
            file.read_bytes() for file in files if file.exists() and "mutation" not in file.parts
        )
    ).hexdigest()[:16]


@cache
def digest_of(name: str) -> str:
    return digest(ROOT / name)


def coverage(examples: int, *, anew: bool = True) -> Coverage:
    """From the file of an earlier run if nothing has changed since (or not `anew`), else from a
    child: this process must not import nemorl.
    """
    from tests.mutation.session import in_fork, measure

    file = STATE / "coverage.json"
    sources = (*MUTATED, *TESTS, "tests/helpers.py", "tests/strategies.py")
    stamp = f"{digest(*(ROOT / name for name in sources))} {examples}"
    if not file.exists() or (anew and json.loads(file.read_text())["stamp"] != stamp):
        prepare()
        print("running every test once ...", flush=True)

        def run() -> str:
            found = measure([*TESTS, *(f"--ignore={name}" for name in LEFT_OUT)], examples)
            file.write_text(json.dumps({"stamp": stamp, **found}))
            return "done"

        if in_fork(run, limited=False)[0] != "killed":
            raise SystemExit("the tests could not be run without a mutant")
    found = json.loads(file.read_text())
    if found["failed"] or not found["tests"]:
        raise SystemExit(
            f"these tests fail without a mutant: {found['failed'] or 'none was found'}"
        )
    tests = found["tests"]
    return Coverage(
        lines={
            test: {path: set(lines) for path, lines in entry["lines"].items()}
            for test, entry in tests.items()
        },
        seconds={test: entry["seconds"] for test, entry in tests.items()},
        at_import={(path, name) for path, name in found["at_import"]},
        examples=examples,
    )


def all_mutants() -> dict[str, Mutant]:
    """By name, in the order of the files."""
    files = [file for folder in MUTATED for file in sorted((ROOT / folder).rglob("*.py"))]
    mutants = [
        mutant
        for file in files
        for mutant in mutants_of(file.relative_to(ROOT).as_posix(), file.read_bytes())
    ]
    return {mutant.name: mutant for mutant in mutants}


def earlier_results(mutants: dict[str, Mutant], found: Coverage) -> dict[str, dict[str, Any]]:
    """Results that still hold: the mutated file is the same, and the test that killed the mutant is
    there, or those that it survived are.
    """
    file = STATE / "results.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    results = {}
    for entry in map(json.loads, lines):
        same = entry["name"] in mutants and entry["file"] == digest_of(mutants[entry["name"]].path)
        if same and entry["judge"] == judge(
            mutants[entry["name"]], entry["result"], entry["by"], found
        ):
            results[entry["name"]] = entry
        else:
            results.pop(entry["name"], None)
    return results


def judge(mutant: Mutant, result: str, by: str, found: Coverage) -> str:
    """A stamp of what a result depends on besides the mutated file: of a survivor the tests that
    execute it, else that its test is still there.
    """
    if result == "survived":
        tests = found.tests_for(mutant)
        files = sorted({test.split("::")[0] for test in tests})
        return sha256(
            " ".join([*sorted(tests), *map(digest_of, files), str(found.examples)]).encode()
        ).hexdigest()[:16]
    file, *names = by.split("::")
    return "" if not names or names[-1].split("[")[0].split(".")[-1] in source_of(file) else "gone"


@cache
def source_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).exists() else ""


def execute(chosen: list[Mutant], found: Coverage) -> None:
    """Judge the mutants, and append each result as soon as it is there."""
    import pytest

    from tests.mutation.session import NO_SWAP, OPTIONS, Forker, in_fork, run_from_import

    sources = {mutant.path: (ROOT / mutant.path).read_bytes() for mutant in chosen}
    work = [(mutant, sources[mutant.path], found.tests_for(mutant)) for mutant in chosen]
    tested = [entry for entry in work if entry[2]]
    warm = [entry for entry in tested if not found.from_import(entry[0])]
    counts: Counter[str] = Counter()
    start = time.monotonic()
    last = start

    def record(mutant: Mutant, result: str, by: str) -> None:
        nonlocal last
        if by == NO_SWAP:
            retry.write_text(retry.read_text() + mutant.name + "\n")
            return
        now = time.monotonic()
        entry = {
            "name": mutant.name,
            "path": mutant.path,
            "operator": mutant.operator,
            "result": result,
            "by": by,
            "seconds": round(now - last, 2),
        }
        last = now
        counts[result] += 1
        with (STATE / "results.jsonl").open("a", encoding="utf-8") as results:
            results.write(
                json.dumps(
                    {
                        **entry,
                        "file": digest_of(mutant.path),
                        "judge": judge(mutant, result, by, found),
                    },
                    ensure_ascii=False,
                )
                + "\n"
            )
        print(
            f"{sum(counts.values()):5} {now - start:6.0f} s  {result:9} {mutant.name[:170]}",
            flush=True,
        )

    for mutant, _, tests in work:
        if not tests:
            record(mutant, "survived", "no test")
    retry = STATE / "retry.txt"
    retry.write_text("")

    def all_warm() -> str:
        arguments = [*TESTS, *(f"--ignore={name}" for name in LEFT_OUT), *OPTIONS]
        return str(
            pytest.main(arguments, plugins=[Forker(found.examples, warm, found.seconds, record)])
        )

    if warm:
        in_fork(all_warm, wall=1e6, limited=False)
    again = set(retry.read_text().splitlines())
    for mutant, source, tests in tested:
        if found.from_import(mutant) or mutant.name in again:
            record(
                mutant,
                *run_from_import(
                    mutant, source, tests, examples=found.examples, seconds=found.seconds
                ),
            )


def reasons() -> dict[str, str]:
    """Why a survivor may live, by its name."""
    groups = (
        tomllib.loads(REASONS.read_text(encoding="utf-8")).get("group", [])
        if REASONS.exists()
        else []
    )
    return {name: group["reason"] for group in groups for name in group["mutants"]}


def report(mutants: Iterable[Mutant], results: dict[str, dict[str, Any]], *, whole: bool) -> int:
    """Print what was found; 1 if too many survived or one without a reason did."""
    tables: dict[str, dict[str, Counter[str]]] = {
        "file": defaultdict(Counter),
        "operator": defaultdict(Counter),
    }
    judged = [mutant for mutant in mutants if mutant.name in results]
    for mutant in judged:
        result = results[mutant.name]["result"]
        for kind, key in (("file", mutant.path), ("operator", mutant.operator)):
            tables[kind][key][result] += 1
            tables[kind]["all"][result] += 1
    for kind, rows in tables.items():
        print(f"\n{kind:32} mutants  killed  timeout  crash  survived  rate")
        for key, row in sorted(rows.items(), key=lambda item: (item[0] == "all", item[0])):
            numbers = (
                f"{row.total():7} {row['killed']:7} {row['timeout']:8} {row['crash']:6}"
                f" {row['survived']:9}"
            )
            print(f"{key:32} {numbers} {sum(row[name] for name in DEAD) / row.total():6.1%}")
    known = reasons()
    alive = [mutant for mutant in judged if results[mutant.name]["result"] == "survived"]
    unexplained = [mutant for mutant in alive if mutant.name not in known]
    names = {mutant.name for mutant in alive}
    stale = [name for name in known if name not in names] if whole else []
    explained = len(alive) - len(unexplained)
    print(
        f"\n{len(alive)} survived, {explained} of them for a reason in {REASONS.relative_to(ROOT)},"
        f" {len(unexplained)} without:"
    )
    for mutant in unexplained:
        print(
            f"  line {mutant.line}: {mutant.name}"
            + (" (no test executes it)" if results[mutant.name]["by"] == "no test" else "")
        )
    for name in stale:
        print(f"  no survivor any more, take it off the table: {name}")
    rate = 1 - len(alive) / max(1, len(judged))
    return int(rate < GOAL or bool(unexplained))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Mutation testing of nemorl/losses and nemorl/data.",
        prog="python -m tests.mutation.run",
    )
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="mutants whose name (path and function first) contains one of these",
    )
    parser.add_argument("--examples", type=int, default=20, help="Hypothesis examples per test")
    parser.add_argument("--fresh", action="store_true", help="forget the results that are there")
    parser.add_argument(
        "--report", action="store_true", help="run nothing, report the results that are there"
    )
    options = parser.parse_args()

    STATE.mkdir(exist_ok=True)
    if options.fresh:
        (STATE / "results.jsonl").unlink(missing_ok=True)
    mutants = all_mutants()
    chosen = [
        mutant for mutant in mutants.values() if any(part in mutant.name for part in options.only)
    ]
    if options.sample is not None:
        drawn = set(
            random.Random(options.seed).sample(
                sorted(mutant.name for mutant in chosen), min(options.sample, len(chosen))
            )
        )
        chosen = [mutant for mutant in chosen if mutant.name in drawn]
    found = coverage(options.examples, anew=not options.report)
    earlier = earlier_results(mutants, found)
    todo = [mutant for mutant in chosen if mutant.name not in earlier]
    print(
        f"{len(mutants)} mutants, {len(chosen)} chosen, {len(chosen) - len(todo)} of them judged"
        " before",
        flush=True,
    )
    if todo and not options.report:
        prepare()
        execute(todo, found)
    return report(
        chosen,
        earlier_results(mutants, found),
        whole=options.sample is None and not any(options.only),
    )


def prepare() -> None:
    """Load what every fork needs and what takes long; nemorl itself must not be among it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in (
        "numpy",
        "torch",
        "transformers",
        "datasets",
        "einops",
        "beartype",
        "jaxtyping",
        "hypothesis",
        "pytest",
        "torch.multiprocessing",
    ):
        importlib.import_module(name)
    assert not any(name.split(".")[0] == "nemorl" for name in sys.modules)


if __name__ == "__main__":
    sys.exit(main())
