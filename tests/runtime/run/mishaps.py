"""What goes wrong on purpose."""

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
