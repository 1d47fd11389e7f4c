"""Programs in each sandbox: what they may use, and escapes that are refused."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from nemorl.rollout import sandbox as module
from nemorl.rollout.sandbox import (
    DESCRIPTORS,
    FILES,
    PLACES,
    SANDBOXES,
    THREADS,
    Limits,
    find_sandbox,
    run_program,
)

PROGRAM, BWRAP = "bubblewrap", "bwrap"
HERE = [name for name in SANDBOXES if name != PROGRAM or shutil.which(BWRAP, path=PLACES)]
"""Bubblewrap where it is installed; rlimits everywhere."""
SMALL = Limits(cpu=1, wall=10, memory=256 << 20, output=10_000, disk=1 << 20)


@pytest.fixture(params=HERE)
def sandbox(request) -> str:
    return request.param


def in_sandbox(sandbox: str, source: str, limits: Limits = SMALL, **options):
    return run_program(source, limits=limits, sandbox=sandbox, **options)


class Targets(NamedTuple):
    """What attacks are aimed at."""

    file: Path
    folder: Path
    port: int
    victim: psutil.Process


@pytest.fixture
def targets(tmp_path: Path, monkeypatch) -> Iterator[Targets]:
    """A file, a folder, a server, and a process of this user with a secret in its environment."""
    tmp_path.chmod(0o755)
    file = tmp_path / "secret.txt"
    file.write_text("secret")
    monkeypatch.setenv("NEMORL_SECRET", "secret")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process,
    ):
        victim = psutil.Process(process.pid)
        yield Targets(file, tmp_path, server.getsockname()[1], victim)
        process.kill()


ATTACKS = {
    "reads a file": "found = open(file).read()",
    "reads the environment": "found = os.environ['NEMORL_SECRET']",
    "reads another's environment": "found = open(f'/proc/{victim}/environ').read()",
    "reads another's memory": "open(f'/proc/{victim}/mem', 'rb')",
    "lists a folder": "assert 'secret.txt' in os.listdir(folder)",
    "overwrites": "open(file, 'w').write('mine')",
    "appends": "os.write(os.open(file, os.O_WRONLY | os.O_APPEND), b'mine')",
    "truncates": "os.truncate(file, 0)",
    "creates": "open(folder + '/new', 'x')",
    "writes beside its folder": "open('/nemorl-left', 'x')",
    "removes": "os.remove(file)",
    "renames": "os.rename(file, file + '2')",
    "makes a folder": "os.mkdir(folder + '/new')",
    "changes a mode": "os.chmod(file, 0o777)",
    "changes times": "os.utime(file, (1, 1))",
    "follows a link of its own": "os.symlink(file, 'link'); open('link', 'a').write('mine')",
    "links": "os.link(file, 'link'); open('link', 'a').write('mine')",
    "leaves a file in shared memory": "open('/dev/shm/nemorl-left', 'w')",
    "connects": "socket.create_connection(('127.0.0.1', port), 2)",
    "listens": "socket.create_server(('127.0.0.1', 0))",
    "uses a socket of a pair for others": "socket.socketpair(type=socket.SOCK_DGRAM)",
    "binds an abstract socket": "socket.socket(socket.AF_UNIX).bind('\\0nemorl')",
    "stops a process": "os.kill(victim, 19)",
    "kills a process by a thread": "done(system(tkill, victim, 9))",
    "kills by a file": (
        "a, b = socket.socketpair(); f = fcntl.fcntl; f(a, 8, victim); f(a, 10, 9);"
        " f(a, fcntl.F_SETFL, os.O_ASYNC); b.send(b'x')"
    ),
    "opens a process": "os.pidfd_open(victim)",
    "limits a process": "resource.prlimit(victim, resource.RLIMIT_NOFILE, (9, 9))",
    "slows a process": "os.setpriority(os.PRIO_PROCESS, victim, 19)",
    "moves a process": "os.sched_setaffinity(victim, {min(os.sched_getaffinity(0))})",
    "traces a process": "done(system(ptrace, 0x4206, victim, 0, 0))",
    "forks": "os.fork() or os._exit(0)",
    "spawns": "subprocess.run(['/bin/true'])",
    "makes shared memory": "done(system(shmget, 0x6E656D6F, 4096, 0o1600))",
    "makes a file in memory": "os.memfd_create('x')",
    "makes a user namespace": "done(ctypes.CDLL(None).unshare(0x10000000))",
    "makes an io_uring": "done(system(425, 4, ctypes.create_string_buffer(120)))",
    "raises a limit": "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
}
NEEDS_LANDLOCK = {"reads a file", "lists a folder"}
if os.getuid() != 0:
    NEEDS_LANDLOCK |= {"reads another's environment", "reads another's memory"}
"""What rlimits alone do not shut, as docs/code.md says."""
ATTACK = """
import ctypes, fcntl, os, resource, socket, subprocess, sys
file, folder, port, victim = *sys.argv[1:3], *map(int, sys.argv[3:5])
system = ctypes.CDLL(None, use_errno=True).syscall
tkill, ptrace, shmget = {"x86_64": (200, 101, 29), "aarch64": (130, 117, 194)}[os.uname().machine]
def done(result):
    assert result >= 0, os.strerror(ctypes.get_errno())
