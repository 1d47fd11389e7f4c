"""What goes wrong on purpose, and may leave a thread."""

import threading

from tests.runtime.runs import digits


class FailsOnce:
    """A reward that raises when it has been asked `after` times; then it works."""

    def __init__(self, after: int, error: BaseException | None = None) -> None:
        self.left, self.error = after, error or RuntimeError("the judge is out")

    def __call__(self, prompt: str, response: str) -> float:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return digits(prompt, response)


def rollout_threads() -> set[threading.Thread]:
    """The threads of drivers, of which one that a test blocked goes on."""
    return {each for each in threading.enumerate() if each.name == "nemorl-rollouts"}
