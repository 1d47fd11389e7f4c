"""Mutation testing of `nemorl/losses` and `nemorl/data`: `make mutants`, or `python -m
tests.mutation.run --help`.

docs/mutants.md says how it runs. What each test executes is kept in `.mutants/coverage.json`, each
result in `.mutants/results.jsonl`; a later run takes up what still holds.
"""

import argparse
import importlib
import json
import os
import random
import re
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.mutation.mutate import Mutant, mutants_of
from tests.mutation.session import NO_SWAP, in_fork, measure, run_from_import, run_warm

ROOT = Path(__file__).parent.parent.parent
STATE = ROOT / ".mutants"
MUTATED = ("nemorl/losses", "nemorl/data")
TESTS = ("tests/losses", "tests/data")
ARGUMENTS = (
    *(*TESTS, *MUTATED),
    # Minutes of compilation per mutant, to compare with the eager result, which others judge.
    "--ignore=tests/losses/test_compile.py",
)
VOCABULARY = ("nemorl/losses/logprobs.py", "nemorl/losses/vocab_parallel.py")
IN_OTHER_PROCESSES = {
    "tests/losses/test_vocab_parallel.py::test_a_split_head_is_what_a_whole_one_gives": VOCABULARY,
}
"""Tests whose lines are executed where nobody counts them, and the files that they are about."""
REASONS = Path(__file__).parent / "survivors.toml"
GOAL = 0.90


@cache
def digest(*names: str) -> str:
    files = [
        file
        for path in map(ROOT.joinpath, names)
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def digest_of_tests() -> str:
    return digest(*TESTS, "tests/helpers.py", "tests/strategies.py")


def coverage() -> dict[str, Any]:
    """What each test executes, from an earlier run if nothing has changed since, else from a child,
    as this process must not import nemorl.
    """
    file = STATE / "coverage.json"
    stamp = f"{digest(*MUTATED)} {digest_of_tests()}"
    if not file.exists() or json.loads(file.read_text())["stamp"] != stamp:
        print("running every test once ...", flush=True)

        def run() -> str:
            file.write_text(json.dumps({"stamp": stamp, **measure(ARGUMENTS)}))
            return "done"

        if in_fork(run, limited=False)[0] != "killed":
            raise SystemExit("the tests could not be run without a mutant")
    found = json.loads(file.read_text())
    if found["failed"] or not found["tests"]:
        raise SystemExit(
            f"these tests fail without a mutant: {found['failed'] or 'none was found'}"
        )
    return found


def tests_for(mutant: Mutant, tests: dict[str, Any]) -> list[str]:
    """The tests that execute the mutated lines, quickest first; for what runs at import all that
    touch the file, or all there are.
    """
    wanted = set(range(mutant.lines[0], mutant.lines[1] + 1))
    touching = [test for test in tests if mutant.path in tests[test]["lines"]]
    if mutant.where:
        chosen = [t for t in touching if wanted.intersection(tests[t]["lines"][mutant.path])]
    else:
        chosen = touching or list(tests)
    elsewhere = [
        test for test in tests if mutant.path in IN_OTHER_PROCESSES.get(test.partition("[")[0], ())
    ]
    return sorted({*chosen, *elsewhere}, key=lambda test: tests[test]["seconds"])


def all_mutants() -> dict[str, Mutant]:
    """By name, in the order of the files."""
    files = [file for folder in MUTATED for file in sorted((ROOT / folder).rglob("*.py"))]
    return {
        mutant.name: mutant
        for file in files
        for mutant in mutants_of(file.relative_to(ROOT).as_posix(), file.read_bytes())
    }


def earlier_results(mutants: dict[str, Mutant]) -> dict[str, dict[str, Any]]:
    """Results that still hold: the mutated file is the same, and the test that killed the mutant is
    there, or all tests are as they were when it survived.
    """
    file = STATE / "results.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    results = {}
    for entry in map(json.loads, lines):
        mutant = mutants.get(entry["name"])
        if mutant is None or entry["file"] != digest(mutant.path):
            continue
        if entry["result"] == "survived":
            holds = entry["tests"] == digest_of_tests()
        else:
            path, *names = entry["by"].split("::")
            test = names[-1].split("[")[0].split(".")[-1] if names else ""
            holds = not names or test in source_of(path)
        if holds:
            results[mutant.name] = entry
    return results


@cache
def source_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).exists() else ""


