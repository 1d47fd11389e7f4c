"""Python that models wrote: parsed by any number of threads, and run in bubblewrap."""

import ast
import functools
import itertools
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from nemorl.checks import at_least

SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"
DEVICES = "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
FILES, DESCRIPTORS = 1024, 64
PLACES = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
NUMBERS = itertools.count(os.getpid())
ELSEWHERE = "judge them by an async reward that calls a sandbox behind a URL (docs/rewards.md)"
LAUNCH = """
import ctypes, os, resource, sys
limits, folder, tmpfs, uid = eval(sys.argv[1])
for name, pair in limits.items():
    kind = getattr(resource, f"RLIMIT_{name}")
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, pair if most < 0 else tuple(min(most, each) for each in pair))
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 6, tmpfs.encode()):
    raise OSError(ctypes.get_errno(), "can't mount a folder in memory")
os.chdir(folder)
if uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
libc.prctl(47, 4, 0, 0, 0)  # capabilities end with `execv`
os.write(2, b"\\0")  # all is shut
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Started in bubblewrap, it sets limits, and becomes the program."""
_ONE_AT_A_TIME = Lock()
"""CPython before 3.11.8 and 3.12.2 counts the depths of all threads' trees in one number: a garbage
collection that lets another thread in ends in SystemError (gh-106905)."""


def parse(text: str, mode: str = "exec") -> Any:
    """Parse Python, from any thread."""
    with _ONE_AT_A_TIME:
        return ast.parse(text, mode=mode)


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """What a program may use."""

    cpu: int = 10
    """Seconds of each process."""
    wall: float = 20.0
    """Seconds by the clock, with the sandbox's start."""
    memory: int = 1 << 30
    """Bytes of address space of each process."""
    output: int = 1 << 20
    """Bytes of stdout and stderr."""
    disk: int = 64 << 20
    """Bytes of files, held in memory."""
    processes: int = 4
    """Processes and threads together."""

    def __post_init__(self) -> None:
        at_least(1, cpu=self.cpu, wall=self.wall, output=self.output)
        at_least(1, disk=self.disk, processes=self.processes)
        at_least(1 << 26, memory=self.memory)


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended."""

    stdout: str
    stderr: str
    exit_code: int
    """128 + n for a signal n."""
    outcome: str
    """ok, error, or the limit that ended it: time, memory, output."""
    seconds: float


def run_program(
    source: str,
    *,
    stdin: str = "",
    arguments: Sequence[str] = (),
    limits: ProgramLimits | None = None,
    descriptors: Sequence[int] = (),
) -> ProgramResult:
    """Run a Python program in bubblewrap, from any thread.

    descriptors: open files that it gets, too. Raises: RuntimeError where it can't be shut in.

    >>> run_program("print(int(input()) + 1)", stdin="41").stdout
    '42\\n'
    """
    limits, begin = limits or ProgramLimits(), time.monotonic()
    with TemporaryDirectory(prefix="nemorl-") as folder:
        Path(folder, "empty").mkdir()
        for name, text in (("program.py", source), ("stdin", stdin)):
            path = Path(folder, name)
            path.write_bytes(text.encode(errors="replace"))
            path.chmod(0o444)
        with (
            path.open("rb") as given,
            subprocess.Popen(
                _command(folder, arguments, limits),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                start_new_session=True,
                env=ENVIRONMENT,
            ) as process,
        ):
            path.unlink()  # others might read it
            try:
                out, err, cut = _read(process, limits.output, begin + limits.wall)
            finally:
                process.kill()
    seconds, code = time.monotonic() - begin, process.returncode
    begun, stderr = err.startswith(b"\0"), err.removeprefix(b"\0").decode(errors="replace")
    if not begun and not cut:
        raise RuntimeError(
            f"programs that a model wrote run only in bubblewrap, which does not work here:"
            f" {stderr.strip()[-500:]}: allow user namespaces, or {ELSEWHERE}"
        )
    code = 128 - code if code < 0 else code
    if not cut and code:
        cut = "error"
        if code == 128 + signal.SIGXCPU or (code == 137 and seconds > limits.cpu):
            cut = "time"
        elif code == 137 or stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            cut = "memory"
    return ProgramResult(out.decode(errors="replace"), stderr, code, cut or "ok", seconds)


def _command(folder: str, arguments: Sequence[str], limits: ProgramLimits) -> list[str]:
    bwrap = shutil.which("bwrap", path=PLACES)
    if bwrap is None:
        raise RuntimeError(
            "programs that a model wrote run only in bubblewrap, but there is no bwrap on the PATH:"
            f" apt install bubblewrap (or dnf, pacman, apk), or {ELSEWHERE}"
        )
    root, where, program = os.getuid() == 0, f"{folder}/empty", f"{folder}/program.py"
    sizes = {"AS": limits.memory, "FSIZE": limits.disk, "NOFILE": DESCRIPTORS, "CORE": 0}
    sizes["NPROC"] = limits.processes + 2 * (not root)  # bubblewrap's own are of the same user
    given = (
        {"CPU": (limits.cpu, limits.cpu + 1)}
        | {name: (size, size) for name, size in sizes.items()},
        where,
        f"size={limits.disk},nr_inodes={FILES},mode=777",
        root and 20_000 + next(NUMBERS) % 40_000,
    )
    python, prefixes = sys.executable, {sys.prefix, sys.base_prefix}
    prefixes |= {*map(os.path.realpath, prefixes)}
    readable = [*SYSTEM, *DEVICES, *sorted(prefixes)]
    above = sorted({str(up) for path in [*readable, where] for up in Path(path).parents[:-1]})
    binds = [("--dev-bind-try" if p in DEVICES else "--ro-bind-try", p, p) for p in readable]
    options = [
        *(("--dir", each) for each in above),  # which other users may enter
        *binds,
        ("--ro-bind", program, program, "--dir", where, "--remount-ro", "/", "--cap-drop", "ALL"),
        *(("--cap-add", f"CAP_{name}") for name in ("SYS_ADMIN", *["SETUID", "SETGID"] * root)),
        *((f"--unshare-{kind}",) for kind in ("ipc", "pid", "net", "uts", *["user"] * (not root))),
    ]
    launch = [python, "-I", "-S", "-c", LAUNCH, repr(given), python, "-I", "-B", program]
    return [bwrap, "--die-with-parent", *itertools.chain(*options), *launch, *arguments]


def _read(process: subprocess.Popen[bytes], most: int, deadline: float) -> tuple[bytes, bytes, str]:
    found = {process.stdout: bytearray(), process.stderr: bytearray()}
    cut = ""
    with selectors.DefaultSelector() as selector:
        for stream in found:
            selector.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]
        while selector.get_map() and not cut:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                chunk = os.read(key.fd, 1 << 16)
                found[key.fileobj] += chunk  # type: ignore[index]
                if not chunk:
                    selector.unregister(key.fileobj)
            if sum(map(len, found.values())) > most:
                cut = "output"
            elif time.monotonic() > deadline:
                cut = "time"
    if not cut:  # a program may close both and go on
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            cut = "time"
    out, err = (bytes(each[:most]) for each in found.values())
    return out, err, cut


@functools.cache
def check_sandbox() -> None:
    """Raise RuntimeError, with the remedy, where no program can be run."""
    run_program("")
