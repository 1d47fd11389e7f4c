"""Rewards judged in processes: their limits, errors and ends."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from nemorl.rollout.conversation import ConversationFailed
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.environments import make_environment
from nemorl.rollout.processes import LATE as LATE_RESULT
from nemorl.rollout.processes import LIMIT, Processes, judged_in_processes
from tests.rollout import nasty_rewards, slow_rewards
from tests.rollout.nasty_rewards import LATE, NASTY
from tests.rollout.slow_rewards import reward


def judged(environment, *responses: str, **columns) -> list[float]:
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": each}]
        for each in responses
    ]
    return environment.step(logs, [columns] * len(logs)).rewards


@pytest.fixture(scope="module")
def environment():
    return FunctionalRewardWrapper(reward)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=10)[1]


def test_rewards_come_in_order_from_other_processes_and_any_thread(environment):
    numbers = list(map(str, range(50)))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: judged(environment, *numbers, answer=2.0), range(8)))
    assert found == [[2.0 * each for each in range(50)]] * 8
    (pid,) = judged(environment, "process")
    assert pid != os.getpid() and psutil.Process(int(pid)).parent().parent().pid == os.getpid()


@pytest.mark.parametrize("response", ["loop", "in C"])
def test_what_takes_too_long_counts_0(environment, response):
    begin = time.monotonic()
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.warns(
            UserWarning,
            match=r"'reward' took longer than 1 s for 1 of 3 responses, which count 0, as for"
            rf" prompt '\?' and response '{response}'",
        ),
    ):
        assert pool.submit(judged, environment, "1", response, "3").result() == [1.0, 0.0, 3.0]
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        ("raise", KeyError, "score"),
        ("odd", RuntimeError, "Odd: 1"),
        ("sys.exit", RuntimeError, r"must not end the run, but it called sys\.exit\(0\)"),
        ("os._exit", RuntimeError, r"its process ended: it called os\._exit, crashed in C, or"),
        ("generator", ValueError, "must be a finite number, but it is <generator object"),
        ("nan", ValueError, "must be a finite number"),
    ],
)
def test_errors_are_those_of_the_reward(environment, response, kind, message):
    with pytest.raises(kind, match=message) as caught:
        judged(environment, "1", response, "2")
    if kind is not ValueError:
        assert "This was reward 'reward' for prompt '?'" in caught.value.__notes__[-1]
    assert judged(environment, "4") == [4.0], "others take the place of those that have ended"


def test_a_conversation_that_a_reward_fails_fails_alone(environment):
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": each}]
        for each in ("1", "fail", "3")
    ]
    found = environment.step(logs, [{}] * 3)
    first, failed, last = found.failures
    assert first is last is None and isinstance(failed, ConversationFailed)
    assert str(failed) == "no judge" and list(found.rewards) == [1.0, 0.0, 3.0]


def test_functions_of_a_notebook_and_those_that_cannot_be_had(monkeypatch):
    scale = 3.0
    one = judged_in_processes(seconds=10)(lambda response: scale * len(response))
    assert judged(FunctionalRewardWrapper(one), "ab") == [6.0]
    monkeypatch.setattr(reward, "__module__", "nowhere")
    monkeypatch.setitem(sys.modules, "nowhere", slow_rewards)
    with pytest.raises(RuntimeError, match="it can't be loaded in another process: ModuleNotFound"):
        judged(FunctionalRewardWrapper(reward), "1")
    with pytest.raises(
        ValueError, match="of one response to be judged in processes, but it is 'of a batch'"
    ):
        FunctionalRewardWrapper(judged_in_processes()(lambda responses: [1.0]))
    with pytest.raises(ValueError, match="seconds must be positive, but it is 0"):
        judged_in_processes(seconds=0)


def test_a_call_whose_worker_is_stopped_before_it_begins_gets_another():
    """By a process that an earlier call has left, say."""
    environment = FunctionalRewardWrapper(reward)
    (pid,) = judged(environment, "process")
    worker = psutil.Process(int(pid))
    worker.suspend()
    assert judged(environment, "4") == [4.0] and gone([worker])


def test_processes_end_with_the_environment():
    environment = FunctionalRewardWrapper(reward)
    (pid,) = judged(environment, "process")
    worker = psutil.Process(int(pid))
    processes = [worker, worker.parent()]
    del environment
    assert gone(processes)


def with_token(token: str) -> list[psutil.Process]:
    """Return processes that have it in their environment or command."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            texts = [*process.environ().values(), *process.cmdline()]
            if process.pid != os.getpid() and any(token in text for text in texts):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def nasty():
    """An environment, and a token that its processes have."""
    token = str(secrets.randbelow(10**12) + 10**12)
    before = os.environ.get("NASTY_TOKEN")
    os.environ["NASTY_TOKEN"] = token
    yield FunctionalRewardWrapper(nasty_rewards.reward), token
    del os.environ["NASTY_TOKEN"]
    assert before is None


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", NASTY)
def test_a_time_limit_holds_whatever_a_reward_does(nasty, name):
    """The calls beside it get their answers, and no process is left."""
    environment, token = nasty
    outcome = NASTY[name][1]
    calls = ThreadPoolExecutor(1)
    found = calls.submit(judged, environment, "1", name, "3", "4")
    if outcome == LATE:
        with pytest.warns(UserWarning, match="longer than 1 s for 1 of 4 responses, which count 0"):
            assert found.result(60) == [1.0, 0.0, 3.0, 4.0]
    elif isinstance(outcome, float):
        assert found.result(60) == [1.0, outcome, 3.0, 4.0]
    else:
        kind = Exception if isinstance(outcome, str) else outcome
        with pytest.raises(kind, match=outcome if isinstance(outcome, str) else None):
            found.result(60)
    assert judged(environment, "5", "6", "7") == [5.0, 6.0, 7.0]
    environment._processes.end()
    assert gone(with_token(token))


