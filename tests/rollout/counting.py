"""Three prompts, and environments of three turns."""

from collections.abc import Iterable
from contextlib import closing

from nemorl.rollout.collect import Rollouts, collect
from nemorl.rollout.conversation import Limits, Prompts
from nemorl.rollout.driver import Driver
from nemorl.rollout.environment import EnvironmentReturn
from nemorl.rollout.environments.classes import TurnResult
from nemorl.rollout.generation import Completion, SamplingParams
from tests.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ROWS = [{"prompt": text, "answer": text[0]} for text in ("1+2=", "20+3=", "4=")]
PROMPTS = Prompts(
    ROWS,
    [TOKENIZER(row["prompt"])["input_ids"] for row in ROWS],
    tokenizer=TOKENIZER,
    limits=Limits(max_tokens=60),
)
SAMPLING = SamplingParams(n=3, max_new_tokens=5, temperature=0.8)


class Count:
    """Counts to three; its rewards are 1, 2, 3."""

    opened = closed = 0

    def reset(self, answer: str) -> str:
        self.turn, self.answer = 0, answer
        Count.opened += 1
        return "7"

    def step(self, response: str) -> TurnResult:
        self.turn += 1
        return TurnResult(
            observation="1+",
            reward=float(self.turn),
            done=self.turn == 3,
            answer=response,
            metrics={"turn": self.turn},
        )

    def close(self) -> None:
        Count.closed += 1


class Batched:
    """The same as an environment of batches."""

    max_turns = 3

    def __init__(self):
        self.sizes = []

    def step(self, message_log_batch, metadata):
        turns = [sum(m["role"] == "assistant" for m in log) for log in message_log_batch]
        self.sizes.append(len(turns))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1+"}] * len(turns),
            metadata=[{**row, "turn": turn} for row, turn in zip(metadata, turns, strict=True)],
            next_stop_strings=[None] * len(turns),
            rewards=[float(turn) for turn in turns],
            terminateds=[turn == 3 for turn in turns],
            answers=[log[-1]["content"] for log in message_log_batch],
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}


def collected(generator, environment, prompts=PROMPTS, *, seed=1) -> Rollouts:
    return collect(generator, environment, prompts, SAMPLING, seed=seed)


def tokens(completions: Iterable[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completions]


def talks(generator, environment, prompts=PROMPTS, sampling=SAMPLING, *, seed=1):
    """The conversations that `collect` judges, failures included."""
    with closing(Driver(generator, environment, sampling, seed=seed)) as driver:
        driver.resume()
        driver.begin([prompts])
        return driver.next_ended()[1]