found = "ESCAPED"
ATTACK
print("ESCAPED", found)
"""


def attack(name: str, targets: Targets) -> tuple[str, list[str]]:
    file, folder, port, victim = targets
    arguments = [str(file), str(folder), str(port), str(victim.pid)]
    return ATTACK.replace("ATTACK\n", f"{ATTACKS[name]}\n", 1), arguments


ENDED_OR_STOPPED = ("stopped", "tracing-stop", "zombie", "dead")


def state(targets: Targets) -> list[object]:
    victim, status = targets.victim, targets.file.stat()
    return [
        *(targets.file.read_text(), status.st_mode, status.st_mtime, status.st_nlink),
        *(sorted(targets.folder.iterdir()), victim.status() in ENDED_OR_STOPPED),
        *(victim.nice(), victim.cpu_affinity(), victim.rlimit(psutil.RLIMIT_NOFILE)),
    ]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(sandbox: str, name: str, targets: Targets):
    if sandbox == SANDBOXES[2] and name in NEEDS_LANDLOCK:
        with pytest.raises(AssertionError):
            refused(sandbox, name, targets)
    else:
        refused(sandbox, name, targets)


def refused(sandbox: str, name: str, targets: Targets) -> None:
    before = state(targets)
    source, arguments = attack(name, targets)
    result = in_sandbox(sandbox, source, arguments=arguments, stdin="")
    assert "ESCAPED" not in result.stdout and "secret" not in result.stdout
    assert result.outcome == "error", result
    assert "Error" in result.stderr, "it was refused, not ended"
    assert state(targets) == before
    assert not any(Path(each, "nemorl-left").exists() for each in ("/dev/shm", "/"))


WORKS = [
    *("reads a file", "reads another's environment", "lists a folder", "overwrites", "removes"),
    *("changes a mode", "follows a link of its own", "connects", "stops a process"),
    *("kills a process by a thread", "kills by a file", "limits a process", "slows a process"),
    *("moves a process", "traces a process", "forks", "spawns", "opens a process"),
]


@pytest.mark.parametrize("name", WORKS)
def test_without_a_sandbox_the_attack_succeeds(name: str, targets: Targets, tmp_path: Path):
    """Otherwise the test above would show nothing."""
    source, arguments = attack(name, targets)
    command = [sys.executable, "-I", "-c", source, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "ESCAPED" in found.stdout, found.stderr


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("while True: pass", "time"),
        ("import signal\nfor n in (15, 24): signal.signal(n, signal.SIG_IGN)\nwhile 1: 0", "time"),
        ("import time; time.sleep(1000)", "time"),
        ("import os, time; os.close(1); os.close(2); time.sleep(1000)", "time"),
        ("import time\nwhile True: print('x', flush=True); time.sleep(0.01)", "time"),
        ("x = bytearray(1 << 30)", "memory"),
        ("x = []\nwhile True: x.append(bytearray(1 << 16))", "memory"),
        ("while True: print('x' * 1_000_000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1_000_000)", "output"),
        ("import sys; sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", None),
        ("f = lambda: f()\nf()", "error"),
        ("input()", "error"),
        ("import sys; sys.exit(3)", "error"),
        ("import os; os.abort()", "error"),
        ("x = (", "error"),
        ("print(1)", "ok"),
        ("import os; os._exit(0)", "ok"),
    ],
)
def test_a_program_ends_at_its_limits(sandbox: str, source: str, outcome: str):
    wall = 2 if outcome == "time" else 60
    limits = Limits(cpu=1, wall=wall, memory=256 << 20, output=10_000)
    begin = time.monotonic()
    result = in_sandbox(sandbox, source, limits)
    assert result.outcome == outcome or (outcome is None and result.outcome != "ok"), result
    assert (result.exit_code == 0) == (outcome == "ok"), result
    assert len(result.stdout) <= 10_000 and len(result.stderr) <= 10_000
    assert result.sandbox == sandbox and 0 < result.seconds <= time.monotonic() - begin


def test_what_a_program_is_given_and_gives(sandbox: str):
    source = "import os, sys; print(sys.argv[1:], input(), os.listdir(), dict(os.environ))"
    result = in_sandbox(sandbox, source, stdin="ä\nb", arguments=["-c", "1"])
    assert result.stdout.startswith("['-c', '1'] ä [] {"), result
    assert not {"HOME", "USER", "PYTHONPATH", "VIRTUAL_ENV"} & {*result.stdout.split("'")}
    garbage = "import sys; sys.stdout.buffer.write(bytes(range(256))); print('\\ud800')"
    result = in_sandbox(sandbox, garbage, stdin="\ud800")
    assert "\ufffd" in result.stdout and "UnicodeEncodeError" in result.stderr
    result = in_sandbox(sandbox, "raise SystemExit('\\0no')")
    assert (result.stderr, result.exit_code) == ("\0no\n", 1)
    numpy = "import numpy\nprint(numpy.ones(3).sum())"
    assert in_sandbox(sandbox, numpy, Limits()).stdout == "3.0\n"
    loop = "import asyncio\nasync def f(): return 1\nprint(asyncio.run(f()))"
    assert in_sandbox(sandbox, loop).stdout == "1\n"


def test_no_descriptor_but_those_given(sandbox: str):
    reads, writes = os.pipe()
    os.set_inheritable(reads, True)
    os.set_inheritable(writes, True)
    source = """
