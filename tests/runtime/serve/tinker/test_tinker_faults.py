"""Clients, the service and a replica die at random moments: nothing is lost, nothing is doubled."""

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress

import httpx
import pytest
import torch
from safetensors.torch import load_file

from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.serve.tinker.messages import MESSAGES
from tests.runtime.engines.shared import small_model
from tests.runtime.engines.toys import kill
from tests.runtime.serve.tinker.test_tinker import SAMPLER, TARGETS, TEXTS, trained
from tests.runtime.serve.tinker.wire import KEYS, Client, datum, said, serving, write_files
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow
SERVE = [sys.executable, "-m", "nemorl", "serve", "tiny", "--name", "tiny", "--tinker"]
KEY, RANKS, STEPS = KEYS["me"], (4, 2, 8, 0), 60
KILLS = 12


class Stubborn(Client):
    """Asks again, until there is an answer."""

    def post(self, *args, **options):
        while True:
            with suppress(httpx.TransportError):
                found = super().post(*args, **options)
                assert found.status_code != 401
                if found.status_code < 500:
                    return found
            time.sleep(0.05)


class Served:
    """A service in a process of its own."""

    def __init__(self, folder):
        self.folder, self.port = folder, 0
        folder.mkdir(exist_ok=True)
        write_files(folder, tiny_model(scale=2.0))
        self.start()

    def start(self):
        command = [*SERVE, "--keys", "keys", "--dir", "run", "--trainer.device", "cpu"]
        log = (self.folder / "log").open("a")
        options = {"cwd": self.folder, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        self.process = subprocess.Popen([*command, "--port", str(self.port)], **options)
        line = self.process.stdout.readline()
        self.url = re.search(r"http://[^/\s]+", line)[0]
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self, by=signal.SIGKILL):
        self.process.send_signal(by)
        return self.process.wait(60)


def program(client, rank, note):
    """Train and sample; note(name, promise) waits for an answer and keeps it."""
    model, sampler = client.create(rank), None
    draw = random.Random(rank)
    for step in range(STEPS if rank else 8):  # a whole model leaves no room for others
        data = [
            datum(x, target_tokens=y, weights=[draw.uniform(-1, 1) for _ in y])
            for x, y in zip(TEXTS, TARGETS, strict=True)
        ]
        bad = [datum([99], target_tokens=[3])] if step % 5 == 4 else data[:2]
        work = {"one": data[:1], "bad": bad, "two": data}
        sent = {k: client.send(model, x, "cross_entropy") for k, x in work.items()}
        adam = {"learning_rate": 0.01, "grad_clip_norm": 1.0}
        sent["step"] = client.ask("optim_step", model, adam_params=adam)
        if step % 6 == 5:
            sent["saved"] = client.ask("save_weights", model, path=f"{step}")
            note(f"{step} sampler", client.ask(SAMPLER, model, path=f"{step}"))
            sampler = client.sampler(f"tinker://{model}/sampler_weights/{step}")
        if sampler:
            sent["sample"] = client.submit(sampler, TEXTS[0], max_tokens=8, seed=step)
        for name, promise in sent.items():
            note(f"{step} {name}", promise)
    note("end", client.ask("save_weights", model, path="end"))


def start_client(url, session, rank, log):
    """Run the program in a process, from its beginning, and keep its answers."""
    if pid := os.fork():
        return pid
    try:
        client = Stubborn(url, KEY, session=session)
        with log.open("a", buffering=1) as file:

            def note(name, promise):
                file.write(json.dumps([name, text_of(client.result(promise))]) + "\n")

            program(client, rank, note)
        os._exit(0)
    except BaseException:
        log.with_suffix(".error").write_text(traceback.format_exc())
    os._exit(1)


def logged(log):
    """The last answer of each name; all of them are the same."""
    found = {}
    for line in log.read_text().splitlines():
        with suppress(ValueError):  # half a line of a killed client
            name, answer = json.loads(line)
            assert found.setdefault(name, answer) == answer
    return found


def text_of(answer):
    return answer.hex() if isinstance(answer, bytes) else answer


def comparable(answer):
    """Without times, and whatever the session's name."""
    if isinstance(answer, str):
        return answer
    if "metrics" in answer:
        return {k: v for k, v in answer["metrics"].items() if not k.startswith("trainer/")}
    return re.sub("[0-9a-f]{32}", "", json.dumps(answer))


