"""A reward for tests of processes. It imports no torch, so that these start at once."""

import ctypes
import os
import signal
import subprocess
import sys

from nemorl.rollout.processes import judged_in_processes

MARK = "NEMORL_TEST_MARK"


class Odd(Exception):
    """Can be pickled but not made again."""

    def __init__(self, first, second):
        super().__init__(first)


def forever():
    while True:
        signal.pause()


@judged_in_processes(seconds=1)
def reward(response, answer=1.0):
    match response:
        case "loop":
            while True:
                pass
        case "in C":
            ctypes.PyDLL(None).sleep(100_000)  # no other thread of Python runs
        case "stops itself":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "ignores signals":
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            forever()
        case "child in a session":
            subprocess.run(["sleep", "100000"], start_new_session=True, check=False)
        case "fork":
            os.fork() or forever()
            os.wait()
        case "child that stays":
            subprocess.Popen(["sleep", "100000"])
        case "raise":
            raise KeyError("score")
        case "odd":
            raise Odd(1, 2)
        case "sys.exit":
            sys.exit(0)
        case "os._exit":
            os._exit(0)
        case "fail":
            from nemorl import ConversationFailed

            raise ConversationFailed("no judge")
        case "huge":
            return "x" * 1_000_000
        case "process":
            return os.getpid()
        case "prints":
            print("said")
        case _:
            return answer * float(response)
    return 1.0
