"""A reward for tests of processes. It imports no torch, so that these start at once."""

import os
import sys

from nemorl.rollout.processes import judged_in_processes


class Odd(Exception):
    """Can be pickled but not made again."""

    def __init__(self, first, second):
        super().__init__(first)


@judged_in_processes(seconds=1)
def reward(prompt, response, answer=1.0):
    match response:
        case "loop":
            while True:
                pass
        case "in C":
            return float(len(str(3 ** (10**8))))
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
        case "generator":
            return (number for number in [1.0])
        case "process":
            return os.getpid()
        case _:
            return answer * float(response)
