"""Rewards of models behind a URL: a server with faults, and real ones of vLLM."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

import nemorl
from nemorl.rollout import judge as module
from nemorl.rollout.conversation import ConversationFailed
from nemorl.rollout.environments import make_environment
from nemorl.runtime.workers.worker import free_port
from tests.examples import run_example
from tests.rollout import talk
from tests.runtime.runs import addition_rows, of_phase
from tests.tiny_models import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(3)]


class Fake:
    """A server whose `reply(path, body)` gives a status and an answer; what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.reply = lambda path, body: (200, "Score: 7")
        self.kind, self.models = "text/html", {"data": [{"id": "big"}]}
        self.at_once, self.between, self.go_on = 1 << 30, 0.0, threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(200, fake.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.asked.append(body)
                fake.headers.append(dict(self.headers))
                self.answer(*fake.reply(self.path, body))

            def answer(self, status: int, said: object) -> None:
                if status == 200 and isinstance(said, str):
                    said = {"choices": [{"message": {"role": "assistant", "content": said}}]}
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                kind = fake.kind if isinstance(said, bytes) else "application/json"
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                with suppress(OSError):  # who asked may have gone
                    for at in range(0, len(data), fake.at_once):
                        fake.go_on.wait(fake.between)
                        self.wfile.write(data[at : at + fake.at_once])

            def log_message(self, *args: object) -> None:
                pass

        ThreadingHTTPServer.request_queue_size = 64
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.root = f"http://127.0.0.1:{self.server.server_port}"
        self.url = f"{self.root}/v1"

    def says(self, *replies: object) -> None:
        """Give replies in their order, the last one for ever; text is an answer."""
        left = list(replies)

        def reply(path: str, body: dict) -> tuple:
            said = left.pop(0) if left[1:] else left[0]
            return said if isinstance(said, tuple) else (200, said)

        self.reply = reply


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.server.shutdown()
    server.server.server_close()


def judge(fake: Fake, **options) -> nemorl.Judge:
    return nemorl.Judge(**{"url": fake.url, "model": "big", "attempts": 2, **options})


def ask(reward, response: str = "3", **row) -> float:
    environment = make_environment(reward)
    row = {"prompt": "1+2=", "answer": "3", **row}
    result = environment.step([talk(row["prompt"], response)], [row])
    if failure := result.failures[0]:
        raise failure
    return result.rewards[0]


def test_the_template_is_filled_and_the_score_is_scaled(fake, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    assert ask(judge(fake, api_key_env="MY_KEY"), response="{answer} is 4") == 0.7
    (body,) = fake.asked
    assert body["model"] == "big" and body["temperature"] == 0.0 and body["max_tokens"] > 0
    expected = module.TEMPLATE.replace("{prompt}", "1+2=").replace("{answer}", "3")
    expected = expected.replace("{response}", "{answer} is 4")
    assert body["messages"] == [{"role": "user", "content": expected}]
    assert fake.headers[0]["authorization"] == "Bearer secret"


def test_only_the_columns_of_the_template_are_asked_for(fake):
    template = 'Is {response} as polite as {style}? Say {"score": 0} or {"score": 1}.'
    polite = judge(
        fake, template=template, read=lambda said: json.loads(said)["score"], best=1, options={}
    )
    fake.says('{"score": 1}')
    assert ask(polite, style="a duke") == 1.0
    text = 'Is 3 as polite as a duke? Say {"score": 0} or {"score": 1}.'
    assert fake.asked[0] == {"model": "big", "messages": [{"role": "user", "content": text}]}
    with pytest.raises(ValueError, match="wants the column 'style'"):
        ask(polite)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score: 10", 1.0),
        ("Score: 1 was my first thought.\n\n**Score:** 7.5/10", 0.75),
        ("SCORE 0", 0.0),
    ],
)
def test_the_last_score_of_an_answer_counts(fake, said: str, score: float):
    fake.says(said)
    assert ask(judge(fake)) == score and len(fake.asked) == 1


def test_an_answer_without_a_score_is_asked_for_once_more(fake):
    fake.says("I like it", "Score: 4")
    assert ask(judge(fake)) == 0.4
    first, second = fake.asked
    assert (first["temperature"], second["temperature"], second["seed"]) == (0.0, 1.0, 1)
    assert first["messages"] == second["messages"]


