"""Classes that workers host in the tests."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time


class Target:
    """A bit of everything."""

    def __init__(self, base: float = 0) -> None:
        self.value, self.met = base, threading.Event()

    def add(self, *numbers):
        return self.value + sum(numbers)

    def environment(self, *names):
        return {name: os.environ.get(name) for name in names}

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    def wait(self):
        return self.met.wait(20)

    def meet(self):
        self.met.set()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self):
        """In every way that a library may."""
        print("from Python")
        print("an error from Python", file=sys.stderr)
        os.write(1, b"from a descriptor\n")
        ctypes.CDLL(None).puts(b"from C")
        ctypes.CDLL(None).fflush(None)
        subprocess.run([sys.executable, "-S", "-c", "print('from a child')"], check=True)

    def fail(self, message):
        raise ValueError(message)

    def run_out(self):
        """End as a call does whose process Ray kills to free memory."""
        from ray.exceptions import OutOfMemoryError

        raise OutOfMemoryError("Task was killed due to the node running low on memory.\nOOM\n[")

    def spawn(self):
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        return subprocess.Popen(command).pid

    def all_reduce(self):
        """The sum of all ranks' numbers: torch.distributed finds everything in the environment."""
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")
        number = torch.tensor(float(distributed.get_rank() + 1))
        distributed.all_reduce(number)
        distributed.destroy_process_group()
        return number.item()
