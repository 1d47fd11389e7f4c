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
OPTIONS = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", "--tb=no")
LATE = (signal.SIGPROF, signal.SIGALRM)
"""What ends a process whose test takes far longer than it should."""
MEMORY = 4 << 30
"""Bytes that a mutant may take beyond what its process has: a loop without an end must not take the
machine down.
"""


class Session:
    """What all have in common: fewer Hypothesis examples, always the same, and none are shrunk: a
    failure is enough.
    """

    def __init__(self, examples: int) -> None:
        self.examples = examples

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:  # after conftest.py has loaded its own profile
        quick = {
            "phases": (Phase.explicit, Phase.generate),
            "suppress_health_check": list(HealthCheck),
        }
        settings.register_profile(
            "mutants",
            max_examples=self.examples,
            derandomize=True,
            database=None,
            deadline=None,
            **quick,
        )
        settings.load_profile("mutants")


class Measure(Session):
    """Runs every test once and notes its seconds and the lines of nemorl that it executes."""

    def __init__(self, examples: int) -> None:
        super().__init__(examples)
        self.files: dict[str, str | None] = {}
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.at_import: set[tuple[str, str]] = set()
        self.tests: dict[str, Any] = {}
        self.failed: list[str] = []
        self.testing = False

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable | None:
        code = frame.f_code
        file = self.files.get(code.co_filename, "")
        if file == "":
            path = Path(code.co_filename)
            file = self.files[code.co_filename] = (
                path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT / "nemorl") else None
            )
        if file is None:
            return None
        if not self.testing:
            self.at_import.add((file, code.co_qualname))
            return None
        lines = self.lines[file]
        lines.add(frame.f_lineno)

        def trace_line(frame: FrameType, event: str, _: Any) -> Callable:
            lines.add(frame.f_lineno)
            return trace_line

        return trace_line

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.testing = True
        for item, following in _in_pairs(session.items):
            self.lines = defaultdict(set)
            start = time.perf_counter()
            sys.settrace(self.trace)
            try:
                reports = runtestprotocol(item, log=False, nextitem=following)
            finally:
                sys.settrace(None)
            lines = {file: sorted(found) for file, found in self.lines.items()}
            self.tests[item.nodeid] = {"seconds": time.perf_counter() - start, "lines": lines}
            if any(report.failed for report in reports):
                self.failed.append(item.nodeid)
        return True


def measure(arguments: Sequence[str], examples: int) -> dict[str, Any]:
    """Per test its seconds and lines, and the functions that run while nemorl is imported and the
    tests are collected.
    """
    session = Measure(examples)
    sys.settrace(session.trace)
    pytest.main([*arguments, *OPTIONS], plugins=[session])
    sys.settrace(None)
    return {
        "tests": session.tests,
        "at_import": sorted(session.at_import),
        "failed": session.failed,
    }


class Forker(Session):
    """Collects once, then forks per mutant, whose function gets the mutated code there."""

    def __init__(
        self,
        examples: int,
        work: Iterable[tuple[Mutant, bytes, list[str]]],
        seconds: dict[str, float],
        record: Callable,
    ) -> None:
        super().__init__(examples)
        self.work, self.seconds, self.record = work, seconds, record

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename.startswith(
                str(ROOT / "nemorl")
            ):
                code = thing.__code__
                functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
        gc.collect()
        gc.freeze()
        for mutant, source, tests in self.work:

            def run(
                mutant: Mutant = mutant, source: bytes = source, tests: list[str] = tests
            ) -> str:
                tell_processes(mutant, source)
                if not swap(mutant, source, functions):
                    return NO_SWAP
                return first_failure([items[test] for test in tests], self.seconds)

            self.record(mutant, *in_fork(run))
        return True


class OneMutant(Session):
    """Runs the given tests until one fails; the mutant is in place already."""

    def __init__(self, examples: int, tests: Sequence[str], seconds: dict[str, float]) -> None:
        super().__init__(examples)
        self.tests, self.seconds = tests, seconds
        self.result = "collection"
        """What a mutant is killed by that cannot be imported, or with which the tests cannot be
        collected.
        """

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        if not session.testsfailed:  # of modules that could not be imported
            self.result = first_failure([items[test] for test in self.tests], self.seconds)
        return True


def run_from_import(
    mutant: Mutant, source: bytes, tests: list[str], *, examples: int, seconds: dict[str, float]
) -> tuple[str, str]:
    """Result and seconds of a mutant that is there when nemorl is imported.

    Forks: the caller must not have imported nemorl.
    """

    def run() -> str:
        tell_processes(mutant, source)
        sitecustomize.override(str(ROOT / mutant.path), mutant.apply(source))
        session = OneMutant(examples, tests, seconds)
        pytest.main([*sorted({test.split("::")[0] for test in tests}), *OPTIONS], plugins=[session])
        return session.result

    return in_fork(run)


def swap(
    mutant: Mutant, source: bytes, functions: dict[tuple[str, str, int], list[FunctionType]]
) -> bool:
    """Give the live function the mutated code, whatever wrappers it is in and wherever it was
    imported to.
    """
    path = str(ROOT / mutant.path)
    name = mutant.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    loader: Any = sys.modules[name].__spec__.loader  # type: ignore[union-attr]
    found = 0
    for code in _codes(loader.source_to_code(mutant.apply(source), path)):
        if code.co_qualname == mutant.where:
            for function in functions[path, code.co_qualname, code.co_firstlineno]:
                function.__code__ = code
                found += 1
    return found > 0


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
    for item, following in _in_pairs(items):
        usual = seconds.get(item.nodeid, 60)
        signal.setitimer(signal.ITIMER_PROF, 3 + 10 * usual)
        signal.setitimer(
            signal.ITIMER_REAL, 100 + 20 * usual
        )  # waiting for another process takes no processor time
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            return item.nodeid
    return SURVIVED


def _in_pairs(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
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
                _close_streams()
                used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf(
                    "SC_PAGE_SIZE"
                )
                resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
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


def _close_streams() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