import os
for number in range(3, 1000):
    try:
        os.fstat(number)
        print(number)
    except OSError:
        pass
"""
    result = in_sandbox(sandbox, source, descriptors=[writes])
    os.close(reads)
    os.close(writes)
    assert result.stdout == f"{writes}\n"


def test_threads_and_descriptors_are_bounded(sandbox: str):
    source = """
import os, threading
threading.stack_size(1 << 16)
end, count = threading.Event(), 0
try:
    while count < 20_000:
        threading.Thread(target=end.wait).start()
        count += 1
except RuntimeError:
    print(count)
end.set()
"""
    result = in_sandbox(sandbox, source, Limits(wall=10))
    assert result.outcome != "ok" or 2 < int(result.stdout) <= 4_000
    if sandbox == PROGRAM:
        assert THREADS - 2 <= int(result.stdout) <= THREADS + 2
    source = "import os\nwhile True: print(*os.pipe())"
    result = in_sandbox(sandbox, source)
    assert result.outcome == "error" and len(result.stdout.split()) < DESCRIPTORS


def test_files(sandbox: str):
    """Bubblewrap gives an empty folder of bounded size; elsewhere nothing is written."""
    source = """
import os, sys
written = 0
try:
    for number in range(5_000):
        with open(f"{number:0200}", "wb") as file:
            written += file.write(b"x" * int(sys.argv[1]))
except OSError as error:
    print(number, written, error.errno)
"""
    for size, errors in (("100000", (27, 28)), ("0", (28,))):
        number, written, error = map(
            int, in_sandbox(sandbox, source, arguments=[size]).stdout.split()
        )
        if sandbox == PROGRAM:
            assert error in errors and number > 5
            assert number <= FILES and written <= SMALL.disk
        else:
            assert (number, written, error) == (0, 0, 1)
    if sandbox == PROGRAM:
        kept = "import tempfile; f = tempfile.TemporaryFile(); f.write(b'a'); print(f.tell())"
        assert in_sandbox(sandbox, kept).stdout == "1\n"
        assert in_sandbox(sandbox, "import os; print(os.listdir())").stdout == "[]\n"
        huge = "open('x', 'wb').write(bytes(5_000_000))"
        assert in_sandbox(sandbox, huge).outcome == "error"


BOMB = """
import os
for _ in range(1_000):
    try:
        os.fork()
    except OSError:
        pass
