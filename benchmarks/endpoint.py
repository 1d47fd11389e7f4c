"""The endpoint: what it adds to a request, and how busy it keeps the engine.

    python benchmarks/endpoint.py [--engine torch] [--small]

Conversations by the bare `sample`, by chat completions as of `nemorl serve`, and by an agent's,
which are recorded. Clients are in the server's process.
"""

import asyncio
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
from branches import TEMPLATE
from common import command, load_tokenizer, median_ratio, saved_model, words
from conversations import Busy
from rollouts import backend

from nemorl import GenerationConfig, SamplingParams, agent
from nemorl.rollout.collect import collect
from nemorl.rollout.conversation import Prompts
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.cli.inference import KEPT
from nemorl.runtime.serve.endpoint import endpoint
from nemorl.runtime.serve.session import Session, Unrecorded

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Conversations of three requests."""

    engine: Literal["vllm", "torch"] = "vllm"
    """What answers."""
    clients: tuple[int, ...] = (1, 16, 64)
    """Conversations at a time."""
    rounds: int = 9
    """The median counts."""
    thinking: int = 2000
    """Conversations that think."""
    think: float = 0.2
    """Mean seconds, exponential."""


async def by_sample(asked: Any, engine: Any, tokenizer: Any) -> None:
    tokens: list[int] = []
    for said, think in asked:
        await asyncio.sleep(think)
        tokens += tokenizer(f"{' t3 ' * bool(tokens)} t2 {said} t3  t2 ")["input_ids"]
        tokens += (await engine.sample(tokens, PARAMS))[0].token_ids


async def by_http(asked: Any, key: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint().port)
    log: list[Any] = []
    for number, (said, think) in enumerate(asked):
        await asyncio.sleep(think)
        log.append({"role": "user", "content": said})
        body = json.dumps({"model": "policy", "messages": log}).encode()
        head = f"POST /s/{key}/v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.partition("content-length: ")[2].partition("\r")[0])
        found = json.loads(await reader.readexactly(size))
        assert found["usage"]["prompt_tokens"] == 36 * number + 19, found  # as by `sample`
        log.append(found["choices"][0]["message"])
    writer.close()


def compare(engine: Any, tokenizer: Any, count: int, rounds: int, think: float) -> None:
    def bare(asked: Any) -> None:
        async def main() -> None:
            await asyncio.gather(*(by_sample(each, engine, tokenizer) for each in asked))

        asyncio.run(main())

    def served(asked: Any) -> None:
        async def main() -> None:
            policy = Unrecorded(generator=engine, params=PARAMS, longest=None)
            session = Session(policy, tokenizer, free=True, most=max(KEPT, 4 * count))
            async with endpoint().open(session) as (_, key):
                await asyncio.gather(*(by_http(each, key) for each in asked))

        asyncio.run(main())

    def recorded(asked: Any) -> None:
        async def run(row: Any, base_url: str, api_key: str) -> float:
            await by_http(asked[row["number"]], api_key)
            return 1.0

        rows = [{"prompt": "t2", "number": number} for number in range(count)]
        prompts = Prompts(rows, [[2]] * count, tokenizer=tokenizer)
        assert not collect(engine, agent(run), prompts, PARAMS, seed=0).failed

    rng, watched = np.random.default_rng(0), Busy(engine)
    found = {way: list[tuple[float, float]]() for way in (bare, served, recorded)}
    for number in range(rounds):
        for way, measured in found.items():
            thinks = rng.exponential(think, (count, 3))
            asked = [[(words(16, rng), each) for each in row] for row in thinks]
            engine.metrics()
            watched.seconds, start = 0.0, time.perf_counter()
            way(asked)
            seconds = time.perf_counter() - start
            computes = next((v for k, v in engine.metrics().items() if "/busy" in k), 1.0)
            if number or rounds == 1:  # the first is not counted
                measured.append((seconds, watched.seconds / seconds * computes))
    engine.sample = watched._sample
    print(f"{count} conversations, {think:g} s")
    for way, measured in found.items():
        seconds, busy = ([*each] for each in zip(*measured, strict=True))
        rate, ratio = (
            3 * count / median(seconds),
            median_ratio(seconds, [s for s, _ in found[bare]]),
        )
        print(f"  {way.__name__:<9}{1000 * count / rate:8.2f} ms a request{rate:8.1f} requests/s"
              f"{ratio:7.3f} of bare   busy {median(busy):.1%}", flush=True)  # fmt: skip


def main(options: Options) -> None:
    with saved_model(hidden=128) as (folder, _):
        path = folder / "model"
        tokenizer = load_tokenizer(path)
        tokenizer.chat_template = TEMPLATE
        made = TorchGenerationBackend(model=str(path), tokenizer=tokenizer)
        made.setup(GenerationConfig())
        with backend(path, 1) if options.engine == "vllm" else nullcontext(made) as engine:
            for count in options.clients:
                compare(engine, tokenizer, count, options.rounds + 1, 0.0)
            compare(engine, tokenizer, options.thinking, 1, options.think)
    endpoint().close()


if __name__ == "__main__":
    command(main, Options, clients=(2,), rounds=1, thinking=4)
