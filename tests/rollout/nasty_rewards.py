"""Rewards that try to outlast their time limit, for tests of processes. It imports no torch."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from math import nan

from nemorl.rollout.processes import judged_in_processes

LATE, OVER = "late", 100_000
PR_SET_DUMPABLE = 4
NASTY = {}
"""By name: the function, and what comes of it: LATE, a reward, or a part of the error."""


def nasty(outcome):
    def add(fn):
        NASTY[fn.__name__] = fn, outcome
        return fn

    return add


@judged_in_processes(seconds=1)
def reward(response, token=""):
    fn = NASTY.get(response)
    return float(response) if fn is None else fn[0]()


def forever():
    while True:
        time.sleep(1)


def sleeper(**options):
    return subprocess.Popen(["sleep", f"{OVER}.{os.environ['NASTY_TOKEN']}"], **options)


class Reduced:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call

    def __call__(self): ...


def sockets():
    """Numbers of the open files that are sockets."""
    for fd in range(3, 100):
        try:
            if os.path.realpath(f"/proc/self/fd/{fd}").split("/")[-1].startswith("socket:"):
                yield fd
        except OSError:
            pass


def write_to_connection(content):
    for fd in sockets():
        os.write(fd, content)


def slow_to_lead_a_session():
    """Have the workers of a server be slow; return a function that may be late."""
    setsid = os.setsid
    os.setsid = lambda: (time.sleep(0.5), setsid())
    return lambda late: forever() if late else 1.0


@nasty(LATE)
def spins():
    while True:
        pass


@nasty(LATE)
def forks_and_waits_for_the_child():
    if os.fork() == 0:
        forever()
    os.wait()


@nasty(1.0)
def forks_and_returns_twice():
    os.fork()
    return 1.0


@nasty("its process ended")
def forks_and_exits():
    if os.fork() == 0:
        forever()
    os._exit(0)


@nasty(LATE)
def pool_hangs():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(time.sleep, [OVER, OVER])


@nasty(LATE)
def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


@nasty(LATE)
def stops_its_group():
    os.killpg(0, signal.SIGSTOP)
    forever()


@nasty(1.0)
def stops_its_server():
    os.kill(os.getppid(), signal.SIGSTOP)
    return 1.0


@nasty(1.0)
def stops_its_server_that_waits():
    time.sleep(0.3)  # it has read that the call has begun
    return stops_its_server()


@nasty(1.0)
def stalls_with_its_server():
    """As if the whole machine were stopped for longer than the limit."""
    worker, server = os.getpid(), os.getppid()
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.2)
        for pid in (server, worker):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(server, signal.SIGCONT)
        time.sleep(0.1)
        os.kill(worker, signal.SIGCONT)
        os._exit(0)
    time.sleep(0.5)
    return 1.0


@nasty(LATE)
def stops_its_server_and_hangs():
    os.kill(os.getppid(), signal.SIGSTOP)
    forever()


@nasty("the server of its processes ended")
def kills_its_server():
    sleeper(start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    forever()


@nasty(LATE)
def cancels_faulthandler():
    faulthandler.dump_traceback_later(OVER)
    faulthandler.cancel_dump_traceback_later()
    forever()


@nasty(LATE)
def masks_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    forever()


@nasty(LATE)
def leaves_the_group():
    if os.fork() == 0:
        os.setsid()
        forever()
    forever()


@nasty(LATE)
def daemon_without_environment_and_hangs():
    sleeper(start_new_session=True, env={})
    forever()


@nasty(1.0)
def daemon_outlives_it():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            forever()
        os._exit(0)
    return 1.0


@nasty(1.0)
def child_outlives_it():
    sleeper()
    return 1.0


@nasty("its process ended")
def closes_all_files():
    os.closerange(0, 1000)
    forever()


@nasty("its process ended")
def exits():
    os._exit(3)


@nasty("its process ended")
def crashes_in_c():
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # to write a core takes its time
    ctypes.string_at(0)


@nasty("its process ended")
def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@nasty("wrote something other than an answer")
def writes_garbage():
    write_to_connection(b"garbage" * 1000)
    forever()


@nasty(LATE)
def writes_half_a_message():
    write_to_connection(b"gar")
    forever()


@nasty("wrote something other than an answer")
def writes_a_huge_size():
    write_to_connection(b"\0" * 7 + b"\1" + b"\xff" * 4)
    forever()


@nasty("must be a finite number, but it is <tests.rollout.nasty_rewards.Reduced")
def answer_hangs_when_it_is_unpickled():
    return Reduced(time.sleep, (OVER,))


@nasty("must be a finite number, but it is <tests.rollout.nasty_rewards.Reduced")
def answer_exits_when_it_is_unpickled():
    return Reduced(os._exit, (1,))


@nasty(RuntimeError)
def error_hangs_when_it_is_unpickled():
    raise type("Bad", (Exception,), {"__reduce__": lambda self: (time.sleep, (OVER,))})("bad")


@nasty(LATE)
def answer_hangs_when_it_becomes_a_number():
    return type("Slow", (), {"__float__": lambda self: forever()})()


@nasty(LATE)
def error_hangs_when_it_is_shown():
    raise type("Slow", (Exception,), {"__str__": lambda self: forever()})()


@nasty("must be a finite number, but it is 'xxxx")
def answer_is_huge():
    return "x" * 1_000_000


@nasty("yyyy")
def error_is_huge():
    raise ValueError("y" * 1_000_000 + "\0" * 1_000_000)


@nasty("must be a finite number, but it is nan")
def nan_with_threads_that_hang():
    for daemon in (True, False):
        threading.Thread(target=forever, daemon=daemon).start()
    return nan


@nasty(1.0)
def threads_hang():
    threading.Thread(target=forever).start()
    return 1.0


@nasty("RecursionError|maximum recursion")
def recurses():
    return recurses()


@nasty("KeyboardInterrupt")
def interrupts():
    raise KeyboardInterrupt


@nasty(LATE)
def waits_without_the_interpreter():
    ctypes.PyDLL(None).sleep(OVER)


@nasty(LATE)
def waits_for_a_socket():
    ours, theirs = socket.socketpair()
    ours.recv(1)
    theirs.close()


@nasty(LATE)
def lowers_its_limits():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    gc.disable()
    os.nice(19)
    forever()
