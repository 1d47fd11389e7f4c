"""Clients, agents and a replica die at random moments: what is recorded is what clients saw."""

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest

from nemorl.rollout.collect import collect
from nemorl.rollout.conversation import Prompts
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.serve.agents import CommandAgent, agent
from nemorl.runtime.serve.endpoint import endpoint
from tests.runtime.engines.shared import small_model, vllm_backend
from tests.runtime.engines.toys import kill
from tests.tiny_models import tiny_tokenizer

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]
KINDS = ["goes on"] * 120 + ["hangs up"] * 40 + ["raises"] * 24 + ["is killed"] * 16
SCRIPT = """
import json, os, random, sys, threading, urllib.request
notes = open(json.loads(sys.stdin.readline())["notes"], "w", buffering=1)
threading.Timer(random.uniform(0, 2), os.kill, [os.getpid(), 9]).start()
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "b"}]}).encode()
while True:
    found = urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    print(json.dumps(json.load(found)["choices"][0]["message"]["content"]), file=notes)
"""


async def ask(key, messages, seconds):
    """An answer; None where it has not come when the client hangs up, after so many seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint().port)
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    head = f"POST /s/{key}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = asyncio.ensure_future(reader.read())
    try:
        if not (await asyncio.wait({answer}, timeout=seconds))[0]:
            writer.write_eof()  # what the server has sent by now still comes
        found = (await answer).partition(b"\r\n\r\n")[2]
    finally:
        answer.cancel()
        writer.transport.abort()
    return json.loads(found)["choices"][0]["message"] if found else None


def test_each_answer_that_was_seen_is_recorded_once(tmp_path, monkeypatch):
    monkeypatch.setattr("nemorl.rollout.collect.MOST_FAILED", 1.0)
    (script := tmp_path / "script.py").write_text(SCRIPT)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ '+' + m.content + '=' }}{% endfor %}"
    backend = vllm_backend(small_model(), num_replicas=2, tokenizer=tokenizer)
    answered, draw = [], random.Random(0)

    async def run(row, base_url, api_key):
        Path(row["notes"]).write_text("")
        if row["kind"] == "is killed":
            return await CommandAgent(f"{sys.executable} {script}")(row, base_url, api_key)
        log, seen = [], []
        while len(seen) < 5:
            late = None if row["kind"] == "goes on" else draw.choice([None, draw.uniform(0, 0.5)])
            asked = [*log, {"role": "user", "content": "a"}]
            async with asyncio.timeout(late if row["kind"] == "raises" else None):
                found = await ask(api_key, asked, late if row["kind"] == "hangs up" else None)
            answered.append(found)
            if found:
                log = [*asked, found]
                seen.append(json.dumps(found["content"]))
                Path(row["notes"]).write_text("\n".join(seen))
            if len(answered) == 300:
                kill(backend._engines, 0)
        return 1.0

    rows = [
        {"prompt": "a", "kind": kind, "notes": f"{tmp_path}/{number}"}
        for number, kind in enumerate(KINDS)
    ]
    prompts = Prompts(rows, [[5]] * len(rows), tokenizer=tokenizer)
    sampling = SamplingParams(max_new_tokens=40, stop_token_ids=(2, 3, 4, 5))
    with pytest.warns(UserWarning, match="replica 0 is started again"):
        found = collect(backend, agent(run), prompts, sampling, seed=0)
    assert answered.count(None) > 10 and len(found.failed) > 10
    for each in (*found.conversations, *found.failed):
        recorded = [turn.completion.text for turn in each.turns]
        seen = [json.loads(line) for line in Path(each.row["notes"]).read_text().splitlines()]
        if each.row["kind"] in ("goes on", "hangs up"):
            assert len(seen) == 5 and recorded == seen
        else:
            assert recorded[: len(seen)] == seen and len(recorded) <= len(seen) + 1
