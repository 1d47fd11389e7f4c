"""Environments in processes of their own."""

import asyncio
import os
import re
import signal
import sysconfig
import threading
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from nemorl.rollout.collect import Rollouts, collect
from nemorl.rollout.config import GenerationConfig, RolloutConfig
from nemorl.rollout.conversation import Prompts
from nemorl.rollout.environments import make_environment
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.run.launch import workers_of
from nemorl.runtime.workers import environments as module
from nemorl.runtime.workers.cluster import RayClusterError, ResourcesError
from nemorl.runtime.workers.environments import RayWorkers, Turns
from nemorl.runtime.workers.worker import Worker
from tests.ray_session import ray_cpus
from tests.rollout.chats import call, played
from tests.rollout.counting import PROMPTS, SAMPLING, TOKENIZER, Batched
from tests.runtime.workers.processes import soon_gone
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.xdist_group("ray")
GONE = r"the process of this environment \(process \d+ on [^)]+\)"


class Game:
    """Three turns. Rows say what happens in the second, once or always."""

    def __init__(self) -> None:
        self.turn = 0

    async def reset(self, **columns) -> None:
        self.columns = columns

    def step(self, response: str) -> tuple[str, float, bool]:
        self.turn += 1
        if self.turn == 2 and self._first():
            match self.columns.get("does"):
                case "hangs":
                    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 30))
                    time.sleep(1000)
                case "crashes":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "raises":
                    raise LookupError("no such move")
                case "imports":
                    import only_there  # type: ignore[import-not-found]

                    return "1+", only_there.number(), True
        return "1+", float(len(response)), self.turn == 3

    def _first(self) -> bool:
        with suppress(FileExistsError):
            Path(self.columns.get("once", "")).touch(exist_ok="once" not in self.columns)
            return True
        return False

    def get_metrics(self) -> dict[str, float]:
        return {"pid": os.getpid()}

    def close(self) -> None:
        if folder := self.columns.get("folder"):
            Path(folder, f"{os.getpid()}-{time.monotonic_ns()}").touch()


def told(*columns: dict, timeout_s: float = 60.0) -> Prompts:
    """The usual prompts with columns."""
    rows = [{**row, **each} for row, each in zip(PROMPTS.rows, columns, strict=True)]
    limits = replace(PROMPTS.limits, timeout_s=timeout_s)
    return Prompts(rows, PROMPTS.token_ids, tokenizer=PROMPTS.tokenizer, limits=limits)


@pytest.fixture(scope="module")
def generator() -> TorchGenerationBackend:
    backend = TorchGenerationBackend(model=tiny_model(scale=2.0), tokenizer=TOKENIZER)
    backend.setup(GenerationConfig())
    return backend


@pytest.fixture(scope="module")
def workers() -> RayWorkers:
    ray_cpus()
    return RayWorkers(2, {})


def in_processes(workers: RayWorkers, kind=Game):
    return make_environment("math", environment=kind, chosen=False, workers=lambda: workers)


def texts(found: Rollouts) -> list[list[str]]:
    return [[turn.completion.text for turn in each.turns] for each in found.conversations]


def pids(found: Rollouts) -> set[float]:
    return {each.outcome.metrics["pid"] for each in found.conversations}


def test_processes_change_nothing(generator, workers, tmp_path):
    prompts = told(*[{"folder": str(tmp_path)}] * 3)
    found = collect(generator, in_processes(workers), prompts, SAMPLING, seed=1)
    usual = collect(generator, make_environment(Game), prompts, SAMPLING, seed=1)
    assert found.rewards.tolist() == usual.rewards.tolist()
    assert texts(found) == texts(usual)
    assert pids(usual) == {os.getpid()}
    assert os.getpid() not in pids(found) and len(pids(found)) == 2
    assert len(list(tmp_path.iterdir())) == 18
    again = collect(generator, in_processes(workers), prompts, SAMPLING, seed=2)
    assert pids(again) == pids(found)  # they are used again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("hangs", "EnvironmentTimeout: environment 'Game': step must end within 5 s"),
        ("crashes", rf"ConversationFailed: {GONE} died: "),
        ("raises", "LookupError: no such move"),
    ],
)
def test_a_conversation_fails_alone(generator, workers, tmp_path, does, reason):
    once, closed = tmp_path / "once", tmp_path / "closed"
    closed.mkdir()
    prompts = told({}, {"does": does, "once": str(once)}, {"folder": str(closed)}, timeout_s=5.0)
    found = collect(generator, in_processes(workers), prompts, SAMPLING, seed=1)
    ((failed, outcome),) = [(each, each.outcome) for each in found.failed]
    assert failed.group == 1 and re.match(reason, outcome.reason), outcome
    assert len(found.conversations) == 8 and len(list(closed.iterdir())) == 3
    after = collect(generator, in_processes(workers), told({}, {}, {}), SAMPLING, seed=1)
    assert not after.failed and len(pids(after)) == 2


