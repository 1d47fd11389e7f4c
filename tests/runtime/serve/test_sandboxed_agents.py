"""A command in the sandbox reaches the policy alone."""

import os
import socket
import sys

import psutil
import pytest

from nemorl import RolloutConfig
from nemorl.rollout import sandbox
from nemorl.runtime.serve.agents import CommandAgent, led_by
from tests.rollout.test_sandbox import with_argument
from tests.runtime.serve.test_agents import ROW, failing, of_agent  # noqa: F401

SCRIPT = """
import json, multiprocessing, os, pathlib, socket, subprocess, sys, urllib.request
row, base = json.loads(input()), os.environ['OPENAI_BASE_URL']
asked = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hello'}]}
request = urllib.request.Request(f'{base}/chat/completions', json.dumps(asked).encode())
assert b'you said hello' in urllib.request.urlopen(request).read()
allowed = []
for attempt in (
    lambda: os.environ['PYTEST_CURRENT_TEST'],
    lambda: pathlib.Path(row['home'], 'secret').read_text(),
    lambda: pathlib.Path(__file__).with_name('mine').write_text(''),
    lambda: socket.create_connection(('127.0.0.1', row['port'])),
):
    try:
        allowed.append(attempt())
    except (OSError, KeyError):
        pass
multiprocessing.Lock()
for place in ('notes', os.environ['HOME'] + '/notes', '/dev/stderr'):
    pathlib.Path(place).write_text('mine')
subprocess.Popen(['sleep', row['mark']], start_new_session=True)
print(len(allowed))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "secret").write_text("")
    (work / "agent.py").write_text(SCRIPT)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    return str(home)


@pytest.mark.parametrize(("shut", "allowed", "left"), [(True, 0, 0), (False, 4, 1)])
def test_it_reaches_the_policy_alone(shut, allowed, left, home):
    run = CommandAgent(f"{sys.executable} agent.py", sandbox=shut)
    mark = f"600.{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        row = {**ROW, "home": home, "port": server.getsockname()[1], "mark": mark}
        found = of_agent(run, row)
    processes = psutil.wait_procs(with_argument(mark), timeout=10 * shut)[1]
    for each in processes:
        each.kill()
    assert [each.outcome.reward for each in found.conversations] == [allowed]
    assert len(processes) == left


def test_what_can_not_be_shut_in_is_refused(home, monkeypatch):
    with pytest.raises(ValueError, match=r"rollout\.sandbox is for rollout\.agent"):
        RolloutConfig(sandbox=True)
    shut = RolloutConfig(agent="python agent.py", sandbox=True)
    monkeypatch.chdir(home)
    with pytest.raises(ValueError, match="the working folder must not hold your home"):
        led_by(None, shut)
    sandbox.check_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "PLACES", "")
    with pytest.raises(RuntimeError, match="no bwrap on the PATH"):
        led_by(None, shut)