def run(folder, kills=0):
    """The answers of each client; between kills of one or of the service there are some."""
    with Served(folder) as served:
        sessions = [Stubborn(served.url, KEY).session for _ in RANKS]
        logs = [folder / f"{rank}.jsonl" for rank in RANKS]
        start = lambda i: start_client(served.url, sessions[i], RANKS[i], logs[i])  # noqa: E731
        clients, draw, due = {start(i): i for i in range(len(RANKS))}, random.Random(1), 0
        try:
            while clients:
                time.sleep(0.02)
                for pid in [*clients]:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if not found:
                        continue
                    i = clients.pop(pid)
                    assert status in (0, signal.SIGKILL), logs[i].with_suffix(".error").read_text()
                    if status:
                        clients[start(i)] = i
                done = sum(each.read_bytes().count(b"\n") for each in logs if each.exists())
                if clients and kills and done > due:
                    kills, due = kills - 1, done + draw.randrange(100)
                    if kills % 2:
                        os.kill(draw.choice([*clients]), signal.SIGKILL)
                    else:
                        served.end()
                        served.start()
        finally:
            for pid in clients:
                os.kill(pid, signal.SIGKILL)
    assert kills == 0
    return [*map(logged, logs)]


def test_a_thousand_requests_and_random_kills(tmp_path):
    expected = run(tmp_path / "straight")
    found = run(tmp_path / "killed", KILLS)
    assert sum(map(len, found)) > 900
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            assert comparable(mine[name]) == comparable(other[name]), name
    for rank in RANKS:
        one, other = (end(tmp_path / each, rank) for each in ("straight", "killed"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def end(folder, rank):
    """The tensors of a model and its optimizer."""
    states = folder.glob("run/runs/*/weights/end")
    (state,) = (x for x in states if json.loads((x / "tinker.json").read_bytes())["rank"] == rank)
    files = state.glob("*.safetensors")
    return {f"{x.name}/{k}": v for x in files for k, v in load_file(x).items()}


def test_ctrl_c_while_a_request_is_executed(tmp_path):
    """It ends at once or after that request, and the rest is done after the next start."""
    with Served(tmp_path / "straight") as one, Served(tmp_path / "ended") as two:
        found = []
        for served in (one, two):
            client = Stubborn(served.url, KEY)
            model = client.create()
            data = [datum([3] * 250, target_tokens=[4] * 250)] * 200
            sent = [client.send(model, data, "cross_entropy") for _ in range(4)]
            sent.append(client.ask("optim_step", model, adam_params={"learning_rate": 0.01}))
            sent.append(client.ask("save_weights", model, path="end"))
            if served is two:
                time.sleep(1)
                assert served.end(signal.SIGINT) in (0, 130)
                served.start()
            found.append([comparable(text_of(client.result(each))) for each in sent])
        assert found[0] == found[1]


def test_a_restart_point_outlives_a_kill_between_two_renames(tmp_path):
    with Served(tmp_path) as served:
        client = Stubborn(served.url, KEY)
        model, other = client.create(), client.create()
        expected = trained(client, other, 3)
        assert trained(client, model, 1) == expected[:3]
        assert served.end(signal.SIGTERM) in (0, 143)
        (restart,) = tmp_path.glob(f"run/runs/{model}/restart")
        restart.rename(restart.with_name(".restart.old"))
        restart.with_name(".restart.new").mkdir()
        served.start()
        assert trained(client, model, 2, seed=1) == expected[3:]


@pytest.mark.xdist_group("ray")
def test_samples_survive_the_death_of_a_vllm_replica(tmp_path):
    replicas = {"backend": "vllm", "num_replicas": 2, "engine": {"kv_cache_memory_bytes": 2**25}}
    with serving(tmp_path, small_model(), generation=GenerationConfig(**replicas)) as url:
        client = Client(url, KEY)
        model = client.create()
        client.passed(model, [datum(TEXTS[0], target_tokens=TARGETS[0])], "cross_entropy")
        client.step(model)
        sampler = client.sampler(client.save(model, "a", SAMPLER))
        options = {"max_tokens": 60, "num_samples": 2, "stop": []}
        before = [said(client.sample(sampler, TEXTS[0], seed=n, **options)) for n in range(8)]
        sent = [client.submit(sampler, TEXTS[0], seed=n % 8, **options) for n in range(64)]
        (backend,) = (x for x in gc.get_objects() if type(x) is VLLMGenerationBackend)
        with pytest.warns(UserWarning, match="replica 0 is started again"):
            kill(backend._engines, 0)
            found = [client.result(each) for each in sent]
        answers = [said(MESSAGES["SampleResponse"].FromString(each)) for each in found]
        assert answers == before * 8
