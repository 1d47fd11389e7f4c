"""The GRPO loop: what a step computes, every preset, and what the pieces around the loss do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nemorl
from nemorl.losses import policy
from nemorl.losses.logprobs import LogprobKind, Logprobs
from nemorl.losses.types import finalize
from nemorl.parallel.backend import ForwardOutput
from nemorl.runtime.algorithms.policy_loss import make_loss
from nemorl.runtime.algorithms.responses import by_segment, minibatches
from nemorl.runtime.config.grpo import PRESETS, preset
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.callbacks import Callback, StopTraining
from tests.runtime.runs import (
    addition_rows,
    grpo_config,
    of_phase,
    rollouts,
    samples_at,
    sft_config,
    start,
)


class Recorder(Callback):
    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, trainer, step) -> None:
        self.weights.append({name: tensor.clone() for name, tensor in trainer.trainer.weights()})


def test_it_learns_and_finishes_a_run_directory(tmp_path: Path):
    """The share of digits in an answer rises, the run directory is complete, and the export answers
    in transformers as it does here.
    """
    run = {"plots": True, "loggers": ("tensorboard",), "export": True, "display": "plain"}
    periods = {"save_period": 10, "val_period": 10}
    config = grpo_config(tmp_path / "run", steps=25, run={**run, **periods})
    result, folder = start(config, validation=addition_rows(5)), tmp_path / "run"
    steps = of_phase(result, "train")
    rewards = [line["reward"] for line in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
    assert all(abs(line["token_mult_prob_error"] - 1) < 1e-5 for line in steps)
    assert [line["step"] for line in of_phase(result, "validation")] == [10, 20, 25]
    assert {path.name for path in folder.glob("checkpoints/step_*")} == {"step_20", "step_25"}
    assert len(RunDirectory(folder).sample_sizes()) == 25
    files = "config.yaml metrics.jsonl tensorboard plots/reward.png plots/overview.png"
    for name in [*files.split(), "hf/config.json", "hf/model.safetensors", "hf/tokenizer.json"]:
        assert (folder / name).exists(), name
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    ids = tokenizer("1+1=", return_tensors="pt")["input_ids"]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4}
    theirs = model.generate(input_ids=ids, **options)[0, 4:].tolist()
    greedy = nemorl.GenerationConfig(temperature=0.0, max_new_tokens=4)
    (ours,) = nemorl.generate(folder, "1+1=", device="cpu", generation=greedy)
    assert tokenizer.decode(theirs, skip_special_tokens=True) == ours["response"]


def test_one_update_needs_no_second_forward_pass_and_gives_the_same(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    batch = rollouts([1.0, 0.0, 0.0, 1.0]).to_batch()
    batch = replace(
        batch,
        advantages=torch.randn(batch.input_ids.shape, generator=generator),
        loss_weights=batch.loss_mask / 12,
    )
    for name in PRESETS:
        loss_fn = make_loss(replace(preset(name), kl=nemorl.KLConfig()))
        outcomes = []
        for explicit in (False, True):
            logprobs = -torch.rand(batch.input_ids.shape, generator=generator.manual_seed(1))
            logprobs.requires_grad_()
            given = replace(batch, prev_logprobs=logprobs.detach().clone()) if explicit else batch
            output = loss_fn(ForwardOutput(logprobs, torch.zeros_like(logprobs)), given)
            (gradient,) = torch.autograd.grad(output.loss, logprobs)
            outcomes.append((output.loss.item(), gradient.tolist(), finalize(output.metrics)))
        assert outcomes[0] == outcomes[1]


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


@pytest.mark.parametrize(("count", "expected"), [(3, [0]), (11, [0, 3])])
def test_the_sample_log_keeps_whole_groups(tmp_path: Path, count, expected):
    """What GRPO compares: each group with all of its responses to one prompt, in order."""
    start(grpo_config(tmp_path, steps=1, run={"samples_per_step": count}))
    samples = samples_at(tmp_path, 1)
    assert [sample["group"] for sample in samples] == [g for g in expected for _ in range(4)]
    prompts = {(sample["group"], sample["prompt"]) for sample in samples}
    assert len(prompts) == len(expected)


@pytest.mark.slow_cases(but=["on_step_begin"])
@pytest.mark.parametrize("hook", ["on_step_begin", "on_validation_end", "on_epoch_end"])
def test_any_hook_can_stop_a_run_after_the_present_step(hook: str, tmp_path: Path):
    def stop(self, trainer, step, *rest) -> None:
        if step in (2, 0):
            raise StopTraining

    callback = type("Stop", (Callback,), {hook: stop})()
    config = grpo_config(tmp_path, steps=9, run={"val_period": 1})
    result = start(config, validation=addition_rows(3), callbacks=[callback])
    last = 7 if hook == "on_epoch_end" else 2
    assert max(line["step"] for line in result.history) == last
    phases = [line["phase"] for line in result.history if line["step"] == last]
    assert phases == ["validation", "train"]
    assert (tmp_path / "checkpoints" / f"step_{last}").exists()


def test_logprobs_of_another_distribution_are_refused():
    batch = rollouts([1.0], group=1).to_batch()

    def logprobs(temperature: float) -> torch.Tensor:
        def compute(part: nemorl.TokenBatch) -> Logprobs:
            return Logprobs(torch.ones_like(part.generation_logprobs), LogprobKind(temperature))

        return by_segment(compute, batch, "prev_logprobs")

    assert logprobs(1.0).shape == batch.input_ids.shape
    message = r"prev_logprobs and the batch's .*temperature: 0\.5 and 1\.0"
    with pytest.raises(ValueError, match=message):
        logprobs(0.5)


@pytest.mark.parametrize(
    ("make", "schedule", "share"),
    [(grpo_config, "linear", 1 / 3), (sft_config, "cosine", 1 / 4)],
    ids=["grpo", "sft"],
)
def test_the_last_step_of_a_schedule_trains(make, schedule, share, tmp_path: Path):
    optimizer = nemorl.OptimizerConfig(lr=1e-2, schedule=schedule)
    recorder = Recorder()
    result = start(make(tmp_path, steps=3, optimizer=optimizer), callbacks=[recorder])
    assert result.metrics["lr"] == pytest.approx(1e-2 * share)
    after = dict(result.model.named_parameters())
    assert not all(torch.equal(w, after[name]) for name, w in recorder.weights[-1].items())


@pytest.mark.parametrize(
    ("term", "constants", "message"),
    [
        (policy.clipped, {"clip_hihg": 0.3}, "'clip_hihg'"),
        (lambda logprobs, prev, advantages, weights, *, c: 0.0, {}, "required argument: 'c'"),
    ],
)
def test_constants_that_do_not_fit_a_term_are_named(term, constants, message):
    with pytest.raises(TypeError, match=message):
        nemorl.policy_loss(term, **constants)