@pytest.mark.parametrize(
    "nonsense",
    ["I like it", "Score: 11", "Score: nan", {"choices": []}, b"<html>"],
)
def test_a_judge_that_answers_nonsense_fails_the_conversation(fake, nonsense):
    fake.says((200, nonsense))
    shown = re.escape("<html>" if isinstance(nonsense, bytes) else str(nonsense))
    with pytest.raises(ConversationFailed, match=f"big gave no score from 0 to 10: .*{shown}"):
        ask(judge(fake))
    assert len(fake.asked) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_is_asked_again(fake, status: int):
    busy = (status, {"error": {"message": "busy"}})
    fake.says(busy, "Score: 2")
    assert ask(judge(fake)) == 0.2 and len(fake.asked) == 2


def test_a_server_that_is_too_slow_is_asked_again(fake):
    go_on = threading.Event()

    def slow_at_first(path: str, body: dict) -> tuple:
        if len(fake.asked) == 1:
            go_on.wait(60)
        return 200, "Score: 3"

    fake.reply = slow_at_first
    assert ask(judge(fake, timeout_s=0.5)) == 0.3
    go_on.set()


def test_an_answer_that_drips_ends(fake, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    fake.at_once, fake.between = 2, 0.1
    with pytest.raises(ConversationFailed, match="Timeout"):
        ask(judge(fake, timeout_s=0.3))
    fake.go_on.set()


UNREADABLE = {
    "too deep": (b"[" * 100_000, "RecursionError|recursion"),
    "too deep to show": (b"[" * 900 + b"]" * 900, "gave no .*"),
    "a number too long": (b'{"data": [{"probs": [1' + b"0" * 400 + b"]}]}", "gave no .*"),
    "digits too many": (b"1" * 5000, "integer string conversion"),
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("kind", ["judge", "server"])
def test_an_unreadable_answer_fails_its_conversation_alone(fake, name: str, kind: str):
    said, message = UNREADABLE[name]
    fake.kind, fake.reply = "application/json", lambda path, body: (200, said)
    reward = judge(fake) if kind == "judge" else nemorl.RewardServer(url=fake.url, model="big")
    with pytest.raises(ConversationFailed, match=message):
        ask(reward)


def test_connections_are_kept(fake):
    environment, before = make_environment(judge(fake)), [*module.CLIENTS]
    for response in "123":
        environment.step([talk("1", response)], [{"answer": "1"}])
    (new,) = [loop for loop in module.CLIENTS if loop not in before]
    assert len(module.CLIENTS[new]) == 1


def test_a_template_must_have_the_response(fake):
    with pytest.raises(ValueError, match=r"template must have \{response\}, but it is .*: add"):
        judge(fake, template="{prompt} {respond}")


def test_a_server_that_is_down_fails_the_conversation_alone():
    nobody = nemorl.Judge(url=f"http://127.0.0.1:{free_port()}/v1", model="big", attempts=2)
    with pytest.raises(ConversationFailed, match=f"{nobody.url}: .*Connection error"):
        ask(nobody)


def test_a_row_that_the_server_refuses_fails_alone(fake):
    fake.says((400, {"error": {"message": "maximum context length"}}))
    with pytest.raises(ConversationFailed, match="maximum context length"):
        ask(judge(fake))
    assert len(fake.asked) == 1


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_model_ends_the_run_before_training(fake, status: int):
    fake.says((status, {"error": {"message": "no such thing"}}))
    message = f"{fake.url} must serve 'big', but says .*{status}.* no such thing: check url, model"
    with pytest.raises(ValueError, match=message + " and the key in OPENAI_API_KEY"):
        ask(judge(fake))
    with pytest.raises(ValueError, match=message):
        train(judge(fake))
    assert len(fake.asked) == 2, "once each, and the run has sampled nothing"


def test_the_first_row_is_judged_before_training(fake):
    make_environment([judge(fake), "exact_match"]).check(ROWS)
    text = fake.asked[0]["messages"][0]["content"]
    assert len(fake.asked) == 1 and "Question:\n0+2=" in text and "Answer:\n2" in text
    fake.says("what?")
    with pytest.raises(ValueError, match=r"there must be rewards, but big gave no score .*what"):
        make_environment(judge(fake)).check(ROWS)
    make_environment(judge(fake)).check([])


def test_of_a_stream_one_row_is_judged_before_training(fake):
    environment = make_environment(judge(fake))
    for row in ROWS:
        environment.check([row])
    assert len(fake.asked) == 1


def test_reward_models_get_messages_and_give_their_number(fake):
    fake.says((200, {"data": [{"probs": [-2.5]}]}))
    paths = []
    inner, fake.reply = fake.reply, lambda path, body: paths.append(path) or inner(path, body)
    for url in (fake.root, fake.url):
        server = nemorl.RewardServer(url=url, model="rm")
        environment = make_environment(server)
        log = [{"role": "system", "content": "add"}, *talk("1+2=", "3")]
        environment.check([{"prompt": log[:2]}])
        assert environment.step([log], [{"prompt": log[:2]}]).rewards == [-2.5]
        expected = {"model": "rm", "use_activation": False}
        assert fake.asked[-1] == {**expected, "messages": log}
        assert asyncio.run(server("1+2=", "3")) == -2.5
        assert fake.asked[-1] == {**expected, "messages": log[1:]}
    assert {*paths} == {"/classify"}


def test_reward_models_with_several_labels_are_refused(fake):
    fake.says((200, {"data": [{"probs": [0.1, 0.9]}]}))
    server = nemorl.RewardServer(url=fake.root, model="rm")
    with pytest.raises(ValueError, match="there must be rewards, but rm gave no number: "):
        make_environment(server).check(ROWS)


def train(reward):
    tokenizer = tiny_tokenizer()
    return nemorl.train(
        model=tiny_model(scale=2.0),
        tokenizer=tokenizer,
        dataset=addition_rows(8),
        reward_fn=reward,
        max_num_steps=1,
        num_prompts_per_step=2,
        num_generations_per_prompt=4,
        max_new_tokens=4,
    )


def test_a_judge_of_a_file_is_a_reward_of_a_run(fake, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("my_url_judge.py").write_text(
        f"import nemorl\njudge = nemorl.Judge(url={fake.url!r}, model='big')\n"
    )
    (step,) = of_phase(train("./my_url_judge.py:judge"), "train")
    assert step["reward"] == pytest.approx(0.7) and "failed/ConversationFailed" not in step
    assert len(fake.asked) >= 1 + 8


def test_the_example_judges_at_a_url(fake, capsys):
    fake.says("Score: 10", "Score: 0", (400, {"error": {"message": "too long"}}), "Score: 1")
    assert run_example("judge.py", "--url", fake.url, "--model", "big") == 0
    first, *_, last = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert len(fake.asked) == 4 and first[1].endswith("= 24.") and "10" in last[1]


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of `vllm serve` for a model."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}"]
    command += ["--dtype=float32", "--served-model-name=tiny", "--max-model-len=512"]
    command += [f"--port={port}", "--host=127.0.0.1", "--enforce-eager"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (URLError, OSError):
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_a_judge_of_vllm(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_model(hidden_size=128, head_dim=32, scale=2.0, max_position_embeddings=1024)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"temperature": 0.0, "max_tokens": 8}
    with served(tmp_path) as url:
        heard = []
        reward = nemorl.Judge(
            url=url,
            model="tiny",
            template="{prompt}{response}not{answer}",
            read=lambda said: heard.append(said) or 5,
            options=options,
        )
        environment = make_environment(reward)
        environment.check(ROWS)
        logs = [talk(row["prompt"], "7") for row in ROWS]
        assert environment.step(logs, ROWS).rewards == [0.5] * 3
        expected = set()
        for text in ("0+2=7not2", "1+2=7not3", "2+2=7not4", "0+2=2not2"):
            ids = tokenizer.apply_chat_template(talk(text), return_tensors="pt")["input_ids"]
            said = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
            expected.add(tokenizer.decode(said, skip_special_tokens=True))
        assert {*heard} == expected and len(expected) > 1

        with pytest.raises(ValueError, match=r"must serve 'other', but says .*404.*check url"):
            make_environment(nemorl.Judge(url=url, model="other")).check(ROWS)


@pytest.mark.slow
def test_a_reward_model_of_vllm(tmp_path: Path):
    from transformers import Qwen2ForSequenceClassification

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = tiny_model(hidden_size=128, head_dim=32, max_position_embeddings=512).config
    config.num_labels = 1
    model = Qwen2ForSequenceClassification(config).eval()
    with torch.no_grad():
        model.score.weight.mul_(20)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    logs = [
        [{"role": "system", "content": "add"}, *talk(row["prompt"], response)]
        for row in ROWS
        for response in ("4", "cat")
    ]
    rows = [{"prompt": log[:2]} for log in logs]
    with served(tmp_path) as url, torch.no_grad():
        environment = make_environment(nemorl.RewardServer(url=url, model="tiny"))
        environment.check(rows)
        expected = [
            model(**tokenizer.apply_chat_template(log, return_tensors="pt")).logits.item()
            for log in logs
        ]
        found = environment.step(logs, rows).rewards
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert min(expected) > 1 and len({*expected}) == 6, "no probabilities"
