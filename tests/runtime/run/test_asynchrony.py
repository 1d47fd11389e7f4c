"""Runs that sample ahead: the same prompts in the same steps, nothing too old, lost or doubled."""

import asyncio
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nemorl
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.files import NotWritten, writing
from nemorl.runtime.store.verify import verify_run
from nemorl.runtime.watch.callbacks import Callback
from tests.examples import EXAMPLES, load_example, visiting
from tests.runtime.run.mishaps import rollout_threads
from tests.runtime.runs import (
    addition_rows,
    ahead,
    digits,
    grpo_config,
    learn,
    lines,
    of_phase,
    opened,
    prove,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.mark.slow_cases(but=["keep-2"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_each_step_trains_on_the_prompts_of_the_synchronous_run(
    staleness: int, in_flight: str, tmp_path: Path
):
    steps = 6
    start(grpo_config(tmp_path / "straight", steps=steps))
    found = start(ahead(tmp_path / "ahead", staleness, in_flight=in_flight, steps=steps))
    straight = [line["trained"] for line in lines(tmp_path / "straight")]
    assert [line["trained"] for line in lines(tmp_path / "ahead")] == straight
    prove(tmp_path / "ahead", steps)
    oldest = [line["staleness/max"] for line in of_phase(found, "train")]
    assert all(age <= min(step, staleness) for step, age in enumerate(oldest))
    assert in_flight == "abort" or max(oldest) > 0
    for line in of_phase(found, "train"):
        shares = [line[key] for key in line if key.removeprefix("staleness/").isdigit()]
        assert line["staleness/limit"] == staleness and sum(shares) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_example_samples_ahead_by_a_flag(tmp_path: Path):
    assert len((EXAMPLES / "grpo_loop.py").read_text().splitlines()) <= 45
    with visiting():
        flags = load_example("quickstart").demonstration(
            tmp_path, "--async.max-staleness=2", "--max-num-steps=4", "--run.display=none"
        )
        found = load_example("grpo_loop").main(nemorl.cli(nemorl.GRPOConfig, flags))
    assert 0 < max(line["staleness/max"] for line in of_phase(found, "train")) <= 2
    prove(tmp_path / "run", 4, count=9)
    receipts = {each.name: each.holds for each in verify_run(tmp_path / "run")}
    assert receipts["tokens"] and receipts["staleness"] and receipts["prompts"]


@pytest.mark.slow_cases("0", "1")
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_dynamic_sampling_draws_as_many_as_it_drops(staleness: int, tmp_path: Path):
    config = ahead(tmp_path, staleness, steps=5, dynamic_sampling=True, max_sampling_rounds=60)

    def sometimes(prompt: str, response: str) -> float:
        return float(response[:1].isdigit()) if prompt[0] in "246" else 0.0

    found = start(config, reward=sometimes)
    rejected = [n for line in lines(tmp_path) for n in line["dropped"].get("uninformative", [])]
    assert len(rejected) > 5
    prove(tmp_path, 5)
    assert max(line["staleness/max"] for line in of_phase(found, "train")) <= staleness


def test_a_resume_with_less_staleness_leaves_the_receipt_of_older_steps(tmp_path: Path):
    start(ahead(tmp_path, 3, steps=4))
    found = start(ahead(tmp_path, 1, steps=6, run={"resume": True}))
    limits = [line["staleness/limit"] for line in lines(tmp_path, "metrics.jsonl")]
    assert limits == [3.0] * 4 + [1.0] * 2 and found.history
    receipt = {each.name: each for each in verify_run(tmp_path)}["staleness"]
    assert receipt.holds, receipt.found


def test_conversations_that_fail_leave_their_groups(tmp_path: Path):
    """A group of which all fail is dropped by name; others have fewer members."""

    def fails(prompt: str, response: str) -> float:
        if prompt.startswith("3") or response.startswith("1"):
            raise nemorl.ConversationFailed("no")
        return digits(prompt, response)

    found = start(ahead(tmp_path, 2, steps=6), reward=fails)
    groups = lines(tmp_path)
    failed = [n for line in groups for n in line["dropped"].get("failed", [])]
    trained = [n for line in groups for n in line["trained"]]
    assert failed and sorted([*failed, *trained]) == list(range(36))
    assert any(line["failed_fraction"] > 0 for line in of_phase(found, "train"))


@pytest.mark.parametrize("staleness", [0, 2])
def test_groups_that_taught_nothing_are_dropped(staleness: int, tmp_path: Path):
    config = ahead(tmp_path, staleness, steps=3, dynamic_sampling=True, max_sampling_rounds=2)
    with pytest.warns(UserWarning, match="nothing to learn from"):
        start(config, reward=lambda prompt, response: 1.0)
    assert [line["trained"] for line in lines(tmp_path)] == [[]] * 3
    assert [len(line["dropped"]["uninformative"]) for line in lines(tmp_path)] == [12] * 3
    assert all(each.holds is not False for each in verify_run(tmp_path))


class Epochs(Callback):
    """The epochs that begin and end, each with the last finished step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        self.seen.append(f"begin {epoch} at {trainer.state.step}")

    def on_epoch_end(self, trainer: Any, epoch: int, metrics: Any) -> None:
        self.seen.append(f"end {epoch} at {trainer.state.step}")


THREE = "begin 0 at 0, end 0 at 2, begin 1 at 2, end 1 at 4, begin 2 at 4, end 2 at 6"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (partial(ahead, staleness=0, steps=6), THREE),
        (partial(ahead, staleness=2, steps=6), THREE),
        (
            partial(sft_config, steps=2, train_global_batch_size=25),
            "begin 0 at 0, end 0 at 1, begin 1 at 1, end 1 at 1, begin 2 at 1, end 2 at 2, begin 3"
            " at 2, end 3 at 2",
        ),
    ],
)
def test_epochs_are_those_of_what_was_trained_on(config: Any, expected: str, tmp_path: Path):
    seen = Epochs()
    start(config(tmp_path), rows=addition_rows(12), callbacks=[seen])
    assert ", ".join(seen.seen) == expected


def test_an_engine_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from nemorl.rollout.torch_backend import TorchGenerationBackend

    draw, passes = TorchGenerationBackend._draw, []

    def broken(self: Any, work: Any) -> torch.Tensor:
        passes.append(1)
        if len(passes) > 30:
            raise FloatingPointError("the logits are not finite")
        return draw(self, work)

    monkeypatch.setattr(TorchGenerationBackend, "_draw", broken)
    with pytest.raises(FloatingPointError, match="the logits are not finite"):
        start(ahead(tmp_path, 2, steps=30))


def test_a_loop_may_ask_again_after_an_error(tmp_path: Path):
    """Where nothing is sampled ahead; it gets the same prompts."""
    with opened(grpo_config(tmp_path, steps=2)) as run:
        prompts = run.prompts()
        for step in run.steps(2):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(type(run.generator), "sample", lambda *args: 1 / 0)
                step.sample(prompts, count=6, n=4)
            learn(step, step.sample(prompts, count=6, n=4))
    prove(tmp_path, 2)


@pytest.mark.slow
def test_tokens_carry_the_version_that_sampled_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With `keep` long responses go on with new weights, and each token has its own version."""
    monkeypatch.setattr("nemorl.rollout.torch_backend.STEP_S", 0.0)  # it stops where it is told
    versions = list[tuple[int, ...]]()

    generation = nemorl.GenerationConfig(max_new_tokens=20, max_batch_size=8)
    with opened(ahead(tmp_path, 2, steps=6, generation=generation)) as run:
        prompts = run.prompts()
        for step in run.steps(6):
            found = step.sample(prompts, count=6, n=4)
            for each in found.completions:
                assert list(each.policy_versions) == sorted(each.policy_versions)
                versions.append(each.policy_versions)
            learn(step, found)
    assert any(len(set(each)) > 1 for each in versions)


@pytest.mark.parametrize(("how", "error"), [("exit", BaseException), ("cancel", RuntimeError)])
def test_an_episode_that_ends_its_own_tasks_ends_the_run(how: str, error: Any, tmp_path: Path):
    """It does not leave the trainer waiting for groups that never come."""

    async def tool() -> None:
        sys.exit(3)

    async def episode(row: Any, policy: Any) -> nemorl.Outcome:
        await policy.sample(policy.prompt)
        if how == "exit":
            await asyncio.gather(tool())
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)
        return nemorl.Outcome(reward=1.0)

    before = rollout_threads()
    with pytest.raises(error):
        nemorl.run(
            ahead(tmp_path, 2),
            model=tiny_model(),
            tokenizer=tiny_tokenizer(),
            train=addition_rows(),
            environment=episode,
        )
    assert rollout_threads() <= before


@pytest.mark.parametrize(("staleness", "expected"), [(0, [24] * 4), (2, [4] * 24)])
def test_rewards_of_a_batch_are_of_a_step_or_a_group(staleness: int, expected: Any, tmp_path: Path):
    sizes = list[int]()

    def slow(prompts: list[str], responses: list[str]) -> list[float]:
        sizes.append(len(responses))
        return [digits("", each) for each in responses]

    start(ahead(tmp_path, staleness, steps=4), reward=slow)
    assert sizes == expected


def test_rewards_of_single_responses_are_judged_for_groups_at_once(tmp_path: Path):
    """A slow judge is not waited for once for each group."""
    asked, several = list[str](), asyncio.Event()

    async def slow(prompt: str, response: str) -> float:
        asked.append(response)
        if len(asked) > 4:
            several.set()
        await several.wait()
        return digits(prompt, response)

    start(ahead(tmp_path, 2, steps=4, num_prompts_per_step=12), reward=slow)
    assert len(asked) == 4 * 12 * 4


def test_the_trainer_may_compute_inside_of_sampling(tmp_path: Path):
    """The embedded engine, which has the same model, waits meanwhile."""
    with opened(ahead(tmp_path, 1, steps=3)) as run:
        prompts, mixed = run.prompts(), run.prompts(name="mixed")
        for step in run.steps(3):
            with run.sampling():
                found = step.sample(prompts, count=6, n=4)
                for _ in range(2):
                    run.trainer.get_logprobs(found.to_batch())
                assert len(step.sample(mixed, count=2, n=2)) == 4
            learn(step, found)
    prove(tmp_path, 3, count=8)


def test_a_version_between_two_steps_counts_as_the_older_one(tmp_path: Path):
    """A replica that comes back between two minibatches has it."""
    with opened(ahead(tmp_path, 2, steps=4)) as run:
        run.generation.synced.update({0: 0, 4: 1, 8: 2})
        assert [run.generation.synced_at(version) for version in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_groups_without_a_section_async(tmp_path: Path):
    with opened(sft_config(tmp_path, steps=2), generates=True) as run:
        prompts = run.prompts()
        for step in run.steps(2):
            step.log({"size": float(len(step.sample(prompts, count=3, n=2)))})
    assert [line["trained"] for line in lines(tmp_path)] == [[0, 1, 2], [3, 4, 5]]


def loop(config: Any) -> None:
    """A loop of one's own that ends the run in order after an error."""
    error = None
    with opened(config) as run:
        prompts = run.prompts()
        try:
            for step in run.steps(6):
                learn(step, step.sample(prompts, count=6, n=4))
        except NotWritten as found:
            error = found
    if error is not None:
        raise error


@pytest.mark.parametrize("train", [start, loop])
def test_groups_that_can_not_be_written_are_not_lost(train: Any, tmp_path: Path):
    """The step has no checkpoint then, and the run continues from the one before."""
    append, calls = RunDirectory.append_groups, itertools.count(1)

    def full(self: Any, *line: Any) -> None:
        if next(calls) == 3:
            with writing("a line", self.groups):
                raise OSError(28, "No space left on device")
        append(self, *line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "append_groups", full)
        with pytest.raises(NotWritten, match="No space left on device"):
            train(ahead(tmp_path, 2, steps=6, run={"save_period": 1}))
    assert all(each.holds is not False for each in verify_run(tmp_path))
    train(ahead(tmp_path, 2, steps=6, run={"resume": True}))
    prove(tmp_path, 6)


def test_a_loop_that_takes_too_few_is_told(tmp_path: Path):
    with opened(ahead(tmp_path, 1, steps=6)) as run:
        prompts = run.prompts()
        with pytest.warns(UserWarning, match="became older than async.max_staleness before a step"):
            for step in run.steps(6):
                learn(step, step.sample(prompts, count=2 if step.number > 1 else 6, n=4))
    assert any(line["dropped"].get("stale") for line in lines(tmp_path))


def test_a_loop_that_samples_by_itself_is_told(tmp_path: Path):
    with (
        pytest.warns(UserWarning, match="the loop sampled from no stream"),
        opened(ahead(tmp_path, 1, steps=2)) as run,
    ):
        prompts = run.prompts()
        for step in run.steps(2):
            step.log({"mine": float(len(prompts.next(3)))})
    assert [line["dropped"] for line in lines(tmp_path)] == [
        {"taken by hand": [0, 1, 2]},
        {"taken by hand": [3, 4, 5]},
    ]


def test_refusals(tmp_path: Path):
    with pytest.raises(ValueError, match=r"async.max_staleness must be below max_num_steps \(4\)"):
        ahead(tmp_path, 4)
    with pytest.raises(ValueError, match="in_flight must be keep or abort with gen"):
        ahead(tmp_path, 1, in_flight="wait")
    with pytest.raises(ValueError, match=r"in_flight is for async.max_staleness of 1"):
        nemorl.AsyncConfig(in_flight="abort")
