"""Run programs that nobody has read: `run_program`."""

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

from nemorl.checks import at_least
from nemorl.warn import warn

SANDBOXES = "bubblewrap", "rlimits", "rlimits without Landlock"
JAIL = Path(__file__).with_name("jail.py").read_text()
SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"
DEVICES = "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
THREADS, FILES, DESCRIPTORS = 64, 1024, 256
PLACES = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
NUMBERS = itertools.count(os.getpid())


@dataclass(frozen=True, kw_only=True)
class Limits:
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
    """Bytes of files, held in memory. With rlimits none is written."""
    processes: int = 1
    """1: no others, but threads; else both together. With rlimits always 1."""

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
    sandbox: str


def run_program(
    source: str,
    *,
    stdin: str = "",
    arguments: Sequence[str] = (),
    limits: Limits | None = None,
    python: str = sys.executable,
    descriptors: Sequence[int] = (),
    sandbox: str | None = None,
) -> ProgramResult:
    """Run a Python program in a sandbox, from any thread.

    descriptors: open files that it gets, too. sandbox: one of SANDBOXES (default: the best).
    Raises: RuntimeError where it can't be shut in.

    >>> run_program("print(int(input()) + 1)", stdin="41").stdout
    '42\\n'
    """
    sandbox, limits = sandbox or find_sandbox(python), limits or Limits()
    begin = time.monotonic()
    with TemporaryDirectory(prefix="nemorl-") as folder:
        Path(folder, "empty").mkdir()
        for name, text in (("program.py", source), ("stdin", stdin)):
            path = Path(folder, name)
            path.write_bytes(text.encode(errors="replace"))
            path.chmod(0o444)
        with (
            path.open("rb") as given,
            subprocess.Popen(
                _command(sandbox, folder, python, arguments, limits),
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
        raise RuntimeError(f"no program can be run in the sandbox {sandbox!r}: {stderr[-500:]}")
    code = 128 - code if code < 0 else code
    if not cut and code:
        cut = "error"
        if code == 128 + signal.SIGXCPU or (code == 137 and seconds > limits.cpu):
            cut = "time"
        elif code == 137 or stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            cut = "memory"
    return ProgramResult(out.decode(errors="replace"), stderr, code, cut or "ok", seconds, sandbox)


def _command(
    sandbox: str, folder: str, python: str, arguments: Sequence[str], limits: Limits
) -> list[str]:
    inside, root = sandbox == "bubblewrap", os.getuid() == 0
    alone = limits.processes == 1 or not inside
    where, program = f"{folder}/empty", f"{folder}/program.py"
    sizes = {"AS": limits.memory, "FSIZE": limits.disk, "NOFILE": DESCRIPTORS, "CORE": 0}
    if inside:  # elsewhere others of the same user would count
        sizes["NPROC"] = (THREADS if alone else limits.processes) + 2 * (not root)
    readable = [*SYSTEM, *DEVICES, *_prefixes(python)]
    given = {
        "limits": {"CPU": (limits.cpu, limits.cpu + 1)} | {k: (v, v) for k, v in sizes.items()},
        "folder": where,
        "alone": alone,
        "tmpfs": inside and f"size={limits.disk},nr_inodes={FILES},mode=777",
        "parent": 1 if inside else os.getpid(),
        "uid": inside and root and 20_000 + next(NUMBERS) % 40_000,
        "readable": sandbox == "rlimits" and [*readable, folder],
    }
    jail = [python, "-I", "-S", "-c", JAIL, repr(given), python, "-I", "-B", program, *arguments]
    if not inside:
        return jail
    above = sorted({str(up) for path in [*readable, where] for up in Path(path).parents[:-1]})
    binds = [("--dev-bind-try" if p in DEVICES else "--ro-bind-try", p, p) for p in readable]
    options = [
        *(("--dir", each) for each in above),  # which other users may enter
        *binds,
        ("--ro-bind", program, program, "--dir", where, "--remount-ro", "/", "--cap-drop", "ALL"),
        *(("--cap-add", f"CAP_{name}") for name in ("SYS_ADMIN", *["SETUID", "SETGID"] * root)),
        *((f"--unshare-{kind}",) for kind in ("ipc", "pid", "net", "uts", *["user"] * (not root))),
    ]
    bwrap = shutil.which("bwrap", path=PLACES) or "bwrap"
    return [bwrap, "--die-with-parent", *itertools.chain(*options), *jail]


@functools.cache
def _prefixes(python: str) -> list[str]:
    """Return the folders of an interpreter, and what they link to."""
    code = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    found = subprocess.check_output([python, "-I", "-c", code], text=True).splitlines()
    return sorted({path for each in found for path in (each, os.path.realpath(each))})


def _read(process: subprocess.Popen[bytes], most: int, deadline: float) -> tuple[bytes, bytes, str]:
    """Return stdout, stderr and which limit cut them, if any."""
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
def find_sandbox(python: str = sys.executable) -> str:
    """Return the first of SANDBOXES that works here; warns of another than the first.

    Raises: RuntimeError if none does.
    """
    reasons = []
    for name in SANDBOXES:
        try:
            result = run_program("", python=python, sandbox=name)
        except (RuntimeError, OSError) as error:
            reasons.append(str(error))
            continue
        if result.outcome != "ok":
            reasons.append(f"{name}: {result.outcome}, {result.stderr[-500:]}")
            continue
        if reasons:
            warn(
                f"programs run in the sandbox {name!r}, because {reasons[0]}: install bubblewrap;"
                " docs/code.md says what it does not shut"
            )
        return name
    raise RuntimeError(f"no sandbox works here, as {'; '.join(reasons)}: use Linux, bubblewrap")
