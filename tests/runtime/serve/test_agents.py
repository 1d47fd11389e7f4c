"""Agents against the endpoint, through their own clients."""

import asyncio
import json
import os
import sys

import httpx
import openai
import pytest

import nemorl
from nemorl.rollout.collect import collect
from nemorl.rollout.conversation import Limits, Outcome, Prompts, examples_of, segments_of
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.wrapped import as_generation_backend
from nemorl.runtime.serve.agents import CommandAgent, agent, led_by
from nemorl.runtime.serve.session import Session, Unrecorded
from nemorl.runtime.serve.wire import Ask, Refused
from tests.rollout.chats import TOKENIZER, Scripted, call

ROW = {"prompt": [{"role": "user", "content": "begin"}], "answer": "7"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture(autouse=True)
def failing(monkeypatch):
    """Let conversations fail."""
    monkeypatch.setattr("nemorl.rollout.collect.MOST_FAILED", 1.0)


def user(text):
    return {"role": "user", "content": text}


def answering(text):
    """What the model says: a call of a tool, then a number, or the last word of the user."""
    asked = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    if asked.startswith("<tool_response>"):
        return "it is 7"
    if asked.startswith("use"):
        return call("add", a=4)
    return f"you said {asked}"


def client_of(base_url, api_key, **options):
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, **options)


def of_agent(run, *rows, engine=None, **limits):
    rows = rows or (ROW,)
    ids = [[1, 2]] * len(rows)
    prompts = Prompts(rows, ids, tokenizer=TOKENIZER, limits=Limits(**limits))
    backend = as_generation_backend(engine or Scripted(answering))
    sampling = SamplingParams(max_new_tokens=200)
    return collect(backend, agent(run), prompts, sampling, seed=1)


def test_what_it_samples_is_recorded_and_continued():
    async def run(row, base_url, api_key):
        async with client_of(base_url, api_key) as client:
            log = [user("use a tool")]
            found = await client.chat.completions.create(model="policy", messages=log, tools=[ADD])
            (choice,) = found.choices
            (asked,) = choice.message.tool_calls
            assert (choice.finish_reason, asked.function.name) == ("tool_calls", "add")
            assert json.loads(asked.function.arguments) == {"a": 4}
            log += [
                choice.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": asked.id, "content": "7"},
            ]
            found = await client.chat.completions.create(model="policy", messages=log, tools=[ADD])
            assert found.usage.completion_tokens == len(TOKENIZER("it is 7")["input_ids"]) + 1
            return float(row["answer"] in found.choices[0].message.content)

    rollouts = of_agent(run)
    (conversation,) = rollouts.conversations
    assert conversation.outcome == Outcome(reward=1.0)
    (segment,) = segments_of(conversation.turns)
    (example,) = examples_of(conversation.turns)
    said = [token for turn in segment.turns for token in turn.completion.token_ids]
    trained = [t for t, is_in in zip(example.input_ids, example.loss_mask, strict=True) if is_in]
    assert trained == said
    assert "<tool_response>\n7\n</tool_response>" in TOKENIZER.decode(example.input_ids)


def test_branches_go_on_from_their_own_tokens():
    async def run(row, base_url, api_key):
        async with client_of(base_url, api_key) as client:

            async def ask(log):
                found = await client.chat.completions.create(model="policy", messages=log)
                return [*log, found.choices[0].message.model_dump(exclude_none=True)]

            first, second = await asyncio.gather(ask([user("ab")]), ask([user("b")]))
            await ask([*first, user("c")])
            await ask([*second, user("d")])
            await ask([first[0], {"role": "assistant", "content": "a lie"}, user("e")])
        return Outcome(reward=0.5, metrics={"asked": 5})

    (conversation,) = of_agent(run).conversations
    lengths = sorted(len(segment.turns) for segment in segments_of(conversation.turns))
    assert (lengths, conversation.outcome.metrics) == ([1, 2, 2], {"asked": 5})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.3}, r"temperature must be 1\.0, as of the run, which trains on what is"),
        ({"presence_penalty": 0.5}, "presence_penalty must be 0: the engine has no other"),
        ({"model": "gpt-4o"}, "model must be 'policy', but is 'gpt-4o': correct it"),
        ({"extra_body": {"best_of": 3}}, "best_of is not a field of this request: leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format must be text"),
        ({"stop": ["a"] * 1000}, "stop must have at most 16 strings"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            r"tools\.0\.function.name",
        ),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\.0"),
        (
            {"messages": [user("a"), {"role": "assistant", "content": "b"}]},
            "messages must not end with the assistant's",
        ),
        ({"n": 500}, "n must be from 1 to 128"),
        ({"api_key": "wrong", "token": "wrong"}, "the key must be that of an open conversation"),
    ],
)
def test_what_can_not_be_obeyed_is_refused_in_the_dialect(options, said):
    async def run(row, base_url, api_key):
        key = options.pop("token", api_key)
        options.pop("api_key", None)
        async with client_of(base_url.replace(api_key, key), key) as client:
            given = {"model": "policy", "messages": [user("a")], **options}
            with pytest.raises(openai.APIStatusError, match=said):
                await client.chat.completions.create(**given)
        async with client_of(base_url, api_key) as client:  # the others go on
            await client.chat.completions.create(
                model="policy", messages=[user("a")], temperature=1.0, max_tokens=1000, top_p=1
            )
        return 1.0

    (conversation,) = of_agent(run).conversations
    assert conversation.outcome == Outcome(reward=1.0)
    assert len(conversation.turns) == 1


