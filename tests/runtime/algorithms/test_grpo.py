"""The GRPO loop: what a step computes, every preset, and what the pieces around the loss do."""

import json
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch

import nemorl
from nemorl.losses import policy
from nemorl.losses.logprobs import LogprobKind, Logprobs
from nemorl.losses.types import finalize
from nemorl.parallel.backend import ForwardOutput
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.collect import Rollouts, to_token_batch
from nemorl.rollout.conversation import Conversation, Outcome, Turn
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.generation import Completion
from nemorl.runtime.algorithms.common import minibatches, of_this_batch
from nemorl.runtime.algorithms.policy_loss import make_advantages, make_loss, make_loss_weights
from nemorl.runtime.config.presets import PRESETS, preset
from nemorl.runtime.run.callbacks import Callback, StopTraining
from tests.runtime.runs import addition_rows, digits, grpo_config, of_phase, sft_config, start


class Recorder(Callback):
    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.samples: list[list[dict]] = []
        self.epochs: list[tuple[str, int]] = []

    def on_step_begin(self, trainer, step) -> None:
        self.weights.append({name: tensor.clone() for name, tensor in trainer.trainer.weights()})

    def on_samples(self, trainer, step, samples) -> None:
        self.samples.append(samples)

    def on_epoch_begin(self, trainer, epoch) -> None:
        self.epochs.append(("begin", epoch))

    def on_epoch_end(self, trainer, epoch, metrics) -> None:
        self.epochs.append(("end", epoch))


def rollouts(
    rewards: list[float],
    *,
    group: int = 2,
    lengths: list[int] | None = None,
    truncated: tuple[int, ...] = (),
) -> Rollouts:
    lengths = lengths or [3] * len(rewards)
    completions = [
        Completion(
            token_ids=(2,) * n,
            logprobs=(-0.5,) * n,
            finish_reason="length" if i in truncated else "stop",
            text="00"[:n],
        )
        for i, n in enumerate(lengths)
    ]
    return Rollouts(
        conversations=[
            Conversation(
                row={},
                group=i // group,
                member=i % group,
                turns=(Turn(prompt=[3, 4], completion=completion),),
                outcome=Outcome(reward=reward),
            )
            for i, (reward, completion) in enumerate(zip(rewards, completions, strict=True))
        ],
        texts=["a"] * len(rewards),
        rewards=torch.tensor(rewards),
        kind=LogprobKind(),
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_trains(name: str, tmp_path: Path, capsys):
    base = grpo_config(tmp_path, run={"display": "plain"})
    config = preset(name)
    # A random model rarely ends an answer; DAPO leaves out those that were cut off, so any digit
    # may end one here.
    generation = nemorl.GenerationConfig(max_new_tokens=4, stop_token_ids=tuple(range(2, 12)))
    sizes = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4, "max_num_steps": 3}
    config = replace(
        config,
        data=base.data,
        trainer=base.trainer,
        generation=generation,
        optimizer=base.optimizer,
        run=base.run,
        **sizes,
    )
    recorder = Recorder()
    result = start(config, callbacks=[recorder])
    assert capsys.readouterr().out.startswith(f"settings of preset {name}\n")
    steps = of_phase(result, "train")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 for line in steps)
    assert any(
        not torch.equal(recorder.weights[0][key], recorder.weights[-1][key])
        for key in recorder.weights[0]
    )
    assert all(
        abs(line["token_mult_prob_error"] - 1) < 1e-5 for line in steps
    )  # the sampler and the trainer agree
    if config.needs_reference:
        assert steps[0].get("kl", 0.0) == pytest.approx(0, abs=1e-6)
    if config.kl.coef:
        assert steps[-1]["kl"] > 1e-6