@pytest.mark.slow
def test_a_python_with_packages_of_its_own(generator, tmp_path):
    ray_cpus()
    venv.create(tmp_path, symlinks=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "only_there.py").write_text("def number():\n    return 7\n")
    python = str(tmp_path / "bin" / "python")
    workers = RayWorkers(1, {"runtime_env": {"py_executable": python}})
    prompts = told(*[{"does": "imports"}] * 3)
    found = collect(generator, in_processes(workers), prompts, SAMPLING, seed=1)
    assert [each.outcome.turn_rewards[1] for each in found.conversations] == [7.0] * 9
    with pytest.raises(ModuleNotFoundError):
        import_module("only_there")


class Counter:
    """Tools, with what a reward reads."""

    def reset(self, **columns) -> None:
        self.count = 0

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: Value to add.
        """
        self.count += step
        return self.count


def counted(environments, **columns) -> list[float]:
    return [float(each.count) for each in environments]


@pytest.mark.slow
def test_tools_and_what_a_reward_reads_of_them(workers):
    environment = make_environment(counted, environment=Counter, workers=lambda: workers)
    answers = {"Go.": call("increment", step=3), "3": "done"}
    found = played(
        environment, lambda asked: answers["3" if "<tool_response>\n3" in asked else "Go."]
    )
    assert found.rewards.tolist() == [3.0, 3.0]


class Marked(Counter):
    """Three wait for each other; the first has its process's number."""

    def reset(self, folder: str) -> None:
        self.count = self.pid = 0
        with suppress(FileExistsError):
            Path(folder, "first").touch(exist_ok=False)
            self.pid = os.getpid()
        Path(folder, f"{os.getpid()}").touch()
        while len([*Path(folder).iterdir()]) < 4:
            time.sleep(0.01)


@pytest.mark.slow
def test_a_process_that_ends_before_its_reward_fails_its_conversation_alone(tmp_path):
    sizes = list[int]()

    def alone(environment, **columns) -> float:
        if pid := environment.pid:
            os.kill(pid, signal.SIGKILL)
            assert soon_gone(pid)
        return float(environment.count)

    def ranked(environments, **columns) -> list[float]:
        sizes.append(len(environments))
        return [alone(each) for each in environments]

    ray_cpus()
    workers = RayWorkers(3, {})
    environment = make_environment([alone, ranked], environment=Marked, workers=lambda: workers)
    row, sampling = {"folder": str(tmp_path)}, SamplingParams(n=3)
    found = played(environment, lambda asked: "done", row, sampling=sampling)
    (failed,) = found.failed
    reason = rf"ConversationFailed: {GONE} died: "
    assert re.match(reason, failed.outcome.reason) and sizes == [3, 2]
    assert found.rewards.tolist() == [0.0] * 2
    after = played(environment, lambda asked: "done", row, sampling=sampling)
    assert after.rewards.tolist() == [0.0] * 3 and not after.failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "reason"),
    [(True, "the cluster has too little"), (False, "a process was not up within 2 s")],
)
def test_processes_without_a_place_end_the_run(generator, monkeypatch, local, reason):
    ray_cpus()
    monkeypatch.setattr(module, "START_S", 2.0)
    monkeypatch.setattr(module, "is_local", lambda: local)
    workers = RayWorkers(2, {"resources": {"sandbox": 1}})
    given = r"rollout\.workers is 2 and rollout\.worker \{'resources': \{'sandbox': 1\}\}"
    message = rf"^{given}: bundles must fit in .* {reason}(.|\n)*asked +worker +2 x \(1 sandbox\)\n"
    with pytest.raises(ResourcesError, match=message):
        collect(generator, in_processes(workers), PROMPTS, SAMPLING, seed=1)