"""
DAEMON = """
import os, signal, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", "MARK"])
    os._exit(0)
time.sleep(WAIT)
print("left")
"""


def test_several_processes_are_bounded_and_end_with_the_program(sandbox: str):
    limits = Limits(cpu=2, wall=20, processes=8)
    if sandbox != PROGRAM:  # never more than one
        assert "PermissionError" in in_sandbox(sandbox, DAEMON, limits).stderr
        return
    count = "import os\nn = 0\ntry:\n    while n < 50:\n        os.fork() or __import__('time')."
    count += "sleep(9)\n        n += 1\nexcept OSError:\n    print(n)"
    assert 4 <= int(in_sandbox(PROGRAM, count, limits).stdout) <= 8
    assert in_sandbox(PROGRAM, "import subprocess; subprocess.run('true')", limits).outcome == "ok"
    in_sandbox(PROGRAM, BOMB, limits)
    for wait, outcome in (("0.5", "ok"), ("1000", "time")):
        mark = f"nemorl-daemon-{os.getpid()}-{wait}"
        source = DAEMON.replace("MARK", mark).replace("WAIT", wait)
        result = in_sandbox(PROGRAM, source, Limits(wall=2, processes=8))
        assert result.outcome == outcome, result
        deadline = time.monotonic() + 10
        while left := with_argument(mark):
            assert time.monotonic() < deadline, left


def with_argument(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if text in (process.info["cmdline"] or []):
            found.append(process)
    return found


def test_a_program_ends_with_the_process_that_runs_it(sandbox: str, tmp_path: Path):
    """Though that is killed."""
    script = f"""
from nemorl.rollout.sandbox import *
run_program("import time; time.sleep(1000)", arguments=["nemorl-{os.getpid()}"],
            sandbox={sandbox!r}, limits=Limits(wall=1000))
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # its folder is left
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as run:
        deadline = time.monotonic() + 60
        while len(with_argument(f"nemorl-{os.getpid()}")) < (3 if sandbox == PROGRAM else 1):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        found = with_argument(f"nemorl-{os.getpid()}")
        run.kill()
    assert not psutil.wait_procs(found, timeout=10)[1]


def test_many_threads_run_programs_and_leave_no_files(sandbox: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda n: in_sandbox(sandbox, "print(input())", stdin=str(n)), range(24))
        assert [result.stdout for result in found] == [f"{n}\n" for n in range(24)]
    assert not list(tmp_path.iterdir())


def test_the_best_sandbox_is_found_and_another_warned_of(monkeypatch):
    find_sandbox.cache_clear()
    if PROGRAM in HERE:
        assert find_sandbox() == run_program("").sandbox == PROGRAM
        find_sandbox.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(module, "SANDBOXES", SANDBOXES[1:])
        assert find_sandbox() == "rlimits"
    find_sandbox.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "which", lambda *_, **options: None)
        with pytest.warns(UserWarning, match="run in the sandbox 'rlimits', because .*: install"):
            assert find_sandbox() == "rlimits"
    find_sandbox.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(module, "JAIL", "raise SystemExit('not here')")
        with pytest.raises(RuntimeError, match=r"no sandbox works here, as .*not here"):
            run_program("print(1)")
    find_sandbox.cache_clear()


def test_another_interpreter_and_one_that_is_none(sandbox: str):
    python = sys.executable if sandbox != PROGRAM else os.path.realpath(sys.executable)
    assert in_sandbox(sandbox, "print(1)", python=python).stdout == "1\n"
    with pytest.raises(FileNotFoundError, match="no-python"):
        in_sandbox(sandbox, "print(1)", python="/no-python")


@pytest.mark.parametrize(
    ("field", "value"),
    [("cpu", 0), ("wall", 0), ("memory", 1), ("output", 0), ("disk", 0), ("processes", 0)],
)
def test_limits_are_checked(field: str, value: int):
    with pytest.raises(ValueError, match=f"{field} must be at least"):
        Limits(**{field: value})