def execute(chosen: list[Mutant]) -> None:
    """Judge the mutants, and append each result as soon as it is there."""
    found = coverage()
    seconds = {test: entry["seconds"] for test, entry in found["tests"].items()}
    sources = {mutant.path: (ROOT / mutant.path).read_bytes() for mutant in chosen}
    work = [(mutant, sources[mutant.path], tests_for(mutant, found["tests"])) for mutant in chosen]
    start = time.monotonic()

    def record(mutant: Mutant, result: str, by: str) -> None:
        if by == NO_SWAP:
            return  # and is tried from the import on
        entry = {"name": mutant.name, "result": result, "by": by, "file": digest(mutant.path)}
        entry["tests"] = digest_of_tests()
        with (STATE / "results.jsonl").open("a", encoding="utf-8") as results:
            results.write(json.dumps(entry, ensure_ascii=False) + "\n")
        print(f"{time.monotonic() - start:6.0f} s  {result:9} {mutant.name[:170]}", flush=True)

    warm = []
    for mutant, source, tests in work:
        at_import = not mutant.in_body or [mutant.path, mutant.where] in found["at_import"]
        if not tests:
            record(mutant, "survived", "no test")
        elif not at_import:
            warm.append((mutant, source, tests))

    def all_warm() -> str:
        run_warm(ARGUMENTS, warm, seconds, record)
        return "done"

    if warm:
        in_fork(all_warm, wall=1e6, limited=False)
    done = earlier_results({mutant.name: mutant for mutant in chosen})
    for mutant, source, tests in work:
        if mutant.name not in done:
            record(mutant, *run_from_import(mutant, source, tests, seconds))


def reasons() -> dict[str, str]:
    """Why a survivor may live, by its name."""
    groups = tomllib.loads(REASONS.read_text(encoding="utf-8")).get("group", [])
    return {name: group["reason"] for group in groups for name in group["mutants"]}


def stale(mutants: dict[str, Mutant], results: dict[str, dict[str, Any]]) -> list[str]:
    """Names in the table that there are no more, or that are noticed now."""
    noticed = {name for name, entry in results.items() if entry["result"] != "survived"}
    return [name for name in reasons() if name not in mutants or name in noticed]


def prune(names: list[str]) -> None:
    """Take these off the table, each a line of it, and groups without any left."""
    lines = REASONS.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if line.strip().strip("',") not in names)
    empty = r'\[\[group\]\]\nreason = """\n[^"]*"""\nmutants = \[\n\]\n\n?'
    REASONS.write_text(re.sub(empty, "", text).rstrip() + "\n", encoding="utf-8")


def report(mutants: Iterable[Mutant], results: dict[str, dict[str, Any]]) -> int:
    """Print what was found; 1 if too many survived or one without a reason did."""
    judged = [mutant for mutant in mutants if mutant.name in results]
    for kind in ("path", "operator"):
        rows: dict[str, Counter[str]] = defaultdict(Counter)
        for mutant in judged:
            for key in (getattr(mutant, kind), "all"):
                rows[key][results[mutant.name]["result"]] += 1
        print(f"\n{kind:32} mutants  killed  timeout  crash  survived  rate")
        for key, row in sorted(rows.items(), key=lambda item: (item[0] == "all", item[0])):
            print(
                f"{key:32} {row.total():7} {row['killed']:7} {row['timeout']:8} {row['crash']:6}"
                f" {row['survived']:9} {1 - row['survived'] / row.total():6.1%}"
            )
    alive = [mutant for mutant in judged if results[mutant.name]["result"] == "survived"]
    known = reasons()
    unexplained = [mutant for mutant in alive if mutant.name not in known]
    print(
        f"\n{len(alive)} survived, {len(alive) - len(unexplained)} of them for a reason in"
        f" {REASONS.relative_to(ROOT)}, {len(unexplained)} without:"
    )
    for mutant in unexplained:
        untested = " (no test executes it)" * (results[mutant.name]["by"] == "no test")
        print(f"  line {mutant.line}: {mutant.name}{untested}")
    return int(bool(unexplained) or len(alive) > (1 - GOAL) * len(judged))


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
    parser.add_argument("--fresh", action="store_true", help="forget the results that are there")
    parser.add_argument(
        "--report", action="store_true", help="run nothing, report the results that are there"
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help=f"take off {REASONS.name} what there is no more, or what is noticed now",
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
        names = sorted(mutant.name for mutant in chosen)
        drawn = random.Random(options.seed).sample(names, min(options.sample, len(names)))
        chosen = [mutant for mutant in chosen if mutant.name in set(drawn)]
    earlier = earlier_results(mutants)
    todo = [mutant for mutant in chosen if mutant.name not in earlier]
    print(f"{len(mutants)} mutants, {len(chosen)} chosen, {len(todo)} to be judged", flush=True)
    if todo and not options.report:
        prepare()
        execute(todo)
    results = earlier_results(mutants)
    gone = stale(mutants, results)
    if options.prune:
        prune(gone)
    elif gone:
        print(f"{len(gone)} in {REASONS.name} survive no more: take them off with --prune")
    return report(chosen, results)


def prepare() -> None:
    """Load what every fork needs and what takes long; nemorl itself must not be among it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in (
        *("numpy", "torch", "transformers", "datasets", "einops", "beartype", "jaxtyping"),
        *("hypothesis", "pytest", "torch.multiprocessing"),
    ):
        importlib.import_module(name)
    assert not any(name.split(".")[0] == "nemorl" for name in sys.modules)


if __name__ == "__main__":
    sys.exit(main())