def test_it_learns_and_finishes_a_run_directory(tmp_path: Path):
    """The share of digits in an answer rises, the run directory is complete, and the export answers
    in transformers as it does here.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = {
        "plots": True,
        "loggers": ("tensorboard",),
        "export": True,
        "save_period": 10,
        "val_period": 10,
    }
    config = grpo_config(tmp_path / "run", steps=25, run=run)
    result = start(config, validation=addition_rows(5))
    rewards = [line["reward"] for line in of_phase(result, "train")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
    assert [line["step"] for line in of_phase(result, "validation")] == [
        10,
        20,
        25,
    ]
    folder = tmp_path / "run"
    assert sorted(path.name for path in (folder / "checkpoints").glob("step_*")) == [
        "step_20",
        "step_25",
    ]
    assert len(list((folder / "samples").glob("step_*.jsonl"))) == 25
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "plots/reward.png",
        "plots/overview.png",
        "hf/config.json",
        "hf/model.safetensors",
        "hf/tokenizer.json",
    ):
        assert (folder / name).exists(), name
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder / "hf"),
        AutoTokenizer.from_pretrained(folder / "hf"),
    )
    inputs = tokenizer("1+1=", return_tensors="pt")
    theirs = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=4,
    )[0, 4:].tolist()
    ours = nemorl.generate(
        folder,
        "1+1=",
        device="cpu",
        generation=nemorl.GenerationConfig(temperature=0.0, max_new_tokens=4),
    )
    assert tokenizer.decode(theirs, skip_special_tokens=True) == ours[0]["response"]


def test_one_update_needs_no_second_forward_pass_and_gives_the_same(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    batch = replace(to_token_batch(rollouts([1.0, 0.0, 0.0, 1.0])), loss_weights=None)
    batch = replace(
        batch,
        advantages=torch.randn(batch.input_ids.shape, generator=generator),
        loss_weights=batch.loss_mask / 12,
    )
    for name in PRESETS:
        loss_fn = make_loss(replace(preset(name), kl=nemorl.KLConfig()))
        outcomes = []
        for explicit in (False, True):
            logprobs = -torch.rand(
                batch.input_ids.shape, generator=torch.Generator().manual_seed(1)
            )
            logprobs.requires_grad_()
            given = replace(batch, prev_logprobs=logprobs.detach().clone()) if explicit else batch
            output = loss_fn(ForwardOutput(logprobs, torch.zeros_like(logprobs)), given)
            outcomes.append(
                (
                    output.loss.detach(),
                    torch.autograd.grad(output.loss, logprobs)[0],
                    finalize(output.metrics),
                )
            )
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        assert torch.equal(outcomes[0][1], outcomes[1][1])
        assert outcomes[0][2] == outcomes[1][2]


def test_minibatches_cover_the_batch_once_a_pass():
    config = nemorl.GRPOConfig(train_global_batch_size=4, num_updates_per_batch=2)
    parts = list(minibatches(10, config, seed=1))
    # As even as can be where dynamic sampling found too few.
    assert [len(part) for part in parts] == [4, 3, 3] * 2
    first, second = torch.cat(parts[:3]), torch.cat(parts[3:])
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(10))
    assert not torch.equal(first, second)  # another order in the second pass
    assert config.updates_on(10) == 6
    assert config.updates_on(3) == 2
    assert nemorl.GRPOConfig().updates_on(3) == 1


def test_minibatches_have_weights_of_their_own(tmp_path: Path, monkeypatch):
    sums, train_step = [], DTensorBackend.train_step

    def watched(self, batch, loss_fn):
        sums.append(float(batch.loss_weights.sum()))
        return train_step(self, batch, loss_fn)

    monkeypatch.setattr(DTensorBackend, "train_step", watched)
    start(grpo_config(tmp_path, steps=1, train_global_batch_size=8, reduction="token_mean"))
    assert sums == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [[1 / 9] * 1, [1 / 9] * 3, [1 / 9] * 5]),
        ("sequence_mean", [[1 / 3], [1 / 9] * 3, [1 / 15] * 5]),
        ("constant", [[1 / 30], [1 / 30] * 3, [1 / 30] * 5]),
        ("group_mean", [[1 / 8], [1 / 8] * 3, [1 / 10] * 5]),
    ],
)
def test_reductions(reduction, expected):
    config = nemorl.GRPOConfig(
        reduction=reduction, generation=nemorl.GenerationConfig(max_new_tokens=10)
    )
    rolled = rollouts([0.0, 1.0, 1.0], lengths=[1, 3, 5])
    weights = make_loss_weights(config)(to_token_batch(rolled).loss_mask, rolled.group_id)
    for row, values in zip(weights, expected, strict=True):
        assert row[row != 0].tolist() == pytest.approx(values)


def test_advantages_by_hand():
    """Rewards 1 and 0 in the first group, equal ones in the second: ±1/√2 with the sample
    deviation, and exactly 0.
    """
    rolled = rollouts([1.0, 0.0, 0.5, 0.5])
    batch = to_token_batch(rolled)
    values = make_advantages(nemorl.GRPOConfig())(rolled, batch)[:, 2]
    assert values.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0, 0.0], abs=1e-5)
    assert values[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("ddof", "expected"), [(0, 1.0), (1, (11 / 12) ** 0.5)])
def test_the_deviation_of_reinforce_plus_plus_is_a_choice(ddof, expected):
    """Rewards of ±1/2 around their mean, on twelve tokens."""
    rolled = rollouts([1.0, 0.0, 0.0, 1.0])
    choice = nemorl.ReinforcePlusPlusAdvantage(ddof=ddof)
    batch = to_token_batch(rolled)
    values = make_advantages(nemorl.GRPOConfig(advantage=choice))(rolled, batch)
    assert batch.loss_mask.sum() == 12
    assert values[:, 2].tolist() == pytest.approx([expected, -expected, -expected, expected], 1e-5)


def test_overlong_responses_lose_reward_and_leave_the_loss():
    overlong = nemorl.OverlongConfig(buffer=0.5, penalty=1.0, filter=True)
    config = nemorl.GRPOConfig(
        overlong=overlong,
        advantage=nemorl.GroupAdvantage(scale="none"),
        generation=nemorl.GenerationConfig(max_new_tokens=4),
    )
    rolled = rollouts([1.0, 1.0], lengths=[3, 4], truncated=(1,))
    batch = to_token_batch(rolled)
    values = make_advantages(config)(rolled, batch)
    assert values[:, 2].tolist() == pytest.approx(
        [0.25, -0.25]
    )  # 1 - 1/2 and 1 - 1, less their mean


def test_dynamic_sampling_replaces_whole_groups(tmp_path: Path):
    """A reward that is the same for all responses to most prompts: only groups with two kinds of
    rewards are trained on, each whole.
    """

    def reward(prompt: str, response: str) -> float:
        return digits(prompt, response) if prompt[0] in "12" else 1.0

    class Groups(Callback):
        def on_step_end(self, trainer, step, metrics) -> None:
            assert metrics["groups_kept"] == pytest.approx(
                metrics["informative_groups"]
            )  # measured on all that were sampled
            assert metrics["groups_kept"] < 1
            assert metrics["calls"] == pytest.approx(1)

    class Counted(FunctionalRewardWrapper):
        def global_post_process_and_metrics(self, batch):
            return batch, {"calls": 1.0}

    recorder = Recorder()
    slow = nemorl.OptimizerConfig(lr=1e-6)
    config = grpo_config(
        tmp_path,
        dynamic_sampling=True,
        max_sampling_rounds=16,  # enough to fill every step
        optimizer=slow,
        run={"samples_per_step": 100},
    )
    start(config, reward=Counted(reward), callbacks=[recorder, Groups()])
    for samples in recorder.samples:
        groups: dict[int, list[float]] = {}
        for sample in samples:
            assert sample["prompt"][0] in "12"
            groups.setdefault(sample["group"], []).append(sample["reward"])
        assert len(groups) == 6
        assert all(len(rewards) == 4 and len(set(rewards)) > 1 for rewards in groups.values())


@pytest.mark.parametrize(("count", "expected"), [(3, [0]), (11, [0, 3]), (100, [*range(6)])])
def test_the_sample_log_keeps_whole_groups(tmp_path: Path, count, expected):
    """What GRPO compares: each group with all of its responses to one prompt, in order."""
    start(grpo_config(tmp_path, steps=1, run={"samples_per_step": count}))
    lines = (tmp_path / "samples" / "step_1.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["group"] for sample in samples] == [g for g in expected for _ in range(4)]
    prompts = {(sample["group"], sample["prompt"]) for sample in samples}
    assert len(prompts) == len(expected)


def test_dynamic_sampling_without_an_informative_group_goes_on(tmp_path: Path):
    result = start(
        grpo_config(tmp_path, steps=2, dynamic_sampling=True, max_sampling_rounds=2),
        reward=lambda prompt, response: 1.0,
    )
    assert result.metrics["grad_norm"] == 0
    assert result.metrics["reward"] == 1.0
    assert result.metrics["groups_kept"] == 0


def test_off_policy_correction_is_measured(tmp_path: Path):
    config = grpo_config(
        tmp_path, steps=2, off_policy=nemorl.OffPolicyConfig(mode="truncate", max=1.5)
    )
    assert start(config).metrics["importance_weight_mean"] == pytest.approx(1, abs=1e-4)


def test_epochs_and_stopping(tmp_path: Path):
    """40 rows, 6 a step: the 7th step ends the first epoch."""

    class StopAt(Callback):
        def on_step_end(self, trainer, step, metrics) -> None:
            if step == 8:
                raise StopTraining

    recorder = Recorder()
    result = start(grpo_config(tmp_path, steps=20), callbacks=[recorder, StopAt()])
    assert recorder.epochs == [("begin", 0), ("end", 0), ("begin", 1)]
    assert max(line["step"] for line in result.history) == 8
    assert (tmp_path / "checkpoints" / "step_8").exists()


@pytest.mark.parametrize(
    "hook", ["on_step_begin", "on_samples", "on_validation_end", "on_epoch_end"]
)
def test_any_hook_can_stop_a_run_after_the_present_step(hook: str, tmp_path: Path):
    class Stop(Callback):
        pass

    def stop(self, trainer, step, *rest) -> None:
        if step in (2, 0):
            raise StopTraining

    setattr(Stop, hook, stop)
    result = start(
        grpo_config(tmp_path, steps=9, run={"val_period": 1}),
        validation=addition_rows(3),
        callbacks=[Stop()],
    )
    last = 7 if hook == "on_epoch_end" else 2
    assert max(line["step"] for line in result.history) == last
    assert [line["phase"] for line in result.history if line["step"] == last] == [
        "validation",
        "train",
    ]
    assert (tmp_path / "checkpoints" / f"step_{last}").exists()


def test_a_group_of_one_learns_from_the_batch(tmp_path: Path):
    """As the error for a group of one advises."""
    advantage = nemorl.GroupAdvantage(baseline="batch_mean", scale="batch_std")
    assert (
        start(
            grpo_config(tmp_path, steps=1, num_generations_per_prompt=1, advantage=advantage)
        ).metrics["grad_norm"]
        > 0
    )


def test_same_seed_same_run_other_seed_other_run(tmp_path: Path):
    def numbers(folder: str, seed: int) -> list[float]:
        history = start(grpo_config(tmp_path / folder, steps=2, run={"seed": seed})).history
        return [line["reward"] for line in history] + [line["loss"] for line in history]

    assert numbers("a", 0) == numbers("b", 0) != numbers("c", 1)


def test_a_loss_holds_no_settings():
    """It goes to other processes in every optimizer step."""
    config = preset("dapo")
    off_policy = nemorl.OffPolicyConfig(mode="truncate")
    loss_fn = make_loss(replace(config, kl=nemorl.KLConfig(coef=0.1), off_policy=off_policy))
    assert len(cloudpickle.dumps(loss_fn)) < 1000
    assert b"Config" not in cloudpickle.dumps(loss_fn)


def test_the_loss_is_the_one_that_was_chosen():
    """By the gradient at a ratio far outside the trust region, where the losses differ."""
    batch = to_token_batch(rollouts([1.0], group=1))
    ones = batch.loss_mask.float()
    batch = replace(batch, advantages=ones, loss_weights=ones / 3, prev_logprobs=-ones)
    logprobs = torch.zeros_like(ones)

    def gradient(loss) -> float:
        leaf = logprobs.clone().requires_grad_()
        config = nemorl.GRPOConfig(loss=loss)
        return float(
            torch.autograd.grad(
                make_loss(config)(ForwardOutput(leaf, leaf.detach()), batch).loss, leaf
            )[0][0, 2]
        )

    assert gradient(nemorl.ClippedLoss()) == 0  # r = e is clipped
    assert gradient(nemorl.ClippedLoss(clip_high=3.0)) == pytest.approx(-torch.e / 3, rel=1e-5)
    assert gradient(nemorl.GSPOLoss(clip_high=3.0)) == pytest.approx(-torch.e / 3, rel=1e-5)
    assert gradient(nemorl.CISPOLoss(clip_high=0.5)) == pytest.approx(-1.5 / 3)
    assert gradient(nemorl.ReinforceLoss()) == pytest.approx(-1 / 3)
    assert policy.on_policy(logprobs).requires_grad is False


def test_logprobs_of_another_distribution_are_refused():
    batch = to_token_batch(rollouts([1.0], group=1))
    values = torch.zeros_like(batch.generation_logprobs)
    assert of_this_batch(Logprobs(values, LogprobKind()), batch, "prev_logprobs") is values
    with pytest.raises(
        ValueError, match=r"prev_logprobs and the batch's .*temperature: 0\.5 and 1\.0"
    ):
        of_this_batch(Logprobs(values, LogprobKind(temperature=0.5)), batch, "prev_logprobs")


def test_entropy_bonus_and_its_metric():
    batch = to_token_batch(rollouts([1.0], group=1))
    ones = batch.loss_mask.float()
    batch = replace(batch, advantages=torch.zeros_like(ones), loss_weights=ones / 3)
    entropy = (2 * ones).requires_grad_()
    output = make_loss(nemorl.GRPOConfig(entropy_coef=0.1))(
        ForwardOutput(torch.zeros_like(ones), entropy), batch
    )
    assert output.loss.item() == pytest.approx(-0.2)
    assert finalize(output.metrics)["entropy"] == pytest.approx(2)


@pytest.mark.parametrize("make", [grpo_config, sft_config], ids=["grpo", "sft"])
@pytest.mark.parametrize(("schedule", "share"), [("linear", 1 / 3), ("cosine", 1 / 4)])
def test_the_last_step_of_a_schedule_trains(make, schedule, share, tmp_path: Path):
    optimizer = nemorl.OptimizerConfig(lr=1e-2, schedule=schedule)
    recorder = Recorder()
    result = start(make(tmp_path, steps=3, optimizer=optimizer), callbacks=[recorder])
    assert result.metrics["lr"] == pytest.approx(1e-2 * share)
    after = dict(result.model.named_parameters())
    assert any(
        not torch.equal(before, after[name]) for name, before in recorder.weights[-1].items()
    )


@pytest.mark.parametrize(
    ("term", "constants", "message"),
    [
        (policy.clipped, {"clip_hihg": 0.3}, "'clip_hihg'"),
        (policy.clipped, {"prev_logprobs": 2.0}, "multiple values for argument 'prev_logprobs'"),
        (lambda logprobs, prev, advantages, weights, *, c: 0.0, {}, "required argument: 'c'"),
    ],
)
def test_constants_that_do_not_fit_a_term_are_named(term, constants, message):
    with pytest.raises(TypeError, match=message):
        nemorl.policy_loss(term, **constants)