def test_one_that_fails_fails_alone():
    late = []

    async def run(row, base_url, api_key):
        late.append((base_url, api_key))
        if row["kind"] == "silent":
            return 1.0
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="policy", messages=[user("a")])
            if row["kind"] == "raises":
                raise OSError("no network")
            if row["kind"] == "hangs":
                await asyncio.sleep(60)
            return "a lot" if row["kind"] == "text" else 1.0

    rows = [{**ROW, "kind": kind} for kind in ("good", "raises", "hangs", "text", "silent")]
    found = of_agent(run, *rows, timeout_s=0.5)
    (good,) = found.conversations
    reasons = {each.row["kind"]: each.outcome.reason for each in found.failed}
    assert good.outcome == Outcome(reward=1.0)
    assert "no network" in reasons["raises"]
    assert "must end within 0.5 s (rollout.timeout_s)" in reasons["hangs"]
    assert "must return a reward, as a number or an Outcome" in reasons["text"]
    assert "must ask the policy, but did not: use base_url" in reasons["silent"]
    base_url, _ = late[0]
    asked = {"model": "policy", "messages": [user("a")]}
    answer = httpx.post(f"{base_url}/chat/completions", json=asked)
    assert answer.status_code == 401 and "its conversation is over" in answer.text


def test_limits_end_a_conversation_with_a_reward_of_zero():
    async def run(row, base_url, api_key):
        async with client_of(base_url, api_key) as client:
            log = [user("a")]
            while True:
                found = await client.chat.completions.create(model="policy", messages=log)
                log += [found.choices[0].message.model_dump(exclude_none=True), user("b")]

    (conversation,) = of_agent(run, max_turns=3).conversations
    assert conversation.cut_by == "rollout.max_turns" and len(conversation.turns) == 3
    (conversation,) = of_agent(run, max_tokens=180).conversations
    assert conversation.cut_by == "data.max_total_sequence_length"


class Slow(Scripted):
    """Answers "wait" when it is let, and counts what begins and is cancelled."""

    begun = cancelled = 0

    async def sample(self, prompt, params):
        self.begun += 1
        try:
            if "wait" in self.tokenizer.decode(list(prompt)) and self.begun < 3:
                await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().sample(prompt, params)


def test_an_abandoned_answer_is_cancelled_and_not_recorded():
    engine = Slow(answering)

    async def run(row, base_url, api_key):
        asked = {"model": "policy", "messages": [user("wait")]}
        async with client_of(base_url, api_key, timeout=0.2) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(**asked)
            await client.chat.completions.create(model="policy", messages=[user("a")])
            for retry in ("0", "1", "1"):
                headers = {"x-stainless-retry-count": retry}
                await client.chat.completions.create(**asked, extra_headers=headers)
        return Outcome(reward=1.0, metrics={"begun": engine.begun})

    rollouts = of_agent(run, engine=engine)
    (conversation,) = rollouts.conversations
    begun = conversation.outcome.metrics["begun"]
    assert (begun, engine.cancelled, len(conversation.turns)) == (3, 1, 2)


