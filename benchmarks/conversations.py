"""Conversations of several turns by vLLM: how busy it is, and what a turn costs.

    python benchmarks/conversations.py [--part busy|turn] [--small]

busy: conversations whose environment sleeps a log-normal time after each response, each for itself,
and with a barrier per turn, as where an environment steps all conversations at once. Busy is the
share of the time in which the engine computes. turn: one conversation after the other, whose turns
are messages, against the bare `vllm.LLM.generate` in another process with the same prompts.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from common import VOCABULARY, command, load_tokenizer, quiet, save_model
from rollouts import backend, bare

from nemorl import Outcome, Policy, SamplingParams
from nemorl.rollout.collect import collect
from nemorl.rollout.conversation import Conversation, Episode, Limits, Prompts

WORDS = 6
"""Tokens of a prompt and of an observation."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which conversations."""

    part: Literal["busy", "turn", "both"] = "both"
    """Which of the two."""
    conversations: int = 2000
    """How many at once."""
    turns: int = 32
    """Of each conversation."""
    length: int = 8
    """Tokens of a response."""
    sleep: float = 0.3
    """Median of the environment's sleep, in seconds; its logarithm has the standard deviation 1."""
    hidden: int = 128
    """Width of the model, which has four layers."""
    alone: int = 20
    """Conversations one after the other, for the cost of a turn."""


def most_tokens(options: Options) -> int:
    """Of a conversation: its prompt, and a response and an observation for each turn."""
    return WORDS + options.turns * (options.length + WORDS)


def prompts_of(count: int, options: Options, folder: Path) -> Prompts:
    ids = np.random.default_rng(0).integers(2, VOCABULARY, (count, WORDS)).tolist()
    tokenizer = load_tokenizer(folder)
    rows = [{"prompt": tokenizer.decode(each), "number": n} for n, each in enumerate(ids)]
    limits = Limits(max_tokens=most_tokens(options))
    return Prompts(rows, ids, tokenizer=tokenizer, limits=limits)


class Busy:
    """The seconds in which an engine has a request."""

    def __init__(self, engine: Any) -> None:
        self.seconds, self._open, self._since, self._sample = 0.0, 0, 0.0, engine.sample
        engine.sample = self.sample

    async def sample(self, prompt: Any, params: SamplingParams) -> Any:
        if not self._open:
            self._since = time.perf_counter()
        self._open += 1
        try:
            return await self._sample(prompt, params)
        finally:
            self._open -= 1
            if not self._open:
                self.seconds += time.perf_counter() - self._since


def slow(options: Options, *, barrier: bool) -> Episode:
    """An episode whose observations take long; with a barrier each turn waits for the longest."""
    shape = options.turns, options.conversations
    sleeps = np.random.default_rng(1).lognormal(np.log(options.sleep), 1.0, shape)
    meeting = asyncio.Barrier(options.conversations)

    async def episode(row: Mapping[str, Any], policy: Policy) -> Outcome:
        tokens = list(policy.prompt)
        for turn in range(options.turns):
            tokens += (await policy.sample(tokens)).token_ids
            tokens += policy.prompt
            if barrier:
                await meeting.wait()
                await asyncio.sleep(sleeps[turn].max())
            else:
                await asyncio.sleep(sleeps[turn, row["number"]])
        return Outcome(reward=0.0)

    return episode


def busy(options: Options, folder: Path) -> None:
    prompts = prompts_of(options.conversations, options, folder)
    sampling = SamplingParams(n=1, max_new_tokens=options.length)
    count = options.conversations * options.turns
    took: dict[str, float] = {}
    print(f"{options.conversations} conversations of {options.turns} turns", flush=True)
    # Keys and values of all conversations, in float32 by four layers, with half a block of 32
    # tokens for each. Where they do not fit, each turn computes its whole prompt again.
    tokens = options.conversations * (most_tokens(options) + 16)
    cache = max(1 << 30, tokens * 2 * 4 * options.hidden * 4)
    with backend(folder, 1, {"kv_cache_memory_bytes": cache}) as engine:
        first = prompts.take(range(min(256, len(prompts))))  # not counted
        collect(engine, slow(options, barrier=False), first, sampling, seed=0)
        watched = Busy(engine)
        for name in ("each for itself", "a barrier per turn"):
            watched.seconds = 0.0
            engine.metrics()
            start = time.perf_counter()
            episode = slow(options, barrier=name != "each for itself")
            found = collect(engine, episode, prompts, sampling, seed=0)
            took[name] = time.perf_counter() - start
            assert int(found.num_turns.sum()) == count
            computes = next(v for k, v in engine.metrics().items() if k.endswith("/busy"))
            share = watched.seconds / took[name] * computes
            speed = f"{took[name]:7.1f} s{count / took[name]:8.0f} turns/s"
            print(f"  {name:<20}{speed}   busy {share:.1%}", flush=True)
    print(f"  each for itself is {took['a barrier per turn'] / took['each for itself']:.2f} times"
          " as fast")  # fmt: skip


async def talk(row: Mapping[str, Any], policy: Policy) -> Outcome:
    messages = list(policy.messages)
    for _ in range(row["turns"]):
        messages.append(await policy.chat(messages))
        messages.append({"role": "user", "content": row["prompt"]})
    return Outcome(reward=0.0)


def turn(options: Options, folder: Path) -> None:
    prompts = prompts_of(options.alone + 1, options, folder)
    for row in prompts.rows:
        row["turns"] = options.turns
    sampling = SamplingParams(n=1, max_new_tokens=options.length)
    ours, theirs = list[float](), list[float]()
    with backend(folder, 1) as engine, bare(folder) as generate:
        for number, (row, ids) in enumerate(zip(prompts.rows, prompts.token_ids, strict=True)):
            one = Prompts([row], [ids], tokenizer=prompts.tokenizer, limits=prompts.limits)
            start = time.perf_counter()
            (found,) = collect(engine, talk, one, sampling, seed=number).conversations
            seconds = time.perf_counter() - start
            bare_seconds = sum(asked(generate, found))
            if number:  # one before is not counted
                ours.append(seconds / options.turns)
                theirs.append(bare_seconds / options.turns)
    over = median(1000 * (a - b) for a, b in zip(ours, theirs, strict=True))
    print(
        f"a turn of {options.length} tokens: {1000 * median(ours):.2f} ms, bare vLLM"
        f" {1000 * median(theirs):.2f} ms, overhead {over:.2f} ms"
    )


def asked(generate: Any, found: Conversation) -> list[float]:
    """Seconds of the bare engine for each turn."""
    seconds = []
    for each in found.turns:
        options = {"max_tokens": len(each.completion.token_ids), "detokenize": False}
        seconds.append(generate([(list(each.prompt), options)])[0])
    return seconds


def main(options: Options) -> None:
    quiet()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        positions = max(512, most_tokens(options))
        save_model(Path(folder), hidden=options.hidden, positions=positions)
        if options.part in ("busy", "both"):
            busy(options, Path(folder))
        if options.part in ("turn", "both"):
            turn(options, Path(folder))


if __name__ == "__main__":
    command(main, Options, conversations=50, turns=3, alone=3)
