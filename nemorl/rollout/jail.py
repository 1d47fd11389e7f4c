"""Shut this process in and execute a program: the script that `sandbox` starts.

System calls are refused by number; those newer than Linux 5.1 do not exist in there.
"""

import ctypes
import os
import resource
import stat
import struct
import sys

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {
    "x86_64": "29-31,41,64-71,101,141-142,144,155,161,165-166,203,220,240-245,248-251,256,272,279,"
    "298,300,308,310-312,314,319,321,323",
    "aarch64": "30,39-41,51,97,117-119,122,140,180-198,217-219,238-239,241,262,268,270-272,274,"
    "279-280,282",
}
"""Sockets, shared memory and queues that outlive a process, ptrace, priorities, CPUs, keys, mounts,
namespaces, memfd_create, perf_event_open, bpf, userfaultfd.
"""
OTHERS = {"x86_64": "57-58,62,129,200,234,297", "aarch64": "129-131,138,240"}
"""Forks and signals."""
WRITES = {
    "x86_64": "76,82-88,90-94,132-133,188-190,197-199,235,258-261,263-266,268,280,316",
    "aarch64": "5-7,14-16,33-38,45,52-55,88,276",
}
"""Changes of files by name, of modes, owners, times and attributes."""
CHECKED = {"x86_64": (56, 302, 72, 16, 53, 257), "aarch64": (220, 261, 25, 29, 199, 56)}
"""clone, prlimit64, fcntl, ioctl, socketpair, openat."""
EQUAL, ABOVE, FROM, ANY_BIT = 0x15, 0x25, 0x35, 0x45
KILL, EPERM, ENOSYS, ALLOW = ((6, 0, 0, end) for end in (1 << 31, 0x50001, 0x50026, 0x7FFF0000))
LIBC = ctypes.CDLL(None, use_errno=True)


def system_call_filter(machine: str, *, alone: bool, writes: bool) -> bytes:
    """Return the filter in BPF: for a process without others, and with or without files."""
    clone, prlimit, fcntl, ioctl, socketpair, openat = CHECKED[machine]
    lists = [REFUSED, *[OTHERS] * alone, *[WRITES] * (not writes)]
    rules = [  # refused if the test of the argument is true
        (clone, 0, ANY_BIT, 0x7E020000, True),  # namespaces
        (prlimit, 0, ANY_BIT, 0xFFFFFFFF, True),  # of others
        *((fcntl, 1, EQUAL, command, True) for command in (8, 10, 15)),  # signals of files
        *((ioctl, 1, EQUAL, command, True) for command in (0x8901, 0x8902)),
        (socketpair, 1, ANY_BIT, 6, True),  # but streams
        *[(clone, 0, ANY_BIT, 0x10000, False)] * alone,  # but threads
        *[(openat, 2, ANY_BIT, 0x243, True)] * (not writes),
        *[(2, 1, ANY_BIT, 0x243, True)] * (not writes and machine == "x86_64"),
    ]
    number = (0x20, 0, 0, 0)
    code = [(0x20, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[machine]), KILL]
    code += [number, (FROM, 0, 1, 424), ENOSYS]
    for part in ",".join(each[machine] for each in lists).split(","):
        first, _, last = part.partition("-")
        code += [(FROM, 0, 2, int(first)), (ABOVE, 1, 0, int(last or first)), EPERM]
    for call, place, test, value, hit in rules:
        code += [(EQUAL, 0, 4, call), (0x20, 0, 0, 16 + 8 * place)]
        code += [(test, not hit, hit, value), EPERM, number]
    return b"".join(struct.pack("HBBI", *each) for each in [*code, ALLOW])


def _done(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _read_only(paths: list[str]) -> None:
    """Have Landlock refuse files but these, and other processes in /proc."""
    rules = _done(LIBC.syscall(444, struct.pack("Q", 0x1FFF), 8, 0))
    for path in filter(os.path.exists, paths):
        place = os.open(path, os.O_PATH)
        rights = 0b1101 if stat.S_ISDIR(os.fstat(place).st_mode) else 0b101
        rule = struct.pack("=Qi", rights, place)
        _done(LIBC.syscall(445, rules, 1, rule, 0))
    _done(LIBC.syscall(446, rules, 0))


def main(given: dict, command: list[str]) -> None:
    """Execute a command as `sandbox` says."""
    for name, pair in given["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        soft, hard = pair if most < 0 else (min(most, each) for each in pair)
        resource.setrlimit(kind, (soft, hard))
    folder, uid, tmpfs = given["folder"], given["uid"], given["tmpfs"]
    if tmpfs:
        _done(LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", 6, tmpfs.encode()))
    os.chdir(folder)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif os.getuid() == 0:
        _done(LIBC.prctl(28, 3, 0, 0, 0))  # root's capabilities end with `execv`
    _done(LIBC.prctl(47, 4, 0, 0, 0))  # ambient ones
    _done(LIBC.prctl(1, 9, 0, 0, 0))  # end with the parent
    if os.getppid() != given["parent"]:
        return
    _done(LIBC.prctl(38, 1, 0, 0, 0))  # no new privileges
    if given["readable"]:
        _read_only(given["readable"])
    code = system_call_filter(os.uname().machine, alone=given["alone"], writes=bool(tmpfs))
    program = ctypes.create_string_buffer(code)
    filled = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(program))
    _done(LIBC.prctl(22, 2, filled, 0, 0))
    os.write(2, b"\0")  # all is shut
    os.execv(command[0], command)


if __name__ == "__main__":
    main(eval(sys.argv[1]), sys.argv[2:])
