"""Programs in bubblewrap: what they may use, and escapes that are refused."""

import ast
import gc
import os
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
from nemorl.rollout.environments import make_environment
from nemorl.rollout.environments.toolbox import Calculator, PythonTool, Toolbox
from nemorl.rollout.sandbox import (
    DESCRIPTORS,
    FILES,
    ProgramLimits,
    ProgramResult,
    check_sandbox,
    parse,
    run_program,
)

SMALL = ProgramLimits(cpu=1, wall=10, memory=256 << 20, output=10_000, disk=1 << 20)


def run(source: str, limits: ProgramLimits = SMALL, **options) -> ProgramResult:
    return run_program(source, limits=limits, **options)


class Targets(NamedTuple):
    """What attacks are aimed at."""

    file: Path
    folder: Path
    port: int
    victim: psutil.Process


@pytest.fixture
def targets(tmp_path: Path, monkeypatch) -> Iterator[Targets]:
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
    "lists a folder": "assert 'secret.txt' in os.listdir(folder)",
    "overwrites": "open(file, 'w').write('mine')",
    "writes beside its folder": "open('/nemorl-left', 'x')",
    "removes": "os.remove(file)",
    "locks": "fcntl.flock(open(file), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "follows a link of its own": "os.symlink(file, 'link'); open('link', 'a').write('mine')",
    "leaves a file in shared memory": "open('/dev/shm/nemorl-left', 'w')",
    "connects": "socket.create_connection(('127.0.0.1', port), 2)",
    "connects abroad": "socket.create_connection(('1.1.1.1', 53), 2)",
    "stops a process": "os.kill(victim, 19)",
    "traces a process": "done(system(ptrace, 0x4206, victim, 0, 0))",
    "mounts": "done(ctypes.CDLL(None).mount(b'tmpfs', b'/usr', b'tmpfs', 0, None))",
    "becomes root": "os.setuid(0); assert os.getuid() == 0; os.chown('/usr', 0, 0)",
    "raises a limit": "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
}
ATTACK = """
import ctypes, fcntl, os, resource, socket, subprocess, sys
file, folder, port, victim = *sys.argv[1:3], *map(int, sys.argv[3:5])
system = ctypes.CDLL(None, use_errno=True).syscall
ptrace = {"x86_64": 101, "aarch64": 117}[os.uname().machine]
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
    ]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name: str, targets: Targets):
    before = state(targets)
    source, arguments = attack(name, targets)
    result = run(source, arguments=arguments)
    assert "ESCAPED" not in result.stdout and "secret" not in result.stdout
    assert result.outcome == "error", result
    assert "Error" in result.stderr, "it was refused, not ended"
    assert state(targets) == before
    assert not any(Path(each, "nemorl-left").exists() for each in ("/dev/shm", "/"))


WORKS = [
    *(
        "reads a file",
        "reads another's environment",
        "lists a folder",
        "overwrites",
        "removes",
        "locks",
    ),
    *("follows a link of its own", "connects", "stops a process", "traces a process"),
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
        ("x = bytearray(1 << 30)", "memory"),
        ("while True: print('x' * 1_000_000)", "output"),
        ("import sys; sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", None),
        ("input()", "error"),
        ("import os; os.abort()", "error"),
        ("print(1)", "ok"),
    ],
)
def test_a_program_ends_at_its_limits(source: str, outcome: str):
    wall = 2 if outcome == "time" else 60
    result = run(source, ProgramLimits(cpu=1, wall=wall, memory=256 << 20, output=10_000))
    assert result.outcome == outcome or (outcome is None and result.outcome != "ok"), result
    assert (result.exit_code == 0) == (outcome == "ok"), result
    assert len(result.stdout) <= 10_000 and len(result.stderr) <= 10_000


def test_what_a_program_is_given_and_gives():
    source = "import os, sys; print(sys.argv[1:], input(), os.listdir(), dict(os.environ))"
    result = run(source, stdin="ä\nb", arguments=["-c", "1"])
    assert result.stdout.startswith("['-c', '1'] ä [] {"), result
    assert not {"HOME", "USER", "PYTHONPATH", "VIRTUAL_ENV"} & {*result.stdout.split("'")}
    garbage = "import sys; sys.stdout.buffer.write(bytes(range(256))); print('\\ud800')"
    result = run(garbage, stdin="\ud800")
    assert "\ufffd" in result.stdout and "UnicodeEncodeError" in result.stderr
    numpy = "import numpy\nprint(numpy.ones(3).sum())"
    assert run(numpy, ProgramLimits()).stdout == "3.0\n"


def test_no_descriptor_but_those_given_and_few():
    reads, writes = os.pipe()
    for end in (reads, writes):
        os.set_inheritable(end, True)
    source = """
import os
for number in range(3, 1000):
    try:
        os.fstat(number)
        print(number)
    except OSError:
        pass