def test_a_command_is_an_agent(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text(
        "import json, os, sys, urllib.request\n"
        "row, base = json.loads(sys.stdin.readline()), os.environ['OPENAI_BASE_URL']\n"
        "asked = {'model': 'policy', 'messages': [{'role': 'user', 'content': row['kind']}]}\n"
        "request = urllib.request.Request(f'{base}/chat/completions', json.dumps(asked).encode())\n"
        "found = json.load(urllib.request.urlopen(request))\n"
        "said = found['choices'][0]['message']['content']\n"
        "print(said)\n"
        "if row['kind'] == 'dies': sys.exit(f'about {said!r}')\n"
        "if row['kind'] == 'forks': __import__('subprocess').Popen(['sleep', '600'])\n"
        "print('no number' if row['kind'] == 'silent' else 0.25)\n"
    )
    run = CommandAgent(f'{sys.executable} "{script}"')
    rows = [{**ROW, "kind": kind} for kind in ("good", "dies", "silent", "forks")]
    found = of_agent(run, *rows)
    assert [each.outcome.reward for each in found.conversations] == [0.25, 0.25]
    reasons = {each.row["kind"]: each.outcome.reason for each in found.failed}
    assert "ended with 1: about 'you said dies'" in reasons["dies"]
    assert "must print a reward in its last line, but did not" in reasons["silent"]
    assert not [p for p in os.popen("ps -eo args") if p.strip() == "sleep 600"]


def test_settings_name_agents(tmp_path, monkeypatch):
    (tmp_path / "my_agents.py").write_text(
        "async def run(row, base_url, api_key): ...\nasync def episode(row, policy): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    config = nemorl.RolloutConfig
    assert led_by(None, config(environment="./my_agents.py:run")).name == "run"
    by_name = {"a": "./my_agents.py:run", "b": "./my_agents.py:episode", "c": "calculator"}
    found = led_by(None, config(environment=by_name))
    assert (found["a"].name, found["b"], found["c"]) == ("run", by_name["b"], "calculator")
    assert led_by(None, config(agent="python x.py")).name == "python x.py"
    with pytest.raises(ValueError, match=r"rollout\.agent must be left out beside an environment"):
        config(agent="python x.py", environment="calculator")
    with pytest.raises(ValueError, match="agent must be a function run"):
        agent(len)


class Strict(Scripted):
    """Refuses tokens that it does not have, which ends all conversations."""

    async def sample(self, prompt, params):
        assert prompt and max(prompt) < len(self.tokenizer)
        return await super().sample(prompt, params)


def test_token_ids_are_taken_as_they_are_and_checked():
    ids = TOKENIZER("<|im_start|>user\nab<|im_end|>")["input_ids"]

    async def run(row, base_url, api_key):
        async with httpx.AsyncClient(base_url=base_url.removesuffix("/v1")) as client:

            async def ask(ids, **params):
                body = {"model": "policy", "token_ids": ids, "sampling_params": params}
                return await client.post("/inference/v1/generate", json=body)

            for wrong in ([], [-1], [len(TOKENIZER)], ["a"]):
                assert (await ask(wrong)).status_code == 400
            assert (await ask(ids, stop_token_ids=[10**9])).status_code == 400
            found = await ask(ids, logprobs=1, skip_special_tokens=False, temperature=1.0)
            (choice,) = found.json()["choices"]
            again = await ask([*ids, *choice["token_ids"], *ids])
            places = [each["token"] for each in choice["logprobs"]["content"]]
            assert places == [f"token_id:{token}" for token in choice["token_ids"]]
            return float(again.status_code == 200)

    (conversation,) = of_agent(run, engine=Strict(answering)).conversations
    assert conversation.outcome == Outcome(reward=1.0)
    (segment,) = segments_of(conversation.turns)
    assert segment.turns[0].prompt == tuple(ids)


def test_a_late_end_of_a_request_leaves_an_equal_one_that_came_since():
    engine = as_generation_backend(Scripted(answering))

    async def asked():
        session = Session(
            Unrecorded(generator=engine, params=SamplingParams(), longest=9), TOKENIZER
        )
        first, second = (asyncio.ensure_future(asyncio.sleep(0)) for _ in range(2))
        session.ask("key", first)
        session.ask("key", second)
        session.abandon("key", first)
        return session.asked["key"] is second

    assert asyncio.run(asked())


def test_a_free_session_takes_zeros_and_seeds_and_a_bound_one_its_own():
    class Noting(Scripted):
        async def sample(self, prompt, params):
            seen.append((params.top_k, params.seed))
            return await super().sample(prompt, params)

    async def asked(free, **sampling):
        params = SamplingParams(top_k=5)
        engine = as_generation_backend(Noting(answering))
        policy = Unrecorded(generator=engine, params=params, longest=None)
        ask = Ask(token_ids=[1], n=2, sampling=sampling)
        return await Session(policy, TOKENIZER, free=free).answer(ask)

    seen = []
    off = {"repetition_penalty": 1, "logit_bias": {}, "presence_penalty": 0}
    asyncio.run(asked(True, top_k=-1, seed=0, **off))
    asyncio.run(asked(False, top_k=5, **off))
    assert seen == [(0, 0), (0, 1), (5, None), (5, None)]
    for wrong in ({"top_k": -1}, {"seed": 0}, {"logit_bias": {"5": 1.0}}):
        with pytest.raises(Refused, match=next(iter(wrong))):
            asyncio.run(asked(False, **wrong))
