"""Rewards judged in processes: their limits, errors and ends."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from nemorl.rollout.conversation import ConversationFailed
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.environments import make_environment
from nemorl.rollout.processes import judged_in_processes
from tests.rollout import slow_rewards, talk
from tests.rollout.slow_rewards import MARK, reward


def judged(environment, *responses: str, **columns) -> list[float]:
    logs = [talk("?", each) for each in responses]
    return environment.step(logs, [columns] * len(logs)).rewards


@pytest.fixture(scope="module")
def environment():
    """Its processes, and what they start, have MARK in their environment."""
    os.environ[MARK] = str(os.getpid())
    yield FunctionalRewardWrapper(reward)
    del os.environ[MARK]


def marked() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(os.getpid()) and process.pid != os.getpid():
                found.append(process)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


def test_rewards_come_in_order_from_other_processes_and_any_thread(environment, capfd):
    numbers = list(map(str, range(50)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: judged(environment, *numbers, answer=2.0), range(4)))
    assert found == [[2.0 * each for each in range(50)]] * 4
    (pid,) = judged(environment, "process")
    assert pid != os.getpid() and psutil.Process(int(pid)).parent().parent().pid == os.getpid()
    assert judged(environment, "prints") == [1.0]


LATE = ["loop", "in C", "stops itself", "ignores signals", "child in a session", "fork"]


@pytest.mark.parametrize("response", LATE)
def test_what_takes_too_long_counts_0_and_its_tree_is_killed(environment, response):
    """The calls beside it, in a thread or not, get their answers."""
    warning = (
        r"'reward' took longer than 1 s for 1 of 4 responses, which count 0, as for"
        rf" prompt '\?' and response '{response}'"
    )
    with pytest.warns(UserWarning, match=warning):
        assert judged(environment, "1", response, "3", "4") == [1.0, 0.0, 3.0, 4.0]
    assert judged(environment, "5") == [5.0]
    processes = [process for process in marked() if process.name() == "sleep"]
    assert gone(processes), "of no process that it has started"


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        ("raise", KeyError, "score"),
        ("odd", RuntimeError, "Odd: 1"),
        ("sys.exit", RuntimeError, r"must not end the run, but it called sys\.exit\(0\)"),
        ("os._exit", RuntimeError, r"its process ended: it called os\._exit, crashed in C, or"),
        ("huge", ValueError, "must be a finite number, but it is 'xxxx"),
    ],
)
def test_errors_are_those_of_the_reward(environment, response, kind, message):
    with pytest.raises(kind, match=message) as caught:
        judged(environment, "1", response, "2")
    if kind is not ValueError:
        assert "This was reward 'reward' for prompt '?'" in caught.value.__notes__[-1]
    assert judged(environment, "4") == [4.0], "others take the place of those that have ended"


def test_a_conversation_that_a_reward_fails_fails_alone(environment):
    found = environment.step([talk("?", each) for each in ("1", "fail", "3")], [{}] * 3)
    first, failed, last = found.failures
    assert first is last is None and isinstance(failed, ConversationFailed)
    assert str(failed) == "no judge" and list(found.rewards) == [1.0, 0.0, 3.0]


def test_functions_of_a_notebook_and_those_that_cannot_be_had(monkeypatch):
    scale = 3.0
    one = judged_in_processes(seconds=10)(lambda response: scale * len(response))
    assert judged(FunctionalRewardWrapper(one), "ab") == [6.0]
    monkeypatch.setattr(reward, "__module__", "nowhere")
    monkeypatch.setitem(sys.modules, "nowhere", slow_rewards)
    with pytest.raises(RuntimeError, match="it can't be loaded in another process: ModuleNot"):
        judged(FunctionalRewardWrapper(reward), "1")


def test_processes_end_with_the_environment():
    environment = FunctionalRewardWrapper(reward)
    (pid,) = judged(environment, "process")
    judged(environment, "child that stays")
    guard = psutil.Process(int(pid)).parent()
    processes = [guard, *guard.children(recursive=True)]
    assert len(processes) == 3
    del environment
    assert gone(processes)


KILLED = """
import subprocess
from nemorl.rollout.processes import Processes, judged_in_processes
@judged_in_processes(seconds=1000)
def reward(response):
    subprocess.Popen(["sleep", "1000"])
    print("busy", flush=True)
    import ctypes
    ctypes.PyDLL(None).sleep(1000)
next(Processes(reward).run([{"response": "!"}]))
"""


@pytest.mark.parametrize("number", [2, 9], ids=["interrupted", "killed"])
def test_no_process_outlives_its_run(number: int):
    """Nor does one that a reward has started, though the reward keeps the interpreter's lock. The
    script has no guard of `__main__`.
    """
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout.readline() == b"busy\n"
        processes = psutil.Process(run.pid).children(recursive=True)
        assert len(processes) == 3
        run.send_signal(number)
        assert run.wait(60) != 0
    assert gone(processes)


def test_math_has_a_limit_in_any_thread():
    environment = make_environment("math")
    with ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning, match="longer than 5 s for 1 of"):
        bomb = r"\boxed{9^{9^{9^9}}}"
        assert pool.submit(
            lambda: judged(environment, r"so $\boxed{0.5}$", bomb, "2", answer=r"\frac{1}{2}")
        ).result() == [1.0, 0.0, 0.0]
