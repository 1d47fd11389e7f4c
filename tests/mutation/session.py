"""The pytest sessions of a mutation run: one that measures, one that forks per mutant, one for a
mutant that is there from the import on.
"""

import gc
import os
import resource
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings

from tests.mutation.mutate import Mutant
from tests.mutation.site import sitecustomize

ROOT = Path(__file__).parent.parent.parent
SURVIVED, NO_SWAP = "", "no function to put it into"
EXAMPLES = 20
OPTIONS = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", "--tb=no")
LATE = (signal.SIGPROF, signal.SIGALRM)
"""What ends a process whose test takes far longer than it should."""
MEMORY = 4 << 30
"""Bytes that a mutant, such as an endless loop, may take beyond what its process has."""
Functions = dict[tuple[str, str, int], list[FunctionType]]


class Session:
    """Few Hypothesis examples, always the same, none of which is shrunk; `loop` runs the tests."""

    def __init__(self, loop: Callable[[pytest.Session], None]) -> None:
        self.loop = loop

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:  # after conftest.py has loaded its own profile
        settings.register_profile(
            "mutants",
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.loop(session)
        return True


def run_session(arguments: Iterable[str], loop: Callable[[pytest.Session], None]) -> None:
    pytest.main([*arguments, *OPTIONS], plugins=[Session(loop)])


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    """Run every test once: its seconds, the lines of nemorl that it executes, which tests fail, and
    the functions that run while nemorl is imported and the tests are collected.
    """
    at_import: set[tuple[str, str]] = set()
    tests: dict[str, Any] = {}
    failed: list[str] = []
    lines: dict[str, set[int]] | None = None

    @cache
    def ours(name: str) -> str:
        inside = name.startswith(str(ROOT / "nemorl"))
        return Path(name).relative_to(ROOT).as_posix() if inside else ""

    def trace(frame: FrameType, event: str, _: Any) -> Callable | None:
        if not (file := ours(frame.f_code.co_filename)):
            return None
        if lines is None:
            at_import.add((file, frame.f_code.co_qualname))
            return None
        executed = lines[file]

        def trace_line(frame: FrameType, event: str, _: Any) -> Callable:
            executed.add(frame.f_lineno)
            return trace_line

        return trace_line(frame, event, _)

    def loop(session: pytest.Session) -> None:
        nonlocal lines
        for item, following in in_pairs(session.items):
            lines = defaultdict(set)
            start = time.perf_counter()
            sys.settrace(trace)
            try:
                reports = runtestprotocol(item, log=False, nextitem=following)
            finally:
                sys.settrace(None)
            executed = {file: sorted(found) for file, found in lines.items()}
            tests[item.nodeid] = {"seconds": time.perf_counter() - start, "lines": executed}
            if any(report.failed for report in reports):
                failed.append(item.nodeid)

    sys.settrace(trace)
    run_session(arguments, loop)
    sys.settrace(None)
    return {"tests": tests, "at_import": sorted(at_import), "failed": failed}


def run_warm(
    arguments: Iterable[str],
    work: Iterable[tuple[Mutant, bytes, list[str]]],
    seconds: dict[str, float],
    record: Callable[[Mutant, str, str], None],
) -> None:
    """Collect once, then fork per mutant, whose function gets the mutated code there."""

    def loop(session: pytest.Session) -> None:
        items = {item.nodeid: item for item in session.items}
        functions: Functions = defaultdict(list)
        for thing in gc.get_objects():
            if type(thing) is FunctionType:
                code = thing.__code__
                functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
        gc.collect()
        gc.freeze()
        for mutant, source, tests in work:

            def run(mutant=mutant, source=source, tests=tests) -> str:
                tell_processes(mutant, source)
                if not swap(mutant, source, functions):
                    return NO_SWAP
                return first_failure([items[test] for test in tests], seconds)

            record(mutant, *in_fork(run))

    run_session(arguments, loop)


def run_from_import(
    mutant: Mutant, source: bytes, tests: list[str], seconds: dict[str, float]
) -> tuple[str, str]:
    """Result and test of a mutant that is there when nemorl is imported.

    Forks: the caller must not have imported nemorl.
    """

    def run() -> str:
        result = "collection"  # kills what can't be imported, or keeps tests from being collected

        def loop(session: pytest.Session) -> None:
            nonlocal result
            items = {item.nodeid: item for item in session.items}
            if not session.testsfailed:  # modules that could not be imported
                result = first_failure([items[test] for test in tests], seconds)

        tell_processes(mutant, source)
        sitecustomize.override(str(ROOT / mutant.path), mutant.apply(source))
        run_session(sorted({test.split("::")[0] for test in tests}), loop)
        return result

    return in_fork(run)


def swap(mutant: Mutant, source: bytes, functions: Functions) -> bool:
    """Give the live function the mutated code, whatever wrappers it is in and wherever it was
    imported to.
    """
    path = str(ROOT / mutant.path)
    name = mutant.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    loader: Any = sys.modules[name].__spec__.loader
    found = False
    for code in _codes(loader.source_to_code(mutant.apply(source), path)):
        if code.co_qualname == mutant.where:
            for function in functions[path, code.co_qualname, code.co_firstlineno]:
                function.__code__ = code
                found = True
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def tell_processes(mutant: Mutant, source: bytes) -> None:
    """Processes that a test starts import the mutant as well."""
    contents = ROOT / ".mutants" / "mutant.py"
    contents.write_bytes(mutant.apply(source))
    os.environ[sitecustomize.MUTANT] = f"{ROOT / mutant.path}{os.pathsep}{contents}"
    os.environ["PYTHONPATH"] = str(Path(sitecustomize.__file__).parent)


def first_failure(items: Sequence[pytest.Item], seconds: dict[str, float]) -> str:
    """The first test that fails, or SURVIVED.

    A test that takes far longer than it should ends the process.
    """
    for item, following in in_pairs(items):
        usual = seconds.get(item.nodeid, 60)
        signal.setitimer(signal.ITIMER_PROF, 3 + 10 * usual)
        # Waiting for another process takes no processor time.
        signal.setitimer(signal.ITIMER_REAL, 100 + 20 * usual)
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            return item.nodeid
    return SURVIVED


def in_pairs(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None], strict=True)


def in_fork(
    work: Callable[[], str], *, wall: float = 1200, limited: bool = True
) -> tuple[str, str]:
    """`("killed", test)`, `("survived", "")`, `("timeout", "")` or `("crash", signal)`: what became
    of `work` in a process of its own.

    `limited`: nothing is shown, and memory has a bound.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            for late in LATE:
                signal.signal(late, signal.SIG_DFL)
            if limited:
                nowhere = os.open(os.devnull, os.O_RDWR)
                for stream in range(3):
                    os.dup2(nowhere, stream)
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            os.write(writing, work().encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    hung = not select.select([reading], [], [], wall)[0]
    answer = b"" if hung else os.read(reading, 65536)
    if hung:
        os.killpg(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test has started
    if hung or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in LATE):
        return "timeout", ""
    if status:
        return "crash", str(os.waitstatus_to_exitcode(status))
    return ("killed", answer.decode()) if answer else ("survived", "")