def test_ray_starts_beside_the_event_loop_in_a_thread_that_lasts(monkeypatch):
    went_on, threads = threading.Event(), list[threading.Thread]()

    def connect() -> None:
        threads.append(threading.current_thread())
        assert went_on.wait(timeout=20), "the event loop is blocked"
        raise RayClusterError("too late")

    async def enter() -> None:
        asyncio.get_running_loop().call_soon(went_on.set)
        async with RayWorkers(1, {}).room(Game, Game):
            pass

    monkeypatch.setattr(module, "connect", connect)
    with pytest.raises(RayClusterError, match="too late"):
        asyncio.run(enter())
    assert threads[0].is_alive()  # Ray's processes end with it


def test_a_process_that_is_long_in_coming_is_shown_and_says_where_it_is(monkeypatch):
    shown, messages = asyncio.Event(), list[str]()

    def warn(message: str) -> None:
        messages.append(message)
        shown.set()

    async def run(*_) -> tuple[str, int]:
        await shown.wait()
        return "there", 7

    monkeypatch.setattr("nemorl.rollout.calls.warn", warn)
    monkeypatch.setattr("nemorl.rollout.calls.SHOWN_S", 0.1)
    monkeypatch.setattr(module, "START_S", 20.0)
    actor = SimpleNamespace(run=SimpleNamespace(remote=run))
    process = module._Process(Worker(actor, "the process"))
    asyncio.run(RayWorkers(1, {})._started(process))
    assert messages == ["waiting for a process of rollout.workers for 0.1 s (1 conversation)"]
    assert str(process._failure()) == "the process (process 7 on there) is lost"


def in_two_loops(work) -> None:
    """On two event loops, each in its thread."""
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(lambda: asyncio.run(work())) for _ in range(2)]:
            each.result(timeout=120)


@pytest.mark.parametrize("count", [1, 3])
def test_no_more_places_are_taken_than_there_are(count):
    """Whichever tasks are cancelled, also just as they get a place."""
    turns, lock, random = Turns(count), threading.Lock(), Random(0)
    taken, most, done = 0, 0, 0

    async def hold() -> None:
        nonlocal taken, most, done
        async with turns:
            with lock:
                taken += 1
                most = max(most, taken)
            try:
                await asyncio.sleep(random.random() / 1000)
            finally:
                with lock:
                    taken -= 1
                    done += 1

    async def work() -> None:
        for _ in range(20):
            tasks = [asyncio.create_task(hold()) for _ in range(10)]
            await asyncio.sleep(random.random() / 1000)
            for task in random.sample(tasks, 5):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    in_two_loops(work)
    assert most == count and done >= 200 and taken == 0

    async def all_places() -> None:
        async with asyncio.timeout(5), AsyncExitStack() as stack:
            for _ in range(count):
                await stack.enter_async_context(turns)

    asyncio.run(all_places())


@pytest.mark.slow
def test_an_environment_of_a_file(generator, workers, tmp_path, monkeypatch):
    """It is not where the processes look for modules."""
    (tmp_path / "game_in_a_file.py").write_text(
        "BASE = 5\nclass Game:\n    def reset(self): pass\n"
        "    def step(self, response): return '', BASE, True\n"
    )
    monkeypatch.chdir(tmp_path)
    environment = in_processes(workers, "./game_in_a_file.py:Game")
    found = collect(generator, environment, PROMPTS, SAMPLING, seed=1)
    assert found.rewards.tolist() == [5.0] * 9


def test_settings_that_do_not_fit():
    with pytest.raises(ValueError, match=r"rollout\.worker must be options of a Ray actor .*cpu"):
        workers_of(RolloutConfig(workers=1, worker={"cpus": 1}))()
    with pytest.raises(ValueError, match=r"rollout\.worker is for rollout\.workers"):
        RolloutConfig(worker={"num_cpus": 1})
    some = workers_of(RolloutConfig(workers=1))
    with pytest.raises(ValueError, match=r"rollout\.workers is for a class with an object for"):
        make_environment("math", environment=Batched(), chosen=False, workers=some)
