"""Python that models wrote: parsed by any number of threads, and run in bubblewrap; agents, too."""

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from nemorl.checks import at_least, require

SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"
DEVICES = "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
HOME = "/run/nemorl"
FILES, DESCRIPTORS = 1024, 64
PLACES = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
AGENT_ENVIRONMENT = ENVIRONMENT | {"PATH": PLACES, "HOME": HOME, "TMPDIR": HOME, "USER": "agent"}
NUMBERS = itertools.count(os.getpid())
ELSEWHERE = "judge them by an async reward that calls a sandbox behind a URL (docs/rewards.md)"
AGENT_SIZES = {"CPU": 3600, "DATA": 4 << 30, "FSIZE": 1 << 28, "NOFILE": 1024, "NPROC": 256}
"""Without AS, of which JavaScript reserves much."""
AGENT_PLACES = [
    *("--dir", "/dev/shm", "--proc", "/proc", "--dir", "/tmp"),
    *("--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "fd/0", "/dev/stdin"),
    *("--symlink", "fd/1", "/dev/stdout", "--symlink", "fd/2", "/dev/stderr"),
]
LAUNCH = """
import ctypes, os, resource, sys
limits, folder, tmpfs, uid, gate = eval(sys.argv[1])
for name, pair in limits.items():
    kind = getattr(resource, f"RLIMIT_{name}")
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, pair if most < 0 else tuple(min(most, each) for each in pair))
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"tmpfs", folder, b"tmpfs", 6, tmpfs):
    raise OSError(ctypes.get_errno(), "can't mount a folder in memory")
if gate:
    os.fchmod(1, 0o666), os.fchmod(2, 0o666)
    for place in (b"/tmp", b"/dev/shm"):
        os.listdir(place) or libc.mount(folder, place, None, 4096, None)
os.chdir(folder)
if uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
libc.prctl(47, 4, 0, 0, 0)  # capabilities end with `execv`
if gate:
    import socket
    listener = socket.create_server(("127.0.0.1", gate[1]))
    with socket.socket(fileno=gate[0]) as ours:
        socket.send_fds(ours, [b"1"], [listener.fileno()])
else:
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
    sizes = {"CPU": limits.cpu, "AS": limits.memory, "FSIZE": limits.disk}
    sizes |= {"NOFILE": DESCRIPTORS, "NPROC": limits.processes}
    with TemporaryDirectory(prefix="nemorl-") as folder:
        program = f"{folder}/program.py"
        python = [sys.executable, "-I", "-B", program, *arguments]
        for name, text in (("program.py", source), ("stdin", stdin)):
            path = Path(folder, name)
            path.write_bytes(text.encode(errors="replace"))
            path.chmod(0o444)
        with (
            path.open("rb") as given,
            subprocess.Popen(
                _in_sandbox(python, f"{folder}/empty", sizes, [program]),
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
    stderr = err.removeprefix(b"\0").decode(errors="replace")
    if not err.startswith(b"\0") and not cut:
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


def _in_sandbox(
    command: Sequence[str],
    where: str,
    sizes: Mapping[str, int],
    readable: Iterable[str],
    gate: tuple[int, int] | None = None,
) -> list[str]:
    bwrap = shutil.which("bwrap", path=PLACES)
    if bwrap is None:
        raise RuntimeError(
            "programs that a model wrote run only in bubblewrap, but there is no bwrap on the PATH:"
            f" apt install bubblewrap (or dnf, pacman, apk), or {ELSEWHERE}"
        )
    root, files = os.getuid() == 0, FILES * sizes["NOFILE"] // DESCRIPTORS
    most = sizes["NPROC"] + 2 * (not root)  # bubblewrap's own are of the same user
    given = (
        {name: (size, size + (name == "CPU")) for name, size in sizes.items()}
        | {"NPROC": (most, most), "CORE": (0, 0)},
        where.encode(),
        f"size={sizes['FSIZE']},nr_inodes={files},mode=777".encode(),
        root and 20_000 + next(NUMBERS) % 40_000,
        gate,
    )
    prefixes = {sys.prefix, sys.base_prefix}
    every = {*SYSTEM, *DEVICES, *prefixes, *map(os.path.realpath, prefixes), *readable}
    tops = sorted(each for each in every if every.isdisjoint(map(str, Path(each).parents)))
    above = sorted({str(up) for path in [*tops, where] for up in Path(path).parents[:-1]})
    options = [
        *(("--dir", each) for each in above),  # which other users may enter
        *(("--dev-bind-try" if p in DEVICES else "--ro-bind-try", p, p) for p in tops),
        AGENT_PLACES if gate else (),
        ("--dir", where, "--remount-ro", "/", "--cap-drop", "ALL"),
        *(("--cap-add", f"CAP_{name}") for name in ("SYS_ADMIN", *["SETUID", "SETGID"] * root)),
        *((f"--unshare-{kind}",) for kind in ("ipc", "pid", "net", "uts", *["user"] * (not root))),
    ]
    launch = [sys.executable, "-I", "-S", "-c", LAUNCH, repr(given), *command]
    return [bwrap, "--die-with-parent", *itertools.chain(*options), *launch]


def agent_in_sandbox(words: Sequence[str], gate: tuple[int, int]) -> list[str]:
    """Return an agent's command in bubblewrap, with a network of `gate` (`Endpoint.gate`)."""
    here, home = Path.cwd(), Path.home().resolve()
    require(
        here not in (home, *home.parents),
        "the working folder",
        "must not hold your home with rollout.sandbox",
        here,
        "use another",
    )
    command = [shutil.which(words[0]) or words[0], *words[1:]]
    command = [str(Path(each).absolute()) if Path(each).is_file() else each for each in command]
    files = {path for path in map(Path, command) if path.is_file()}
    for _ in range(3):
        files |= {each.with_name("python") for each in files}
        files |= {each.resolve() for each in files}
        files |= {each.parent / each.readlink() for each in files if each.is_symlink()}
    around = {each.parents[1] for each in files if each.parent.name == "bin"}
    files |= {each / name for each in around for name in ("bin", "lib", "pyvenv.cfg")}
    readable = [*map(str, {here, *files}), "/etc/alternatives", "/etc/ssl/certs"]
    return _in_sandbox(command, HOME, AGENT_SIZES, readable, gate)


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