def test_a_server_that_stays_silent_is_replaced(monkeypatch):
    monkeypatch.setattr("nemorl.rollout.processes.SILENT_S", 2.0)
    monkeypatch.setattr("nemorl.rollout.processes.ENDING_S", 1.0)
    monkeypatch.setattr("nemorl.rollout.processes._revive", lambda server: None)
    environment = FunctionalRewardWrapper(nasty_rewards.reward)
    with pytest.raises(RuntimeError, match="its processes did not answer within 2 s"):
        judged(environment, "1", "stops_its_server_and_hangs", "3")
    monkeypatch.undo()
    assert judged(environment, "5") == [5.0]


def test_a_function_whose_loading_hangs_ends(monkeypatch):
    monkeypatch.setattr("nemorl.rollout.processes.LOADING_S", 2.0)
    monkeypatch.setattr("nemorl.rollout.processes.ENDING_S", 1.0)
    fn = nasty_rewards.Reduced(time.sleep, (nasty_rewards.OVER,))
    setattr(fn, LIMIT, (1.0, ()))
    processes = Processes(fn)
    with pytest.raises(RuntimeError, match="did not load the function within 2 s"):
        processes.start((), {}).result(60)


@pytest.mark.parametrize(
    ("written", "outcome"),
    [(b"\0\0\0\4abcd", 1.0), (b"garbage", "the server of its processes ended")],
)
def test_a_function_that_writes_to_the_server_s_connection_ends(written, outcome):
    text = f"__import__('os').write(int(__import__('sys').argv[1]), {written}) and (lambda: 1.0)"
    fn = nasty_rewards.Reduced(eval, (text,))
    setattr(fn, LIMIT, (1.0, ()))
    processes = Processes(fn)
    error = (
        contextlib.nullcontext() if outcome == 1.0 else pytest.raises(RuntimeError, match=outcome)
    )
    with error:
        assert processes.start((), {}).result(60) == outcome


def test_a_new_worker_is_not_taken_for_what_an_ended_one_has_left():
    """Though it leads no session yet."""
    fn = nasty_rewards.Reduced(nasty_rewards.slow_to_lead_a_session, ())
    setattr(fn, LIMIT, (0.2, ()))
    processes = Processes(fn)
    late = [processes.start((True,), {}) for _ in os.sched_getaffinity(0)]
    assert processes.start((False,), {}).result(60) == 1.0
    assert [each.result(60) for each in late] == [LATE_RESULT] * len(late)


KILLED = """
import os, subprocess, sys, time
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.processes import LIMIT, Processes, judged_in_processes
@judged_in_processes(seconds=1000)
def reward(response):
    subprocess.Popen(["sleep", "1000"])
    print("busy", flush=True)
    while True:
        pass
log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
FunctionalRewardWrapper(reward).step([log], [{}])
"""


@pytest.mark.parametrize("first", ["", "os.kill(os.getppid(), 19); "], ids=["", "server stopped"])
def test_no_process_outlives_one_that_is_killed(first: str):
    """Nor does one that a reward has started, while it computes."""
    script = KILLED.replace('print("busy"', f'{first}print("busy"')
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"busy\n"
        processes = psutil.Process(run.pid).children(recursive=True)
        assert len(processes) == 3
        run.kill()
    assert gone(processes)


def test_no_process_outlives_a_run_that_is_killed_and_a_fork_of_it_lives():
    """It has the connection to the server, too."""
    judge = "FunctionalRewardWrapper(reward).step([log], [{}])"
    script = KILLED.replace(
        "    subprocess", "    if response == 'fast':\n        return 1.0\n    subprocess"
    )
    forks = """
environment = FunctionalRewardWrapper(reward)
environment.step([[log[0], {**log[1], "content": "fast"}]], [{}])
if os.fork() == 0:
    import time
    time.sleep(1000)
environment.step([log], [{}])
"""
    with subprocess.Popen(
        [sys.executable, "-c", script.replace(judge, forks)], stdout=subprocess.PIPE
    ) as run:
        assert run.stdout.readline() == b"busy\n"
        processes = psutil.Process(run.pid).children(recursive=True)
        (fork,) = (one for one in processes if one.ppid() == run.pid and not one.children())
        run.kill()
    processes.remove(fork)
    try:
        assert gone(processes)
    finally:
        fork.kill()


def test_math_has_a_limit_in_any_thread():
    environment = make_environment("math")
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning, match="longer than 5 s for 1 of"):
        bomb = r"\boxed{9^{9^{9^9}}}"
        assert pool.submit(
            lambda: judged(environment, r"so $\boxed{0.5}$", bomb, "2", answer=r"\frac{1}{2}")
        ).result() == [1.0, 0.0, 0.0]
    assert time.monotonic() - begin < 60
