"""Run the parity matrix: `make parity`, or `python -m tests.parallel.parity.run --help`.

Results are appended to `.parity/results.jsonl`; the next run takes up those of the same code.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from tests.parallel.batches import DEVICE
from tests.parallel.parity.cases import CONTROLS, Case, matrix
from tests.parallel.parity.compare import errors, verdict
from tests.parallel.parity.golden import make_model
from tests.parallel.parity.table import write
from tests.parallel.parity.worker import Result, run_cases
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent.parent
STATE = ROOT / ".parity" / "results.jsonl"
SOURCES = (
    "nemorl/losses",
    "nemorl/data",
    "nemorl/models",
    "nemorl/parallel",
    "tests/parallel/parity",
    "tests/tiny_models.py",
)
NOT_COMPUTED_WITH = ("run.py", "table.py", "test_parity.py", "checkpoint.py")
CHUNK = 14
SECONDS_PER_CASE = {False: 120, True: 600}
"""Before a chunk is given up, per case of it: eager ones, and those that compile."""


@cache
def digest() -> str:
    """Of all that the numbers depend on."""
    files = sorted(
        file
        for name in SOURCES
        for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    )
    return sha256(
        b"".join(file.read_bytes() for file in files if file.name not in NOT_COMPUTED_WITH)
    ).hexdigest()[:16]


def run_chunk(cases: Sequence[Case], device: str = DEVICE) -> list[dict[str, float] | str]:
    """The errors of cases that need as many ranks, or the reasons why they could not be run."""
    ranks, seconds = cases[0].ranks, sum(SECONDS_PER_CASE[case.compile] for case in cases)
    try:
        with TemporaryDirectory() as folder:
            folders = tuple(Path(folder) / str(i) for i in range(len(cases)))
            for case, path in zip(cases, folders, strict=True):
                write_model(case, path)
            given, fresh = (tuple(cases), folders, device), cases[0].compile
            if ranks:
                options = {"timeout_s": seconds, "fresh": fresh, "process_group": device == DEVICE}
                results = run_ranks(ranks, run_cases, *given, **options)
            else:
                results = [run_cases(*given)]
    except Exception as error:  # of one case, perhaps, which the others have to be told from
        if len(cases) == 1:
            return [f"{type(error).__name__}: {error}"]
        return [found for case in cases for found in run_chunk([case], device)]
    return [judge(case, [of_rank[i] for of_rank in results]) for i, case in enumerate(cases)]


def judge(case: Case, results: list[Result]) -> dict[str, float] | str:
    try:
        return errors(case, results)
    except ValueError as error:
        return f"ValueError: {error}"


def write_model(case: Case, folder: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    make_model(case.problem).save_pretrained(folder)
    if case.sabotage == "the tied weight":
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def chunks(cases: Iterable[Case]) -> list[list[Case]]:
    """By number of ranks, and those that compile apart: they take long."""

    def key(case: Case) -> tuple[bool, int]:
        return case.compile, case.ranks

    found = []
    for _, group in groupby(sorted(cases, key=key), key=key):
        members = list(group)
        found += [members[start : start + CHUNK] for start in range(0, len(members), CHUNK)]
    random.Random(0).shuffle(found)  # so that what is left can be guessed from what is done
    return found


def known() -> dict[str, dict[str, float] | str]:
    if not STATE.exists():
        return {}
    lines = [json.loads(line) for line in STATE.read_text().splitlines()]
    return {line["case"]: line["errors"] for line in lines if line["digest"] == digest()}


def run(cases: Sequence[Case]) -> dict[str, dict[str, float] | str]:
    results = known()
    missing = [case for case in cases if isinstance(results.get(str(case), ""), str)]
    print(f"{len(cases)} cases, {len(missing)} of them to be run", flush=True)
    STATE.parent.mkdir(exist_ok=True)
    done, start = 0, time.monotonic()
    for chunk in chunks(missing):
        for case, found in zip(chunk, run_chunk(chunk), strict=True):
            results[str(case)] = found
            line = json.dumps({"case": str(case), "digest": digest(), "errors": found})
            with STATE.open("a") as file:
                file.write(line + "\n")
            right, words = verdict(case, found)
            done += 1
            left = (time.monotonic() - start) / done * (len(missing) - done)
            words = f"{'ok' if right else 'WRONG'}: {case}{words and f': {words}'}"
            print(f"{done}/{len(missing)} ({left / 60:.0f} min left) {words}", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--match", default="", help="only cases with this in their name ('TP 2')")
    parser.add_argument("--write", type=Path, help="put the tables into this guide")
    parser.add_argument("--report", action="store_true", help="run nothing, write what is known")
    options = parser.parse_args(arguments)
    cases = [case for case in (*matrix(), *CONTROLS) if options.match in str(case)]
    results = known() if options.report else run(cases)
    cases = [case for case in cases if str(case) in results]
    failed = [case for case in cases if not verdict(case, results[str(case)])[0]]
    print(f"{len(cases) - len(failed)} of {len(cases)} cases come out as they have to")
    if options.write:
        write(options.write, cases, results)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    sys.exit(main())
