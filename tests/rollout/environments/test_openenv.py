"""Environments on a server of OpenEnv, made by its own package."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemorl.rollout.collect import collect
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import Limits, Prompts
from nemorl.rollout.environments import make_environment
from nemorl.rollout.environments.openenv import openenv
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.workers.worker import free_port
from tests.tiny_models import tiny_model, tiny_tokenizer

pytest.importorskip("mcp")  # of the server, which vLLM brings
TOKENIZER = tiny_tokenizer()
SAMPLING = SamplingParams(n=4, max_new_tokens=5)
SERVER = Path(__file__).parent / "openenv_server.py"


def led(make):
    return make_environment("exact_match", environment=make, chosen=False)


def prompts(*answers: str) -> Prompts:
    rows = [{"prompt": "1+2=", "answer": answer, "others": object()} for answer in answers]
    ids = [TOKENIZER(row["prompt"])["input_ids"] for row in rows]
    return Prompts(rows, ids, tokenizer=TOKENIZER, limits=Limits(max_tokens=80))


@pytest.fixture(scope="module")
def generator() -> TorchGenerationBackend:
    backend = TorchGenerationBackend(model=tiny_model(scale=2.0), tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    return backend


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, str(port), "16"], text=True)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def sessions(url: str) -> list[int]:
    """How many environments the server has opened and closed."""
    with urllib.request.urlopen(f"{url}/count") as answer:
        return json.load(answer)


def test_a_session_for_each_conversation(generator, url):
    echo = openenv(
        url, act=lambda response: {"text": response}, show=lambda observation: observation["text"]
    )
    before = sessions(url)
    found = collect(generator, led(echo), prompts("7", "4"), SAMPLING, seed=1)
    assert not found.failed and found.num_turns.tolist() == [3] * 8
    assert found.rewards.tolist() == [0.0 + 2.0 + 3.0] * 8
    for each in found.conversations:
        own = each.row["answer"]
        first, second, third = (TOKENIZER.decode(list(turn.prompt)) for turn in each.turns)
        assert first == f"1+2={own}+"
        assert second.endswith(f"{own}1") and third.endswith(f"{own}2")
        assert not each.outcome.truncated
    after = sessions(url)
    assert [b - a for a, b in zip(before, after, strict=True)] == [8, 8]


def test_what_the_server_refuses_fails_one_conversation(generator, url):
    said: list[str] = []

    def act(response: str) -> dict[str, str]:
        said.append(response)
        return {3: {"text": "fail"}, 5: {"words": response}}.get(len(said), {"text": response})

    echo = openenv(url, act=act, show=lambda observation: observation["text"])
    found = collect(generator, led(echo), prompts("7", "4"), SAMPLING, seed=1)
    assert len(found.conversations) == 6
    reasons = sorted(each.outcome.reason for each in found.failed)
    assert "EXECUTION_ERROR" in reasons[0] and "'lost'" in reasons[0]
    assert "VALIDATION_ERROR" in reasons[1] and "Field required" in reasons[1]
    opened, closed = sessions(url)
    assert opened == closed


def test_an_observation_is_json_by_default(generator, url):
    echo = openenv(url, act=lambda response: {"text": response})
    found = collect(generator, led(echo), prompts("7"), SAMPLING, seed=1)
    messages = TOKENIZER("1+2=" + json.dumps({"text": "7+"}))["input_ids"]
    assert list(found.conversations[0].turns[0].prompt) == messages
