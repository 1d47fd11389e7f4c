"""The server against clients that are wrong, slow or many, and what it counts."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

from nemorl.rollout.calls import EventLoop
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.wrapped import as_generation_backend
from nemorl.runtime.serve import endpoint as module
from nemorl.runtime.serve.endpoint import Endpoint, Key
from nemorl.runtime.serve.session import Session, Unrecorded
from tests.rollout.chats import TOKENIZER, Scripted

CLIENT = httpx.Client()
CHAT, READ = "c" * 20, "r" * 20
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


class Long(Scripted):
    """Says the temperature that it was asked for, or much."""

    async def sample(self, prompt, params):
        much = "b" * 20_000 if "much" in self.tokenizer.decode(list(prompt)) else ""
        self.answer = lambda _: much or f"{params.temperature:g}"
        return await super().sample(prompt, params)


@pytest.fixture
def served(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "SILENT_S", 0.3)
    found = Endpoint(audit=str(tmp_path / "audit.jsonl"))
    with closing(EventLoop()) as loop:

        async def session():
            policy = Unrecorded(
                generator=as_generation_backend(Long(str)), params=SamplingParams(), longest=500
            )
            return Session(policy, TOKENIZER, model="tiny", longest=500, free=True, most=4)

        found.keys[CHAT] = Key(name="alice", role="chat", session=loop.run(session()))
        found.keys[READ] = Key(name="monitor", role="read")
        try:
            yield found
        finally:
            found.close()


def post(served, *, key=CHAT, path="/v1/chat/completions", **body):
    headers = {"authorization": f"Bearer {key}"}
    return CLIENT.post(served.url + path, json={**ASKED, **body}, headers=headers)


def connected(served):
    return socket.create_connection(("127.0.0.1", served.port))


def ended(connection, seconds=5.0):
    """Whether the other side closes."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 20):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_keys_have_roles_and_requests_are_written_down(served):
    assert post(served, temperature=0.5).json()["choices"][0]["message"]["content"] == "0.5"
    assert post(served, key="nobody").status_code == 401
    refused = post(served, key=READ)
    assert refused.status_code == 403 and "may read, but not chat" in refused.text
    with httpx.Client(base_url=served.url, headers={"x-api-key": READ}) as client:
        (card,) = client.get("/v1/models").json()["data"]
        metrics = client.get("/metrics").text
        assert client.get("/v1/nothing").status_code == 404
        assert "POST" not in client.get("/health").text
    assert (card["id"], card["max_model_len"]) == ("tiny", 500)
    assert 'nemorl_requests_total{path="/v1/chat/completions",status="401"} 1.0' in metrics
    lines = [json.loads(line) for line in open(served.audit)]  # noqa: PTH123, SIM115
    found = [(line["key"], line["status"], line["completion_tokens"]) for line in lines]
    assert (
        found
        == [("alice", 200, 4), (None, 401, 0), ("monitor", 403, 0)] + [("monitor", 200, 0)] * 2
    )
    assert served.traffic.totals()["answered"] == 3


@pytest.mark.parametrize(
    ("status", "said", "body"),
    [
        (404, "model must be 'tiny'", {"model": "x" * 500}),
        (400, "surprise is not a field", {"surprise": 1}),
        (400, "a valid boolean, unable to interpret input, but is 'xx", {"stream": "x" * 5000}),
        (400, "but is {'role': 'user'}", {"messages": {"role": "user"}}),
        (400, "temperature must be at least 0", {"temperature": -1}),
        (
            400,
            "maximum context length is 500",
            {"messages": [{"role": "user", "content": "a" * 600}]},
        ),
        (400, "messages.0", {"messages": [{"role": "bishop", "content": "a"}]}),
        (
            400,
            "parameters",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
        ),
    ],
)
def test_what_can_not_be_answered_is_refused(served, status, said, body):
    answer = post(served, **body)
    assert answer.status_code == status and said in answer.json()["error"]["message"]
    assert len(answer.text) < 1000


def test_large_and_slow_clients_are_sent_away_and_the_others_go_on(served):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {CHAT}\r\n"
    slow = {
        "says nothing": b"",
        "half a head": head.encode(),
        "half a body": f"{head}Content-Length: 100\r\n\r\n{{".encode(),
        "too large": f"{head}Content-Length: {100 << 20}\r\n\r\n".encode(),
    }
    connections = []
    for sent in slow.values():
        connections.append(connected(served))
        connections[-1].sendall(sent)
    assert post(served).status_code == 200
    time.sleep(1.5)
    assert [ended(each) for each in connections] == [True] * 4
    assert post(served).status_code == 200


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_sent_away(served):
    much = {**ASKED, "messages": [{"role": "user", "content": "much"}], "n": 16, "logprobs": True}
    body = json.dumps(much).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", served.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {CHAT}\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    while served.traffic.totals()["answered"] < 1:
        time.sleep(0.1)
    time.sleep(1)
    received = 0
    while part := connection.recv(1 << 20):
        received += len(part)
    assert received < 16 * 20_000 * 50  # bytes of its log-probabilities
    assert post(served).status_code == 200


def test_many_connections_wait_in_vain_and_cost_little(served):
    idle = [connected(served) for _ in range(150)]
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: post(served).status_code, range(20))]
    assert found == [200] * 20
    assert all(ended(each) for each in idle)


def test_it_ends_after_the_requests_that_are_open(served):
    found = []
    asking = threading.Thread(target=lambda: found.append(post(served).status_code))
    asking.start()
    asking.join()
    served.close()
    with pytest.raises(httpx.ConnectError):
        post(served)
    assert found == [200]


def test_a_port_that_is_taken_is_named(served):
    with pytest.raises(ValueError, match=r"host and port must be free, but 127\.0\.0\.1:"):
        Endpoint(port=served.port)
