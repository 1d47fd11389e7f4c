"""Classes that workers host in the tests."""

import builtins
import ctypes
import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


class Target:
    """A bit of everything."""

    def __init__(self, base: float = 0, *, left: str = "") -> None:
        self.value, self.left, self.four = base, left, threading.Barrier(4, timeout=60)

    def add(self, *numbers):
        return self.value + sum(numbers)

    def environment(self, *names):
        return {name: os.environ.get(name) for name in names}

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    def meet(self):
        """Waits until four calls are in here."""
        return self.four.wait()

    def stop_still(self):
        """Stopped as by a debugger, this process answers nobody."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep_or_die(self, seconds):
        return os.kill(os.getpid(), signal.SIGKILL) if seconds is None else self.sleep(seconds)

    def write(self):
        """In every way that a library may."""
        print("from Python")
        print("an error from Python", file=sys.stderr)
        os.write(1, b"from a descriptor\n")
        ctypes.CDLL(None).puts(b"from C")
        ctypes.CDLL(None).fflush(None)
        subprocess.run([sys.executable, "-S", "-c", "print('from a child')"], check=True)

    def fail(self, kind, message):
        raise {**vars(builtins), **globals()}[kind](message)

    def lock(self):
        return threading.Lock()

    def spawn(self):
        """A child in this process's group and one in a session of its own; their process ids."""
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        return subprocess.Popen(command).pid, subprocess.Popen(command, start_new_session=True).pid

    def versions(self, *names):
        import nemorl

        return [
            sys.executable,
            str(Path(nemorl.__file__).parent),
            *map(importlib.metadata.version, names),
        ]

    def all_reduce(self):
        """The sum of all ranks' numbers, by torch.distributed, which finds everything in the
        environment.
        """
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")
        number = torch.tensor(float(distributed.get_rank() + 1))
        distributed.all_reduce(number)
        distributed.destroy_process_group()
        return number.item()

    def shutdown(self):
        if self.left:
            Path(f"{self.left}-{os.environ['RANK']}").write_text("in order", encoding="utf-8")


class Slow:
    """Made at once unless there is a file, beside which it leaves a trace of itself then."""

    def __init__(self, flag):
        if Path(flag).exists():
            Path(f"{flag}-{os.getpid()}").touch()
            time.sleep(60)


class Own(Exception):
    pass


class Subtle(FloatingPointError):
    pass


class Unsendable(Exception):
    """It can't be pickled."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class Unmakeable:
    def __init__(self) -> None:
        raise ValueError("engine.what must be something, but it is nothing: say what")
