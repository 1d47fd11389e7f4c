"""What messages cost in a conversation: a tree of calls against a line of as many.

    python benchmarks/branches.py [--small]

Each call's prompt is made of its messages, and in the end all turns become segments; no model
answers. The branches of the tree go on in turns, all from the first answer.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import VOCABULARY, command, load_tokenizer, quiet, save_model

from nemorl.data.templates import Message
from nemorl.rollout.context import Context
from nemorl.rollout.conversation import Turn, segments_of
from nemorl.rollout.generation import Completion

TEMPLATE = (
    "{% for m in messages %}{{ ' t2 ' + m.content + ' t3 ' }}{% endfor %}"
    "{{ ' t2 ' if add_generation_prompt }}"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which conversations."""

    calls: int = 200
    """Of each conversation."""
    branches: int = 20
    """Of the tree."""
    length: int = 64
    """Tokens of a message."""
    rounds: int = 7
    """How often each is measured."""


def conversation(tokenizer: Any, options: Options, branches: int) -> tuple[float, int]:
    """Return the seconds of a conversation, and the tokens of its segments."""
    random = np.random.default_rng(0)
    texts = random.integers(4, VOCABULARY, (2 * options.calls + 1, options.length)).tolist()
    said = [" ".join(f"t{token}" for token in text) for text in texts]
    log: list[Message] = [{"role": "user", "content": said.pop()}]
    prompt = tokenizer.apply_chat_template(log, add_generation_prompt=True)["input_ids"]
    context, turns, logs = Context(tokenizer, log, prompt), list[Turn](), [log]
    start = time.perf_counter()
    for number in range(options.calls):
        place = number % len(logs)
        tokens, asked = context.prompt_of(logs[place])
        text = said.pop()
        ids = tuple(tokenizer(text)["input_ids"])
        completion = Completion(
            token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="length", text=text
        )
        turns.append(Turn(prompt=tokens, completion=completion))
        answered = [*logs[place], context.add(tokens, asked, completion)]
        if not number:
            logs = [answered] * branches
        logs[place] = answered
        for each in range(branches) if not number else [place]:
            logs[each] = [*logs[each], {"role": "user", "content": f"{said[-1]} t{4 + each}"}]
        said.pop()
    segments = segments_of(turns)
    return time.perf_counter() - start, sum(len(each.tokens) for each in segments)


def main(options: Options) -> None:
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        tokenizer = load_tokenizer(Path(folder))
    tokenizer.chat_template = TEMPLATE
    ratios, seconds = list[float](), list[tuple[float, float]]()
    for number in range(options.rounds + 1):
        tree, held = conversation(tokenizer, options, options.branches)
        line, whole = conversation(tokenizer, options, 1)
        if number:  # the first is not counted
            ratios.append(tree / line)
            seconds.append((tree, line))
    of_tree, of_line = (median(each) for each in zip(*seconds, strict=True))
    print(f"a tree of {options.branches} branches, {options.calls} calls: {of_tree:.3f} s,"
          f" {held} tokens; a line: {of_line:.3f} s, {whole} tokens")  # fmt: skip
    print(f"the tree takes {median(ratios):.2f} times as long as the line")


if __name__ == "__main__":
    command(main, Options, calls=40, branches=4, rounds=1)