"""
    result = run(source, descriptors=[writes])
    os.close(reads)
    os.close(writes)
    assert result.stdout == f"{writes}\n"
    result = run("import os\nwhile True: print(*os.pipe())")
    assert result.outcome == "error" and len(result.stdout.split()) < DESCRIPTORS


def test_files_are_held_in_a_folder_of_bounded_size():
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
        number, written, error = map(int, run(source, arguments=[size]).stdout.split())
        assert error in errors and number > 5
        assert number <= FILES and written <= SMALL.disk
    assert run("open('x', 'wb').write(bytes(5_000_000))").outcome == "error"


COUNT = """
import os, threading, time
count, fork = 0, FORK
try:
    while count < 50:
        if fork:
            os.fork() or time.sleep(9)
        else:
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        count += 1
except (OSError, RuntimeError):
    os.write(1, b"%d" % count)
    os._exit(0)
"""
DAEMON = """
import os, signal, sys, time
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


@pytest.mark.parametrize("fork", [True, False])
def test_processes_and_threads_are_bounded_together(fork: bool):
    limits = ProgramLimits(cpu=2, wall=20, processes=8)
    assert 4 <= int(run(COUNT.replace("FORK", str(fork)), limits).stdout) <= 8
    thread = "import threading as t; a = t.Thread(target=print, args=[1]); a.start(); a.join()"
    assert run(thread).stdout == "1\n", "solutions raise the stack's size so"


@pytest.mark.parametrize(("wait", "outcome"), [("0.5", "ok"), ("1000", "time")])
def test_what_a_program_starts_ends_with_it(wait: str, outcome: str):
    mark = f"nemorl-daemon-{os.getpid()}-{wait}"
    source = DAEMON.replace("MARK", mark).replace("WAIT", wait)
    result = run(source, ProgramLimits(wall=2, processes=8))
    assert result.outcome == outcome, result
    assert not psutil.wait_procs(with_argument(mark), timeout=10)[1]


def with_argument(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if text in (process.info["cmdline"] or []):
            found.append(process)
    return found


def test_a_program_ends_with_the_process_that_runs_it(tmp_path: Path):
    """Though that is killed."""
    script = f"""
from nemorl.rollout.sandbox import *
run_program("import time; time.sleep(1000)", arguments=["nemorl-{os.getpid()}"],
            limits=ProgramLimits(wall=1000))
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # its folder is left
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as run:
        deadline = time.monotonic() + 60
        while len(with_argument(f"nemorl-{os.getpid()}")) < 3:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        found = with_argument(f"nemorl-{os.getpid()}")
        run.kill()
    assert not psutil.wait_procs(found, timeout=10)[1]


def test_many_threads_run_programs_and_leave_no_files(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda n: run("print(input())", stdin=str(n)), range(8))
        assert [result.stdout for result in found] == [f"{n}\n" for n in range(8)]
    assert not list(tmp_path.iterdir())


NO_NAMESPACES = """#!/bin/sh
echo 'bwrap: No permissions to create new namespace' >&2
exit 1
"""


@pytest.mark.parametrize(
    ("bwrap", "message"),
    [
        ("", "there is no bwrap on the PATH: apt install bubblewrap .*, or judge them by an async"),
        (NO_NAMESPACES, "does not work here: bwrap: No permissions to create new namespace: allow"),
    ],
    ids=["none", "no namespaces"],
)
def test_without_bubblewrap_programs_are_refused_before_the_run(
    bwrap: str, message: str, tmp_path: Path, monkeypatch
):
    environments = [make_environment("exact_match", environment=e) for e in (PythonTool, Toolbox)]
    environments.append(make_environment("code"))
    rows = [{"prompt": "1+1=", "answer": "assert f() == 2"}]
    for environment in environments:
        environment.check(rows)
    if bwrap:
        Path(tmp_path, "bwrap").write_text(bwrap)
        Path(tmp_path, "bwrap").chmod(0o755)
    monkeypatch.setattr(module, "PLACES", str(tmp_path))
    check_sandbox.cache_clear()
    for environment in environments:
        with pytest.raises(RuntimeError, match=message):
            environment.check(rows)
    make_environment("exact_match", environment=Calculator).check(rows)


def test_threads_parse_while_garbage_is_collected():
    """A collection in the middle of a tree lets the other threads go on."""
    text = "def f(x): return x\nassert f(1) == 2\n" * 30
    wanted, before = ast.dump(ast.parse(text)), gc.get_threshold()

    def let_others_in(*_: object) -> None:
        time.sleep(0.001)

    gc.callbacks.append(let_others_in)
    gc.set_threshold(100)
    try:
        with ThreadPoolExecutor(3) as threads:
            trees = list(threads.map(parse, [text] * 60))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(let_others_in)
    assert {ast.dump(tree) for tree in trees} == {wanted}
