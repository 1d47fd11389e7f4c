"""Loops over `open_run`: how they are left, what they may not do, and what goes on of itself."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import nemorl
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.config.tree import from_dict, to_dict
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.callbacks import Terminated
from tests.examples import forgetting_own
from tests.helpers import shapes_checked
from tests.parallel.batches import random_batch
from tests.runtime import runs
from tests.runtime.runs import (
    LOSS,
    TRAINER,
    addition_rows,
    grpo_config,
    numbers,
    opened,
    resumed,
    run_config,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model


def learn(step, prompts) -> Any:
    """A step that samples and trains; its batch."""
    return runs.learn(step, step.sample(prompts, count=4, n=2))


def whole(config, steps: int = 4, **given) -> list[dict[str, Any]]:
    with opened(config, **given) as run:
        prompts = run.prompts()
        for step in run.steps(steps):
            learn(step, prompts)
    assert run.result is not None
    return [numbers(line) for line in run.result.history]


def test_what_happens_between_steps(tmp_path: Path):
    seen = []

    class Watch(nemorl.Callback):
        def on_step_end(self, trainer, step, metrics):
            seen.append(step)
            metrics["mine"] = 2.0 * step

        def on_checkpoint(self, trainer, step, path):
            seen.append(path.name)

    config = grpo_config(tmp_path, run={"val_period": 2, "save_period": 2})
    history = whole(config, callbacks=[Watch()], validation=addition_rows(3))
    assert seen == [1, 2, "step_2", 3, 4, "step_4"]
    train = [line for line in history if line["phase"] == "train"]
    assert [line["mine"] for line in train] == [2.0, 4.0, 6.0, 8.0]
    assert all({"reward", "accuracy", "loss", "grad_norm"} <= line.keys() for line in train)
    assert [line["step"] for line in history if line["phase"] == "validation"] == [2, 4]
    assert [*RunDirectory(tmp_path).sample_sizes()] == [1, 2, 3, 4]


@pytest.mark.parametrize("error", [None, ArithmeticError, KeyboardInterrupt])
def test_a_loop_that_is_left_goes_on_where_it_was(error: Any, tmp_path: Path):
    """By a break, or an error."""
    expected = whole(grpo_config(tmp_path / "whole"))
    config = grpo_config(tmp_path / "left")
    try:
        with opened(config) as run:
            prompts = run.prompts()
            for step in run.steps(4):
                if step.number == 3 and error:
                    prompts.next(3)
                    raise error("of the loop")
                learn(step, prompts)
                if step.number == 2 and not error:
                    break
    except (ArithmeticError, KeyboardInterrupt) as caught:
        assert error and "has a checkpoint of step 2" in caught.__notes__[0]
    else:
        assert not error and run.result.metrics["loss"] == expected[1]["loss"]
    assert list(checkpoint.present(tmp_path / "left")) == [2]
    assert whole(resumed(config)) == expected


def test_several_orders_go_on_after_a_resume(tmp_path: Path):
    def taken(folder: str, steps: int, **options) -> list[list[int]]:
        config = grpo_config(tmp_path / folder, run={"save_period": 1, **options})
        found = []
        with opened(config) as run:
            mine, other = run.order(run.rows), run.order(range(7), name="replay")
            for step in run.steps(steps):
                found.append([*mine.next(3), *other.next(step.number), step.seed])
                step.log(run.trainer.train_step(BATCH, LOSS))
        return found

    assert taken("parts", 2) + taken("parts", 4, resume=True) == taken("whole", 4)


def test_groups_are_numbered_through_the_run(tmp_path: Path):
    """Whatever stream they are of, and whether or not a step samples them."""
    config = grpo_config(tmp_path, steps=2, run={"val_period": 1, "save_period": 1})
    with opened(config, validation=addition_rows(3)) as run:
        prompts, other, found = run.prompts(), run.prompts(name="other"), list[int]()
        assert prompts.next(2).groups == [0, 1]
        for step in run.steps(2):
            with (
                shapes_checked(on=False),
                pytest.raises(ValueError, match=r"prompts must be the stream .* it is 'Prompts'"),
            ):
                step.sample(other.prompts, count=1)
            for each, count in ((prompts, 2), (other, 1), (prompts, 1)):
                found += step.sample(each, count=count, n=2).group_id[::2].tolist()
            step.log(run.trainer.train_step(BATCH, LOSS))
        assert found == [*range(2, 10)]
        assert (run.state.groups, run.state.open_groups) == (10, ())
        assert run.state.cursors == {"train": 8, "other": 2}


def test_a_step_samples_episodes(tmp_path: Path):
    async def digit(row, policy):
        completion = await policy.sample(policy.prompt)
        return nemorl.Outcome(reward=float(completion.text[:1].isdigit()), answer="none")

    with opened(grpo_config(tmp_path, steps=1), reward=None, generates=True) as run:
        for step in run.steps(1):
            responses = step.sample(run.prompts(), digit, count=2, n=2)
            step.log(run.trainer.train_step(BATCH, LOSS), samples=responses)
    assert responses.answers == ["none"] * 4
    assert run.result.metrics["reward"] == responses.rewards.mean()


BATCH = random_batch([5, 4])
BATCH = replace(
    BATCH,
    advantages=torch.where(BATCH.loss_mask, 1.0, 0.0),
    generation_logprobs=torch.where(BATCH.loss_mask, -1.0, 0.0),
)


def test_what_a_loop_may_not_do(tmp_path: Path):
    with opened(grpo_config(tmp_path / "a")) as run:
        prompts = run.prompts()
        with pytest.raises(ValueError, match="count must be at least 1"):
            prompts.next(0)
        for step in run.steps(1):
            with pytest.raises(RuntimeError, match="must be called once in a run, but this is a"):
                run.steps(1)
            with pytest.raises(ValueError, match=r"batch\.loss_weights must be given to train"):
                run.trainer.train_step(replace(BATCH, loss_weights=None), LOSS)
            with pytest.raises(RuntimeError, match="optim_step needs a gradient: call forward_ba"):
                run.trainer.optim_step()
            learn(step, prompts)
    for use in (lambda: run.trainer, lambda: run.steps(1), lambda: run.backend("second")):
        with pytest.raises(RuntimeError, match="the run is closed: use it inside `with"):
            use()


@pytest.mark.parametrize("early", [True, False])
def test_the_schedule_is_of_the_steps_that_are_taken(early: bool, tmp_path: Path):
    """Whatever comes first, the trainer or the loop."""
    linear = nemorl.OptimizerConfig(lr=1e-2, schedule="linear")
    message = r"last_step times 1 optimizer steps must be the 4 for which optimizer.schedule linear"
    config = grpo_config(tmp_path / "a", steps=4, optimizer=linear)
    with pytest.raises(ValueError, match=message), opened(config) as run:
        assert not early or run.trainer.step == 0
        run.steps(3)
    rates = []
    config = grpo_config(tmp_path / "b", steps=4, optimizer=linear)
    with opened(config, num_updates=2) as run:
        assert not early or run.trainer.step == 0
        for _ in run.steps(1):
            for _ in range(2):
                metrics = run.trainer.train_step(BATCH, LOSS)
                rates.append(metrics["lr"].finalize())
    assert rates == pytest.approx([1e-2, 0.5e-2])


def test_another_models_schedule_is_of_the_steps_that_are_taken(tmp_path: Path):
    """Its rate would be 0 in the steps after those that the config names."""
    cosine = nemorl.OptimizerConfig(lr=1e-2, schedule="cosine")
    rates = []
    with opened(grpo_config(tmp_path / "a", steps=4)) as run:
        steps = run.steps(8)  # which says how long the run is
        critic = run.backend("critic", model=tiny_model(), optimizer=cosine)
        for step in steps:
            step.log(run.trainer.train_step(BATCH, LOSS))
            rates.append(critic.train_step(BATCH, LOSS)["lr"].finalize())
    assert rates[4] == pytest.approx(0.5e-2) and rates[-1] > 0
    endless = nemorl.BaseConfig(run=run_config(tmp_path / "b"), trainer=TRAINER)
    message = "optimizer.schedule must be constant where no setting says how long the run is"
    with pytest.raises(ValueError, match=message), opened(endless, reward=None) as run:
        run.backend("critic", model=tiny_model(), optimizer=cosine)


def test_a_run_says_whether_it_samples(tmp_path: Path):
    config = sft_config(tmp_path / "no", train_global_batch_size=4)
    with opened(config, reward=None) as run:
        with pytest.raises(ValueError, match=r"generates must be True for a run that samples, .*T"):
            _ = run.generator
        assert run.trainer.step == 0
    config = sft_config(tmp_path / "yes", train_global_batch_size=4)
    with opened(config, reward=None, generates=True) as run:
        assert run.trainer.step == 0
        assert run.generator.policy_version == 0


def co_trained(folder: Path, *steps: int, critic: bool = True, **options: Any) -> Any:
    """Train a second model on the same batches as the policy; the weights of both at the end."""
    run_options = {"save_period": 1, **options}
    for last in steps:
        resume = last != steps[0] or run_options.get("resume", False)
        config = grpo_config(folder, steps=steps[-1], run={**run_options, "resume": resume})
        with opened(config) as run:
            if critic:
                run.backend("critic", model=tiny_model(seed=5), optimizer=SLOW)
            prompts = run.prompts()
            for step in run.steps(last):
                batch = learn(step, prompts)
                if critic:
                    step.train(batch, LOSS, backend="critic")
            weights = {name: dict(each.weights()) for name, each in run.backends.items()}
            copies = {
                name: {key: value.clone() for key, value in found.items()}
                for name, found in weights.items()
            }
    return copies, [numbers(line) for line in run.result.history]


SLOW = nemorl.OptimizerConfig(lr=1e-3)


def same_weights(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, weights in one.items():
        assert all(torch.equal(value, other[name][key]) for key, value in weights.items()), name


def test_two_models_train_and_go_on_bit_for_bit(tmp_path: Path):
    whole_weights, lines = co_trained(tmp_path / "whole", 4)
    parts_weights, parts = co_trained(tmp_path / "parts", 2, 4)
    assert parts == lines and lines[-1]["critic/lr"] == pytest.approx(1e-3)
    same_weights(whole_weights, parts_weights)
    began = tiny_model(seed=5).state_dict()
    assert any(not torch.equal(began[name], x) for name, x in whole_weights["critic"].items())
    folder = tmp_path / "parts" / "checkpoints" / "step_4"
    assert {"policy", "critic"} <= {path.name for path in folder.iterdir()}


def test_models_are_exported_under_their_names(tmp_path: Path):
    weights, _ = co_trained(tmp_path / "run", 1, export=True)
    for name, folder in (("policy", "hf"), ("critic", "hf-critic")):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / folder).state_dict()
        assert all(torch.equal(found[key], value) for key, value in weights[name].items())
    of_run = {"run": str(tmp_path / "run"), "output": str(tmp_path / "exported")}
    exported = nemorl.export(**of_run, backend="critic")
    found = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert all(torch.equal(found[key], value) for key, value in weights["critic"].items())
    with pytest.raises(ValueError, match=r"one of the models in the checkpoint \(policy, critic\)"):
        nemorl.export(**of_run, backend="teacher")
    message = r"run.backend must be called for each .*step_1 holds, .*: call run.backend\(.critic"
    with pytest.raises(ValueError, match=message):
        co_trained(tmp_path / "run", 2, critic=False, resume=True)


def test_which_models_a_run_may_have(tmp_path: Path):
    with opened(grpo_config(tmp_path / "run")) as run:
        with pytest.raises(ValueError, match="model must be given for a scalar head where the pol"):
            run.backend("critic", head="scalar")
        assert run.live is None, "that was known before anything was loaded"
        initial = run.backend("initial", trains=False)
        with pytest.raises(ValueError, match="name must be a Python name, and none of"):
            run.backend("initial")
        before = initial.get_logprobs(BATCH).values
        assert torch.equal(run.trainer.get_logprobs(BATCH).values, before)
        with pytest.raises(ValueError, match="model must be given where the policy's was, which"):
            run.backend("late", trains=False)
        with pytest.raises(ValueError, match="own_ranks needs ranks that Ray places"):
            run.backend("apart", model=tiny_model(), own_ranks=True)
        for step in run.steps(2):
            with pytest.raises(ValueError, match="must be called before the first step"):
                run.backend("critic", model=tiny_model())
            step.log(run.trainer.train_step(BATCH, LOSS))
        assert torch.equal(initial.get_logprobs(BATCH).values, before)
        assert not torch.equal(run.trainer.get_logprobs(BATCH).values, before)
        run.release("initial")
        with pytest.raises(RuntimeError, match="the training backend has no model"):
            initial.get_logprobs(BATCH)
    assert [path.name for path in (tmp_path / "run/checkpoints/step_2").glob("*/")] == ["policy"]


def test_a_run_without_a_loop_loads_nothing(tmp_path: Path):
    with opened(grpo_config(tmp_path)) as run:
        pass
    assert run.live is None


def test_a_run_is_resumed_by_the_program_that_began_it(tmp_path: Path):
    config = grpo_config(tmp_path / "script", steps=2)
    whole(config, 1)
    again = resumed(config)
    theirs = (
        "run.dir must be the folder of a run of grpo, but it is 'one of a script with GRPOConfig'"
    )
    with pytest.raises(ValueError, match=f"{theirs}: resume it with that script"):
        start(again)
    assert len(whole(again, 2)) == 2

    config = grpo_config(tmp_path / "grpo", steps=1)
    start(config)
    ours = (
        "must be the folder of a run of a script with GRPOConfig,"
        " but it is 'one of grpo': nemorl grpo"
    )
    with pytest.raises(ValueError, match=ours):
        whole(resumed(config))


@pytest.mark.parametrize("where", ["loss", "advantage", "callback"])
def test_an_exit_in_code_of_one_s_own_is_an_error(where: str, tmp_path: Path):
    """By itself it would end the process without a word."""

    class Exits(nemorl.Callback):
        def on_step_end(self, trainer, step, metrics):
            sys.exit(0)

    own = tmp_path / f"exits_{where}.py"
    own.write_text(
        "import sys\ndef loss(a, b, c, d): sys.exit(0)\ndef advantage(a, b): sys.exit(0)\n"
    )
    section = {} if where == "callback" else {where: {"name": f"{own}:{where}"}}
    tree = to_dict(grpo_config(tmp_path / "run")) | section
    ending = pytest.raises(RuntimeError, match=r"must not end the run, but it called sys\.exit")
    with forgetting_own(), ending:
        config = from_dict(nemorl.GRPOConfig, tree)
        start(config, callbacks=[Exits()] if where == "callback" else [])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_sigterm_in_a_reward_is_no_exit_of_the_reward(tmp_path: Path):
    def reward(response: str) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

    with pytest.raises(Terminated):
        start(grpo_config(tmp_path), reward=reward)


def test_what_takes_less_memory_is_said_where_there_is_too_little(tmp_path: Path):
    with (
        pytest.raises(RuntimeError, match="can't allocate memory") as caught,
        opened(grpo_config(tmp_path)) as run,
    ):
        torch.empty(1 << 55)
    assert "--trainer.micro-batch-tokens" in caught.value.__notes__[-1]
    assert run.result is None


class Counting(TorchGenerationBackend):
    """Says how many tokens it has made since it was last asked."""

    tokens = 0

    async def sample(self, prompt, params):
        answers = await super().sample(prompt, params)
        self.tokens += sum(len(one.token_ids) for one in answers)
        return answers

    def metrics(self) -> dict[str, float]:
        tokens, self.tokens = self.tokens, 0
        return {"tokens": tokens}


@pytest.mark.slow
def test_a_resumed_run_has_the_metrics_of_the_generator_of_an_unbroken_one(tmp_path, monkeypatch):
    """Neither the check at the start of a process nor a validation counts as a step's."""
    monkeypatch.setattr("nemorl.runtime.run.parts.get_generation_backend", lambda name: Counting)
    asked = {"val_period": 1, "val_at_start": True}

    def tokens(folder: str, *steps: int) -> list[float]:
        for last in steps:
            run = {**asked, "resume": last != steps[0]}
            config = grpo_config(tmp_path / folder, steps=last, run=run)
            result = start(config, validation=addition_rows(3))
        lines = [line for line in result.history if line["phase"] == "train"]
        assert all(0 < line["generation/tokens"] <= 24 * 4 for line in lines)
        return [line["generation/tokens"] for line in lines]

    assert tokens("resumed", 2, 4) == tokens("unbroken", 4)
